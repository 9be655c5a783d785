"""Effects of an asynchronous job: entering the local phase, and waiting for local groups."""

from __future__ import annotations

from collections.abc import Iterable

from fft.messages.causes import NO_CAUSE, Cause, CauseCode
from fft.messages.effects import Broadcast, Effect, Tell
from fft.messages.protocol import Event, Here, Join
from fft.protocol import apart
from fft.protocol.effects.base import action
from fft.protocol.effects.timing import arm
from fft.protocol.state import Config, Local, hello


@action
def stand_apart(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Leave the epoch; requests to join that have arrived meanwhile stay valid."""
    s.epoch, s.vote, s.proposed, s.cause = None, None, False, NO_CAUSE
    s.stopped, s.ready = {}, {}
    assert s.head is not None, "it ended an epoch"
    s.token = s.head.token
    return ()


@action
def ask_to_come_in(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Ask to be in the next epoch, and count this participant among those that do."""
    word = hello(s, c)
    s.hellos = {**s.hellos, (c.me.group, c.me.rank): word}
    s.joining |= {c.me}
    yield Broadcast(Join(word))


@action
def tell_here(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Send the joiner a sign of life: this group will synchronize."""
    assert isinstance(event, Join)
    yield Tell(event.hello.peer, Here(c.me))


@action
def note_awaited(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Record which groups are waited for, and why."""
    away = apart.awaited(s, c)
    s.awaits = apart.names(away)
    s.cause = Cause(CauseCode.AWAITED, apart.in_words(s, c, away))
    return ()


@action
def suspect_awaited(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Suspect the groups that are waited for and have sent no sign of life."""
    s.suspected |= {p for each in apart.awaited(s, c) for p in each.entry.peers()}
    return ()


@action
def rearm_apart_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Restart the window after a sign of life from a group that is waited for."""
    yield arm(s, c, "apart_window")

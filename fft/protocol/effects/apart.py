"""Effects of an asynchronous job: standing apart, and waiting for those who do."""

from __future__ import annotations

from collections.abc import Iterable

from fft.messages.effects import Broadcast, Effect, Tell
from fft.messages.protocol import Event, Here, Join
from fft.protocol import apart
from fft.protocol.effects.base import action
from fft.protocol.effects.timing import arm
from fft.protocol.state import Config, Local, hello


@action
def stand_apart(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Be outside every epoch again; who asked to come in meanwhile still does."""
    s.epoch, s.vote, s.proposed, s.cause = None, None, False, ""
    s.stopped, s.ready = {}, {}
    assert s.head is not None, "it ended an epoch"
    s.token = s.head.token
    return ()


@action
def ask_to_come_in(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Ask to be in the next epoch, and count myself among those who do."""
    word = hello(s, c)
    s.hellos = {**s.hellos, (c.me.group, c.me.rank): word}
    s.joining |= {c.me}
    yield Broadcast(Join(word))


@action
def tell_here(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Tell who asks to come in that I live, and will come."""
    assert isinstance(event, Join)
    yield Tell(event.hello.peer, Here(c.me))


@action
def note_awaited(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Say which groups are waited for, and why."""
    away = apart.awaited(s, c)
    s.awaits = apart.names(away)
    s.cause = apart.in_words(s, c, away)
    return ()


@action
def suspect_awaited(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Leave out of the next epoch those that are needed and have given no sign of life."""
    s.suspected |= {p for each in apart.awaited(s, c) for p in each.entry.peers()}
    return ()


@action
def rearm_apart_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """A group that is needed lives: it has the window once more."""
    yield arm(s, c, "apart_window")

"""Effects: what others said is kept."""

from __future__ import annotations

from collections.abc import Iterable

from fft.messages.effects import Effect
from fft.messages.protocol import Ack, Death, Drain, Event, Hello, Join, Leave, Ready, Suspect
from fft.protocol.apart import standing
from fft.protocol.effects.base import action
from fft.protocol.state import (
    Config,
    Local,
    incarnations,
    member_peers,
    peers_meant,
    silent_mates,
)


def _heard(s: Local, h: Hello) -> None:
    key = (h.peer.group, h.peer.rank)
    s.dead |= {p for p in incarnations(s, *key) if p.inc < h.peer.inc}
    s.hellos = {**s.hellos, key: h}
    s.suspected -= {h.peer}


@action
def note_hello(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember who spoke; an older incarnation of the same identity has ended."""
    assert isinstance(event, Join)
    _heard(s, event.hello)
    return ()


@action
def note_join(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember who asks to come in."""
    assert isinstance(event, Join)
    s.joining |= {event.hello.peer}
    return ()


@action
def forget_silent_mates(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """A rank of my group that has said nothing while the job went on does not ask any more.

    It may have left, and its word of that may be lost. If it lives, its next word counts again.
    """
    s.joining -= silent_mates(s, c)
    return ()


@action
def note_ack(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember who has stopped, and with what state."""
    assert isinstance(event, Ack)
    _heard(s, event.hello)
    s.stopped = {**s.stopped, event.hello.peer: event.token}
    return ()


@action
def note_ready(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember who is in the barrier."""
    assert isinstance(event, Ready)
    s.ready = {**s.ready, event.peer: event.epoch}
    s.suspected -= {event.peer}
    return ()


@action
def note_leave(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Whoever leaves by its own word is waited for no longer."""
    assert isinstance(event, Leave)
    s.dead |= {event.peer}
    s.cause = s.cause or f"{event.peer} left: {event.cause}"
    return ()


@action
def note_death(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Whoever was seen to end is waited for no longer."""
    assert isinstance(event, Death)
    s.dead |= set(peers_meant(s, event))
    return ()


@action
def blame_death(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """A member of the epoch has ended: that is the cause of what follows."""
    assert isinstance(event, Death)
    names = ", ".join(map(str, sorted(set(peers_meant(s, event)))))
    s.cause = f"{names} died: {event.cause} (seen by {event.by})"
    return ()


@action
def note_reforming(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The group of whoever has ended gets another process: the next epoch waits for it."""
    assert isinstance(event, Death)
    s.reforming |= {event.group}
    return ()


@action
def note_suspect(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Who does not move, or is not heard of, is waited for no longer, until it says it is back."""
    assert isinstance(event, Suspect)
    known = set(member_peers(s)) | {p for each in standing(s) for p in each.entry.peers()}
    suspected = (set(peers_meant(s, event)) & known) - {c.me}
    s.suspected |= suspected
    names = ", ".join(map(str, sorted(suspected)))
    s.cause = f"{names} is suspected: {event.cause} (seen by {event.by})"
    return ()


@action
def note_stuck(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """My own main thread does not move: I say so until it has come back from the rollback."""
    assert isinstance(event, Suspect)
    s.stuck = True
    s.cause = f"{c.me} hangs: {event.cause} (seen by {event.by})"
    return ()


@action
def note_drain(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """These groups leave with the next commit."""
    assert isinstance(event, Drain)
    known = set(member_peers(s)) | {h.peer for h in s.hellos.values()} | {c.me}
    known |= {p for each in standing(s) for p in each.entry.peers()}
    s.leaving |= {p for p in known if p.group in event.groups}
    return ()

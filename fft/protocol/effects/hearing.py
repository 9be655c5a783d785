"""Effects: recording what messages of others report."""

from __future__ import annotations

from collections.abc import Iterable

from fft.messages.causes import Cause, CauseCode
from fft.messages.effects import Effect
from fft.messages.protocol import Ack, Death, Drain, Event, Hello, Join, Leave, Ready, Suspect
from fft.protocol.apart import standing
from fft.protocol.effects.base import action
from fft.protocol.state import Config, Local, incarnations, member_peers, peers_meant, silent_mates


def _heard(s: Local, h: Hello) -> None:
    key = (h.peer.group, h.peer.rank)
    s.dead |= {p for p in incarnations(s, *key) if p.inc < h.peer.inc}
    s.hellos = {**s.hellos, key: h}
    s.suspected -= {h.peer}


@action
def note_hello(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember the sender; an older incarnation of the same identity has ended."""
    assert isinstance(event, Join)
    _heard(s, event.hello)
    return ()


@action
def note_join(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember that the sender asks to join."""
    assert isinstance(event, Join)
    s.joining |= {event.hello.peer}
    return ()


@action
def forget_silent_mates(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Drop the join requests of ranks of this group that stayed silent while the job continued.

    Such a rank may have left, and its `leave` may have been lost. If it lives, its next message
    counts.
    """
    s.joining -= silent_mates(s, c)
    return ()


@action
def note_ack(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember that the sender has stopped, and with which state."""
    assert isinstance(event, Ack)
    _heard(s, event.hello)
    s.stopped = {**s.stopped, event.hello.peer: event.token}
    return ()


@action
def note_ready(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember that the sender is in the barrier."""
    assert isinstance(event, Ready)
    s.ready = {**s.ready, event.peer: event.epoch}
    s.suspected -= {event.peer}
    return ()


@action
def note_leave(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop waiting for a participant that leaves on its own account."""
    assert isinstance(event, Leave)
    s.dead |= {event.peer}
    if not s.cause.text:
        text = f"{event.peer} left: {event.cause}"
        s.cause = Cause(CauseCode.LEFT, text, (event.peer,))
    return ()


@action
def note_death(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop waiting for a process that was seen to end."""
    assert isinstance(event, Death)
    s.dead |= set(peers_meant(s, event))
    return ()


@action
def blame_death(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Name the death of a member as the cause of the rollback."""
    assert isinstance(event, Death)
    dead = tuple(sorted(set(peers_meant(s, event))))
    text = f"{', '.join(map(str, dead))} died: {event.cause} (seen by {event.by})"
    s.cause = Cause(CauseCode.DIED, text, dead)
    return ()


@action
def note_reforming(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Make the next epoch wait for the replacement of the ended process."""
    assert isinstance(event, Death)
    s.reforming |= {event.group}
    return ()


@action
def note_suspect(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop waiting for suspected processes until they send a message."""
    assert isinstance(event, Suspect)
    known = set(member_peers(s)) | {p for each in standing(s) for p in each.entry.peers()}
    suspected = (set(peers_meant(s, event)) & known) - {c.me}
    s.suspected |= suspected
    accused = tuple(sorted(suspected))
    names = ", ".join(map(str, accused))
    text = f"{names} is suspected: {event.cause} (seen by {event.by})"
    s.cause = Cause(CauseCode.SUSPECTED, text, accused)
    return ()


@action
def note_stuck(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Report the main thread as stalled until it has returned from the rollback."""
    assert isinstance(event, Suspect)
    s.stuck = True
    text = f"{c.me} hangs: {event.cause} (seen by {event.by})"
    s.cause = Cause.of_own(c.me, CauseCode.HANG, text)
    return ()


@action
def note_drain(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember that these groups leave with the next commit."""
    assert isinstance(event, Drain)
    known = set(member_peers(s)) | {h.peer for h in s.hellos.values()} | {c.me}
    known |= {p for each in standing(s) for p in each.entry.peers()}
    s.leaving |= {p for p in known if p.group in event.groups}
    return ()

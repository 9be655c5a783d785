"""Effects: sending messages.

A coordinator records its own `ack` and `ready` instead of sending them.
"""

from __future__ import annotations

from collections.abc import Iterable

from fft.messages.effects import Broadcast, DropBallot, Effect, Tell
from fft.messages.protocol import (
    Ack,
    Begin,
    BusMessage,
    Decision,
    Drain,
    Event,
    Hello,
    Here,
    Join,
    Leave,
    Peer,
    Ready,
)
from fft.protocol.effects.base import action
from fft.protocol.state import Config, Local, coordinator, hello


@action
def tell_drain(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Broadcast a drain that was requested in this process."""
    assert isinstance(event, Drain)
    yield Broadcast(Drain(groups=event.groups, by=event.by))


@action
def greet(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Send this participant's `join` to a joiner, which may not have received it."""
    assert isinstance(event, Join)
    yield Tell(event.hello.peer, Join(hello(s, c)))


@action
def say_join(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Ask to be in the next epoch."""
    yield Broadcast(Join(hello(s, c)))


def _tell(to: Peer | None, message: BusMessage) -> Effect:
    return Broadcast(message) if to is None else Tell(to, message)


def _give_word(s: Local, c: Config, word: Hello) -> None:
    s.told = coordinator(s)
    s.hellos = {**s.hellos, (c.me.group, c.me.rank): word}


@action
def give_word(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Record the `Hello` for the acknowledgement: the state that is held now."""
    _give_word(s, c, hello(s, c))
    return ()


@action
def give_word_committed(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Record the `Hello` for the acknowledgement: the state of the commit that ends the epoch."""
    _give_word(s, c, hello(s, c, after=s.head))
    return ()


@action
def count_me_stopped(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Count this coordinator's own acknowledgement."""
    s.stopped = {**s.stopped, c.me: s.token}
    return ()


@action
def tell_ack(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Send the acknowledgement with the recorded `Hello` to the coordinator, or broadcast it."""
    yield _tell(s.told, Ack(s.hellos[c.me.group, c.me.rank], s.token))


@action
def count_me_ready(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Count this coordinator itself as in the barrier."""
    s.ready = {**s.ready, c.me: s.token.epoch}
    return ()


@action
def tell_ready(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Send `ready` to the coordinator, or broadcast it."""
    yield _tell(coordinator(s), Ready(c.me, s.token.epoch))


@action
def say_begin(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Broadcast `begin`, so that all members leave the barrier."""
    yield Broadcast(Begin(c.me, s.token.epoch))


@action
def say_here(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Broadcast a sign of life for members that wait for an epoch and joiners."""
    yield Broadcast(Here(c.me))


@action
def say_leave(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Broadcast that no participant needs to wait for this one."""
    yield Broadcast(Leave(c.me, getattr(event, "cause", "") or "shut down"))


@action
def say_decision(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Broadcast the last decision of the job."""
    yield Broadcast(Decision(s.head))


@action
def drop_ballot(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Drop the ballot of the decided txn."""
    assert s.head is not None, "it is decided"
    yield DropBallot(s.head.token)

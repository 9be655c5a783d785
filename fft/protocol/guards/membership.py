"""Guards: who is in, who asks to come in, who leaves, and how a job ends."""

from __future__ import annotations

from fft.messages.protocol import Drain, Event, Here, Join, Leave, Peer
from fft.protocol.guards.base import guard, record_of
from fft.protocol.state import (
    Config,
    Local,
    is_member,
    is_older_self,
    leavers,
    members,
    missing_mates,
    waited_for,
    whole_groups,
)


@guard
def no_head(s: Local, c: Config, event: Event) -> bool:
    """The job has no history yet."""
    return s.head_read and s.head is None


@guard
def has_history(s: Local, c: Config, event: Event) -> bool:
    """The register answered with a record."""
    return record_of(event) is not None


@guard
def head_known(s: Local, c: Config, event: Event) -> bool:
    """The head register has been read."""
    return s.head_read


@guard
def epoch_with_me(s: Local, c: Config, event: Event) -> bool:
    """A newer epoch is formed, and this incarnation is in it."""
    record = record_of(event)
    return (
        record is not None
        and record.kind == "epoch"
        and record.epoch > s.token.epoch
        and any(c.me in g.peers() for g in record.members)
    )


@guard
def moved_on(s: Local, c: Config, event: Event) -> bool:
    """The job is in a newer epoch without me: I am fenced."""
    record = record_of(event)
    return record is not None and record.epoch > s.token.epoch


@guard
def fenced(s: Local, c: Config, event: Event) -> bool:
    """The head is in a newer epoch than I am."""
    return s.head is not None and s.head.epoch > s.token.epoch


@guard
def adopted(s: Local, c: Config, event: Event) -> bool:
    """The epoch I stand in is open: its record is the head."""
    return s.head is not None and s.epoch is not None and s.head.n == s.epoch.n


@guard
def heard_first(s: Local, c: Config, event: Event) -> bool:
    """It is the first word of another participant."""
    if not isinstance(event, Join) or event.hello.peer == c.me:
        return False
    peer = event.hello.peer
    known = s.hellos.get((peer.group, peer.rank))
    return known is None or known.peer != peer


@guard
def asks_to_come_in(s: Local, c: Config, event: Event) -> bool:
    """It is no member's word from before it was let in.

    A member that knows of this epoch's record, or of later ones, and still asks is not in it, and
    will not be.
    """
    if not isinstance(event, Join):
        return False
    hello = event.hello
    return s.epoch is None or not is_member(s, hello.peer) or hello.head >= s.epoch.n


@guard
def answers_joiners(s: Local, c: Config, event: Event) -> bool:
    """The last decision of the job is mine, or that of nobody in my epoch."""
    return s.head is not None and (s.head.by == c.me or not is_member(s, s.head.by))


def _is_newer_self(c: Config, peer: Peer) -> bool:
    return peer[:2] == c.me[:2] and peer.inc > c.me.inc


@guard
def superseded(s: Local, c: Config, event: Event) -> bool:
    """A newer incarnation of my own identity has joined."""
    return isinstance(event, Join) and _is_newer_self(c, event.hello.peer)


@guard
def from_older_self(s: Local, c: Config, event: Event) -> bool:
    """Who asks to come in had my identity before me, and has not heard that it was replaced."""
    return isinstance(event, Join) and is_older_self(c, event.hello.peer)


@guard
def from_newer_self(s: Local, c: Config, event: Event) -> bool:
    """Who says that it lives has my identity in my place."""
    return isinstance(event, Here) and _is_newer_self(c, event.peer)


@guard
def replaced(s: Local, c: Config, event: Event) -> bool:
    """The newest record forms an epoch with a newer incarnation of my own identity."""
    entry = s.head.entries.get((c.me.group, c.me.rank)) if s.head else None
    return entry is not None and entry.inc > c.me.inc


@guard
def mates_are_here(s: Local, c: Config, event: Event) -> bool:
    """All ranks of my group ask to come in, as far as I have heard.

    While one is missing nobody can let us in: it may have left, and its word of that may be lost.
    """
    return not missing_mates(s, c)


@guard
def enough_groups(s: Local, c: Config, event: Event) -> bool:
    """As many whole groups are here as an epoch needs."""
    return len(whole_groups(s, c)) >= max(1, c.min_groups)


@guard
def all_expected_joined(s: Local, c: Config, event: Event) -> bool:
    """As many whole groups as the launcher announced want to join."""
    expected = max(c.expected_groups, c.min_groups)
    return len(s.joining) >= expected * c.world and len(whole_groups(s, c)) >= expected


@guard
def asked_here(s: Local, c: Config, event: Event) -> bool:
    """The drain was asked for in this process."""
    return isinstance(event, Drain) and event.local


@guard
def asked_to_leave(s: Local, c: Config, event: Event) -> bool:
    """A drain has named my group."""
    return c.me in s.leaving


@guard
def mate_left(s: Local, c: Config, event: Event) -> bool:
    """A rank of my own group instance has left by its own word."""
    if not isinstance(event, Leave):
        return False
    known = s.hellos.get((event.peer.group, event.peer.rank))
    mine = known is not None and known.peer == event.peer and known.store == c.store
    return mine and event.peer.group == c.me.group and event.peer != c.me


@guard
def all_others_left(s: Local, c: Config, event: Event) -> bool:
    """All groups but mine left with the last commit; mine alone is too few, and nobody comes."""
    others = {g.group for g in members(s)} - {c.me.group}
    return c.min_groups > 1 and not s.joining and others <= set(leavers(s))


@guard
def peers_moved_on(s: Local, c: Config, event: Event) -> bool:
    """Nobody who stays still needs me: the next epoch is formed, or nobody stays."""
    return fenced(s, c, event) or not waited_for(s)


@guard
def job_diverged(s: Local, c: Config, event: Event) -> bool:
    """The last decision ends the job: replicas differ, and nobody can tell who is right."""
    return s.head is not None and s.head.diverged


@guard
def job_ended(s: Local, c: Config, event: Event) -> bool:
    """All members left with the last decision."""
    return s.head is not None and s.head.last

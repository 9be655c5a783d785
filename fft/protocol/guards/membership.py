"""Guards: membership of the epoch, joiners, leavers, and the end of a job."""

from __future__ import annotations

from fft.messages.protocol import Drain, Event, Here, Join, Leave, Peer
from fft.protocol.active import chosen
from fft.protocol.guards.base import GUARDS, guard, record_of
from fft.protocol.state import (
    Config,
    Local,
    is_member,
    is_older_self,
    leavers,
    member_peers,
    members,
    missing_mates,
    suffice,
    waited_for,
    whole_groups,
)


@guard
def no_head(s: Local, c: Config, event: Event) -> bool:
    """The head register has been read and is empty."""
    return s.head_read and s.head is None


@guard
def has_history(s: Local, c: Config, event: Event) -> bool:
    """The event is a read or an announcement of a register record."""
    return record_of(event) is not None


@guard
def head_known(s: Local, c: Config, event: Event) -> bool:
    """The head register has been read."""
    return s.head_read


@guard
def epoch_with_me(s: Local, c: Config, event: Event) -> bool:
    """The record forms a newer epoch that includes this incarnation."""
    record = record_of(event)
    return (
        record is not None
        and record.kind == "epoch"
        and record.epoch > s.token.epoch
        and any(c.me in g.peers() for g in record.members)
    )


@guard
def moved_on(s: Local, c: Config, event: Event) -> bool:
    """The record belongs to a newer epoch. Rows for an epoch with this participant come first."""
    record = record_of(event)
    return record is not None and record.epoch > s.token.epoch


@guard
def fenced(s: Local, c: Config, event: Event) -> bool:
    """The head belongs to a newer epoch than this participant does."""
    return s.head is not None and s.head.epoch > s.token.epoch


@guard
def adopted(s: Local, c: Config, event: Event) -> bool:
    """The head is the record of this participant's epoch, so nothing was decided in it yet."""
    return s.head is not None and s.epoch is not None and s.head.n == s.epoch.n


@guard
def heard_first(s: Local, c: Config, event: Event) -> bool:
    """The event is a `join` of another participant, and the first message from it."""
    if not isinstance(event, Join) or event.hello.peer == c.me:
        return False
    peer = event.hello.peer
    known = s.hellos.get((peer.group, peer.rank))
    return known is None or known.peer != peer


@guard
def asks_to_come_in(s: Local, c: Config, event: Event) -> bool:
    """The `join` is not a member's message from before the epoch was formed.

    A member that knows the record of this epoch, or a later one, and still asks to join is not in
    the epoch and will not enter it.
    """
    if not isinstance(event, Join):
        return False
    hello = event.hello
    return s.epoch is None or not is_member(s, hello.peer) or hello.head >= s.epoch.n


@guard
def answers_joiners(s: Local, c: Config, event: Event) -> bool:
    """This participant wrote the last decision, or no member of its epoch did."""
    return s.head is not None and (s.head.by == c.me or not is_member(s, s.head.by))


def _is_newer_self(c: Config, peer: Peer) -> bool:
    return peer[:2] == c.me[:2] and peer.inc > c.me.inc


@guard
def superseded(s: Local, c: Config, event: Event) -> bool:
    """A newer incarnation of this participant's identity asks to join."""
    return isinstance(event, Join) and _is_newer_self(c, event.hello.peer)


@guard
def from_older_self(s: Local, c: Config, event: Event) -> bool:
    """The `join` comes from an older incarnation of this identity that does not know it was
    replaced."""
    return isinstance(event, Join) and is_older_self(c, event.hello.peer)


@guard
def from_newer_self(s: Local, c: Config, event: Event) -> bool:
    """The sender of the sign of life is a newer incarnation of this identity."""
    return isinstance(event, Here) and _is_newer_self(c, event.peer)


@guard
def replaced(s: Local, c: Config, event: Event) -> bool:
    """The newest record forms an epoch with a newer incarnation of this identity."""
    entry = s.head.entries.get((c.me.group, c.me.rank)) if s.head else None
    return entry is not None and entry.inc > c.me.inc


@guard
def mates_are_here(s: Local, c: Config, event: Event) -> bool:
    """All ranks of this group ask to join, as far as is known here.

    While one is missing no member can admit the group. The missing rank may have left, and its
    `leave` may have been lost.
    """
    return not missing_mates(s, c)


@guard
def enough_groups(s: Local, c: Config, event: Event) -> bool:
    """There are at least as many whole groups as an epoch needs."""
    return suffice(whole_groups(s, c), c)


@guard
def all_expected_joined(s: Local, c: Config, event: Event) -> bool:
    """At least as many whole groups as the launcher announced ask to join."""
    expected = max(c.expected_groups, c.min_groups)
    return len(s.joining) >= expected * c.world and len(whole_groups(s, c)) >= expected


@guard
def asked_here(s: Local, c: Config, event: Event) -> bool:
    """The drain was requested in this process."""
    return isinstance(event, Drain) and event.local


@guard
def asked_to_leave(s: Local, c: Config, event: Event) -> bool:
    """A drain names this participant's group."""
    return c.me in s.leaving


@guard
def mate_left(s: Local, c: Config, event: Event) -> bool:
    """Another rank of this group's instance has sent `leave`."""
    if not isinstance(event, Leave):
        return False
    known = s.hellos.get((event.peer.group, event.peer.rank))
    mine = known is not None and known.peer == event.peer and known.store == c.store
    return mine and event.peer.group == c.me.group and event.peer != c.me


@guard
def too_few_remain(s: Local, c: Config, event: Event) -> bool:
    """Too few groups remain for another epoch, no remaining group is to stay, and none joins.

    A group does not remain if it left with the last commit. A group that was asked to leave does
    not remain either once one of its processes has ended, because that process is not replaced.
    """
    asked = {p.group for p in member_peers(s) if p in s.leaving}
    ended = {p.group for p in member_peers(s) if p in s.dead}
    remaining = {g.group for g in members(s)} - set(leavers(s)) - (asked & ended)
    joins = s.joining - s.leaving - s.dead
    left = [(g.group, g.place) for g in members(s) if g.group in remaining]
    return len(chosen(left, c.rules)) < c.min_groups and remaining <= asked and not joins


GUARDS["all_others_left"] = too_few_remain  # the name in the tables of older traces


@guard
def peers_moved_on(s: Local, c: Config, event: Event) -> bool:
    """No remaining member needs this participant: the next epoch is formed, or none remains."""
    return fenced(s, c, event) or not waited_for(s)


@guard
def job_diverged(s: Local, c: Config, event: Event) -> bool:
    """The last decision ends the job: replicas differ and no majority shows which are right."""
    return s.head is not None and s.head.diverged


@guard
def job_ended(s: Local, c: Config, event: Event) -> bool:
    """All members left with the last decision."""
    return s.head is not None and s.head.last

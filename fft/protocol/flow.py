"""The data flow between scopes: what the known positions of other scopes allow. Pure.

Positions are slices of the data, which both scopes count alike: a skipped step takes its slices
like any other step, and scopes may temporarily have different groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from fft.messages.causes import LeaveReason
from fft.messages.protocol import Event, Record, Stop, Vote
from fft.protocol.state import Config, Local, ScopePosition, data_after, participants


def begun_at(s: Local) -> Local | Record:
    """Return the position that the current txn begins at.

    The first txn of an epoch begins at that of the epoch's record: a group that still fetches its
    state has not reached it itself.
    """
    return s.epoch if s.epoch is not None and s.token.txn == 1 else s


def slices_due(s: Local, c: Config) -> tuple[int, int]:
    """Return the first slice of the current txn and the first slice after it."""
    at = begun_at(s)
    return at.cursor, data_after(s, c, at).cursor


def step_due(s: Local) -> int:
    """Return the number of committed steps before the current txn."""
    return begun_at(s).step


def held_for(s: Local, c: Config) -> ScopePosition | None:
    """Return the scope that must take more slices before the current txn is computed, or None."""
    if not s.others:
        return None
    first, after = slices_due(s, c)
    return next((e for e in s.others if not e.allows(first, after)), None)


def needed_of(s: Local, c: Config, other: ScopePosition) -> int:
    """Return how many slices ``other`` must have taken before the current txn may be computed."""
    first, after = slices_due(s, c)
    return after if not other.ahead else first + 1 - other.ahead * other.takers


def ended_before(s: Local, c: Config) -> ScopePosition | None:
    """Return the scope that holds back the current txn if all groups have left it, else None."""
    other = held_for(s, c)
    return other if other is not None and other.has_ended else None


def data_end(s: Local, cursor: int, groups: int) -> bool:
    """Return whether a scope that this one follows has ended with too few slices for another txn.

    Args:
        cursor: The first slice of that txn.
        groups: The number of slices that it needs.
    """
    return any(e.has_ended and cursor + groups > e.cursor for e in s.others if not e.ahead)


def is_last(s: Local, c: Config) -> bool:
    """Return whether no txn can follow the current one, because a followed scope has ended."""
    return bool(s.others) and data_end(s, slices_due(s, c)[1], participants(s, c))


def has_left_well(s: Local) -> bool:
    """Return whether this participant has left with the state of the newest decision."""
    return s.role == "terminal" and s.head is not None and s.lineage == s.head.lineage


def may_leave(s: Local, group: str) -> bool:
    """Return whether a group that is asked to leave may leave this scope now.

    A group leaves scopes in the order of the flow, because a scope that it follows may need steps
    of this one before it can commit its last step.
    """
    return not any(group in e.groups for e in s.others if e.ahead == 0)


def why_left(s: Local, c: Config, votes: Sequence[Vote], group: str) -> LeaveReason:
    """Return why ``group`` leaves with a commit of these votes. One rank at its end is enough."""
    if last := [vote for vote in votes if vote.last and vote.peer.group == group]:
        is_shard = any(vote.manifest.shard and not vote.skip for vote in last)
        return LeaveReason.SHARD_ENDED if is_shard else LeaveReason.LAST_STEP
    if is_last(s, c) and not any(peer.group == group for peer in s.leaving):
        return LeaveReason.UPSTREAM_ENDED
    return LeaveReason.DRAINED


def why_it_leaves(s: Local, c: Config, event: Event) -> LeaveReason:
    """Return why this participant leaves without a commit."""
    reason = event.reason if isinstance(event, Stop) else LeaveReason.SHUT_DOWN
    if c.me in s.leaving and not reason.is_end:
        return LeaveReason.DRAINED
    return reason if ended_before(s, c) is None else LeaveReason.UPSTREAM_ENDED

"""Whether the job is over, who is not in it, and who is where, if traces do not tell. Reads the
bus, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fft.bus.base import HEAD, ErrorBus
from fft.messages.protocol import GroupEntry, Record
from fft.messages.wire import EPOCH, Wire, decode_packed, left_name
from fft.trace.tail import JobView


def last_on(host: str, buses: Iterable[ErrorBus]) -> set[int] | None:
    """Processes of ``host`` that were in a job whose scopes are all over, given their buses; None:
    one of them may go on. Raises BusError, UnreadableMessage."""
    found = set[int]()
    for bus in buses:
        if (epoch := last_epoch(bus)) is None:
            return None
        found |= {r.pid for entry in epoch.members for r in entry.ranks if r.host == host}
    return found


def last_epoch(bus: ErrorBus) -> Record | None:
    """The epoch whose groups have all left, with the newest commit, or as a stage does that has
    found nothing to do; None: somebody may go on.

    Raises BusError, UnreadableMessage.
    """
    if (found := _newest(bus)) is None:
        return None
    head, epoch = found
    stay = (entry for entry in epoch.members if entry.group not in head.leavers)
    return epoch if all(_has_left(entry, bus) for entry in stay) else None


def _newest(bus: ErrorBus) -> tuple[Record, Record] | None:
    """The newest record, and its epoch with all members; None: there is none, or it is being
    written down. Raises BusError, UnreadableMessage."""
    if (head := head_of(bus)) is None:
        return None
    listed = bus.read(EPOCH)  # it may be late by a moment
    epoch = None if listed is None else Wire().found(decode_packed(listed), bus.read)
    return None if epoch is None or epoch.epoch != head.epoch else (head, epoch)


def _has_left(entry: GroupEntry, bus: ErrorBus) -> bool:
    """Whether all its ranks have said so, without a record. Raises BusError."""
    return all(bus.read(left_name(entry.group, r.rank)) == b"%d" % r.inc for r in entry.ranks)


def complete(view: JobView, buses: Iterable[ErrorBus]) -> None:
    """Have ``view`` know who is in the job, and how far that is, where traces have gaps.

    Given the buses of its scopes. Raises BusError, UnreadableMessage.
    """
    for bus in buses:
        if (found := _newest(bus)) is None:
            continue  # the next look will find them
        head, epoch = found
        for peer in epoch.peers:
            view.see_member(peer, head.step, has_committed=head.kind == "commit")


class Absent:
    """Who does not take part. Keeps the newest epoch, whose members may be many."""

    def __init__(self, groups: Collection[str]) -> None:
        self._groups = frozenset(groups)
        self._head = 0
        """Number of the newest record at the last look."""
        self._listed: bytes | None = None
        self._members: frozenset[str] = frozenset()

    def look(self, bus: ErrorBus) -> frozenset[str]:
        """Which of the groups are not in the newest epoch of the job, if that goes on.

        All, while nothing follows an ABORT since the last look: perhaps there are too few for the
        next epoch. Raises BusError, UnreadableMessage.
        """
        head, listed = head_of(bus), bus.read(EPOCH)
        if head is None or head.last or listed is None:
            return frozenset()
        stands, self._head = head.n == self._head and head.kind == "abort", head.n
        if stands:
            return self._groups
        if listed != self._listed:
            epoch = Wire().found(decode_packed(listed), bus.read)
            if epoch is None:  # the job has moved on meanwhile
                return frozenset()
            self._listed, self._members = listed, frozenset(e.group for e in epoch.members)
        is_over = self._members <= set(head.leavers)
        return frozenset() if is_over else self._groups - self._members


def head_of(bus: ErrorBus) -> Record | None:
    """The newest record, without its members. Raises BusError, UnreadableMessage."""
    held = bus.read(HEAD)
    return None if held is None else decode_packed(held).record

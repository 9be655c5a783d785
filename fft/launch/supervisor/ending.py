"""Whether the job is over, and who is not in it. Reads the bus, and nothing else."""

from __future__ import annotations

from collections.abc import Collection

from fft.bus.base import HEAD, ErrorBus
from fft.messages.protocol import Record
from fft.messages.wire import EPOCH, Wire, decode_packed


def last_epoch(bus: ErrorBus) -> Record | None:
    """The epoch whose groups have all left with the newest commit; None: somebody may go on.

    Raises BusError, UnreadableMessage.
    """
    head = head_of(bus)
    if head is None or head.kind != "commit" or not head.leavers:
        return None
    listed = bus.read(EPOCH)  # it may be late by a moment
    epoch = None if listed is None else Wire().found(decode_packed(listed), bus.read)
    if epoch is None or epoch.epoch != head.epoch:
        return None
    return epoch if {entry.group for entry in epoch.members} <= set(head.leavers) else None


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

"""Read from the bus whether the job is over, which groups are missing, and the members.

The supervisor uses the members where traces have gaps. This module accesses only the bus.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from fft.bus.base import HEAD, ErrorBus
from fft.messages.exits import gone_register, gone_value
from fft.messages.protocol import GroupEntry, Record
from fft.messages.wire import EPOCH, Wire, decode_packed, left_name
from fft.trace.tail import JobView


def last_on(host: str, buses: Iterable[ErrorBus]) -> set[int] | None:
    """Return the pids on ``host`` of a job whose scopes are all over.

    Args:
        buses: The buses of all scopes of the job.

    Returns:
        The processes of the last epochs, or None if a scope may continue.

    Raises:
        BusError: A bus cannot be reached.
        UnreadableMessage: A register cannot be decoded.
    """
    found = set[int]()
    for bus in buses:
        if (epoch := last_epoch(bus)) is None:
            return None
        found |= {r.pid for entry in epoch.members for r in entry.ranks if r.host == host}
    return found


def last_epoch(bus: ErrorBus) -> Record | None:
    """Return the newest epoch if all its groups have left, or None if a group may continue.

    A group leaves with the newest commit, or without one if it is a stage with nothing to do.
    Raises BusError, UnreadableMessage.
    """
    if (found := _newest(bus)) is None:
        return None
    head, epoch = found
    stay = (entry for entry in epoch.members if entry.group not in head.leavers)
    return epoch if all(_has_left(entry, bus) for entry in stay) else None


def _newest(bus: ErrorBus) -> tuple[Record, Record] | None:
    """Return the newest record and the record of its epoch with all members.

    None if there is no record yet, or if the epoch is still being written. Raises BusError,
    UnreadableMessage.
    """
    if (head := head_of(bus)) is None:
        return None
    listed = bus.read(EPOCH)  # written shortly after the head
    epoch = None if listed is None else Wire().found(decode_packed(listed), bus.read)
    return None if epoch is None or epoch.epoch != head.epoch else (head, epoch)


def _has_left(entry: GroupEntry, bus: ErrorBus) -> bool:
    """Return whether all ranks of the group left without a record. Raises BusError."""
    return all(bus.read(left_name(entry.group, r.rank)) == b"%d" % r.inc for r in entry.ranks)


def complete(view: JobView, buses: Iterable[ErrorBus]) -> None:
    """Add the members and the step of the job to ``view``, where traces have gaps.

    ``buses`` are those of the job's scopes. Raises BusError, UnreadableMessage.
    """
    for bus in buses:
        if (found := _newest(bus)) is None:
            continue  # the next call will find them
        head, epoch = found
        for peer in epoch.peers:
            view.see_member(peer, head.step, has_committed=head.kind == "commit")


def have_all_died(buses: Sequence[ErrorBus], is_silent: Callable[[str, int], bool]) -> bool:
    """Return whether all processes of the newest epochs have ended, so that none has the state.

    Args:
        buses: The buses of all scopes, that of the job first.
        is_silent: Returns whether the host of a rank was found to have vanished.

    Raises:
        BusError: The bus cannot be reached.
        UnreadableMessage: A register cannot be decoded.
    """
    for bus in buses:
        listed = bus.read(EPOCH)
        epoch = None if listed is None else Wire().found(decode_packed(listed), bus.read)
        if epoch is None or not epoch.members:
            return False
        for group, r in ((entry.group, r) for entry in epoch.members for r in entry.ranks):
            held = buses[0].read(gone_register(group, r.rank))
            if held != gone_value(r.pid, r.host) and not is_silent(group, r.rank):
                return False
    return True


class Absent:
    """Finds groups that take no part. Caches the newest epoch, whose member list may be long."""

    def __init__(self, groups: Collection[str]) -> None:
        self._groups = frozenset(groups)
        self._head = 0
        """Number of the newest record at the last look."""
        self._listed: bytes | None = None
        self._members: frozenset[str] = frozenset()

    def look(self, bus: ErrorBus) -> frozenset[str]:
        """Return the groups that are not in the newest epoch, or none if the job is over.

        Returns all groups if the head has been the same ABORT since the last call, because there
        may be too few groups for the next epoch. Raises BusError, UnreadableMessage.
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
    """Return the newest record without its members. Raises BusError, UnreadableMessage."""
    held = bus.read(HEAD)
    return None if held is None else decode_packed(held).record


STANDSTILL_S = 30.0
"""Time without a commit until the supervisor logs what the job waits for, in seconds."""


_STEPS = 20
"""Number of the last steps whose median counts as the usual time of a step."""


class Standstill:
    """The time since the job's last progress. The clock is ``time.monotonic``."""

    def __init__(self) -> None:
        self._progress: tuple[int, int] | None = None
        """None until the first epoch."""
        self._since, self._wait = time.monotonic(), STANDSTILL_S
        self._steps = deque[float](maxlen=_STEPS)
        """Seconds between two commits."""

    def lasts(self, progress: tuple[int, int] | None) -> float | None:
        """Return the seconds without progress each time that they have doubled, else None.

        A job of long steps is given the time of three steps.

        Args:
            progress: The progress of the job, or None before its first epoch.
        """
        now = time.monotonic()
        if progress != self._progress:
            if self._progress is not None and self._progress > (0, 0):
                self._steps.append(now - self._since)
            usual = 3 * statistics.median(self._steps) if self._steps else 0.0
            self._progress, self._since, self._wait = progress, now, max(STANDSTILL_S, usual)
        if now - self._since < self._wait:
            return None
        self._wait *= 2
        return now - self._since


class Outage:
    """The current outage of a bus. The clock is ``time.monotonic``."""

    def __init__(self) -> None:
        self._began, self._last = 0.0, -math.inf

    @property
    def has_begun(self) -> bool:
        """Whether the last operation has failed."""
        return self._last > -math.inf

    def answered(self) -> None:
        """End the outage: an operation has succeeded."""
        self._last = -math.inf

    def exceeds(self, limit_s: float) -> bool:
        """Record a failure; return whether the outage has lasted ``limit_s`` seconds.

        A failure that long after the one before begins another outage: the bus may have answered
        in between.
        """
        now = time.monotonic()
        self._began = now if now - self._last > limit_s else self._began
        self._last = now
        return now - self._began >= limit_s

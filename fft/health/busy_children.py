"""Detect whether a process waits for a child process that computes, such as a compiler. Linux only.

Reads ``/proc``. A main thread that waits for a C++ compiler or a build makes no progress of its
own, but does not hang.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class BusyChildren:
    """The children that the main thread of one process has started."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: dict[int, int] = {}

    def are_busy(self, since: float) -> bool:
        """Whether children that were started after ``since`` have computed since the last call.

        Older children do not count: workers of a data loader prefetch regardless of their parent.

        Args:
            since: Seconds on ``CLOCK_MONOTONIC``.
        """
        before, self._seen = self._seen, {}
        for child in _children(self._pid):
            self._add(child, since)
        return bool(self._seen) and self._seen != before

    def _add(self, pid: int, since: float) -> None:
        """Record the processor time of a child and of its descendants, in ticks."""
        with suppress(OSError, ValueError, IndexError):  # it has ended
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
            if _monotonic(int(fields[19])) < since - 2 * _TICK_S:  # the kernel rounds it down
                return
            # its own time, and that of its reaped children
            self._seen[pid] = sum(map(int, fields[11:15]))
            for child in _children(pid):
                self._add(child, since)


def _children(pid: int) -> list[int]:
    """Return the children that the first thread of a process has started."""
    with suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(number) for number in file.read().split()]
    return []


def _monotonic(ticks: int) -> float:
    """Convert ticks since boot to ``CLOCK_MONOTONIC``, which does not count suspends."""
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return ticks * _TICK_S - asleep

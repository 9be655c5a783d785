"""One time for the traces of several hosts, whose wall clocks may differ or jump.

Every process traces each register record when it receives it. The same record arrives everywhere
within milliseconds, so that the records which two processes share give the difference between
their clocks. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

Who = tuple[str, int, int]
"""Group, rank and incarnation of a process."""
_LATENCY_S = 0.05
"""A smaller difference may be the time that records take to arrive, and is not corrected."""
_KEPT = 4096
"""Maximum number of records kept of each process; beyond it, only every second one is kept."""


def who_of(line: Mapping[str, Any]) -> Who:
    """Return the process that has written ``line``."""
    return line["group"], line["rank"], line["inc"]


class _Clock:
    """The monotonic clock of one process, which does not jump as its wall clock may."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}
        """Record number → monotonic time at which the process first had the record."""
        self._walls: list[float] = []
        self._stride = 1

    def take(self, line: Mapping[str, Any]) -> None:
        record = (line.get("event") or {}).get("record")
        n = record.get("n") if isinstance(record, dict) else None
        if not self._walls:
            self._walls.append(line["wall"] - line["mono"])
        if not isinstance(n, int) or n % self._stride or n in self.seen:
            return
        self.seen[n] = line["mono"]
        self._walls.append(line["wall"] - line["mono"])
        if len(self.seen) > _KEPT:
            self._stride *= 2
            self.seen = {n: at for n, at in self.seen.items() if n % self._stride == 0}
            self._walls = self._walls[::2]

    @property
    def wall(self) -> float:
        """Median number of seconds from its monotonic clock to its wall clock."""
        return median(self._walls)


class Clocks:
    """A common time for all traces of one scope: pass their lines to `take`, then call `at`."""

    def __init__(self) -> None:
        self._clocks: dict[Who, _Clock] = {}
        self._offsets: dict[Who, float] | None = None

    def take(self, line: Mapping[str, Any]) -> None:
        """Learn from a transition or a note."""
        self._offsets = None
        self._clocks.setdefault(who_of(line), _Clock()).take(line)

    def at(self, line: Mapping[str, Any]) -> float:
        """Return the time of ``line`` in seconds, on the wall clock of the first process."""
        if self._offsets is None:
            self._offsets = self._aligned()
        offset = self._offsets.get(who_of(line), line["wall"] - line["mono"])
        return float(line["mono"] + offset)

    def _aligned(self) -> dict[Who, float]:
        """Seconds from the monotonic clock of each process to the common time.

        A process that shares no record with those before it, in the order of their first records,
        keeps its own wall clock.
        """
        found: dict[Who, float] = {}
        common: dict[int, float] = {}
        order = sorted(self._clocks, key=lambda who: (min(self._clocks[who].seen, default=-1), who))
        for who in order:
            clock = self._clocks[who]
            offset = clock.wall
            shared = [common[n] - at for n, at in clock.seen.items() if n in common]
            if shared and abs(median(shared) - offset) > _LATENCY_S:
                offset = median(shared)
            found[who] = offset
            for n, at in clock.seen.items():
                common.setdefault(n, at + offset)
        return found

"""What a job's processes hold, sampled while it runs, and whether that stays the same.

Reads /proc through psutil; ends nothing. A process is known by its place (``trainer 1/0``), so that
one that was started again goes on where the one before it was; its first seconds do not count.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field

import psutil

WARM_UP_S = 10.0
"""Of a process's life: it loads, and allocators reach their size."""
LEAST = 6
"""Samples of a place, without which nothing is said about it."""
BOUNDS = {"rss_mib": (0.05, 8.0), "fds": (0.0, 4.0), "threads": (0.0, 3.0), "bus_keys": (0.0, 8.0)}
"""How much the median of the last third may be above that of the first: a share of it, or so much
at least. Threads and descriptors come and go with every epoch."""
UNITS = {"rss_mib": "MiB", "fds": "file descriptors", "threads": "threads", "bus_keys": "bus keys"}


@dataclass(frozen=True)
class Series:
    """One quantity of one place."""

    place: str
    what: str
    first: float
    last: float
    low: float
    high: float
    early: float
    """Median of the first third."""
    late: float
    """Median of the last third."""
    samples: int

    @property
    def bound(self) -> float:
        """What ``late`` may be."""
        share, least = BOUNDS[self.what]
        return self.early + max(share * self.early, least)

    @property
    def steady(self) -> bool:
        """Whether it has not grown beyond the bound."""
        return self.late <= self.bound


@dataclass
class Sampler:
    """Takes samples of the children of the process ``pid``, and of itself."""

    pid: int
    worker: str
    """Path of the training script, by which trainers are known."""
    _values: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    _places: dict[tuple[int, float], str | None] = field(default_factory=dict)

    def sample(self, now: float, bus_keys: int) -> None:
        """One sample of all at the wall clock's ``now``, in seconds."""
        self._values["the bus", "bus_keys"].append(bus_keys)
        try:
            root = psutil.Process(self.pid)
            processes = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                place = self._place(process)
                if place is None or now - process.create_time() < WARM_UP_S:
                    continue
                with process.oneshot():
                    held = {
                        "rss_mib": process.memory_info().rss / 2**20,
                        "fds": process.num_fds(),
                        "threads": process.num_threads(),
                    }
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue  # it has just ended
            for what, value in held.items():
                self._values[place, what].append(value)

    def series(self) -> list[Series]:
        """What was seen, by place."""
        return [
            _series(place, what, values)
            for (place, what), values in sorted(self._values.items())
            if len(values) >= LEAST
        ]

    def _place(self, process: psutil.Process) -> str | None:
        """A name; None: a process of a moment."""
        key = (process.pid, process.create_time())
        if key not in self._places:
            self._places[key] = self._name(process)
        return self._places[key]

    def _name(self, process: psutil.Process) -> str | None:
        if process.pid == self.pid:
            return "supervisor"
        words = process.cmdline()
        role = (
            "trainer"
            if self.worker in words
            else "monitor"
            if "fft.health.monitor" in words
            else None
        )
        parent = process.parent()
        is_forked = parent is not None and parent.pid != self.pid and parent.cmdline() == words
        if role is None or is_forked:  # the latter is a worker of a trainer's loader
            return None
        env = process.environ()
        return f"{role} {env.get('FFT_GROUP')}/{env.get('RANK')}"


def _series(place: str, what: str, values: list[float]) -> Series:
    third = max(1, len(values) // 3)
    early, late = statistics.median(values[:third]), statistics.median(values[-third:])
    ends = (values[0], values[-1], min(values), max(values))
    return Series(place, what, *ends, early, late, len(values))

"""Samples of the resources of a job's processes while it runs, and whether they stay constant.

It reads /proc through psutil and ends no process. A process is identified by its place (``trainer
1/0``), so a restarted one continues the series of its predecessor; its first seconds do not count.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

WARM_UP_S = 10.0
"""Seconds of a process's life that do not count: it loads, and allocators reach their size."""
LEAST = 6
"""Minimum number of samples of a place for a verdict."""
BOUNDS = {"rss_mib": (0.05, 8.0), "fds": (0.0, 4.0), "threads": (0.0, 3.0), "bus_keys": (0.0, 8.0)}
"""Limits for the growth of the median from the first to the last third: a share of it, or at least
an absolute amount. Threads and descriptors come and go with every epoch."""
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
        """Return the maximum for ``late``."""
        share, least = BOUNDS[self.what]
        return self.early + max(share * self.early, least)

    @property
    def steady(self) -> bool:
        """Whether it has not grown beyond the bound."""
        return self.late <= self.bound


@dataclass
class Sampler:
    """A sampler of the children of the process ``pid``, and of that process."""

    pid: int
    _values: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    _places: dict[tuple[int, float], str | None] = field(default_factory=dict)

    def sample(self, now: float, bus_keys: int, trainers: Mapping[int, str]) -> None:
        """Take one sample of all processes.

        Args:
            now: The wall-clock time in seconds.
            bus_keys: Number of keys on the bus.
            trainers: The trainers' places by process ID, from the job's records: a forked process
                has the command line and the environment of its parent in /proc.
        """
        self._values["the bus", "bus_keys"].append(bus_keys)
        try:
            root = psutil.Process(self.pid)
            processes = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                place = self._place(process, trainers)
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
            if not held["fds"]:
                continue  # it is ending: the kernel has closed its files
            for what, value in held.items():
                self._values[place, what].append(value)

    def series(self) -> list[Series]:
        """Return the samples by place."""
        return [
            _series(place, what, values)
            for (place, what), values in sorted(self._values.items())
            if len(values) >= LEAST
        ]

    def _place(self, process: psutil.Process, trainers: Mapping[int, str]) -> str | None:
        """Return the name of a process's place, or None for any other process."""
        if process.pid in trainers:
            return f"trainer {trainers[process.pid]}"
        key = (process.pid, process.create_time())
        if key not in self._places:
            self._places[key] = self._name(process)
        return self._places[key]

    def _name(self, process: psutil.Process) -> str | None:
        if process.pid == self.pid:
            return "supervisor"
        if "fft.health.monitor" not in process.cmdline():
            return None
        env = process.environ()
        return f"monitor {env.get('FFT_GROUP')}/{env.get('RANK')}"


def _series(place: str, what: str, values: list[float]) -> Series:
    third = max(1, len(values) // 3)
    early, late = statistics.median(values[:third]), statistics.median(values[-third:])
    ends = (values[0], values[-1], min(values), max(values))
    return Series(place, what, *ends, early, late, len(values))

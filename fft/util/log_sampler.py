"""Counters for events that must not flood a log: report only the 1st, 10th, 100th … Pure data."""

from __future__ import annotations

import threading


class LogSampler:
    """Event counts by name, for a bounded set of names. Thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, name: str) -> int | None:
        """Count one event; return its number if that is a power of ten and worth a report."""
        with self._lock:
            count = self._counts[name] = self._counts.get(name, 0) + 1
        return count if count == 10 ** (len(str(count)) - 1) else None

    def counts(self) -> dict[str, int]:
        """Return the number of events by name."""
        with self._lock:
            return dict(self._counts)

"""Counting what must not flood a log or a trace: said at the 1st, 10th, 100th … time. Pure data."""

from __future__ import annotations

import threading


class LogSampler:
    """Counts by name; names come from a set that does not grow. Thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, name: str) -> int | None:
        """Count one more; its number if it is one to speak of, a power of ten, else None."""
        with self._lock:
            count = self._counts[name] = self._counts.get(name, 0) + 1
        return count if count == 10 ** (len(str(count)) - 1) else None

    def counts(self) -> dict[str, int]:
        """How many of each there were."""
        with self._lock:
            return dict(self._counts)

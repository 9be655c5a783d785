"""The time that a caller gives one call of the manager. Pure but for the clock."""

from __future__ import annotations

import time
from datetime import timedelta


class Limit:
    """Of a wait that a caller bounds; counts from the making of it. Its text names the call."""

    def __init__(self, call: str, timeout: timedelta) -> None:
        self._text = f"{call}(timeout={timeout.total_seconds():g} s)"
        self._deadline = time.monotonic() + timeout.total_seconds()

    def left(self) -> float:
        """Seconds, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def __str__(self) -> str:
        return self._text

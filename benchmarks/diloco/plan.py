"""The plan of the runs: their lengths, and the times of the faults. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GROUPS = 2
OUTER = 300
"""Number of synchronizations."""
EVERY = 5
"""Inner steps between synchronizations."""
BATCH = 8
FAULT_EVERY = 10
"""Synchronizations between faults."""
WHOLE = 4
"""Synchronizations of the whole job in a row that a fault waits for."""
AT_INNER = 2
"""Inner steps of the victim since its last synchronization, when an exception or a kill comes."""
LONELY_S = 1.2
"""Seconds of a synchronization of a single group, so that the other has time to come back."""
KINDS = ("exception", "one_sided", "kill")
VICTIM = 1
System = Literal["fft", "torchft"]
SYSTEMS: dict[System, str] = {"fft": "FFT", "torchft": "torchft"}
UNCOMMITTED = "the synchronisation was not committed"
"""The reason for which a torchft group drops its inner steps."""


@dataclass(frozen=True)
class Schedule:
    """The faults that remain after ``fired`` faults."""

    outer: int = OUTER
    every: int = FAULT_EVERY

    def due(self, fired: int, step: int, whole: int) -> str | None:
        """Return the kind of fault at ``step`` (synchronizations so far), after ``whole``
        synchronizations of the whole job in a row, or None. Near the end there is none, so that a
        group has time to come back."""
        at = (fired + 1) * self.every
        if not at <= step <= self.outer - 2 * self.every or whole < WHOLE:
            return None
        return KINDS[fired % len(KINDS)]

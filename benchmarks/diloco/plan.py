"""What is run: its lengths, and which fault comes when. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GROUPS = 2
OUTER = 300
"""Synchronisations."""
EVERY = 5
"""Inner steps from one to the next."""
BATCH = 8
FAULT_EVERY = 10
"""Synchronisations from one fault to the next."""
WHOLE = 4
"""Synchronisations of the whole job in a row, without which a fault waits."""
AT_INNER = 2
"""Inner steps of the victim since its last synchronisation, when an exception or a kill comes."""
LONELY_S = 1.2
"""A synchronisation of one group alone takes as long: the other has time to come back."""
KINDS = ("exception", "one_sided", "kill")
VICTIM = 1
System = Literal["fft", "torchft"]
SYSTEMS: dict[System, str] = {"fft": "FFT", "torchft": "torchft"}
UNCOMMITTED = "the synchronisation was not committed"
"""Why a group of torchft's drops its inner steps."""


@dataclass(frozen=True)
class Schedule:
    """Of ``fired`` faults so far, those that are left."""

    outer: int = OUTER
    every: int = FAULT_EVERY

    def due(self, fired: int, step: int, whole: int) -> str | None:
        """The kind that comes at ``step`` (synchronisations so far), after ``whole`` in a row of
        the whole job; None: none does. Before the end there is time to come back."""
        at = (fired + 1) * self.every
        if not at <= step <= self.outer - 2 * self.every or whole < WHOLE:
            return None
        return KINDS[fired % len(KINDS)]

"""The common parts of all fault detectors. Pure; imports nothing of FFT.

A detector takes observations, each with its time, and judges at a given time. The same observations
give the same verdict, regardless of when and how often it is requested.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar


class Level(IntEnum):
    """Severity of a verdict; higher is worse."""

    GREEN = 0
    """No action is needed."""
    YELLOW = 1
    """Suspect: roll back."""
    RED = 2
    """Beyond recovery: end the process."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A level, and a readable one-line reason, which is empty for green."""

    level: Level
    reason: str = ""


GREEN = Verdict(Level.GREEN)

Observation = TypeVar("Observation", contravariant=True)


class FaultDetector(Protocol[Observation]):
    """A detector that collects observations in ``observe``; ``verdict`` only evaluates them."""

    def observe(self, event: Observation) -> None:
        """Take one observation. Observations come in the order in which they are made."""

    def verdict(self, now: float) -> Verdict:
        """Return the verdict at ``now``, in monotonic seconds; changes nothing."""


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict, the first among equals; green for an empty sequence."""
    return max(verdicts, key=lambda verdict: verdict.level, default=GREEN)


_STARVED = 0.75
"""Maximum share of a silence that is excused by waits for a core."""


def counted(silent: float, starved: float) -> float:
    """Return the part of a silence that counts, in seconds.

    On a busy host a process is silent while it waits for a core. At least a quarter of the silence
    counts, because other threads of a process that hangs may wait, too.

    Args:
        silent: Duration of the silence.
        starved: Time of it in which a thread of the process waited for a core.
    """
    return silent - min(starved, _STARVED * max(0.0, silent))


class Attention:
    """The absence of an observer: time that must not count against the observed processes.

    An observer that was stopped, starved or swapped out finds everything old when it comes back,
    although only the observer itself was at fault. So at most ``look_s`` of the time between two of
    its looks counts (the idea of local health: Dadgar, Phillips & Currey, *Lifeguard: SWIM-ing with
    Situational Awareness*, 2017). With an infinite ``look_s`` the observer is never away.
    """

    def __init__(self, look_s: float = math.inf) -> None:
        self.look_s = look_s
        self._looked_at: float | None = None
        self._back_at = -math.inf
        self._absence = 0.0

    def look(self, now: float) -> float:
        """Record a look at ``now``. Returns the seconds by which it comes late."""
        late = self.late(now)
        if late > 0:
            self._back_at, self._absence = now, late
        self._looked_at = now if self._looked_at is None else max(now, self._looked_at)
        return late

    def late(self, now: float) -> float:
        """Return the seconds by which the observer would be late, if ``now`` were its next look."""
        if self._looked_at is None:
            return 0.0
        return max(0.0, now - self._looked_at - self.look_s)

    def missed_since(self, moment: float) -> float:
        """Return the seconds of the last absence that lie after ``moment``."""
        return min(self._absence, max(0.0, self._back_at - moment))

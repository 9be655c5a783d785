"""What every fault detector has in common. Pure; imports nothing of FFT.

A detector is fed with observations, each with its time, and judges at a time that it is given. The
same observations give the same verdict whenever and however often it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar


class Level(IntEnum):
    """How bad it looks; higher is worse."""

    GREEN = 0
    """Nothing to be done."""
    YELLOW = 1
    """Suspect: roll back."""
    RED = 2
    """Beyond recovery: end it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A level, and the reason in one line that a person can read; green needs none."""

    level: Level
    reason: str = ""


GREEN = Verdict(Level.GREEN)

Observation = TypeVar("Observation", contravariant=True)


class FaultDetector(Protocol[Observation]):
    """Feed it with ``observe``; ``verdict`` only reads what was fed."""

    def observe(self, event: Observation) -> None:
        """Take in what was seen. Observations come in the order in which they are made."""

    def verdict(self, now: float) -> Verdict:
        """The judgement at ``now``, in monotonic seconds; changes nothing."""


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of them, the first among equals; green if there are none."""
    return max(verdicts, key=lambda verdict: verdict.level, default=GREEN)


class Attention:
    """How long an observer was away: time that it may not hold against those it observes.

    An observer that was stopped, starved or swapped out finds everything old when it comes back,
    although nothing is wrong but itself. So of the time between two of its looks at most ``look_s``
    counts (the idea of local health: Dadgar, Phillips & Currey, *Lifeguard: SWIM-ing with
    Situational Awareness*, 2017). ``look_s`` without limit: the observer is never away.
    """

    def __init__(self, look_s: float = math.inf) -> None:
        self.look_s = look_s
        self._looked_at: float | None = None
        self._back_at = -math.inf
        self._absence = 0.0

    def look(self, now: float) -> float:
        """The observer looks at ``now``. Returns the seconds by which it comes late."""
        late = self.late(now)
        if late > 0:
            self._back_at, self._absence = now, late
        self._looked_at = now if self._looked_at is None else max(now, self._looked_at)
        return late

    def late(self, now: float) -> float:
        """The seconds by which the observer would come late, if ``now`` were its next look."""
        if self._looked_at is None:
            return 0.0
        return max(0.0, now - self._looked_at - self.look_s)

    def missed_since(self, moment: float) -> float:
        """The seconds of the last absence that lie after ``moment``."""
        return min(self._absence, max(0.0, self._back_at - moment))

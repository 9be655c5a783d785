"""Names ranks that are slower than the others, from how long their bodies took. Pure.

Each rank's time is taken relative to the median of the same txn, so that a txn that was hard for
all says nothing. A rank's score is the median of that over the last txns, so that single slow steps
say nothing either. A rank is slow if its score is beyond the middle score by ``least`` at least,
and by ``deviations`` times the spread of all scores: the median absolute deviation, scaled to a
standard deviation of normal scores (Rousseeuw & Croux, *Alternatives to the median absolute
deviation*, 1993), which up to half the ranks cannot inflate by being slow.

Medians are low medians (of an even number the lower of the middle two), so that of two ranks one
can be the slower. Body times must be a rank's own: without its waits for others, or else all ranks
are as slow as the slowest. To be slow is no fault to end a process for: never red.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

from fft.detectors.base import GREEN, Level, Verdict

_TO_SIGMA = 1.4826
_NAMED = 3
"""So many are named in a reason, the slowest first."""


@dataclass(frozen=True, slots=True)
class BodyTimes:
    """How long the bodies of one txn took at ``step``: seconds by name of the rank."""

    step: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StragglerConfig:
    """When a rank is slow. Raises ValueError for what cannot be.

    Attributes:
        least: by what part of the median body time at least; 0.25 is a quarter slower.
        deviations: and by how many deviations of all scores.
        window: over how many of the last txns; ``samples`` of them are needed.
    """

    least: float = 0.25
    deviations: float = 4.0
    window: int = 32
    samples: int = 8

    def __post_init__(self) -> None:
        if not (self.least > 0 and self.deviations >= 0):
            raise ValueError("need least > 0 and deviations >= 0")
        if not 1 <= self.samples <= self.window:
            raise ValueError(f"need 1 <= samples <= window, not {self.samples} and {self.window}")


class StragglerDetector:
    """Judges the ranks of one job against each other. Who is not in a txn is forgotten."""

    def __init__(self, config: StragglerConfig | None = None) -> None:
        self.config = config or StragglerConfig()
        self._ratios: dict[str, deque[float]] = {}
        self._middles: deque[float] = deque(maxlen=self.config.window)

    def observe(self, event: BodyTimes) -> None:
        """Take in one txn. Times that are not positive are left out, as nobody can be so fast."""
        times = {rank: seconds for rank, seconds in event.seconds.items() if seconds > 0}
        if not times:
            return
        middle = median_low(times.values())
        self._middles.append(middle)
        for rank in self._ratios.keys() - times.keys():
            del self._ratios[rank]
        for rank, seconds in times.items():
            ratios = self._ratios.setdefault(rank, deque(maxlen=self.config.window))
            ratios.append(seconds / middle)

    def slow(self) -> dict[str, float]:
        """The slow ranks, slowest first, each with how many times the median time it takes."""
        scores = {
            rank: median_low(ratios)
            for rank, ratios in self._ratios.items()
            if len(ratios) >= self.config.samples
        }
        if len(scores) < 2:
            return {}
        middle = median_low(scores.values())
        spread = _TO_SIGMA * median_low(abs(score - middle) for score in scores.values())
        limit = middle + max(self.config.least, self.config.deviations * spread)
        found = [(rank, score) for rank, score in scores.items() if score > limit]
        return dict(sorted(found, key=lambda item: (-item[1], item[0])))

    def verdict(self, now: float = 0.0) -> Verdict:
        """Green or yellow; the time does not matter."""
        slow = self.slow()
        if not slow:
            return GREEN
        middle = median_low(self._middles)
        named = [self._named(rank, slow[rank], middle) for rank in list(slow)[:_NAMED]]
        if len(slow) > _NAMED:
            named.append(f"and {len(slow) - _NAMED} more")
        return Verdict(Level.YELLOW, "; ".join(named))

    def _named(self, rank: str, score: float, middle: float) -> str:
        steps = len(self._ratios[rank])
        return (
            f"rank {rank} takes {score:.2f} × the median body time over the last {steps} steps "
            f"({score * middle:.3g} s, not {middle:.3g} s)"
        )

"""Detect ranks that are slower than the others, from the durations of their step functions. Pure.

Each rank sends a progress report about once a second. Reports are gathered into *rounds*, in which
every rank has reported. Each rank's time is taken relative to the median of its round, so that
steps that were hard for all ranks have no effect. A rank's score is the median of that over the
last rounds, so that single slow rounds have no effect either. A rank is slow if its score exceeds
the middle score by at least ``least``, by ``deviations`` times the spread of all scores, and by
``least_s`` seconds. The spread is the median absolute deviation, scaled to a standard deviation of
normal scores (Rousseeuw & Croux, *Alternatives to the median absolute deviation*, 1993), which up
to half the ranks cannot inflate by being slow.

Medians are low medians (of an even number the lower of the middle two), so that of two ranks one
can be the slower. Step times must be a rank's own: they exclude its waits for others, or else all
ranks are as slow as the slowest. Slowness is not a reason to end a process: the verdict is never
red.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

from fft.health.detectors.base import GREEN, Level, Verdict

_TO_SIGMA = 1.4826
_PATIENCE = 4
"""Reports of one rank after which a round no longer waits for ranks that have not reported."""
_NAMED = 3
"""Maximum number of ranks that a reason names, the slowest first."""


@dataclass(frozen=True, slots=True)
class BodyTimes:
    """Durations of the step functions in one round: seconds by name of the rank."""

    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StragglerConfig:
    """Conditions for a slow rank. Raises ValueError for impossible values.

    Attributes:
        least: Minimum excess as a fraction of the median step time; 0.25 is a quarter slower.
        least_s: Minimum excess in seconds; less is noise of the machine. If ranks share cores, one
            may be late by a few time slices in every step, for many rounds (a sound demo on two
            cores: 13 and 23 ms, which was 1.33 and 1.47 times its 40 to 50 ms). From steps of 0.2 s
            on ``least`` is the stricter.
        deviations: Minimum excess in deviations of all scores.
        window: Number of recent rounds that are kept.
        samples: Number of rounds that a rank needs for a score.
        sure: Number of consecutive rounds in which a rank must be found slow, or not slow, before
            the change is reported.
    """

    least: float = 0.25
    least_s: float = 0.05
    deviations: float = 4.0
    window: int = 10
    samples: int = 5
    sure: int = 5

    def __post_init__(self) -> None:
        if not (self.least > 0 and self.least_s >= 0 and self.deviations >= 0):
            raise ValueError("need least > 0, least_s >= 0 and deviations >= 0")
        if not 1 <= self.samples <= self.window:
            raise ValueError(f"need 1 <= samples <= window, not {self.samples} and {self.window}")
        if self.sure < 1:
            raise ValueError(f"need sure >= 1, not {self.sure}")


class StragglerDetector:
    """A judge of the ranks of one job. A rank that is not in a round is forgotten."""

    def __init__(self, config: StragglerConfig | None = None) -> None:
        self.config = config or StragglerConfig()
        self._ratios: dict[str, deque[float]] = {}
        self._middles: deque[float] = deque(maxlen=self.config.window)

    def observe(self, event: BodyTimes) -> None:
        """Take one round. Times that are not positive are impossible and are left out."""
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

    def forget(self, rank: str) -> None:
        """Drop the times of ``rank``, because they are of a process that is gone."""
        self._ratios.pop(rank, None)

    def slow(self) -> dict[str, float]:
        """Return the slow ranks, slowest first, each with its time as a multiple of the median."""
        scores = {
            rank: median_low(ratios)
            for rank, ratios in self._ratios.items()
            if len(ratios) >= self.config.samples
        }
        if len(scores) < 2:
            return {}
        middle = median_low(scores.values())
        spread = _TO_SIGMA * median_low(abs(score - middle) for score in scores.values())
        config = self.config
        floor = config.least_s / median_low(self._middles)
        limit = middle + max(config.least, floor, config.deviations * spread)
        found = [(rank, score) for rank, score in scores.items() if score > limit]
        return dict(sorted(found, key=lambda item: (-item[1], item[0])))

    def verdict(self, now: float = 0.0) -> Verdict:
        """Return green or yellow; ``now`` has no effect."""
        slow = self.slow()
        if not slow:
            return GREEN
        named = [self.evidence(rank, slow[rank]) for rank in list(slow)[:_NAMED]]
        if len(slow) > _NAMED:
            named.append(f"and {len(slow) - _NAMED} more")
        return Verdict(Level.YELLOW, "; ".join(named))

    def evidence(self, rank: str, score: float) -> str:
        """Explain why ``rank`` is slow."""
        middle, words = median_low(self._middles), len(self._ratios[rank])
        return (
            f"rank {rank} takes {score:.2f} × the median body time over its last {words} reports "
            f"({score * middle:.3g} s, not {middle:.3g} s)"
        )


@dataclass(frozen=True, slots=True)
class Change:
    """A rank has become slow, with the evidence, or is no longer slow."""

    rank: str
    slow: bool
    factor: float
    """Its last known time as a multiple of the median."""
    evidence: str


class Stragglers:
    """The slow ranks of a job, from its progress reports as they come in."""

    def __init__(self, config: StragglerConfig | None = None) -> None:
        self.slow: dict[str, float] = {}
        """The slow ranks, each with its time as a multiple of the median."""
        self._detector = StragglerDetector(config)
        self._sure = self._detector.config.sure
        self._incs: dict[str, int] = {}
        self._round: dict[str, list[float]] = {}
        self._known: set[str] = set()
        """Ranks in the last round."""
        self._otherwise: dict[str, int] = {}
        """Number of consecutive rounds in which a rank differed from its reported state."""

    def hear(self, rank: str, inc: int, seconds: float) -> list[Change]:
        """Take a report of incarnation ``inc`` of ``rank``, and return the changes it causes."""
        if inc < self._incs.get(rank, inc):
            return []
        if inc > self._incs.get(rank, inc):
            self._detector.forget(rank)
            self._round.pop(rank, None)
            self._otherwise[rank] = self._sure if rank in self.slow else 0
        self._incs[rank] = inc
        self._round.setdefault(rank, []).append(seconds)
        if self._known - self._round.keys() and len(self._round[rank]) < _PATIENCE:
            return []
        self._known = set(self._round)
        gathered = {name: median_low(times) for name, times in self._round.items()}
        self._round.clear()
        self._detector.observe(BodyTimes(gathered))
        return self._changes()

    def _changes(self) -> list[Change]:
        before, found = self.slow, self._detector.slow()
        differ = found.keys() ^ before.keys()
        self._otherwise = {rank: self._otherwise.get(rank, 0) + 1 for rank in differ}
        sure = {rank for rank, rounds in self._otherwise.items() if rounds >= self._sure}
        sure |= before.keys() - self._known  # a rank that is gone is not slow
        self.slow = {rank: by for rank, by in found.items() if rank in before or rank in sure}
        self.slow |= {rank: before[rank] for rank in before.keys() - found.keys() - sure}
        changes = [
            Change(rank, True, factor, self._detector.evidence(rank, factor))
            for rank, factor in self.slow.items()
            if rank not in before
        ]
        for rank, factor in before.items():
            if rank not in self.slow:
                why = "as fast as the others" if rank in self._known else "no longer heard"
                changes.append(Change(rank, False, factor, f"rank {rank} is {why}"))
        return changes

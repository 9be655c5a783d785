"""Detect that a peer, a host or a process has fallen silent, from the times of its heartbeats.
Pure.

The bound is ``factor`` times the longest of the last gaps between two heartbeats, between ``min_s``
and ``max_s``. The phi-accrual detector (Hayashibara et al., *The phi accrual failure detector*,
2004) is not used: it turns the silence into a probability under a normal distribution fitted to the
gaps. Gaps here are regular with rare long ones (a scheduler, a garbage collector, a lost packet),
so that distribution is too narrow until the first long gap is observed, and the levels in use,
10^-8 and less, are far beyond what a window of gaps can support. This detector keeps its idea: the
bound follows the gaps observed on this path. The longest gap is a number that a person can check in
a log, and a false alarm corrects itself, as its gap is in the window from then on.

An observer's own pause does not count against any peer (`fft.health.detectors.base.Attention`).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from fft.health.detectors.base import GREEN, Attention, Level, Verdict


@dataclass(frozen=True, slots=True)
class Seen:
    """A look at ``at``. ``beat``: time of the newest heartbeat known to the observer, or None."""

    at: float
    beat: float | None = None


@dataclass(frozen=True, slots=True)
class SilenceConfig:
    """Limits, in seconds. Raises ValueError for limits that are inconsistent.

    Attributes:
        max_s: Maximum of the bound.
        grace_s: Time from yellow to red; None: silence alone is never beyond recovery.
        min_s: Minimum of the bound; before ``samples`` gaps are known the bound is ``max_s``.
        factor: Bound as a multiple of the longest gap.
        window: Number of gaps that are kept.
        samples: Number of gaps that must be known.
        look_s: Maximum time between two looks of the observer that counts.
    """

    max_s: float = 10.0
    grace_s: float | None = None
    min_s: float = 1.0
    factor: float = 3.0
    window: int = 64
    samples: int = 3
    look_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.min_s <= self.max_s < math.inf:
            raise ValueError(f"need 0 < min_s <= max_s, not {self.min_s:g} and {self.max_s:g}")
        if not (self.factor >= 1 and self.look_s > 0 and (self.grace_s or 0.0) >= 0):
            raise ValueError("need factor >= 1, look_s > 0 and grace_s None or >= 0")
        if not 1 <= self.samples <= self.window:
            raise ValueError(f"need 1 <= samples <= window, not {self.samples} and {self.window}")


class SilenceDetector:
    """A judge of one named sender. Green until its first beat, before which it is not missed."""

    def __init__(self, who: str, config: SilenceConfig | None = None) -> None:
        self.who = who
        self.config = config or SilenceConfig()
        self._attention = Attention(self.config.look_s)
        self._gaps: deque[float] = deque(maxlen=self.config.window)
        self._beat: float | None = None
        self._excused = 0.0

    def observe(self, event: Seen) -> None:
        """Take one look, with or without a new heartbeat."""
        self._excused += self._attention.look(event.at)
        if event.beat is None or (self._beat is not None and event.beat <= self._beat):
            return
        missed = self._attention.missed_since(event.beat)
        if self._beat is not None:
            # A beat that came while the observer was away may have had others before it.
            away = self._excused - missed
            self._gaps.append(max(0.0, event.beat - self._beat - away))
        self._beat, self._excused = event.beat, missed

    def bound(self) -> float:
        """Return the longest silence that is not suspect, in seconds."""
        config = self.config
        if len(self._gaps) < config.samples:
            return config.max_s
        return min(config.max_s, max(config.min_s, config.factor * max(self._gaps)))

    def silent(self, now: float) -> float:
        """Return the seconds of silence that count."""
        if self._beat is None:
            return 0.0
        return now - self._beat - self._excused - self._attention.late(now)

    def verdict(self, now: float) -> Verdict:
        """Return green, yellow beyond the bound, or red ``grace_s`` later if that is set."""
        silent, bound, grace = self.silent(now), self.bound(), self.config.grace_s
        if self._beat is None or silent < bound:
            return GREEN
        reason = f"nothing was heard from {self.who} for {silent:.2f} s ({self._explained(bound)})"
        if grace is None or silent < bound + grace:
            return Verdict(Level.YELLOW, reason)
        return Verdict(Level.RED, f"{reason}, and the {grace:g} s of grace are over")

    def _explained(self, bound: float) -> str:
        config = self.config
        if len(self._gaps) < config.samples:
            return f"the maximum is {bound:g} s; too few beats were heard for a shorter one"
        wanted = config.factor * max(self._gaps)
        source = f"{config.factor:g} × the longest of the last {len(self._gaps)} gaps"
        if wanted < config.min_s:
            return f"bound {bound:.2f} s, the minimum; {source} is only {wanted:.2g} s"
        if wanted > config.max_s:
            return f"bound {bound:.2f} s, the maximum; {source} is {wanted:.2f} s"
        return f"bound {bound:.2f} s = {source}"

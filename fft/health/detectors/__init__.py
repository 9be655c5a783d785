"""Fault detectors: from timed observations, they derive a level and the reason for it.

All are pure: no clock, no thread, no torch. Times are seconds on one monotonic clock.
"""

from __future__ import annotations

from fft.health.detectors.base import GREEN, FaultDetector, Level, Verdict, worst

__all__ = ["GREEN", "FaultDetector", "Level", "Verdict", "worst"]

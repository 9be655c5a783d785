"""Fault detectors: fed with what was seen and when, they say how bad it looks, and why.

All are pure: no clock, no thread, no torch. Times are seconds on one monotonic clock.
"""

from __future__ import annotations

from fft.health.detectors.base import GREEN, FaultDetector, Level, Verdict, worst

__all__ = ["GREEN", "FaultDetector", "Level", "Verdict", "worst"]

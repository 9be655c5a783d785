"""Durations in a simulated job, drawn for each run. Pure."""

from __future__ import annotations

import random


class Latency:
    """Durations in virtual seconds, before the slowness of a particular process."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._hop, self._jitter = rng.choice(
            [(0.0003, 0.2), (0.001, 1.0), (0.001, 5.0), (0.005, 1.0)]
        )
        self._work = rng.choice([0.02, 0.05, 0.1])
        self.handling = 0.00005
        self.calm_work = 0.0
        """Duration of a step function in a calm job: long, so that waiting costs few events."""

    def _about(self, base: float) -> float:
        return base * (0.5 + self._rng.random())

    def hop(self) -> float:
        """Return the time of one way over the network."""
        u = self._rng.random()
        return self._hop * (0.5 + u * self._jitter if u < 0.98 else 20.0 * self._jitter)

    def operation(self, slow: float) -> float:
        """Return the time from the begin of an operation to its arrival at the bus."""
        return self.hop() * slow

    def compute(self) -> float:
        """Return the time of a forward and backward pass."""
        return self._about(self.calm_work or self._work)

    def apply(self) -> float:
        """Return the time of an optimizer step."""
        return self._about(self._work * 0.2)

    def restore(self) -> float:
        """Return the time to unwind, wait until the groups are quiet, and restore the state."""
        return self._about(self._work * 0.2)

    def transfer(self) -> float:
        """Return the time to fetch a state."""
        return self._about(self._work * 2.0)

    def notice(self) -> float:
        """Return the time until the end of a process or a connection is noticed."""
        return self._about(0.005)

    def boot(self) -> float:
        """Return the time from the start of a process to its first message."""
        return self._about(0.2)

    def exit(self) -> float:
        """Return the time from the last command to the end of the process."""
        return self._about(0.01)

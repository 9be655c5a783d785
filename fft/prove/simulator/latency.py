"""How long things take in a simulated job, drawn for each run. Pure."""

from __future__ import annotations

import random


class Latency:
    """How long things take, in virtual seconds, before a process's own slowness."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._hop, self._jitter = rng.choice(
            [(0.0003, 0.2), (0.001, 1.0), (0.001, 5.0), (0.005, 1.0)]
        )
        self._work = rng.choice([0.02, 0.05, 0.1])
        self.handling = 0.00005
        self.calm_work = 0.0
        """Of a body, once it is calm: long, so that waiting for others costs few events."""

    def _about(self, base: float) -> float:
        return base * (0.5 + self._rng.random())

    def hop(self) -> float:
        """One way over the network."""
        u = self._rng.random()
        return self._hop * (0.5 + u * self._jitter if u < 0.98 else 20.0 * self._jitter)

    def operation(self, slow: float) -> float:
        """From the begin of an operation to its arrival at the bus."""
        return self.hop() * slow

    def compute(self) -> float:
        """Forward and backward pass."""
        return self._about(self.calm_work or self._work)

    def apply(self) -> float:
        """The optimizer step."""
        return self._about(self._work * 0.2)

    def restore(self) -> float:
        """Unwinding, waiting for the groups to be quiet, putting back."""
        return self._about(self._work * 0.2)

    def transfer(self) -> float:
        """Fetching a state."""
        return self._about(self._work * 2.0)

    def notice(self) -> float:
        """Until somebody sees a process or a connection end."""
        return self._about(0.005)

    def boot(self) -> float:
        """From the start of a process to its first message."""
        return self._about(0.2)

    def exit(self) -> float:
        """From the last command to the end of the process."""
        return self._about(0.01)

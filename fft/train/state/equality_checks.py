"""Schedules a rank's fingerprints, by which votes reveal divergent replicas and wrong gradients.

A step that is due gives its vote two fingerprints: of the state that it begins with, and of the
gradients that its commit would apply.

By default the interval is measured, so that fingerprints take a
hundredth of the time. Ranks may measure different intervals. All are powers of 2, so the steps of
the longest interval are common to all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

from fft.errors import FftError
from fft.train.state.fingerprint import fingerprint

_SHARE = 0.01
"""Share of the time between commits that fingerprints may take."""
_FIRST = 16
"""Steps between two checks until the times are measured."""
_LONGEST = 1024


def refuse_interval(every: int | None) -> None:
    """Raise FftError unless ``every`` is an interval that all ranks can share."""
    if every is not None and (every < 0 or every & (every - 1)):
        raise FftError(
            f"check_replicas={every}: expected 0 or a power of 2, so that the intervals of ranks "
            "have common steps"
        )


class EqualityChecks:
    """Takes the fingerprints in the steps in which they are due.

    Args:
        state: Computes the fingerprint of the present state.
        every: Steps between two checks, a power of 2. 0 disables them; None measures the
            interval.

    Raises:
        FftError: ``every`` is not a power of 2.
    """

    def __init__(self, state: Callable[[], str], every: int | None) -> None:
        refuse_interval(every)
        self._state = state
        self._is_measured = every is None
        self.every = _FIRST if every is None else every
        self._since = time.monotonic()
        self._commits = 0
        self._due: int | None = None
        """The last step that was due. Its replays are due although the interval has changed."""
        self._gradients_s = 0.0
        """Duration of the last fingerprint of gradients."""

    def committed(self) -> None:
        """Count a committed txn."""
        self._commits += 1

    def digest(self, step: int) -> str | None:
        """Return that of the state if it is due at the txn after ``step`` committed steps."""
        if not self.every or (step % self.every and step != self._due):
            return None
        self._due = step
        begun = time.monotonic()
        found = self._state()
        if self._is_measured and self._commits:
            self._adapt(begun, time.monotonic() - begun)
        return found

    def now(self) -> str | None:
        """Return that of the state, due or not, or None if checks are disabled."""
        return self._state() if self.every else None

    def gradients(self, tensors: Iterable[torch.Tensor]) -> str:
        """Return that of the reduced gradients, in a step that compares the state, too."""
        begun = time.monotonic()
        found = fingerprint(tensors)
        self._gradients_s = time.monotonic() - begun
        return found

    def _adapt(self, now: float, cost: float) -> None:
        step_s = (now - self._since) / self._commits
        self.every, cost_s = 1, cost + self._gradients_s
        while self.every < _LONGEST and cost_s > _SHARE * step_s * self.every:
            self.every *= 2
        self._since, self._commits = now + cost, 0

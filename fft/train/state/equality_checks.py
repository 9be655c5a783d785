"""When a rank fingerprints its state, so that replicas that differ are found by their votes.

Pure but for the clock. How often is measured: as often as takes a hundredth of the time. Ranks may
come to different answers; all are powers of 2, so that the rarest of them is common to all.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fft.util.errors import FftError

_SHARE = 0.01
"""Of the time between commits."""
_FIRST = 16
"""Steps between two checks until the times are known."""
_LONGEST = 1024


def refuse_interval(every: int | None) -> None:
    """Raise FftError if ``every`` is no interval that ranks could agree on."""
    if every is not None and (every < 0 or every & (every - 1)):
        raise FftError(f"check_replicas={every}: give a power of 2, so that ranks agree, or 0")


class EqualityChecks:
    """Calls ``fingerprint`` in the steps in which it is due.

    Args:
        fingerprint: of the state as it is.
        every: steps between two, a power of 2; 0: never; None: as measured.

    Raises:
        FftError: ``every`` is no power of 2.
    """

    def __init__(self, fingerprint: Callable[[], str], every: int | None) -> None:
        refuse_interval(every)
        self._fingerprint = fingerprint
        self._is_measured = every is None
        self.every = _FIRST if every is None else every
        self._since = time.monotonic()
        self._commits = 0

    def committed(self) -> None:
        """A txn was committed."""
        self._commits += 1

    def digest(self, step: int) -> str | None:
        """The fingerprint, if it is due at the txn of ``step`` (committed steps before it)."""
        if not self.every or step % self.every:
            return None
        begun = time.monotonic()
        found = self._fingerprint()
        if self._is_measured and self._commits:
            self._adapt(begun, time.monotonic() - begun)
        return found

    def now(self) -> str | None:
        """The fingerprint, due or not; None: there are no checks."""
        return self._fingerprint() if self.every else None

    def _adapt(self, now: float, cost: float) -> None:
        step_s = (now - self._since) / self._commits
        self.every = 1
        while self.every < _LONGEST and cost > _SHARE * step_s * self.every:
            self.every *= 2
        self._since, self._commits = now + cost, 0

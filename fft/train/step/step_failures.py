"""Count the failures of the step function on this rank. Pure.

Repeated failures distinguish a deterministic bug from transient faults.
"""

from __future__ import annotations

from collections.abc import Hashable

from fft.errors import StepRetriesExceeded
from fft.train.session.error_reports import text_of
from fft.util.error_places import fingerprint, may_pass

MAX_IDENTICAL = 2
"""Failures in a row with one error (message and stack) at one step after which to give up."""
MAX_FAILURES = 5
"""Failures in a row with any errors at one step after which to give up."""


class StepFailures:
    """The failures in a row at one step. Main thread only."""

    def __init__(self, limit: int | None) -> None:
        """``limit``: failures in a row after which to give up; None for both defaults."""
        self._same = MAX_IDENTICAL if limit is None else limit
        self._any = MAX_FAILURES if limit is None else limit
        self.committed()

    def committed(self) -> None:
        """Reset the counts after a commit."""
        self._step = -1
        self._all = self._identical = 0
        self._last: Hashable = None

    def failed(
        self,
        step: int,
        members: Hashable,
        error: Exception,
        where: str = "",
        most: int | None = None,
    ) -> str | None:
        """Count a failure.

        Args:
            step: The step that failed.
            members: Members of the epoch.
            error: The error of the step function.
            where: Description of the step; empty for its number.
            most: Failures with any errors after which to give up; None for the default.

        Returns:
            Why to give up, or None to try again.
        """
        where = where or f"step {step}"
        if step != self._step:
            self.committed()
            self._step = step
        # after a change of members, the change may have caused the error
        this = None if may_pass(error) else (members, fingerprint(error))
        self._identical = self._identical + 1 if this is not None and this == self._last else 1
        self._all, self._last = self._all + 1, this
        if this is not None and self._identical >= self._same:
            times = f"{self._identical} times in a row"
            return f"the step function failed {times} by the same error at {where}"
        if self._all >= (most or self._any):
            return f"the step function failed {self._all} times in a row at {where}"
        return None


def retries_exceeded(why: str, error: Exception) -> StepRetriesExceeded:
    """Return the error to raise from ``error``, which a replay cannot avoid for the reason
    ``why``."""
    return StepRetriesExceeded(f"{text_of(error)}; {why}. The traceback of the cause is attached")

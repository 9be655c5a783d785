"""Counts the failures of the body on this rank, to tell a mistake in it from bad luck. Pure."""

from __future__ import annotations

from collections.abc import Hashable

from fft.errors import StepRetriesExceeded
from fft.train.reported import text_of
from fft.util.error_places import fingerprint, may_pass

SAME = 2
"""An error that comes back at one step, the same in every word and call, will come back again."""
ANY = 5
"""Whatever they are."""


class BodyFailures:
    """The failures in a row at one step. Main thread only."""

    def __init__(self, limit: int | None) -> None:
        """``limit``: after so many, of whatever sort, it is hopeless; None: `SAME`, or `ANY`."""
        self._same = SAME if limit is None else limit
        self._any = ANY if limit is None else limit
        self.committed()

    def committed(self) -> None:
        """A step is done: what comes is a new trouble."""
        self._step = -1
        self._all = self._alike = 0
        self._last: Hashable = None

    def failed(self, step: int, members: Hashable, error: Exception, where: str = "") -> str | None:
        """Count one, in an epoch of ``members``. Why to try no more; None: try again.

        ``where``: the step in words; empty: its number says it.
        """
        where = where or f"step {step}"
        if step != self._step:
            self.committed()
            self._step = step
        # with other members it may be their going that failed it
        this = None if may_pass(error) else (members, fingerprint(error))
        self._alike = self._alike + 1 if this is not None and this == self._last else 1
        self._all, self._last = self._all + 1, this
        if this is not None and self._alike >= self._same:
            times = f"{self._alike} times in a row"
            return f"the step function failed {times} by the same error at {where}"
        if self._all >= self._any:
            return f"the step function failed {self._all} times in a row at {where}"
        return None


def hopeless(why: str, error: Exception) -> StepRetriesExceeded:
    """Return the error to raise from ``error``, which a replay cannot avoid for the reason
    ``why``."""
    return StepRetriesExceeded(f"{text_of(error)}; {why}. The traceback of the cause is attached")

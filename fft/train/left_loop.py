"""What is to be said of a loop over transactions that its script has left by `break`."""

from __future__ import annotations

import logging
import sys

from fft.util.error_places import place_of, traceback_of_caller
from fft.util.errors import FftError

logger = logging.getLogger(__name__)


class LeftLoop:
    """Of one manager; main thread. What is raised where a loop is left reaches nobody, so this
    keeps it until the manager is shut down."""

    def __init__(self) -> None:
        self._mistake: FftError | None = None
        """What the last body has left undone."""
        self._error: FftError | None = None
        """That, if the loop was left then."""
        self._at: int | None = None
        """The loop was left after that step, which was not the last."""

    def begun(self) -> None:
        """A loop begins: it may go on where one was left."""
        self._at = None

    def note(self, mistake: FftError) -> None:
        """The body was no step; its place is that of the `with` statement."""
        self._mistake = mistake.with_traceback(traceback_of_caller())

    def forget(self) -> None:
        """Nothing is, or it is raised now."""
        self._mistake = None

    def leave(self, step: int, at_end: bool = False) -> None:
        """The script leaves the loop, after ``step``; ``at_end``: no txn was to come."""
        if (mistake := self._mistake) is None:
            self._at = None if at_end else step
            return
        text = f"the loop was left (`break`?) after an attempt that was not committed: {mistake}"
        logger.error("%s; at %s", text, place_of(mistake).where)
        self._error = FftError(text).with_traceback(mistake.__traceback__)

    def tell(self) -> None:
        """Raise FftError if the loop was left after a body that was no step, and warn if it was
        left before its end, unless it was for another exception."""
        error, self._error = self._error, None
        at, self._at = self._at, None
        if sys.exc_info()[1] is not None:
            return
        if error is not None:
            raise error
        if at is not None:
            logger.warning(
                "the loop was left (`break`?) after step %d, before its end: the replicas are not "
                "compared once more, and no last checkpoint is taken; manager.drain() on all "
                "ranks, in the place of it, does both",
                at,
            )

"""The warning about a loop over transactions that its script has left by `break`."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger(__name__)


class LeftLoop:
    """Whether the script of one manager has left its loop early. Main thread only."""

    def __init__(self) -> None:
        self._at: int | None = None
        """The loop was left after that step, which was not the last."""

    def begun(self) -> None:
        """A loop begins: it may continue where an earlier one was left."""
        self._at = None

    def leave(self, step: int, at_end: bool = False) -> None:
        """The script leaves the loop after ``step``; ``at_end``: no transaction was to follow."""
        self._at = None if at_end else step

    def tell(self) -> None:
        """Warn if the loop was left before its end, unless another exception is being raised."""
        at, self._at = self._at, None
        if at is not None and sys.exc_info()[1] is None:
            logger.warning(
                "the loop was left (`break`?) after step %d, before its end: the replicas are not "
                "compared once more, and no last checkpoint is taken; manager.drain() on all "
                "ranks, in the place of it, does both",
                at,
            )

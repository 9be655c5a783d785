"""Aborts of other libraries, which a user adds to those of FFT's process groups."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import NamedTuple

from fft.errors import ConfigError
from fft.train.participation import Participation

logger = logging.getLogger(__name__)

ABORT_HANGS = "abort_hangs"
"""Note in the trace: an abort did not end within its limit, so the process ends."""


class _Abort(NamedTuple):
    function: Callable[[], object]
    limit_s: float
    name: str


class Aborts:
    """The user's aborts of one manager, in the order in which they were added."""

    def __init__(self, job: Participation) -> None:
        self._job = job
        self._all: tuple[_Abort, ...] = ()

    def add(self, function: Callable[[], object], limit_s: float) -> None:
        """Add an abort. Raises ConfigError if ``limit_s`` is not positive."""
        if not limit_s > 0:
            raise ConfigError(f"on_abort(limit_s={limit_s!r}): expected a positive number, as 5.0")
        name = getattr(function, "__qualname__", type(function).__qualname__)
        self._all = (*self._all, _Abort(function, limit_s, f"{name}()"))

    def run(self) -> None:
        """Call every abort. Called on the engine's thread, after FFT's own aborts."""
        for each in self._all:
            watchdog = threading.Timer(each.limit_s, self._end, [each])
            watchdog.daemon = True
            watchdog.start()
            try:
                each.function()
            except Exception:  # the rollback goes on: the abort may have nothing left to release
                logger.exception("the abort %s, added by on_abort, has failed", each.name)
            finally:
                watchdog.cancel()

    def _end(self, hangs: _Abort) -> None:
        """End this process, because waiting longer would hold up the other groups."""
        logger.critical(
            "the abort %s, added by on_abort, has not ended within %g s: this process ends now; a "
            "restarted process fetches the state",
            *(hangs.name, hangs.limit_s),
        )
        self._job.note(ABORT_HANGS, {"abort": hangs.name, "limit_s": hangs.limit_s})
        os.kill(os.getpid(), signal.SIGKILL)

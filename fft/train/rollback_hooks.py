"""The user's aborts, which run in each rollback, and health checks, which also run before the rank
joins."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from fft.errors import ConfigError, HealthCheckFailed
from fft.train.error_reports import text_of
from fft.train.participation import Participation

logger = logging.getLogger(__name__)

HOOK_HANGS = "hook_hangs"
"""Name of the trace note for an abort or a check that exceeded its limit, which ends the
process."""
CHECK_FAILED = "health_check_failed"
"""Name of the trace note for a failed health check, after which the process leaves the job."""


class _Hook(NamedTuple):
    function: Callable[[], object]
    limit_s: float
    name: str


class _Functions:
    """Functions of one kind, in the order in which they were added.

    Args:
        job: The job session of this rank.
        method: The method of the manager that adds them, for messages.
    """

    def __init__(self, job: Participation, method: str) -> None:
        self._job, self._method = job, method
        self._all: tuple[_Hook, ...] = ()

    def add(self, function: Callable[[], object], limit_s: float) -> None:
        """Add a function. Raises ConfigError if ``limit_s`` is not positive and finite."""
        if not 0 < limit_s <= threading.TIMEOUT_MAX:
            raise ConfigError(
                f"{self._method}(limit_s={limit_s!r}): expected a positive number of seconds, and "
                "not inf"
            )
        name = getattr(function, "__qualname__", type(function).__qualname__)
        self._all = (*self._all, _Hook(function, limit_s, f"{name}()"))

    @contextmanager
    def _limited(self, hook: _Hook) -> Iterator[None]:
        watchdog = threading.Timer(hook.limit_s, self._end, [hook])
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()

    def _end(self, hook: _Hook) -> None:
        """End this process, because waiting longer would hold up the other groups."""
        logger.critical(
            "%s, added by %s, did not return within %g s; killing this process. A restarted "
            "process fetches the state",
            *(hook.name, self._method, hook.limit_s),
        )
        self._job.note(HOOK_HANGS, {"hook": hook.name, "limit_s": hook.limit_s})
        os.kill(os.getpid(), signal.SIGKILL)


class Aborts(_Functions):
    """The user's aborts; they run on the engine's thread after FFT has aborted its own process
    groups."""

    def __init__(self, job: Participation) -> None:
        super().__init__(job, "on_abort")

    def run(self) -> None:
        """Call every abort."""
        for each in self._all:
            with self._limited(each):
                try:
                    each.function()
                except BaseException:
                    logger.exception("the abort %s, added by on_abort, has failed", each.name)


class HealthChecks(_Functions):
    """The user's health checks, which run on the main thread before this rank is admitted."""

    def __init__(self, job: Participation) -> None:
        super().__init__(job, "health_check")

    def run(self) -> None:
        """Call every check.

        Raises:
            HealthCheckFailed: A check has raised, which is the cause.
        """
        for each in self._all:
            with self._limited(each):
                try:
                    each.function()
                except Exception as error:
                    text = text_of(error)
                    self._job.note(CHECK_FAILED, {"check": each.name, "error": text})
                    raise HealthCheckFailed(
                        f"rank {self._job.peer} leaves the job: its health check {each.name} "
                        f"failed: {text}"
                    ) from error


class Hooks:
    """The user's aborts and health checks on one rank."""

    def __init__(self, job: Participation) -> None:
        self.aborts, self.checks = Aborts(job), HealthChecks(job)

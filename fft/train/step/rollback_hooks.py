"""The user's hooks: functions that run before and after attempts, each within a time limit."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from fft.errors import ConfigError, HealthCheckFailed, HookFailed
from fft.train.session.error_reports import text_of
from fft.train.session.participation import Participation

logger = logging.getLogger(__name__)

HOOK_HANGS = "hook_hangs"
"""Name of the trace note for a hook that exceeded its limit, which ends the process."""
HOOK_FAILED = "hook_failed"
"""Name of the trace note for a hook that raised, after which the process leaves the job."""


class _Hook(NamedTuple):
    function: Callable[[], object]
    limit_s: float
    name: str


class HookFunctions:
    """The hooks of one kind, in the order in which they were added.

    Args:
        job: The job session of this rank.
        method: The method of the manager that adds them.
    """

    def __init__(self, job: Participation, method: str) -> None:
        self._job, self._method = job, method
        self._all: tuple[_Hook, ...] = ()

    def add(self, function: Callable[[], object], limit_s: float) -> None:
        """Add a function. Raises ConfigError if ``limit_s`` is not positive and finite."""
        if not 0 < limit_s <= threading.TIMEOUT_MAX:
            raise ConfigError(
                f"{self._method}(limit_s={limit_s!r}): expected a positive, finite number of "
                "seconds"
            )
        name = getattr(function, "__qualname__", type(function).__qualname__)
        self._all = (*self._all, _Hook(function, limit_s, f"{name}()"))

    def run(self) -> None:
        """Call the functions, until one raises. Main thread.

        Raises:
            HookFailed: A function has raised; its error is the cause.
            HealthCheckFailed: The same, for a health check.
        """
        for each in self._all:
            with self._limited(each):
                try:
                    each.function()
                except Exception as error:
                    raise self._failure(each, error) from error

    def run_all(self) -> None:
        """Call every function, and log their errors. Any thread."""
        for each in self._all:
            with self._limited(each):
                try:
                    each.function()
                except BaseException:
                    logger.exception("%s, added by %s, has failed", each.name, self._method)

    def _failure(self, hook: _Hook, error: Exception) -> HookFailed:
        """Trace the error of a hook, and return the error with which this rank leaves the job."""
        text, method = text_of(error), self._method
        self._job.note(HOOK_FAILED, {"added_by": method, "hook": hook.name, "error": text})
        is_check = method == "health_check"
        kind, what = (HealthCheckFailed, "health check") if is_check else (HookFailed, method)
        return kind(f"rank {self._job.peer} leaves the job: its {what} {hook.name} failed: {text}")

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
        """Kill this process, because the other groups would wait for it."""
        logger.critical(
            "%s, added by %s, did not return within %g s; killing this process. A restarted "
            "process fetches the state",
            *(hook.name, self._method, hook.limit_s),
        )
        self._job.note(HOOK_HANGS, {"hook": hook.name, "limit_s": hook.limit_s})
        os.kill(os.getpid(), signal.SIGKILL)


class Hooks:
    """The user's hooks on one rank, by the methods of the manager that add them.

    ``on_join`` and ``health_check`` run when the rank joins, and after each rollback. A rollback
    first runs ``on_abort`` on the engine's thread, after FFT has aborted its own process groups,
    and then ``on_unwound`` on the main thread.
    """

    def __init__(self, job: Participation) -> None:
        self.on_abort = HookFunctions(job, "on_abort")
        self.on_unwound = HookFunctions(job, "on_unwound")
        self.on_join = HookFunctions(job, "on_join")
        self.health_check = HookFunctions(job, "health_check")
        self.on_complete = HookFunctions(job, "on_complete")
        self.on_leave = HookFunctions(job, "on_leave")
        self._has_begun = self._has_ended = False

    def begin(self) -> None:
        """Run ``on_join`` and ``health_check``. Raises HookFailed or HealthCheckFailed."""
        self.on_join.run()
        self.health_check.run()
        self._has_begun = True

    def complete(self) -> None:
        """Run ``on_complete``, because the job is complete. Idempotent. Raises HookFailed."""
        if not self._has_ended:
            self._has_ended = True
            self.on_complete.run()

    def terminate(self) -> None:
        """Run ``on_leave``, unless the job is complete or this rank has begun no attempt.

        Idempotent.
        """
        if self._has_begun and not self._has_ended:
            self._has_ended = True
            self.on_leave.run_all()

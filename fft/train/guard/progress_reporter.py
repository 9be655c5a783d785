"""A participant's progress reports: it times its steps and publishes the results, and it publishes
reports of other parts of the process.

A single thread sends everything in the topic ``progress`` and does nothing else, so a slow or lost
message affects neither the step nor the engine. This module does not need torch.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from statistics import median_low
from types import TracebackType

from fft.bus.base import ErrorBus
from fft.errors import BusError
from fft.messages.progress import Goal, Report, SpeedReport, encode_report, register_of
from fft.messages.protocol import Peer
from fft.util.log_sampler import LogSampler

REPORTS_PER_SECOND = 100
"""Maximum number of reports of a whole job; in a large job each rank reports less often."""
_KEEP = 1024
"""Maximum number of timed steps between two reports."""

logger = logging.getLogger(__name__)


class _Waiting:
    """Context manager around waits for other ranks inside a step. It is one reused object, so that
    it costs next to nothing."""

    __slots__ = ("_reporter", "_since")

    def __init__(self, reporter: ProgressReporter) -> None:
        self._reporter = reporter
        self._since = threading.local()

    def __enter__(self) -> None:
        self._since.at = self._reporter.clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reporter.waited += self._reporter.clock() - self._since.at


class ProgressReporter:
    """Times the steps of one participant; `begin` to `committed` are called on its main thread.

    With ``interval`` 0 it sends no speed reports, and starts a thread only for reports given to
    `say`.
    """

    def __init__(
        self,
        bus: ErrorBus,
        peer: Peer,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
        scope: str | None = None,
    ) -> None:
        self.clock = clock
        self.waiting = _Waiting(self)
        """Context manager around waits for other ranks; not reentrant."""
        self.waited = 0.0
        """Seconds in the current step that were spent waiting for other ranks."""
        self.loss: float | None = None
        """The newest loss that the script has logged."""
        self.goal: Goal | None = None
        """The planned end of the loop."""
        self._bus, self._peer, self._interval, self._scope = bus, peer, interval, scope
        self._begun = 0.0
        self._own = 0.0
        self._lock = threading.Lock()
        self._step_times: list[float] = []
        self._step = 0
        self._ranks = 1
        self._failed = LogSampler()
        self._queue: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        """Reports to send; None ends the thread."""
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if interval > 0:
            self._start()

    def begin(self) -> None:
        """Start the clock at the beginning of a txn."""
        self.waited = 0.0
        self._begun = self.clock()

    def end(self) -> None:
        """Stop the clock at the end of the step function, before the vote."""
        self._own = self.clock() - self._begun - self.waited

    def committed(self, step: int, ranks: int) -> None:
        """Count the txn, which was committed as step ``step`` in a job of ``ranks`` ranks."""
        with self._lock:
            self._step, self._ranks = step, ranks
            if len(self._step_times) < _KEEP:
                self._step_times.append(max(0.0, self._own))

    def say(self, report: Report) -> None:
        """Queue ``report`` for the thread. Any thread; never waits. It is ignored after `close`."""
        with self._lock:
            if self._is_closed:
                return
            self._queue.put(report)
            if self._thread is None:
                self._start()

    def close(self) -> None:
        """Send the queued reports and end the thread. Idempotent; returns within 1 s even if the
        bus hangs."""
        with self._lock:
            self._is_closed = True
        self._queue.put(None)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(1.0)

    def word(self) -> SpeedReport | None:
        """Return the report on the time since the last call, or None if no txn was committed."""
        with self._lock:
            step_times, self._step_times = self._step_times, []
            step = self._step
        if not step_times:
            return None
        group, rank, inc = self._peer
        took = round(median_low(step_times), 6)
        return SpeedReport(group, rank, inc, step, took, self._scope, self.loss, self.goal)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="fft-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due = self._next()
        while True:
            try:
                word = self._queue.get(timeout=max(0.0, due - time.monotonic()))
                if word is None:
                    return
            except queue.Empty:
                due, word = self._next(), self.word()
                if word is None:
                    continue
            try:
                if (register := register_of(word)) is not None:
                    self._bus.write(register, encode_report(word))
                self._bus.broadcast(encode_report(word), "progress")
            except BusError as error:  # the engine detects a failed bus itself
                if (count := self._failed.add("word")) is not None:
                    logger.info("a progress report could not be sent (%d so far): %s", count, error)

    def _next(self) -> float:
        """Return when the next speed report is due."""
        if not self._interval:
            return time.monotonic() + threading.TIMEOUT_MAX / 2
        return time.monotonic() + max(self._interval, self._ranks / REPORTS_PER_SECOND)

"""Supervision of the main thread of a participant: interrupter, hang monitor, speed reports.

They start when the job is joined. Some may not exist: there may be no monitor, or another thread
may train. `Watchers` checks this, so that its callers need not.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from statistics import median

from fft.bus import ErrorBus
from fft.bus.resubscribing import ResubscribingListener
from fft.errors import BusError
from fft.health.death_mutex import Hold, hold
from fft.health.detectors.trainer import MonitorConfig, ProgressConfig
from fft.health.monitor_client import MonitorClient, supervisor_socket
from fft.messages.progress import SpeedReport, decode_report
from fft.messages.protocol import Peer, UnreadableMessage
from fft.train.guard.interrupt import Interrupter
from fft.train.guard.progress_reporter import ProgressReporter

logger = logging.getLogger(__name__)

_LIMITS = ProgressConfig()


class Watchers:
    """Supervision of the thread that calls ``watch``."""

    def __init__(self) -> None:
        self.main: int | None = None
        """Identity of the thread that trains, or None until it has joined the job."""
        self.interrupter: Interrupter | None = None
        self.monitor: MonitorClient | None = None
        self.speed: ProgressReporter | None = None
        self.joins = 0.0
        """Least limit of the first steps of a process that joins a running job, else 0."""
        self._others: ResubscribingListener | None = None
        """Listener to the speeds of the other ranks, until this rank has some of its own."""
        self._commits = 0
        self._hold: Hold | None = None

    def watch(
        self, config: MonitorConfig | None, peer: Peer, url: str, on_hang: HangCallback
    ) -> None:
        """Start supervision of the calling thread; if ``config`` is None, without a monitor."""
        if threading.current_thread() is threading.main_thread():
            # Python runs signal handlers on the main thread only, so no other can be interrupted
            self.interrupter = Interrupter()
            if config is not None:
                self.monitor = _start_monitor(config, peer, url, on_hang)
            self._hold = hold(os.environ.get("FFT_DEATH_MUTEX_FD"))
        self.main = threading.get_ident()

    def report_speed(
        self, bus: ErrorBus, peer: Peer, interval_s: float, scope: str | None
    ) -> ProgressReporter:
        """Publish progress reports of this rank on ``bus``."""
        self.speed = ProgressReporter(bus, peer, interval_s, scope=scope)
        if (monitor := self.monitor) is not None:
            expected = ExpectedStep(peer, monitor.pulse.expect)
            with suppress(BusError):  # then only this rank's own steps count
                self._others = ResubscribingListener(bus, "progress", expected.take, str(peer))
        return self.speed

    # --- the main thread ---

    def waiting(self) -> AbstractContextManager[None]:
        """Context of waits for other ranks, which are no hang of this rank."""
        return nullcontext() if self.monitor is None else self.monitor.pulse.waiting

    def reducing(self) -> AbstractContextManager[None]:
        """Context of waits for reductions, which do not count as this rank's compute time."""
        return nullcontext() if self.speed is None else self.speed.waiting

    def join(self, is_strict: bool) -> None:
        """Record that this process joins a running job, whose ranks wait for its first steps.

        Only the first call has an effect.

        Args:
            is_strict: Limit these steps like later ones. Otherwise the limit has the higher minimum
                of a step that loads what later steps use.
        """
        self.joins = self.joins or (_LIMITS.min_s if is_strict else _LIMITS.first_s)

    def txn_begun(self, step: int) -> None:
        """Record the start of a txn that attempts ``step``."""
        if self.speed is not None:
            self.speed.begin()
        if self.monitor is not None:
            self.monitor.pulse.begin(step)
            self.monitor.compilations.attach()

    def step_begun(self) -> None:
        """Record that the other ranks wait for this one from now on, until `body_done`."""
        if self.monitor is not None:
            self.monitor.pulse.join(self.joins)

    def body_done(self) -> None:
        """Record the end of the step function, before the vote."""
        if self.speed is not None:
            self.speed.end()
        if self.monitor is not None:
            self.monitor.pulse.join(0.0)

    def committed(self, step: int, ranks: int) -> None:
        """Record that the txn was committed, by ``ranks`` ranks in all."""
        if self.speed is not None:
            self.speed.committed(step, ranks)
        self._commits += 1
        if self._commits >= _LIMITS.samples:  # the monitor judges this rank by its own steps
            self.joins = 0.0
            self._stop_listening()

    def txn_ended(self, committed: bool) -> None:
        """Record that the main thread has finished the txn."""
        if self.monitor is not None:
            self.monitor.pulse.end(committed=committed)

    def ping(self) -> None:
        """Report progress to the hang monitor."""
        if self.monitor is not None:
            self.monitor.pulse.ping()

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Context of a section that is not interrupted, and whose hang limit is longer."""
        pulse = nullcontext() if self.monitor is None else self.monitor.pulse.atomic
        own = nullcontext() if self.interrupter is None else self.interrupter.atomic()
        with own, pulse:
            yield

    @property
    def doomed(self) -> bool:
        """Whether the monitor is about to end this process, which hangs."""
        return self.monitor is not None and self.monitor.pulse.doomed

    # --- any thread ---

    def interrupt(self, cause: str) -> None:
        """Interrupt the running step function, if there is one."""
        if self.interrupter is not None:
            self.interrupter.request(cause)

    # --- the end ---

    def end_reports(self) -> None:
        """Stop the progress reports within 1 s. Idempotent."""
        self._stop_listening()
        if self.speed is not None:
            self.speed.close()

    def _stop_listening(self) -> None:
        others, self._others = self._others, None
        if others is not None:
            others.close()

    def close(self) -> None:
        """Stop interrupter and monitor, after everything that may still hang. Idempotent."""
        if self.interrupter is not None:
            self.interrupter.close()
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None
        if self._hold is not None:
            self._hold.release()


class ExpectedStep:
    """The median time of a step on the other ranks of the job, by their newest reports."""

    def __init__(self, peer: Peer, expect: Callable[[float], None]) -> None:
        self._peer, self._expect = peer, expect
        self._times: dict[tuple[str, int], float] = {}

    def take(self, payload: bytes) -> None:
        """Take a message of the topic ``progress``."""
        try:
            report = decode_report(payload)
        except UnreadableMessage:  # observers log it
            return
        if isinstance(report, SpeedReport) and (report.group, report.rank) != self._peer[:2]:
            self._times[report.group, report.rank] = report.compute
            self._expect(median(self._times.values()))


HangCallback = Callable[[str], None]
"""Callback for a hang, with the monitor's reason, on a thread of the monitor's client."""


def _start_monitor(
    config: MonitorConfig, peer: Peer, url: str, on_hang: HangCallback
) -> MonitorClient | None:
    try:
        return MonitorClient(
            config,
            on_hang,
            group=peer.group,
            rank=peer.rank,
            # under a supervisor, the supervisor reports deaths
            bus_url=None if "FFT_GROUP" in os.environ else url,
            supervisor=supervisor_socket(os.environ.get("FFT_SUPERVISOR_FD")),
        )
    except OSError as error:
        logger.warning(
            "no hang detection: the monitor of this process cannot be started: %s", error
        )
        return None

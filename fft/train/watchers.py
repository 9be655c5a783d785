"""What watches the main thread of a participant: interrupter, monitor, speed reports.

Touches no engine. Made with the manager; most of it begins when the job is joined, and what does
not exist (no monitor, a thread that is not the main one) is left out here, once.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from fft.bus import ErrorBus
from fft.health.death_mutex import Hold, hold
from fft.health.detectors.trainer import MonitorConfig
from fft.health.monitor_client import MonitorClient, supervisor_socket
from fft.messages.protocol import Peer
from fft.train.interrupt import Interrupter
from fft.train.progress_reporter import ProgressReporter

logger = logging.getLogger(__name__)


class Watchers:
    """Of one main thread: the one that calls ``watch``."""

    def __init__(self) -> None:
        self.main: int | None = None
        """Thread that trains; known once it has joined the job."""
        self.interrupter: Interrupter | None = None
        self.monitor: MonitorClient | None = None
        self.speed: ProgressReporter | None = None
        self._hold: Hold | None = None

    def watch(self, config: MonitorConfig | None, peer: Peer, url: str, hung: Hung) -> None:
        """Begin, on the thread that trains. ``config`` None: no monitor."""
        if threading.current_thread() is threading.main_thread():
            self.interrupter = Interrupter()  # else Python lets nobody interrupt the bodies
            if config is not None:
                self.monitor = _start_monitor(config, peer, url, hung)
            self._hold = hold(os.environ.get("FFT_DEATH_MUTEX_FD"))
        self.main = threading.get_ident()

    def report_speed(
        self, bus: ErrorBus, peer: Peer, interval_s: float, scope: str | None
    ) -> ProgressReporter:
        """Say on ``bus`` how fast this rank is."""
        self.speed = ProgressReporter(bus, peer, interval_s, scope=scope)
        return self.speed

    # --- the main thread ---

    def waiting(self) -> AbstractContextManager[None]:
        """Around what waits for others: whatever is wrong then is not this rank's."""
        return nullcontext() if self.monitor is None else self.monitor.pulse.waiting

    def reducing(self) -> AbstractContextManager[None]:
        """Around the wait for a reduction, which is no time of this rank's own."""
        return nullcontext() if self.speed is None else self.speed.waiting

    def txn_begun(self, step: int) -> None:
        """A txn begins that attempts ``step``."""
        if self.speed is not None:
            self.speed.begin()
        if self.monitor is not None:
            self.monitor.pulse.begin(step)
            self.monitor.compilations.attach()

    def body_done(self) -> None:
        """The body has ended; what follows is the vote."""
        if self.speed is not None:
            self.speed.end()

    def committed(self, step: int, ranks: int) -> None:
        """The txn was committed, by so many ranks in all."""
        if self.speed is not None:
            self.speed.committed(step, ranks)

    def txn_ended(self, committed: bool) -> None:
        """Nothing of the txn is left to do on this thread."""
        if self.monitor is not None:
            self.monitor.pulse.end(committed=committed)

    def ping(self) -> None:
        """Work was done."""
        if self.monitor is not None:
            self.monitor.pulse.ping()

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """A section that is neither interrupted nor soon taken for a hang."""
        pulse = nullcontext() if self.monitor is None else self.monitor.pulse.atomic
        own = nullcontext() if self.interrupter is None else self.interrupter.atomic()
        with own, pulse:
            yield

    @property
    def doomed(self) -> bool:
        """Whether the monitor ends this process, which has hung."""
        return self.monitor is not None and self.monitor.pulse.doomed

    # --- any thread ---

    def interrupt(self, cause: str) -> None:
        """Unwind the body that is open, if one is."""
        if self.interrupter is not None:
            self.interrupter.request(cause)

    # --- the end ---

    def end_reports(self) -> None:
        """Report nothing any more. Idempotent; within 1 s."""
        if self.speed is not None:
            self.speed.close()

    def close(self) -> None:
        """End all; after whatever may still hang. Idempotent."""
        if self.interrupter is not None:
            self.interrupter.close()
        if self.monitor is not None:
            self.monitor.close()
        if self._hold is not None:
            self._hold.release()


Hung = Callable[[str], None]
"""Gets the monitor's reason, on a thread of the monitor's client."""


def _start_monitor(config: MonitorConfig, peer: Peer, url: str, hung: Hung) -> MonitorClient | None:
    try:
        return MonitorClient(
            config,
            hung,
            group=peer.group,
            rank=peer.rank,
            # under a supervisor it is the supervisor that tells of deaths
            bus_url=None if "FFT_GROUP" in os.environ else url,
            supervisor=supervisor_socket(os.environ.get("FFT_SUPERVISOR_FD")),
        )
    except OSError as error:
        logger.warning("nobody watches this process: its monitor cannot be started: %s", error)
        return None

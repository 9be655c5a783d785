"""A trainer's interface to its monitor: its pulse, the records of its main thread, the verdicts.

Starts one process (`fft.health.monitor`) and two threads; ``close`` ends them. It does not use the
engine: its owner decides how to react to a verdict.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from fft.health.compiling import Compilations
from fft.health.detectors.pulse import Pulse
from fft.health.detectors.trainer import MonitorConfig
from fft.health.main_thread_probe import MainThreadProbe
from fft.health.monitor import MonitorProcess

logger = logging.getLogger(__name__)


def supervisor_socket(setting: str | None) -> int | None:
    """Return the inherited descriptor that ``FFT_SUPERVISOR_FD`` names, if it is such a socket."""
    if setting is None or not setting.isdecimal():
        return None
    try:
        with socket.socket(fileno=os.dup(int(setting))) as end:
            is_it = (end.family, end.type) == (socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:  # a process between us and the supervisor has closed it
        return None
    return int(setting) if is_it else None


class MonitorClient:
    """Watch this process from construction until ``close``. Main thread only."""

    def __init__(
        self,
        config: MonitorConfig,
        on_suspect: Callable[[str], None],
        *,
        group: str,
        rank: int,
        bus_url: str | None,
        supervisor: int | None = None,
    ) -> None:
        """Start the monitor.

        Args:
            config: Limits of the monitor.
            on_suspect: Called with the reason, on a thread of this object, while any thread can
                run.
            group: Group of this process.
            rank: Rank of this process.
            bus_url: Bus where the monitor reports the death of this process; None: another process
                reports it.
            supervisor: Descriptor of a datagram socket to the supervisor, which forwards
                suspicions.

        Raises:
            OSError: The monitor cannot be started.
        """
        self._on_suspect = on_suspect
        self._is_closed = False
        self.begun = threading.Event()
        """Set when the monitor watches; it takes a moment to start."""
        self.pulse = Pulse(time.monotonic)
        self.compilations = Compilations(self.pulse.atomic)
        """To be attached when a txn begins, because a process that compiles does not hang."""
        self._moves = MainThreadProbe(self.pulse, config.interval_s)
        try:
            self._process = MonitorProcess(
                self.pulse,
                config,
                group=group,
                rank=rank,
                bus_url=bus_url,
                supervisor=supervisor,
                on_line=self._hear,
            )
        except OSError:
            self._moves.close()
            self.pulse.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the monitor."""
        return self._process.pid

    def _hear(self, line: dict[str, Any]) -> None:
        if line["type"] == "watching":
            self.begun.set()
        if line["type"] != "verdict":
            return
        logger.warning("the monitor of this process: %s: %s", line["level"], line["reason"])
        if line["level"] == "yellow":
            self._on_suspect(line["reason"])

    def close(self) -> None:
        """End the monitor first, so that it does not treat the rest as a fault. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._process.close()
        self.compilations.detach()
        self._moves.close()
        self.pulse.close()

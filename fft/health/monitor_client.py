"""A trainer's interface to its monitor: its pulse, the records of its main thread, the verdicts.

Starts one process (`fft.health.monitor`) and two threads; ``close`` ends them. It does not use the
engine: its owner decides how to react to a verdict.

Probe whether the main thread of this process still runs bytecodes, and record it in the pulse.

Starts one thread. Every ``interval_s`` it records a *beat*: a thread of this process runs, so the
process is not stopped, and no thread keeps the interpreter lock. With ``Py_AddPendingCall`` it also
asks the interpreter to have its main thread call a function between two bytecodes. If the call is
made, the main thread *moves*. (NVIDIA's resiliency extension also watches main threads by pending
calls.) Without a mark by the user, this distinguishes a main thread that computes from one that is
stuck in a call that never returns. It cannot detect a loop of bytecodes that never ends.

The function is C's ``sem_post`` on a semaphore of ours, not a Python function: a signal could
arrive while a Python function runs, and the exception that its handler raises (a
``KeyboardInterrupt``) would be lost in it. At most one call is pending, because the queue for them
is short and shared.

Pending calls are run by the process's *main* thread. A `MainThreadProbe` that is constructed on
another thread therefore records beats only: the main thread's activity is no evidence about the
thread that trains.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from fft.health.compiling import Compilations
from fft.health.detectors.trainer import MonitorConfig, Pulse
from fft.health.monitor import MonitorProcess

logger = logging.getLogger(__name__)


# --- main thread probe ---

_SEM_WORDS: Final = 8  # sem_t has 32 bytes with glibc on 64 bits; twice that is enough anywhere
_lent: list[ctypes.Array[ctypes.c_uint64]] = []
"""Semaphores, 64 bytes each, that a pending call may post to after their probe is gone."""


class MainThreadProbe:
    """Record beats and moves in ``pulse``, from construction until ``close``."""

    def __init__(self, pulse: Pulse, interval_s: float = 0.1) -> None:
        """Start the thread. ``interval_s``: seconds between two records, and so their accuracy."""
        if not interval_s > 0:
            raise ValueError(f"interval_s must be more than 0, not {interval_s:g}")
        self.follows_main = threading.current_thread() is threading.main_thread()
        """Whether moves are recorded, or only beats."""
        self._pulse = pulse
        self._interval_s = interval_s
        self._calls = _Calls() if self.follows_main else None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fft-main-thread-probe", daemon=True)
        pulse.beat()
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._pulse.beat()
            if self._calls is not None and self._calls.came_through():
                self._pulse.moved()

    def close(self) -> None:
        """End the thread; call it before the pulse is closed. Idempotent."""
        self._closing.set()
        self._thread.join()
        if self._calls is not None:
            self._calls.close()
            self._calls = None


class _Calls:
    """Requests to the main thread, one at a time, to post a semaphore."""

    def __init__(self) -> None:
        libc = ctypes.PyDLL(None)  # keeps the interpreter lock: these calls do not block
        self._sem = (ctypes.c_uint64 * _SEM_WORDS)()
        self._at = ctypes.c_void_p(ctypes.addressof(self._sem))
        self._try_wait = libc.sem_trywait
        self._post = ctypes.cast(libc.sem_post, ctypes.c_void_p)
        self._add = ctypes.pythonapi.Py_AddPendingCall
        self._pending = False
        if libc.sem_init(self._at, 0, 0) != 0:
            raise OSError("sem_init failed: this C library has no semaphores within a process")

    def came_through(self) -> bool:
        """Whether the previous call was made; if so, or if none was pending, request another."""
        done = self._pending and self._try_wait(self._at) == 0
        if done or not self._pending:
            # A full queue is not an error: the next look tries again.
            self._pending = self._add(self._post, self._at) == 0
        return done

    def close(self) -> None:
        """Keep the semaphore allocated for as long as a call may still post to it."""
        if self._pending and self._try_wait(self._at) != 0:
            _lent.append(self._sem)


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

"""Probe whether the main thread of this process still runs bytecodes, and record it in the pulse.

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
import threading
from typing import Final

from fft.health.detectors.pulse import Pulse

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

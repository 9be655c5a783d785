"""Sees whether the main thread of this process still runs bytecodes, and stamps the pulse with it.

Starts one thread. Every ``interval_s`` it stamps the *beat* (some thread of this process runs: the
process is not stopped, and nobody sits on the interpreter lock), and asks the interpreter by
``Py_AddPendingCall`` to have its main thread call a function between two bytecodes; whether that
was done says whether the main thread *moves*. (NVIDIA's resiliency extension watches main threads
by pending calls too.) Without a mark by the user this tells a main thread that computes from one
that is stuck in a call that never returns. It cannot tell a loop of bytecodes that never ends.

The function is C's ``sem_post`` on a semaphore of ours, no Python function: a
signal could arrive while that runs, and what the handler raises (a ``KeyboardInterrupt``) would be
lost in it. At most one call is pending; the queue for them is short and belongs to all.

Pending calls are run by the process's *main* thread. A `MainThreadProbe` that is made on another
thread therefore stamps beats only: what the main thread does says nothing about the one that
trains.
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
    """Stamps beats and moves into ``pulse`` from its making on, until ``close``."""

    def __init__(self, pulse: Pulse, interval_s: float = 0.1) -> None:
        """``interval_s``: seconds between two stamps, and the error of what they say."""
        if not interval_s > 0:
            raise ValueError(f"interval_s must be more than 0, not {interval_s:g}")
        self.follows_main = threading.current_thread() is threading.main_thread()
        """Whether moves are stamped, or beats only."""
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
    """Asks the main thread, one call at a time, to post a semaphore."""

    def __init__(self) -> None:
        libc = ctypes.PyDLL(None)  # keeps the interpreter lock: these calls do not wait
        self._sem = (ctypes.c_uint64 * _SEM_WORDS)()
        self._at = ctypes.c_void_p(ctypes.addressof(self._sem))
        self._try_wait = libc.sem_trywait
        self._post = ctypes.cast(libc.sem_post, ctypes.c_void_p)
        self._add = ctypes.pythonapi.Py_AddPendingCall
        self._pending = False
        if libc.sem_init(self._at, 0, 0) != 0:
            raise OSError("sem_init failed: this C library has no semaphores within a process")

    def came_through(self) -> bool:
        """Whether the call before was made; if so, or if there was none, ask again."""
        done = self._pending and self._try_wait(self._at) == 0
        if done or not self._pending:
            # a full queue is no error: then it is tried again the next time
            self._pending = self._add(self._post, self._at) == 0
        return done

    def close(self) -> None:
        """Keep the semaphore where it is for as long as a call may still post to it."""
        if self._pending and self._try_wait(self._at) != 0:
            _lent.append(self._sem)

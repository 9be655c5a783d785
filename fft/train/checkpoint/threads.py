"""Reusable threads that write a rank's checkpoints.

Starting a thread waits until it runs, and the training would wait for that: mostly a tenth of a
millisecond, but now and then some milliseconds if other threads want the interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

NAME, IDLE = "fft-checkpoint", "fft-checkpoint-idle"
"""Names of a thread at work and of an idle one."""


class _Hand:
    """One thread. It is a daemon, since a process may end while it works."""

    def __init__(self) -> None:
        self._work = SimpleQueue[tuple[Callable[[], None], threading.Event] | None]()
        self._over: threading.Event | None = None
        self._has_failed = False
        self._thread = threading.Thread(target=self._serve, name=IDLE, daemon=True)
        self._thread.start()

    @property
    def is_free(self) -> bool:
        return self._over is None or (self._over.is_set() and not self._has_failed)

    def do(self, work: Callable[[], None]) -> threading.Event:
        over = self._over = threading.Event()
        self._thread.name = NAME
        self._work.put((work, over))
        return over

    def end(self) -> None:
        self._work.put(None)

    def _serve(self) -> None:
        while (found := self._work.get()) is not None:
            work, over = found
            try:
                work()
            except BaseException:
                self._has_failed = True
                raise  # for threading.excepthook
            finally:
                self._thread.name = IDLE
                over.set()


class Threads:
    """A pool that grows to the number of jobs at work at once. One thread submits the jobs."""

    def __init__(self) -> None:
        self._hands: list[_Hand] = []

    def do(self, work: Callable[[], None]) -> threading.Event:
        """Run ``work`` on one of the threads and return an event that is set at its end. An
        exception ends that thread."""
        free = next((hand for hand in self._hands if hand.is_free), None)
        if free is None:
            free = _Hand()
            self._hands.append(free)
        return free.do(work)

    def close(self) -> None:
        """End each thread after its current job. Idempotent."""
        for hand in self._hands:
            hand.end()
        self._hands.clear()

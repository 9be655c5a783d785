"""Threads that write a rank's checkpoints, each used again.

The start of a thread waits until it runs, for which the training would wait: mostly a tenth of a
millisecond, but some milliseconds now and then, where others want the interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

NAME, IDLE = "fft-checkpoint", "fft-checkpoint-idle"
"""Of a thread at work, and of one that waits for it."""


class _Hand:
    """One thread. A daemon: a process may end in the midst of its work."""

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
    """As many as have been at work at once. For one thread that gives the work."""

    def __init__(self) -> None:
        self._hands: list[_Hand] = []

    def do(self, work: Callable[[], None]) -> threading.Event:
        """Have it done by one of them; what it raises ends that one. Set when it is over."""
        free = next((hand for hand in self._hands if hand.is_free), None)
        if free is None:
            free = _Hand()
            self._hands.append(free)
        return free.do(work)

    def close(self) -> None:
        """Have each end after its work. Idempotent."""
        for hand in self._hands:
            hand.end()
        self._hands.clear()

"""Release of callers that wait in gloo: threads that wait for them, and futures that can fail."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch

from fft.train.unsafe_places import guarded

MILLISECOND = timedelta(milliseconds=1)


class WaiterPool:
    """Threads that wait in gloo for sends and receives, so that their callers can be freed.

    There are as many threads as simultaneous waits. An idle thread ends with `close`. A waiting one
    ends when gloo releases it: usually at once, otherwise at the op's own timeout.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Callable[[], None] | None]] = []
        self._closed = False

    @guarded
    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` on a thread."""
        with self._lock:
            tasks = self._idle.pop() if self._idle else None
        if tasks is None:
            tasks = SimpleQueue()
            threading.Thread(
                target=self._serve, args=(tasks,), name="fft-peer-wait", daemon=True
            ).start()
        tasks.put(task)

    def close(self) -> None:
        """End every thread once it is idle."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for tasks in idle:
            tasks.put(None)

    def _serve(self, tasks: SimpleQueue[Callable[[], None] | None]) -> None:
        while (task := tasks.get()) is not None:
            task()
            del task  # releases its tensors
            with self._lock:
                if self._closed:
                    return
                self._idle.append(tasks)


class FailableFuture:
    """A future that wraps gloo's, and that FFT can fail."""

    def __init__(
        self,
        inner: torch.futures.Future[Any],
        failure: Callable[[BaseException], RuntimeError],
    ) -> None:
        self.outer: torch.futures.Future[Any] = torch.futures.Future()
        self._failure: Callable[[BaseException], RuntimeError] | None = failure
        """Makes the op's error. It holds tensors, so it is released when the op has ended."""
        self._first = itertools.count()  # its next() is atomic in the interpreter
        inner.add_done_callback(self._settle)

    def _settle(self, inner: torch.futures.Future[Any]) -> None:
        failure, self._failure = self._failure, None
        assert failure is not None, "a future ends once"
        try:
            value = inner.value()
        except RuntimeError as error:
            self.fail(failure(error))
            return
        if next(self._first) == 0:
            self.outer.set_result(value)

    def fail(self, error: RuntimeError) -> None:
        if next(self._first) == 0:
            self.outer.set_exception(error)


def deadline_of(timeout: timedelta | None) -> float | None:
    """Return the time, in monotonic seconds, at which a wait ends, or None without a limit.

    torch counts whole milliseconds, and zero means no limit (``kNoTimeout``). Native code, such as
    ``wait_tensor``, always passes zero. A negative timeout ends at once.
    """
    if timeout is None:
        return None
    milliseconds = int(timeout / MILLISECOND)
    return time.monotonic() + milliseconds / 1e3 if milliseconds else None


def time_left(deadline: float) -> timedelta:
    """Return the time until `deadline` (monotonic seconds), at least a millisecond."""
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))

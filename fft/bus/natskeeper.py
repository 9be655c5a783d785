"""A supervisor of the NATS servers that this process has started; it restarts those that end.

It owns one thread. A server that the thread starts ends with the thread. A server keeps its ports
and its store, so the cluster is complete again once the server has caught up.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_PAUSES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds before a restart, by the number of ends since the server last ran for `_LONG_S`."""
_LONG_S = 60.0
_END_S = 30.0


class NatsKeeper:
    """A supervisor of servers; until ``close``, no other code may start or end them."""

    def __init__(
        self, processes: list[subprocess.Popen[bytes] | None], start: Callable[[int], None]
    ) -> None:
        """Start supervising.

        Args:
            processes: The servers by number; ``start`` must update the list.
            start: Starts the server of a number again.
        """
        self._processes, self._start = processes, start
        self._ends = [0] * len(processes)
        self._began = [time.monotonic()] * len(processes)
        self._due: dict[int, float] = {}
        """Time of the next restart by server number, on the monotonic clock."""
        self._wake = os.eventfd(0)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="fft-nats-keeper", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            fds = {os.pidfd_open(p.pid): n for n, p in enumerate(self._processes) if p is not None}
            try:
                ready = self._wait(list(fds))
            finally:
                for fd in fds:
                    os.close(fd)
            for fd in ready:
                self._on_end(fds[fd])
            for number in [n for n, at in self._due.items() if at <= time.monotonic()]:
                del self._due[number]
                if not self._closing:
                    self._start_again(number)

    def _wait(self, fds: list[int]) -> list[int]:
        """Wait until a process of ``fds`` ends, a restart is due, or the keeper is closed.

        Returns those of ``fds`` whose process has ended.
        """
        waiter = select.poll()
        for fd in (*fds, self._wake):
            waiter.register(fd, select.POLLIN)
        left = min(self._due.values(), default=None)
        limit = None if left is None else max(0.0, left - time.monotonic()) * 1000
        return [fd for fd, _ in waiter.poll(limit) if fd != self._wake]

    def _on_end(self, number: int) -> None:
        process = self._processes[number]
        assert process is not None
        code = process.wait()
        self._processes[number] = None
        now = time.monotonic()
        if now - self._began[number] > _LONG_S:
            self._ends[number] = 0
        pause = _PAUSES[min(self._ends[number], len(_PAUSES) - 1)]
        self._ends[number] += 1
        self._due[number] = now + pause
        logger.error(
            "NATS server %d of %d (pid %d) ended with status %d; it is started again in %g s",
            number,
            len(self._processes),
            process.pid,
            code,
            pause,
        )

    def _start_again(self, number: int) -> None:
        self._began[number] = time.monotonic()
        try:
            self._start(number)
        except OSError as error:
            self._due[number] = time.monotonic() + _PAUSES[-1]
            logger.error("NATS server %d cannot be started: %s", number, error)

    def close(self) -> None:
        """Stop restarting servers. The servers that the keeper has started end. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_END_S)
        os.close(self._wake)

"""Warm spares: processes that have loaded what the script imports and wait for a role.

Starts processes and communicates with each over a pair of sockets; the other end is in
`fft.launch.script_runner`. Runs on the supervisor's thread.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from fft.launch.supervisor.children import Child

logger = logging.getLogger(__name__)

GROUP = "spare"
"""Group name of a process without a role."""
_REFILL_S = 5.0
"""Time from the loss or use of a spare until the next one starts, in seconds; the job has the
processor to itself meanwhile."""
_MOST_IN_VAIN = 3
"""Number of spares that may end without a role before no more are started."""

Start = Callable[[int, int], Child]
"""Starts a spare, given its number and the descriptor of its end of the sockets."""


class Spare:
    """A process without a role."""

    def __init__(self, number: int, start: Start) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.child = start(number, theirs.fileno())
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self.began = time.monotonic()
        self._socket = ours
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether it has loaded everything."""
        with suppress(OSError):
            self._is_ready |= self._socket.recv(1) != b""
        return self._is_ready

    def take_role(self, env: Mapping[str, str], log: Path) -> bool:
        """Send the role that ``env`` describes; return whether it was sent."""
        if self.child.dies_within(0):
            self._socket.close()
            return False
        word = json.dumps({"env": dict(env), "log": str(log)}).encode() + b"\n"
        try:
            self._socket.setblocking(True)
            self._socket.sendall(word)
        except OSError:
            return False
        finally:
            self._socket.close()
        return True

    def close(self) -> None:
        """Close our end of the sockets."""
        self._socket.close()


class Spares:
    """A pool of spares, refilled after each loss or use."""

    def __init__(self, wanted: int, start: Start) -> None:
        """Prepare a pool of ``wanted`` spares; ``start`` may raise OSError."""
        self._wanted = wanted
        self._start = start
        self._spares: list[Spare] = []
        self._number = 0
        self._in_vain = 0
        self._refill_at: float | None = None

    def __iter__(self) -> Iterator[Child]:
        return (spare.child for spare in self._spares)

    @property
    def ready(self) -> int:
        """Number of spares that can take a role at once."""
        return sum(spare.is_ready for spare in self._spares)

    def started(self) -> list[Child]:
        """Start the missing spares if the pause is over; return the new processes."""
        if self._refill_at is not None and time.monotonic() < self._refill_at:
            return []
        self._refill_at = None
        new: list[Child] = []
        while len(self._spares) < self._wanted and self._in_vain < _MOST_IN_VAIN:
            self._number += 1
            try:
                self._spares.append(Spare(self._number, self._start))
            except OSError as error:
                logger.warning("spare %d could not be started: %s", self._number, error)
                self._in_vain += 1
                break
            new.append(self._spares[-1].child)
        return new

    def take(self, env: Mapping[str, str], log: Path) -> Child | None:
        """Give a spare the role that ``env`` describes; return it, or None if there is none."""
        for spare in sorted(self._spares, key=lambda s: not s.is_ready):
            self._spares.remove(spare)
            self._refill_at = time.monotonic() + _REFILL_S
            if spare.take_role(env, log):
                self._in_vain = 0
                return spare.child
            spare.child.signal(signal.SIGKILL)
        return None

    def late(self, limit_s: float) -> list[Child]:
        """Return the spares that have not loaded everything within ``limit_s`` seconds."""
        now = time.monotonic()
        return [s.child for s in self._spares if not s.is_ready and now > s.began + limit_s]

    def ended(self, child: Child) -> None:
        """Remove a spare that has ended without a role."""
        for spare in [spare for spare in self._spares if spare.child is child]:
            self._spares.remove(spare)
            spare.close()
        self._in_vain += 1
        self._refill_at = time.monotonic() + _REFILL_S
        more = "; no more are started" if self._in_vain == _MOST_IN_VAIN else ""
        logger.warning("%s%s", child.verdict(set()), more)

    def end(self) -> None:
        """End all spares and start no more."""
        self._wanted = 0
        for spare in self._spares:
            spare.close()
            spare.child.signal(signal.SIGKILL)

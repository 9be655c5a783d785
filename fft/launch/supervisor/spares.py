"""Warm spares: processes that have loaded what the script imports, and wait for a role.

Starts processes, and talks to each over a pair of sockets (`fft.launch.script_runner` has the other
end). All on the supervisor's thread.
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
"""What a process without a role has for the name of its group."""
_REFILL_S = 5.0
"""From the loss of a spare, or its getting a role, until the next one starts: the job has the
processor for itself meanwhile."""
_MOST_IN_VAIN = 3
"""Spares that ended before they had a role, after which none is started any more."""

Start = Callable[[int, int], Child]
"""Starts spare number ``n``, which finds its end of the sockets at a descriptor."""


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
        """Have it run the script as whom ``env`` says. Whether it was told so."""
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
        """Let go of the sockets."""
        self._socket.close()


class Spares:
    """So many of them, started one by one."""

    def __init__(self, wanted: int, start: Start) -> None:
        """``start`` raises OSError."""
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
        """How many can take a role at once."""
        return sum(spare.is_ready for spare in self._spares)

    def started(self) -> list[Child]:
        """Start what is lacking, if it is time; those that were started."""
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
        """The spare that runs the script now as whom ``env`` says; None: there is none."""
        for spare in sorted(self._spares, key=lambda s: not s.is_ready):
            self._spares.remove(spare)
            self._refill_at = time.monotonic() + _REFILL_S
            if spare.take_role(env, log):
                self._in_vain = 0
                return spare.child
            spare.child.signal(signal.SIGKILL)
        return None

    def late(self, limit_s: float) -> list[Child]:
        """Those that have not loaded everything for so long: they hang."""
        now = time.monotonic()
        return [s.child for s in self._spares if not s.is_ready and now > s.began + limit_s]

    def ended(self, child: Child) -> None:
        """A spare has ended without a role."""
        for spare in [spare for spare in self._spares if spare.child is child]:
            self._spares.remove(spare)
            spare.close()
        self._in_vain += 1
        self._refill_at = time.monotonic() + _REFILL_S
        more = "; no more are started" if self._in_vain == _MOST_IN_VAIN else ""
        logger.warning("%s%s", child.verdict(set()), more)

    def end(self) -> None:
        """Start no more; those that wait end."""
        self._wanted = 0
        for spare in self._spares:
            spare.close()
            spare.child.signal(signal.SIGKILL)

"""Reap orphans, whose parent is `fft run` if it is PID 1, as in a container.

Reads ``/proc``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LOOK_S = 1.0
"""Interval between two scans, in seconds."""
_OWN_S = 5.0
"""Time that a zombie is left to the code that may have started it, in seconds."""


class Orphans:
    """Reaps zombies that no other code collects. Does nothing unless this process is PID 1."""

    def __init__(self) -> None:
        self._is_init = os.getpid() == 1
        self._look_at = 0.0
        self._since: dict[int, float] = {}
        """Zombies by pid, with the time of the first sight in seconds."""

    def reap(self, own: Iterable[int]) -> None:
        """Collect orphans that have ended, except ``own``, which their owner collects."""
        now = time.monotonic()
        if not self._is_init or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        zombies = _zombies() - set(own)
        self._since = {pid: self._since.get(pid, now) for pid in zombies}
        for pid, since in list(self._since.items()):
            if now >= since + _OWN_S:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                del self._since[pid]


def _zombies() -> set[int]:
    """Return our children that have ended and were not collected."""
    found, me = set[int](), str(os.getpid()).encode()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_bytes().rpartition(b") ")[2].split()[:2]
        except (OSError, ValueError):  # collected meanwhile
            continue
        if state == b"Z" and parent == me:
            found.add(int(stat.parent.name))
    return found

"""Copies of the output of chosen ranks, for the terminal of ``fft run``.

A rank writes each line to its log, and a copy to one pipe of the supervisor
(`fft.launch.script_runner`). It never waits for the pipe: if the supervisor does not read, the copy
is dropped.
"""

from __future__ import annotations

import os

from fft.launch.supervisor.config import SupervisorError

VARIABLE = "FFT_TEE"
_READ = 1 << 16


class Tee:
    """The pipe, and the choice of ranks: ``first``, ``all``, ``none``, or ``GROUP.RANK,…``."""

    def __init__(self, chosen: str, first_group: int) -> None:
        """Open the pipe.

        Args:
            chosen: The value of ``--tee``.
            first_group: Number of the first group on this host.

        Raises:
            SupervisorError: The value cannot be read.
        """
        named = f"{first_group}.0" if chosen == "first" else chosen
        self._ranks = set() if named in ("all", "none") else set(named.split(","))
        self._all = named == "all"
        for name in self._ranks:
            group, _, rank = name.rpartition(".")
            if not group or not rank.isdecimal():
                raise SupervisorError(
                    f"--tee {chosen}: expected first, all, none, or ranks as GROUP.RANK,… "
                    f"(such as 0.0,1.0); found {name!r}"
                )
        self._fd, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a rank has printed something."""
        return self._fd

    def env(self, group: str, rank: int) -> dict[str, str]:
        """Return the environment variable by which a chosen rank finds the pipe."""
        if not self._all and f"{group}.{rank}" not in self._ranks:
            return {}
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._writer}"}

    def lines(self) -> list[str]:
        """Return the lines printed since the last call, at most 64 KiB of them.

        If several ranks were chosen, each line begins with its rank.
        """
        try:
            *lines, self._rest = (self._rest + os.read(self._fd, _READ)).split(b"\n")
        except BlockingIOError:
            return []
        found = (line.decode(errors="replace").partition("\t") for line in lines)
        is_one = not self._all and len(self._ranks) == 1
        return [text if is_one else f"[{rank}] {text}" for rank, _, text in found]

    def close(self) -> None:
        """Close the pipe. Idempotent."""
        for fd in (self._fd, self._writer):
            if fd >= 0:
                os.close(fd)
        self._fd = self._writer = -1

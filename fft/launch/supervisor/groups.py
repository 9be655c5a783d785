"""One replica group under supervision: its ranks' processes, its starts and its pauses.

Starts processes and the group's rendezvous store (one fresh TCPStore per start).
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fft.launch.supervisor.children import Child
from fft.launch.supervisor.claims import Loss
from fft.messages.commands import Evict
from fft.util.error_places import Place

_PAUSES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)

_SUPERVISORS = frozenset(
    {
        *("FFT_FAULTS", "FFT_INJECT", "FFT_SUPERVISOR_FD", "FFT_LAST_WORDS_FD"),
        *("FFT_TOKEN", "FFT_TOKEN_FILE"),
    }
)
"""Settings that are never inherited."""


class Pauses:
    """The growing pauses before restarts, in seconds: none at first, at most half a minute."""

    def __init__(self) -> None:
        self.restarts = 0

    def next(self) -> float:
        """The pause before the next restart, which is thereby counted."""
        self.restarts += 1
        return _PAUSES[min(self.restarts, len(_PAUSES)) - 1]

    def progressed(self) -> None:
        """The group has committed a step: what comes is a new trouble, not the old one."""
        self.restarts = 0


class Group:
    """A replica group. Exactly one of these holds: it runs, a restart is due, it has ended."""

    def __init__(self, name: str, ranks: int) -> None:
        self.name = name
        self.ranks = ranks
        self.starts = 0
        self.children: list[Child] = []
        self.pauses = Pauses()
        self.restart_at: float | None = None
        """When to start again, on the monotonic clock in seconds."""
        self.return_at_step: int | None = None
        """Drained; to start again when the job has committed this many steps."""
        self.given_up = False
        self.eviction: Evict | None = None
        """Being carried out: its processes have been asked to end."""
        self.kill_at: float | None = None
        """When to end those that have not, on the monotonic clock in seconds."""
        self.evicted = False
        """Ended on an operator's word, and not to be started by anybody else's."""
        self.loss: Loss | None = None
        """Another supervisor has it now, or will when its processes here have ended."""
        self.known_incs: dict[int, int] = {}
        """The ranks' newest incarnations that were on record when it was started last."""
        self._store: Any = None

    @property
    def living(self) -> list[Child]:
        """The children that have not been reaped."""
        return [child for child in self.children if child.alive]

    @property
    def finished(self) -> bool:
        """Whether all ranks of the last start ended by their own word."""
        return bool(self.children) and all(child.code == 0 for child in self.children)

    @property
    def last_words(self) -> Place | None:
        """The error of its own by which a rank ended, and its mates with it."""
        said = (child.last_words for child in self.children)
        return next((words for words in said if words is not None), None)

    def doing(self) -> str:
        """The state of its processes, for the screen."""
        if self.loss is not None:
            return "being handed over" if self.living else "taken over"
        if self.evicted and not self.living:
            return "evicted"
        if self.eviction is not None:
            return "being evicted"
        if self.living:
            gone = [str(child.rank) for child in self.children if not child.alive]
            ended = f", rank {', '.join(gone)} has ended" if gone else ""
            return f"running (start {self.starts}){ended}"
        if self.restart_at is not None:
            return "restarting"
        if self.return_at_step is not None:
            return f"away until step {self.return_at_step}"
        return "given up" if self.given_up else ("finished" if self.finished else "down")

    def start(
        self,
        script: list[str],
        env: Mapping[str, str],
        logs: Path,
        groups: int,
        inherits: Sequence[int] = (),
        address: str = "127.0.0.1",
    ) -> list[Child]:
        """Start all ranks with a store of their own, which listens at ``address``.

        Raises OSError, BusError: one cannot be started; then none is left.
        """
        from fft.bus.tcpserver import (
            host_store,  # here, so that a bad plan is refused without torch
        )

        self.restart_at = self.return_at_step = None
        self.evicted = False
        self.starts += 1
        self._store, port = host_store(address)
        self.children = []
        with ExitStack() as undo:
            undo.callback(self._undo_start)
            self._start_ranks(script, env, logs, groups, inherits, address, port)
            undo.pop_all()
        return self.children

    def _undo_start(self) -> None:
        for child in self.children:
            child.signal(signal.SIGKILL)
            child.reap()
        self.children = []
        self.close()

    def _start_ranks(
        self,
        script: list[str],
        env: Mapping[str, str],
        logs: Path,
        groups: int,
        inherits: Sequence[int],
        address: str,
        port: int,
    ) -> None:
        for rank in range(self.ranks):
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.ranks),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                # whose store is served here: init_process_group() shall not serve another there
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "REPLICA_GROUP_ID": self.name,
                "FFT_GROUP": self.name,  # by which supervisor and participants speak of it
                "NUM_REPLICA_GROUPS": str(groups),
            }
            log = logs / f"g{self.name}r{rank}-{self.starts}.log"
            own = {**env, **place}
            child = Child(self.name, rank, self.starts, script, own, log, inherits)
            self.children.append(child)

    def ask_to_leave(self, grace: float, whom: Sequence[Child] | None = None) -> None:
        """SIGTERM to ``whom`` (None: all), and SIGKILL to all that are left after so long, in s."""
        self.kill_at = time.monotonic() + grace
        for child in self.living if whom is None else whom:
            child.signal(signal.SIGCONT)  # who is stopped hears nothing else
            child.signal(signal.SIGTERM)

    def close(self) -> None:
        """Let go of the store; its server ends with it."""
        self._store = None


def base_env(services: Mapping[str, str], outer: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What every child gets: the outer environment, the services, and calm defaults.

    A fault plan, the permission to inject faults, and a job token come from the supervisor only.
    """
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    inherited = {name: value for name, value in outer.items() if name not in _SUPERVISORS}
    return {**defaults, **inherited, "FFT_DRAIN_SIGNAL": "SIGTERM", **services}


def why_not_started(group: Group, error: Exception) -> str:
    """What to say of a group whose processes or store could not be started."""
    reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"group {group.name} could not be started: {reason}. This process may open {files} files "
        f"(ulimit -n), and needs some 20, 10 for each group and 4 for each rank; memory and "
        "processes are limited, too (ulimit -v, ulimit -u)"
    )

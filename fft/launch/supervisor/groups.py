"""One supervised replica group: the processes of its ranks, its starts and its pauses.

This module starts processes and the group's rendezvous store (one fresh TCPStore per start).
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fft.bus.addresses import joined
from fft.errors import FftError
from fft.launch.supervisor.children import Child
from fft.launch.supervisor.claims import Loss
from fft.launch.supervisor.spanning import GroupStart, part_name
from fft.messages.commands import Evict
from fft.trace.tail import JobView
from fft.util.error_places import Place
from fft.util.files import claimed

logger = logging.getLogger(__name__)

_PAUSES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)

_CHAIN = 3
"""Restarts in a row, of any cause, for each restart that is permitted after an error."""

_ADDRESS_OF_RANK_0 = "manager_addr"
"""torchft's key (``torchft.manager.MANAGER_ADDR_KEY``) in the store of a group."""

_SUPERVISORS = frozenset(
    {
        *("FFT_FAULTS", "FFT_INJECT", "FFT_SUPERVISOR_FD", "FFT_ERROR_FD"),
        *("FFT_TOKEN", "FFT_TOKEN_FILE", "FFT_SUCCESSOR", "FFT_ROLE_FD", "FFT_TEE"),
        "FFT_GROUP_STORE",
    }
)
"""Environment variables that only the supervisor sets; children never inherit them."""


class Restarts:
    """Restarts in a row without progress: how many, by cause, and the pauses before them.

    The pauses grow from 0 s to at most 30 s.
    """

    def __init__(self) -> None:
        self.in_a_row = 0
        self._errors = 0

    def next(self, is_error: bool = True) -> float:
        """Count a restart and return the pause before it, in seconds."""
        self.in_a_row += 1
        self._errors += is_error
        return _PAUSES[min(self.in_a_row, len(_PAUSES)) - 1]

    def are_used_up(self, limit: int, is_error: bool = True) -> bool:
        """Return whether no further restart is due.

        Args:
            limit: Number of restarts after errors. Preemptions and losses of peers or hosts do not
                use it up; a chain with these may be three times as long.
            is_error: The cause of the next restart is an error.
        """
        is_long = self.in_a_row >= _CHAIN * max(limit, 1)
        return is_long or (is_error and self._errors >= limit)

    def progressed(self) -> None:
        """Begin anew, because there was progress."""
        self.in_a_row = self._errors = 0


class Group:
    """A replica group, which is either running, due for a restart, or ended."""

    def __init__(
        self,
        name: str,
        world: int,
        local: int | None = None,
        part: int = 0,
        is_adopted: bool = False,
    ) -> None:
        """Start nothing yet.

        Args:
            world: Number of ranks of the group on all hosts.
            local: Number of its ranks on one host; None for all of them.
            part: The part of the group that this host has.
        """
        self.name = name
        self.is_adopted = is_adopted
        """Taken over from a supervisor that was lost."""
        self.world, self.local = world, local or world
        self.part = part
        self.begun = GroupStart(0)
        """The present start of the group. Supervisors of all its parts agree on it."""
        self.is_superseded = False
        """Its processes are being ended, because other hosts have begun a new start."""
        self.is_successor = False
        """All processes here were started in the place of lost ones, while others lived."""
        self.starts = 0
        self.children: list[Child] = []
        self.lost: list[Child] = []
        """Processes that were replaced in this start."""
        self.restarts = Restarts()
        self.stuck_at: tuple[int, int] | None = None
        """Progress of the job when its last restart was used up."""
        self.restart_at: float | None = None
        """Time of the next start on the monotonic clock, in seconds."""
        self.return_at_step: int | None = None
        """Step of the job at which to start the drained group again."""
        self.given_up = False
        self.eviction: Evict | None = None
        """The eviction in progress: the processes have been asked to end."""
        self.kill_at: float | None = None
        """Time of SIGKILL for processes that are still alive, on the monotonic clock in seconds."""
        self.evicted = False
        """An operator's command ended the group; it is not restarted for another reason."""
        self.loss: Loss | None = None
        """Another supervisor holds it now, or will when its processes here have ended."""
        self.replaced: dict[int, int] = {}
        """Ranks that were replaced in this start, with the incarnations recorded until then."""
        self.known_incs: dict[int, int] = {}
        """The ranks' newest incarnations that were recorded before the latest start."""
        self.started_at = 0.0
        """Time of the latest start on the monotonic clock, in seconds."""
        self.took: float | None = None
        """Seconds from the latest start until all ranks had begun their first txn."""
        self._store: Any = None
        self._place: dict[str, str] = {}

    @property
    def ranks(self) -> range:
        """The ranks of the group that this host has."""
        return range(self.part * self.local, (self.part + 1) * self.local)

    @property
    def spans(self) -> bool:
        """Whether other hosts have ranks of the group as well."""
        return self.world > self.local

    @property
    def claim(self) -> str:
        """Name under which this host has claimed its part of the group."""
        return part_name(self.name, self.part)

    @property
    def living(self) -> list[Child]:
        """The children that have not been reaped."""
        return [child for child in self.children if child.alive]

    @property
    def incs_before(self) -> dict[int, int]:
        """The ranks' newest incarnations recorded before the present processes started."""
        return {**self.known_incs, **self.replaced}

    @property
    def is_to_go_on(self) -> bool:
        """Whether its processes have not been asked to end and it was not taken over."""
        return self.eviction is None and self.kill_at is None and self.loss is None

    @property
    def finished(self) -> bool:
        """Whether all ranks of the last start ended on their own and without failure."""
        return bool(self.children) and not any(child.has_failed for child in self.children)

    @property
    def error_place(self) -> Place | None:
        """The error that ended one of its ranks, and with it the group."""
        said = (child.error_place for child in self.children)
        return next((words for words in said if words is not None), None)

    def waiting(self, inside: Collection[int], view: JobView) -> list[Child]:
        """Return the living processes that will not leave the job by themselves.

        Processes with a pid in ``inside`` leave with the job's end. Others have left already, and
        may still be writing a checkpoint.
        """
        ranks = view.since(self.name, self.incs_before)
        left = {rank for rank, seen in ranks.items() if seen.role == "terminal"}
        return [c for c in self.living if c.pid not in inside and c.rank not in left]

    @property
    def has_left(self) -> bool:
        """Whether one of its ranks has left the job in good order since the last start."""
        return any(child.exit.has_left for child in self.children)

    @property
    def ended_by_error(self) -> bool:
        """Whether a preemption or a loss elsewhere does not explain its end."""
        return not any(child.exit.is_preempted or child.exit.lost_peers for child in self.children)

    def start_later(self) -> None:
        """Schedule a restart after a pause, and log it if an error has ended the group."""
        self.restart_at = time.monotonic() + self.restarts.next(self.ended_by_error)
        if self.error_place is not None:
            logger.warning("group %s is started again", self.name)

    @property
    def came_too_late(self) -> bool:
        """Whether the job, or a stage, was over when a rank came; valid after the group ended."""
        return any(child.came_too_late for child in self.children)

    @property
    def why_not_back(self) -> str:
        """Message for a group that came too late while the job continues."""
        return (
            f"group {self.name} came back after a later stage had ended, so no process has the "
            "state of that stage: the group is not started again, and the others continue without "
            "it; give all stages the same number of steps, or start the job again with --resume"
        )

    def doing(self) -> str:
        """Describe the state of its processes for the screen."""
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

    def serve(self, address: str) -> str:
        """Serve a store for the group on ``address`` and return its ``host:port``.

        Raises BusError.
        """
        from fft.bus.tcpserver import (
            host_store,  # here, so that a bad plan is refused without torch
        )

        self._store, port = host_store(address)
        return joined(address, port)

    def start(
        self, make: Callable[[int, Path], Child], logs: Path, groups: int, begun: GroupStart
    ) -> list[Child]:
        """Start all ranks that this host has.

        If one of them cannot be started, the others are ended.

        Args:
            make: Starts the process of a rank with the given log.
            logs: Folder for the logs.
            groups: Number of groups of the job.
            begun: The start of the group, with its store.

        Raises:
            OSError: A process cannot be started.
        """
        self.restart_at = self.return_at_step = None
        self.evicted = False
        self.starts += 1
        self.started_at, self.took = time.monotonic(), None
        self.children, self.lost, self.replaced = [], [], {}
        self.begun = begun
        self._place = {
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.local),
            # as torchrun numbers the hosts of a job: all ranks of a group are one job for torch
            "GROUP_RANK": str(self.part),
            "NODE_RANK": str(self.part),
            "GROUP_WORLD_SIZE": str(self.world // self.local),
            "TORCHELASTIC_RUN_ID": f"fft-{self.name}",
            # the supervisor serves the store, so init_process_group() must not serve another
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "REPLICA_GROUP_ID": self.name,
            "FFT_GROUP": self.name,  # the name in messages between supervisor and participants
            "NUM_REPLICA_GROUPS": str(groups),
            "FFT_START": str(begun.number),
        }
        with ExitStack() as undo:
            undo.callback(self._undo_start)
            for rank in self.ranks:
                log = claimed(logs / f"g{self.name}r{rank}-{self.starts}.log")
                self.children.append(self._own(make(rank, log), rank, log))
            undo.pop_all()
        return self.children

    def place(self, rank: int) -> dict[str, str]:
        """Return the environment variables of a rank of the present start."""
        host, _, port = self.begun.home.rpartition(":")
        where = {"MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}
        if self.spans:
            where["FFT_GROUP_STORE"] = self.begun.store
        local = rank - self.ranks.start
        return {**self._place, **where, "RANK": str(rank), "LOCAL_RANK": str(local)}

    def replace(self, lost: Child, inc: int, logs: Path, start: Callable[[Path], Child]) -> Child:
        """Start a process in the place of a lost rank.

        Args:
            lost: The process to replace.
            inc: The rank's newest incarnation recorded until now.
            logs: Folder for the log.
            start: Starts the process with the given log.

        Raises:
            OSError: The process cannot be started.
        """
        log = claimed(logs / f"g{self.name}r{lost.rank}-{self.starts}.log")
        child = self._own(start(log), lost.rank, log)
        self.lost.append(lost)
        self.children[self.children.index(lost)] = child
        self.replaced[lost.rank] = inc
        return child

    def _own(self, child: Child, rank: int, log: Path) -> Child:
        """Assign the rank to the process, which may have been a spare until now."""
        child.group, child.rank, child.start, child.log = self.name, rank, self.starts, log
        return child

    def forget_address_of(self, rank: int) -> None:
        """Delete rank 0's address from the store, so that its readers wait for its successor."""
        if rank == 0 and self._store is not None:
            self._store.delete_key(_ADDRESS_OF_RANK_0)

    def _undo_start(self) -> None:
        for child in self.children:
            child.signal(signal.SIGKILL)
            child.reap()
        self.children = []
        self.close()

    def ask_to_leave(self, grace: float, whom: Sequence[Child] | None = None) -> None:
        """Send SIGTERM, and schedule SIGKILL for processes that still live afterwards.

        Args:
            grace: Time before SIGKILL, in seconds.
            whom: Processes to send SIGTERM to; by default all living ones.
        """
        self.kill_at = time.monotonic() + grace
        for child in self.living if whom is None else whom:
            child.signal(signal.SIGCONT)  # a stopped process cannot handle SIGTERM
            child.signal(signal.SIGTERM)

    def close(self) -> None:
        """Release the store; its server ends with it."""
        self._store = None


def base_env(services: Mapping[str, str], outer: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of every child: the outer one, the services, and defaults.

    Variables that only the supervisor may set, such as a fault plan or a job token, are not
    inherited.

    Args:
        services: Variables of the services, which take precedence.
        outer: The environment to inherit.
    """
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    inherited = {name: value for name, value in outer.items() if name not in _SUPERVISORS}
    return {**defaults, **inherited, "FFT_DRAIN_SIGNAL": "SIGTERM", **services}


def why_not_started(group: Group, error: Exception) -> str:
    """Return the message for a group whose processes or store could not be started."""
    reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    if isinstance(error, FftError):
        return f"group {group.name} could not be started: {reason}"
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"group {group.name} could not be started: {reason}. This process may open {files} files "
        f"(ulimit -n), and needs about 20, and 10 for each group and 4 for each rank; memory and "
        "processes are limited, too (ulimit -v, ulimit -u)"
    )

"""The configuration of a supervisor, and its checks. This module accesses only the file system."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fft.checkpoints.copies import PART, HeldCopies
from fft.checkpoints.files import file_stem
from fft.checkpoints.peers import CopiesServer
from fft.checkpoints.plan import Checkpointing, MemoryPlan, memory_interval
from fft.errors import ConfigError
from fft.launch.exit_status import ExitStatus
from fft.launch.placement import SplitGroup
from fft.launch.supervisor.culprit import AFTER
from fft.protocol.timeouts import HOST_LIMIT_S

SOON = 20
"""Number of steps after a resume within which an end makes the state suspect that it began with."""


class SupervisorError(ConfigError):
    """The job cannot be started as asked; the message names the fix."""

    exit_status = ExitStatus.REFUSED
    """The exit status of `fft run`."""


class GroupHeld(SupervisorError):
    """Another `fft run` supervises one of the groups, and keeps it."""

    exit_status = ExitStatus.HELD


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The part of this host in a job that may have several."""

    first_group: int = 0
    """Number of the first group on this host; other hosts have other numbers."""
    all_groups: int | None = None
    """Number of groups on all hosts; by default ``first_group + groups``."""
    ranks_per_host: int | None = None
    """Number of ranks of a group on one host, or None for all of them."""
    host_limit: float = HOST_LIMIT_S
    """Maximum silence of this host after which the other hosts continue without it."""
    take_over: bool = False
    """Ask another supervisor of these groups to hand them over, instead of giving up."""
    bus_url: str | None = None
    """The bus of the start that this process joins; None if it serves the bus itself."""


@dataclass(frozen=True, kw_only=True)
class FaultOptions:
    """The faults that are injected into the job."""

    faults: Path | None = None
    injectable: bool = False
    stop_after_plan: int | None = None
    min_steps: int = 0

    @property
    def may_inject(self) -> bool:
        """Whether faults may be injected: by option, or because there is a fault plan."""
        return self.injectable or self.faults is not None


@dataclass(frozen=True, kw_only=True)
class ReformOptions:
    """The replacement of single lost ranks."""

    reform: bool = True
    """A group that loses one rank keeps the others, where its script allows it."""
    spares: int = 0
    """Number of processes that wait for a role with the script's imports loaded."""
    reform_window: float | None = None
    """How long the others wait for the successor of a lost rank; None: the window of the spec if
    a spare is ready, else no wait."""


@dataclass(frozen=True)
class RunConfig(HostOptions, FaultOptions, ReformOptions, SplitGroup):
    """The job to run. Times are in seconds; the job needs ``min_groups`` groups to continue."""

    script: Sequence[str]
    groups: int
    ranks: int
    trace_dir: Path
    min_groups: int = 1
    max_restarts: int = 10
    timeout: float | None = None
    drain_timeout: float = 60.0
    evict_stragglers: float | None = None
    """Restart the group of a rank, once, if the rank is this many times as slow as the median."""
    diagnose_after: int = AFTER
    checkpoint: Checkpointing | None = None
    """Settings of durable checkpoints; None leaves them to the script."""
    memory: str = "off"
    """Copies of the state in memory: ``auto``, ``off``, or the number of steps between two."""
    copies: MemoryPlan | None = None
    """Where and when these copies are made; None if there are none."""
    copies_server: CopiesServer | None = None
    """Serves the copies of this host to the others, in a job that may have some."""
    resume: bool = False
    """Begin with the newest state, of a checkpoint or a copy in memory."""
    auto_resume: bool = True
    """Resume from the newest state when the job has lost its own."""
    resume_step: int | None = None
    """Step of the checkpoint that the job begins with, or None to begin without one."""
    tee: str = "first"
    """The ranks whose output is shown: ``first``, ``all``, ``none``, or ``GROUP.RANK,…``."""
    compiled: Path | None = None
    """Folder for code that inductor compiles; None leaves it to the environment."""

    def make_place(self) -> None:
        """Create the folder for traces and logs.

        Raises:
            SupervisorError: The folder cannot be written.
        """
        try:
            (self.trace_dir / "logs").mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.trace_dir):
                pass
        except OSError as error:
            raise SupervisorError(
                f"--trace-dir {self.trace_dir} cannot be written: {error.strerror}; name another, "
                "or free room there"
            ) from error

    def check(self, joins: bool = False) -> None:
        """Raise SupervisorError unless the job can be started.

        Args:
            joins: Another process serves the bus.
        """
        if not self.script or not Path(self.script[0]).is_file():
            named = self.script[0] if self.script else ""
            raise SupervisorError(f"no script at {named!r}; give the path of a Python file")
        self._check_parts(joins)
        is_complete = joins and self.spares >= self.local_ranks > 0 and self.all_groups
        if self.groups == 0 and not is_complete:
            raise SupervisorError(
                "--groups 0 is a host of spares only: give --join, --all-groups, and at least as "
                f"many --spares as a group has ranks on a host ({self.local_ranks}); found "
                f"{self.spares}"
            )
        if self.groups and not 1 <= self.min_groups <= self.groups:
            raise SupervisorError(
                f"--min-groups {self.min_groups}: expected 1 to {self.groups}, the number of "
                "--groups"
            )
        if self.groups_in_all < self.first_group + self.groups:
            raise SupervisorError(
                f"--all-groups {self.all_groups}: expected at least "
                f"{self.first_group + self.groups}, because this host has group "
                f"{self.first_group} to {self.first_group + self.groups - 1}"
            )
        if not 0 < self.host_limit < math.inf:
            raise SupervisorError(
                f"--host-limit {self.host_limit:g}: expected a positive number of seconds"
            )
        if self.min_steps and self.stop_after_plan is None:
            raise SupervisorError(
                f"--min-steps {self.min_steps} needs --stop-after-plan: give both or neither"
            )
        if self.evict_stragglers is not None and not self.evict_stragglers > 1:
            raise SupervisorError(
                f"--evict-stragglers {self.evict_stragglers:g}: expected more than 1, the "
                "factor by which a rank is slower than the median rank"
            )
        if self.memory != "off":
            memory_interval(self.memory)
        if self.reform_window is not None and not 0 <= self.reform_window < math.inf:
            raise SupervisorError(
                f"--reform-window {self.reform_window:g}: expected a number of seconds, at least 0"
            )

    def _check_parts(self, joins: bool) -> None:
        if (wrong := self.wrong_split()) is not None:
            raise SupervisorError(wrong)
        if self.parts_of_group > 1 and (not joins or self.take_over):
            unfit = "--take-over" if joins else "a job without --join"
            raise SupervisorError(
                f"--ranks-per-host {self.ranks_per_host}: a group on {self.parts_of_group} hosts "
                f"is not possible with {unfit}; serve the bus by `fft serve`, give --join on each "
                "host, and leave out --take-over"
            )

    @property
    def parts_in_all(self) -> int:
        """Number of parts of all groups of the job; equal to that of the groups here if this host
        has the whole job."""
        return self.groups_in_all * self.parts_of_group

    @property
    def groups_in_all(self) -> int:
        """Number of groups of the job on all hosts."""
        return self.first_group + self.groups if self.all_groups is None else self.all_groups

    def settings(self) -> dict[str, str]:
        """Return the environment variables that pass settings to the job's processes."""
        found = {"FFT_TRACE_DIR": str(self.trace_dir.resolve())}
        if 0 < self.drain_timeout < math.inf:  # the supervisor follows SIGTERM with SIGKILL
            found["FFT_DRAIN_WITHIN"] = str(self.drain_timeout)
        if self.faults is not None:
            found["FFT_FAULTS"] = str(self.faults.resolve())
        if self.may_inject:
            found["FFT_INJECT"] = "1"
        if self.reform_window:
            found["FFT_REFORM_WINDOW"] = str(self.reform_window)
        if self.compiled is not None:
            found["TORCHINDUCTOR_CACHE_DIR"] = str(self.compiled)
        if self.checkpoint is not None:
            found |= self.checkpoint.to_env(self.resume_step)
        if self.copies is not None:
            found |= self.copies.to_env()
        return found

    @property
    def can_resume(self) -> bool:
        """Whether a job that has lost its state resumes from another one."""
        if not self.auto_resume:
            return False
        if self.has_other_hosts:  # they cannot follow to the bus of another start here
            return self.bus_url is not None and bool(self.checkpoint or self.copies)
        return self.checkpoint is not None or self.has_copies

    @property
    def has_other_hosts(self) -> bool:
        """Whether other hosts have parts of the job."""
        return self.parts_in_all != self.groups

    @property
    def source(self) -> str:
        """Where the state of `resume_step` is, for messages."""
        if self.copies is not None and self.copies.resume is not None:
            return f"in memory ({self.copies.place})"
        return "" if self.checkpoint is None else f"at {self.checkpoint.place}"

    def is_soon(self, step: int) -> bool:
        """Return whether a job at ``step`` began a few steps before with a saved state.

        Its end may then be the fault of that state.
        """
        begun_at = self.resume_step
        is_alone = self.can_resume and not self.has_other_hosts
        return is_alone and begun_at is not None and step <= begun_at + SOON

    @property
    def has_copies(self) -> bool:
        """Whether there is a copy of the state in memory."""
        return self.copies is not None and bool(HeldCopies(self.copies.place).steps())

    def has_copies_of(self, group: str, part: int) -> bool:
        """Whether there is a copy in memory of the first rank of a part of a group."""
        name = f"step-*/{file_stem(group, part * self.local_ranks)}{PART}"
        return self.copies is not None and any(self.copies.place.glob(name))

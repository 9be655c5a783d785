"""What a supervisor is to run, and whether it can be run. Reads no more than the file system."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fft.durable.plan import Checkpointing
from fft.launch.supervisor.culprit import AFTER
from fft.protocol.timeouts import HOST_LIMIT_S
from fft.util.errors import FftError


class SupervisorError(FftError):
    """A job that cannot be started as asked: names what to change."""


@dataclass(frozen=True)
class RunConfig:
    """What to run. Times in seconds; ``min_groups`` are needed for the job to go on."""

    script: Sequence[str]
    groups: int
    ranks: int
    trace_dir: Path
    faults: Path | None = None
    injectable: bool = False
    min_groups: int = 1
    max_restarts: int = 10
    stop_after_plan: int | None = None
    min_steps: int = 0
    timeout: float | None = None
    drain_timeout: float = 60.0
    evict_stragglers: float | None = None
    """Start the group of a rank that is so many times as slow as the median rank again, once."""
    diagnose_after: int = AFTER
    host_limit: float = HOST_LIMIT_S
    """The silence of this host after which others go on without it, at most."""
    first_group: int = 0
    """Its groups are numbered from here; others have other hosts."""
    all_groups: int | None = None
    """Of the whole job, on all hosts; None: these."""
    checkpoint: Checkpointing | None = None
    """Durable checkpoints; None: what the script says."""
    auto_resume: bool = True
    """Go on from the newest of them when the job has lost its state."""
    resume_step: int | None = None
    """The checkpoint that the job begins with; None: with none."""
    reform: bool = True
    """A group that loses one rank keeps the others, where its script allows it."""
    spares: int = 0
    """Processes that wait for a role with the script's imports loaded."""
    reform_window: float | None = None
    """How long the others wait for the successor of a lost rank; None: if there is a spare, and
    then as the spec says."""
    compiled: Path | None = None
    """Where processes keep what inductor compiles; None: as their environment says."""
    bus_url: str | None = None
    """The bus of the start that this process joins; None: it serves the bus itself."""
    take_over: bool = False
    """Have another supervisor of these groups hand them over; else it is left alone."""

    def make_place(self) -> None:
        """Make the folder of traces and logs. Raises SupervisorError: it cannot be written."""
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
            joins: The bus is served elsewhere.
        """
        if not self.script or not Path(self.script[0]).is_file():
            named = self.script[0] if self.script else ""
            raise SupervisorError(f"no script at {named!r}; give the path of a Python file")
        is_complete = joins and self.spares >= self.ranks > 0 and self.all_groups
        if self.groups == 0 and not is_complete:
            raise SupervisorError(
                "--groups 0 is a host of spares only: give --join, --all-groups, and at least as "
                f"many --spares as a group has ranks ({self.ranks}); found {self.spares}"
            )
        if self.groups < 0:
            raise SupervisorError(
                f"--groups {self.groups}: expected at least 1, or 0 for a host of spares only"
            )
        if self.ranks < 1:
            raise SupervisorError(f"--ranks {self.ranks}: expected at least 1")
        if self.groups and not 1 <= self.min_groups <= self.groups:
            raise SupervisorError(
                f"--min-groups {self.min_groups}: expected 1 to {self.groups}, the number of "
                "--groups"
            )
        if self.first_group < 0:
            raise SupervisorError(f"--first-group {self.first_group}: expected at least 0")
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
        if self.diagnose_after < 0:
            raise SupervisorError(
                f"--diagnose-after {self.diagnose_after}: expected at least 0, which means never"
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
        if self.spares < 0:
            raise SupervisorError(f"--spares {self.spares}: expected at least 0")
        if self.reform_window is not None and not 0 <= self.reform_window < math.inf:
            raise SupervisorError(
                f"--reform-window {self.reform_window:g}: expected a number of seconds, at least 0"
            )

    @property
    def groups_in_all(self) -> int:
        """How many groups the job has on all hosts."""
        return self.first_group + self.groups if self.all_groups is None else self.all_groups

    def settings(self) -> dict[str, str]:
        """What of it every process of the job finds in its environment."""
        found = {"FFT_TRACE_DIR": str(self.trace_dir.resolve())}
        if 0 < self.drain_timeout < math.inf:  # SIGTERM comes from us, and then SIGKILL
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
        return found

    @property
    def can_resume(self) -> bool:
        """Whether a job that has lost its state is to go on from a checkpoint; on one host."""
        is_whole = self.groups_in_all == self.groups
        return self.checkpoint is not None and self.auto_resume and is_whole

    @property
    def may_inject(self) -> bool:
        """Whether faults may be injected: it was said, or there is a plan of them."""
        return self.injectable or self.faults is not None

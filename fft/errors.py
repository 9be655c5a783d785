"""Exceptions of FFT. Each message names the object, the expected and the actual value, and the fix.

The public exceptions, such as ``fft.errors.NoState``; ``fft.FftError`` is their base::

    Exception
    └── FftError                     base of every error that FFT raises on purpose
        ├── ConfigError              an argument, option, spec, plan, token or timeout is wrong
        ├── DataError                the data or its loader does not allow a replay
        ├── StateError               the state does not fit, cannot be restored, or cannot be sent
        ├── CheckpointError          a checkpoint cannot be written, read, or used
        ├── BusError                 the bus cannot be reached, or has lost its contents
        ├── JobError                 this process cannot take part in the job any more
        │   ├── Diverged             replicas hold different states
        │   ├── Fenced               a newer process took this identity
        │   ├── InDoubt              the decision about this rank's YES cannot be learned
        │   └── NoEpoch              no epoch was formed in time
        │       └── NoState          no process holds the state of the last committed step
        ├── LiveBlockFailed          a member of a live block failed, and so the block on all
        ├── StepRetriesExceeded      the step function of one step failed too many times
        └── DeviceLost               an accelerator failed for good
    SystemExit
    └── Drained                      the replica group has left the job as asked

Subclasses of them appear in messages, logs and traces. They may change: catch the public class.
This module imports nothing of FFT.
"""

from __future__ import annotations

__all__ = [
    "BusError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DeviceLost",
    "Diverged",
    "Drained",
    "Fenced",
    "FftError",
    "InDoubt",
    "JobError",
    "LiveBlockFailed",
    "NoEpoch",
    "NoState",
    "StateError",
    "StepRetriesExceeded",
]


class FftError(Exception):
    """Base of every error that FFT raises on purpose."""


class ConfigError(FftError):
    """An argument, option, environment variable, spec, fault plan, token or timeout is wrong."""


class DataError(FftError):
    """The data, or the way its loader continues after a restart, does not allow a replay.

    A subclass is raised if ranks that must draw the same data have drawn different data.
    """


class StateError(FftError):
    """The state of a rank does not fit, cannot be restored, or cannot be exchanged with a peer."""


class CheckpointError(FftError):
    """A checkpoint cannot be written, read or used as configured; the message names the fix."""


class BusError(FftError):
    """The bus did not answer, or has lost its contents. Base of all errors of the bus."""


class JobError(FftError):
    """This process cannot take part in the job any more; the message says whether the job can."""


class Diverged(JobError):
    """Replicas hold different states; the message names the ranks, digests and step."""


class Fenced(JobError):
    """A newer incarnation took this identity; this process must stop."""


class InDoubt(JobError):
    """This rank voted YES and could not learn the decision within ``bus_limit``."""


class NoEpoch(JobError):
    """No epoch was formed within the quorum timeout; its coordinator reports the reason."""


class NoState(NoEpoch):
    """No live replica group holds the state of the last committed step."""


class LiveBlockFailed(FftError):
    """A live block was rolled back; all processes that were in it raise this error.

    Attributes:
        failed: The members that are gone, or whose own error ended the block.
        members: All members of the block.
    """

    def __init__(
        self, text: str, failed: tuple[object, ...] = (), members: tuple[object, ...] = ()
    ) -> None:
        super().__init__(text)
        self.failed, self.members = failed, members


class StepRetriesExceeded(FftError):
    """The step function of the same step failed on this rank too many times in a row.

    ``__cause__`` is the last error of the step function.
    """


class DeviceLost(FftError):
    """An accelerator has failed permanently in this process, which must be restarted."""


class Drained(SystemExit):
    """The replica group has drained; let this exception end the process with exit status 0."""

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


# --- subclasses without a promise -----------------------------------------------------------------


class OtherSettings(ConfigError):
    """This process has other settings than the job it would join; the message names them."""


class UnequalData(DataError):
    """Ranks that must draw the same data have drawn different data; the message names the fix."""


class GradientsDiffer(FftError):
    """Ranks that must have equal reduced gradients do not; the message names them."""


class GradientMissing(FftError):
    """A rank has no gradient for a parameter to which others contribute; the message names it."""


class GradientsNotReproducible(FftError):
    """Two computations of the same batch on this rank gave different gradients."""


class ResultRefused(FftError):
    """A step was not committed, because ``on_nonfinite`` or a veto refuses its result.

    Attributes:
        ends_job: The job must end; otherwise the step is repeated.
    """

    def __init__(self, text: str, ends_job: bool = True) -> None:
        super().__init__(text)
        self.ends_job = ends_job


class RestartRefused(ResultRefused):
    """A restartable function is not called again, because of ``max_restarts`` or ``stop_on``."""


class StateMismatch(StateError):
    """A state does not fit this rank's model or optimizer; names the first place that differs."""


class GradientLayoutMismatch(StateError):
    """The groups do not reduce the same gradients; the message lists each group's reductions."""


class UnfitCheckpoint(CheckpointError):
    """A checkpoint does not fit the script, so retrying would not help."""


class HookFailed(JobError):
    """A hook of the user failed on this rank, which leaves the job; the cause is attached."""


class HealthCheckFailed(HookFailed):
    """A health check of the user failed on this rank, which leaves the job."""


class JobEnded(JobError):
    """All groups of the job have left after its last step, so it cannot be joined any more."""


class NotEnoughGroups(NoEpoch):
    """Fewer than ``min_replica_size`` replica groups joined within the quorum timeout."""


class GroupNotReformable(JobError):
    """A replacement for a lost rank cannot enter a process group that its group's ranks use."""


class UpstreamTimeout(JobError):
    """Another scope that the next step waits for has not advanced in time."""


class NoLighthouseQuorum(JobError):
    """With ``membership="lighthouse"``: torchft's lighthouse had no quorum for the txn in time."""


class LiveBlockMisuse(FftError):
    """Live blocks are nested, in different orders, or not entered by all; the message has the
    fix."""


class TxnAborted(FftError):
    """The caller's txn was rolled back. Unwinds the step function, and is not a fault of it."""


class ProtocolError(FftError):
    """The state machine has no row for an event in this state. It is traced and changes nothing."""

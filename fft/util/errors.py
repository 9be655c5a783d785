"""The errors that FFT raises on purpose. Their messages name the place and the fix.

This module imports nothing.
"""

from __future__ import annotations


class FftError(Exception):
    """Base of every error that FFT raises on purpose."""


class SpecError(FftError):
    """A spec file cannot be used; the message names the file, the place and the fix."""


class ProtocolError(FftError):
    """The state machine has no row for an event in this state. It is traced and changes nothing."""


class InDoubt(FftError):
    """This rank voted YES and could not learn the decision within the configured limit."""


class Fenced(FftError):
    """A newer incarnation took this identity; this process must stop."""


class Diverged(FftError):
    """Replicas hold different states; the message names the ranks, digests and step."""


class JobEnded(FftError):
    """All groups of the job have left after its last step, so it cannot be joined any more."""


class UnlikeGroups(FftError):
    """The groups do not reduce the same gradients; the message lists each group's reductions."""


class DataError(FftError):
    """The loader cannot give the items that the cursor asks for."""


class UnequalData(FftError):
    """Ranks that must draw the same data have drawn different data; the message names the fix."""


class OtherSettings(FftError):
    """This process has other settings than the job it would join; the message names them."""


class CannotMeet(FftError):
    """A replacement for a lost rank cannot enter a process group that its group's ranks use."""


class NoEpoch(FftError):
    """No epoch was formed within the quorum timeout; its coordinator reports the reason."""


class NoState(NoEpoch):
    """No live replica group holds the state of the last committed step."""


class NotEnoughGroups(NoEpoch):
    """Fewer than ``min_replica_size`` replica groups joined within the quorum timeout."""


class FlowStalled(FftError):
    """Another scope that the next step waits for has not advanced in time."""


class NoQuorum(FftError):
    """With ``membership="lighthouse"``: torchft's lighthouse had no quorum for the txn in time."""


class BodyKeepsFailing(FftError):
    """The step function of the same step failed on this rank too many times in a row."""


class DeviceLost(FftError):
    """An accelerator has failed permanently in this process, which must be restarted."""


class TxnAborted(FftError):
    """The caller's txn was rolled back. Unwinds the step function, and is not a fault of it."""


class Drained(SystemExit):
    """The replica group has drained; let this exception end the process with exit status 0."""

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason

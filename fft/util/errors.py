"""Errors that FFT raises on purpose. Messages name the place and what to do. Imports nothing."""

from __future__ import annotations


class FftError(Exception):
    """Base of every error that FFT raises on purpose."""


class SpecError(FftError):
    """A spec file cannot be used; the message names file, place and what to do."""


class ProtocolError(FftError):
    """An event that the state has no row for. It is traced and changes nothing."""


class InDoubt(FftError):
    """Voted YES, and the decision could not be learned within the configured limit."""


class Fenced(FftError):
    """A newer incarnation took this identity; this process must stop."""


class Diverged(FftError):
    """Replicas hold different states; the message names ranks, digests and step."""


class JobEnded(FftError):
    """All groups of the job have left after its last step: there is no job left to join."""


class UnlikeGroups(FftError):
    """The groups do not reduce the same gradients; the message says what each reduces."""


class UnequalData(FftError):
    """Ranks that must draw the same data have drawn different data; the message names the fix."""


class OtherSettings(FftError):
    """This process is not set up as the job that it would join; the message says what differs."""


class CannotMeet(FftError):
    """A new process has come for a lost rank of this group, whose ranks meet where it cannot."""


class NoEpoch(FftError):
    """No epoch was formed within the quorum timeout; its coordinator reports the reason."""


class NoState(NoEpoch):
    """No live replica group holds the state of the last committed step."""


class NotEnoughGroups(NoEpoch):
    """Fewer than ``min_replica_size`` replica groups came within the quorum timeout."""


class FlowStalled(FftError):
    """Another scope, which the next step waits for, has not gone on in time."""


class NoQuorum(FftError):
    """With ``membership="lighthouse"``: torchft's lighthouse had no quorum for the txn in time."""


class BodyKeepsFailing(FftError):
    """The body of the same step failed on this rank too many times in a row."""


class DeviceLost(FftError):
    """An accelerator has failed for good in this process, which must end and start again."""


class TxnAborted(FftError):
    """The txn of the caller was rolled back. Unwinds the body; it is not a fault of the body."""


class Drained(SystemExit):
    """The replica group has drained; let it end the process, with exit status 0."""

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason

"""The end of a process of a job, as its register on the job's bus holds it. Pure data.

The process itself writes why it has left, or the class of the error that ended it. The launcher
adds the exit status when it has collected the process, and what the process could not write if it
was killed. So each observer of the bus knows how a process has ended, also one on another host.
"""

from __future__ import annotations

import signal

from pydantic.dataclasses import dataclass

from fft.errors import JobEnded, NoEpoch
from fft.messages.causes import LeaveReason
from fft.messages.codec import Codec
from fft.messages.identities import CONFIG, Count, Name, Text
from fft.util.error_places import Place

EXIT = "exit/"
"""Prefix of the registers; each holds the newest process of its rank that has ended."""


@dataclass(frozen=True, config=CONFIG)
class Exit:
    """The end of one process.

    Attributes:
        step: Committed steps that it knew.
        reason: Why it has left in good order; None if it has not.
        error: Class of ``fft.errors`` with which FFT has ended it; empty without one.
        took_part: It was a member of an epoch.
        status: Its exit status, or minus the number of the signal; None if no launcher knows it.
        place: The error of the script that ended it, without its traceback.
        asked: The launcher has sent it SIGTERM.
        early: It ended with exit status 0 in the middle of the job.
        replaces: It has taken the place of a lost process of a living group.
        log: The file with its output.
    """

    group: Name
    rank: Count
    pid: Count
    host: Text
    step: Count = 0
    reason: LeaveReason | None = None
    error: Text = ""
    took_part: bool = True
    status: int | None = None
    place: Place | None = None
    asked: bool = False
    early: bool = False
    replaces: bool = False
    log: str = ""

    @property
    def has_left(self) -> bool:
        """Whether it has left the job in good order."""
        return self.reason is not None

    @property
    def failed(self) -> bool:
        """Whether it ended by a failure or too early."""
        return self.status not in (0, None) or self.early

    @property
    def failed_by_itself(self) -> bool:
        """Whether its script failed, rather than a machine or a peer."""
        return (self.status or 0) > 0 and not (self.place is not None and self.place.may_pass)

    @property
    def is_preempted(self) -> bool:
        """Whether it was ended from outside: drained, or by a SIGTERM that FFT has not sent."""
        by_signal = self.status == -signal.SIGTERM and not self.asked
        return self.reason is LeaveReason.DRAINED or by_signal

    @property
    def lost_peers(self) -> bool:
        """Whether it ended because other groups, or their hosts, were lost."""
        return self.place is not None and self.place.is_a(NoEpoch)

    @property
    def came_too_late(self) -> bool:
        """Whether it returned after all others had left, as after a hang."""
        return self.place is not None and self.place.is_a(JobEnded)

    @property
    def leaves(self) -> bool:
        """Whether it has left with its group: at its end, or because it was asked to."""
        return self.reason is not None and (
            self.reason.is_end or self.reason is LeaveReason.DRAINED
        )


_EXITS = Codec[Exit](Exit, omit="defaults")
encode_exit, decode_exit = _EXITS.encode, _EXITS.decode
"""Encode and decode the value of a register."""


def exit_register(group: str, rank: int) -> str:
    """Return the register of a rank's newest exit."""
    return f"{EXIT}{group}/{rank}"


def gone_register(group: str, rank: int) -> str:
    """Return the register of the newest process of a rank that had taken part and has ended."""
    return f"gone/{group}/{rank}"


def gone_value(pid: int, host: str) -> bytes:
    """Return the value of that register."""
    return f"{pid} {host}".encode()

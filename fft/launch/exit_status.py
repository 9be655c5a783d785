"""Exit statuses of `fft run`: what a scheduler does next depends on them."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """How a job, or the part of it on this host, has ended."""

    COMPLETE = 0
    """The work is done. A group that is still restarting at the end does not change this."""
    FAILED = 1
    """The work is not done, and starting the job again may not help. An automatic resume that fails
    also ends like this."""
    REFUSED = 2
    """The job was not started as asked, or the arguments are wrong."""
    FEWER_GROUPS = 3
    """The work is done, but a group was drained, evicted or given up before the end, or was away
    when the shards of the others ended."""
    HELD = 4
    """This part of the job was not started, because another `fft run` supervises one of its
    groups."""
    NO_PROGRESS = 5
    """Restarts in a row have committed no step, so starting the job again as it is will not
    help."""
    BUS_LOST = 69
    """The bus was out of reach for too long, so this part of the job ended: start it again when the
    bus is back. This is ``EX_UNAVAILABLE`` of ``sysexits.h``."""
    DRAINED = 75
    """The job was drained or preempted before its end: start it again to resume. This is
    ``EX_TEMPFAIL`` of ``sysexits.h``."""


DONE = (ExitStatus.COMPLETE, ExitStatus.FEWER_GROUPS)
"""The statuses of a job whose work is done."""

AGAIN = (ExitStatus.BUS_LOST, ExitStatus.DRAINED)
"""The statuses of a job that resumes when it is started again."""

RELEASE_S = 20.0
"""How long a supervisor may take to end after the last step, in seconds: it gives its processes
time to write the last checkpoint. A supervisor that takes longer was lost with its host."""

IN_A_WORD = {
    ExitStatus.COMPLETE: "complete",
    ExitStatus.FAILED: "failed",
    ExitStatus.REFUSED: "not started",
    ExitStatus.FEWER_GROUPS: "complete, but with fewer groups",
    ExitStatus.HELD: "not started beside another fft run",
    ExitStatus.NO_PROGRESS: "given up after restarts without a step",
    ExitStatus.BUS_LOST: "ended without its bus",
    ExitStatus.DRAINED: "drained before its end",
}

IN_WORDS = (
    "Exit status: 0 complete; 1 failed; 2 not started (wrong arguments, or a directory in use); "
    "3 complete, but with fewer groups; 4 another fft run has the groups; 5 given up after "
    "restarts that committed no step; 69 the bus was lost, 75 drained or preempted: start it again "
    "to resume."
)
"""The end of `fft run --help`."""

"""Operations on a process by its pidfd (Linux), which is never reused for another process."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress


def send(pidfd: int, number: int) -> None:
    """Send a signal, unless the process is already dead."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def ends_within(pidfd: int, seconds: float) -> bool:
    """Wait up to ``seconds`` for a process, not necessarily a child; return whether it ended."""
    waiter = select.poll()
    waiter.register(pidfd, select.POLLIN)
    return bool(waiter.poll(max(0.0, seconds) * 1000))


def is_there(pid: int) -> bool:
    """Whether a process of any user on this host has this pid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal; a process held by a debugger does not count."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b") ")[2][:1]
    except OSError:  # the process has ended
        return False
    return state == b"T"

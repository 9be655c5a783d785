"""A process by its pidfd (Linux), which never means another one that got its number."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress


def send(pidfd: int, number: int) -> None:
    """Send a signal; a process that is already dead is left alone."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def ends_within(pidfd: int, seconds: float) -> bool:
    """Wait for its end, at most so long. It need not be a child."""
    waiter = select.poll()
    waiter.register(pidfd, select.POLLIN)
    return bool(waiter.poll(max(0.0, seconds) * 1000))


def is_there(pid: int) -> bool:
    """Whether a process of this host has the number, whoever's it is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal. One that a debugger holds is not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b") ")[2][:1]
    except OSError:  # it has ended
        return False
    return state == b"T"

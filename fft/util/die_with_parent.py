"""Ties a child to who started it, then becomes the child: ``shim.py PARENT_PID PROGRAM ARG…``.

Run as a file, before anything of FFT is loaded. Asks the kernel (Linux) to SIGKILL this
process when the thread that started it ends; the request outlives the exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def tied(command: Sequence[str]) -> list[str]:
    """What to start in the place of ``command``, so that it ends with the calling thread."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command]


def main() -> None:
    """Make the request, check that it came in time, and exec the program."""
    parent, *program = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        sys.exit(f"cannot tie this process to its parent: {os.strerror(error)}")
    if os.getppid() != int(parent):  # it died before the request was made
        sys.exit("the parent is gone")
    ignore_warnings()
    os.execv(program[0], program)


def ignore_warnings() -> None:
    """Ignore SIGUSR1 and SIGHUP in this process, and in the programs that it starts.

    A scheduler may send them to all processes of a step. `fft run` answers for the whole job.
    """
    for number in (signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send ``number`` to this process when its parent ends.

    The parent is the thread that started this process. Raises OSError: the kernel refuses.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent:  # it ended before the request was made
        signal.raise_signal(number)


if __name__ == "__main__":
    main()

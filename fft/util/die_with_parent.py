"""A launcher that ties a child to its parent: ``die_with_parent.py PARENT_PID PROGRAM ARG…``.

It runs as a file, without importing FFT. It asks the kernel (Linux) to SIGKILL this process when
the thread that started it ends, and then execs the program; the request survives the exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def tied(command: Sequence[str]) -> list[str]:
    """Return a command that runs ``command`` and ends when the calling thread ends."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command]


def main() -> None:
    """Make the request, check that the parent is still alive, and exec the program."""
    parent, *program = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        sys.exit(f"cannot tie this process to its parent: {os.strerror(error)}")
    if os.getppid() != int(parent):  # the parent died before the request was made
        sys.exit("the parent is gone")
    ignore_warnings()
    os.execv(program[0], program)


def ignore_warnings() -> None:
    """Ignore SIGUSR1 and SIGHUP in this process, and in the programs that it starts.

    A scheduler may send them to all processes of a SLURM job step; `fft run` handles them for the
    whole job.
    """
    for number in (signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def end_with_parent(numbers: Sequence[signal.Signals]) -> None:
    """Have the kernel send a signal to this process when its parent ends.

    The parent is the thread that started this process. Raises OSError if the kernel refuses.

    Args:
        numbers: The signal is the first of these that is not ignored, since a shell may start this
            process with some ignored; if all are, it is SIGKILL.
    """
    parent = os.getppid()
    heard = (number for number in numbers if signal.getsignal(number) != signal.SIG_IGN)
    number = next(heard, signal.SIGKILL)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent:  # the parent ended before the request was made
        signal.raise_signal(number)


if __name__ == "__main__":
    main()

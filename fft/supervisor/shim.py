"""Ties a child to its supervisor, then becomes the child: ``shim.py PARENT_PID PROGRAM ARG…``.

Run as a file, before anything of FFT is loaded. Asks the kernel (Linux) to SIGKILL this
process when the supervisor's thread that started it ends; the request outlives the exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Make the request, check that it came in time, and exec the program."""
    parent, *program = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        sys.exit(f"cannot tie this process to its supervisor: {os.strerror(error)}")
    if os.getppid() != int(parent):  # it died before the request was made
        sys.exit("the supervisor is gone")
    os.execv(program[0], program)


if __name__ == "__main__":
    main()

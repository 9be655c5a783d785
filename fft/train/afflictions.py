"""What an injected fault does to its own process, where it takes more than a line: hang and stop.

`stop_oneself` starts one small process, which ends by itself; nothing else is touched.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

# Wakes a stopped process. It gets the stopped one as a pidfd, so that a number that was used again
# is never hit, and goes on waking until that one closes the pipe: who was woken just before it
# stopped would sleep for ever.
_WAKER = """
import os, select, signal, sys
pidfd, pipe, seconds = int(sys.argv[1]), 0, float(sys.argv[2])
waiter = select.poll()
waiter.register(pidfd, select.POLLIN)
waiter.register(pipe, select.POLLIN | select.POLLHUP)
os.write(1, b"!")
while not waiter.poll(seconds * 1000):
    signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    seconds = 0.5
"""
_READY_S = 60.0  # for the waker to start, on a machine that is busy


def hang(seconds: float, holding_gil: bool = False) -> None:
    """Wait on this thread for ``seconds``; ``holding_gil``: with the interpreter's lock held."""
    if not holding_gil:
        threading.Event().wait(seconds)
        return
    libc = ctypes.PyDLL(None)  # its functions are called without letting go of the lock
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:  # a signal ends one wait early
        libc.poll(None, 0, int(left * 1000) + 1)


def stop_oneself(seconds: float) -> None:
    """SIGSTOP this process; a small one sends SIGCONT after ``seconds``. Returns when it has."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        waker = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WAKER, str(pidfd), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[pidfd],
        )
        assert waker.stdin is not None
        assert waker.stdout is not None
        with waker.stdin, waker.stdout:
            if waker.stdout.read(1) != b"!":
                raise OSError("the process that was to wake this one did not start")
            os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait(_READY_S)
    finally:
        os.close(pidfd)

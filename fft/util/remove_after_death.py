"""A file or folder that goes away with this process, however that ends: a child waits for it, and
removes it.

Run as a file by `vanishing`: ``remove_after_death.py PATH DEVICE INODE``; standard input is a pipe
of which only the process that started it holds the other end. It has a session of its own, so that
a Ctrl-C does not reach it. Loads nothing of FFT.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_END_S = 10.0
_TRIES = 20
"""To remove a folder into which others, who end with this process, may still write."""


@contextmanager
def vanishing(path: Path) -> Iterator[None]:
    """Have what is at ``path`` removed when the block is left, or this process has ended.

    Something else that has come into its place is left alone. Raises OSError: nothing is there, or
    no process can be started.
    """
    known = path.stat()
    which = [os.path.abspath(path), str(known.st_dev), str(known.st_ino)]
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), *which],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd="/",  # it shall keep no other folder in use
        start_new_session=True,
    )
    assert child.stdin is not None
    try:
        yield
    finally:
        child.stdin.close()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            _remove(str(path))


def main() -> None:
    """Wait for the end of standard input, then remove what is there."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):  # sent to a whole step
        signal.signal(number, signal.SIG_IGN)
    path, device, inode = sys.argv[1:]
    while os.read(0, 4096):
        pass
    with suppress(FileNotFoundError):
        found = os.stat(path)
        if (found.st_dev, found.st_ino) == (int(device), int(inode)):
            _remove(path)


def _remove(path: str) -> None:
    for _ in range(_TRIES):
        if not os.path.isdir(path):
            break
        shutil.rmtree(path, ignore_errors=True)
    else:
        return
    with suppress(FileNotFoundError):
        os.unlink(path)


if __name__ == "__main__":
    main()

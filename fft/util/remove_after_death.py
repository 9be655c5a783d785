"""Removal of a file or folder when this process ends, by a child process that waits for that.

`vanishing` runs this file as ``remove_after_death.py PATH DEVICE INODE``. Standard input is a pipe
whose other end only the parent holds. The child has its own session, so that a Ctrl-C does not
reach it. It does not import FFT.
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
"""Number of attempts to remove a folder, into which processes of this job may still write."""


@contextmanager
def vanishing(path: Path) -> Iterator[None]:
    """Remove the file or folder at ``path`` when the block is left or this process ends.

    Another file that has replaced it is left alone. Raises OSError if ``path`` does not exist or
    the child process cannot be started.
    """
    known = path.stat()
    which = [os.path.abspath(path), str(known.st_dev), str(known.st_ino)]
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), *which],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd="/",  # keeps no other folder in use
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
    """Wait for the end of standard input, then remove the file or folder."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):  # a scheduler signals all
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

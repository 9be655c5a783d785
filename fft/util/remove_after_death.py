"""Removal of a file or folder when this process ends, by a child process that waits for that.

`vanishing` runs this file as ``remove_after_death.py PATH DEVICE INODE SECONDS``. Standard input is
a pipe whose other end only the parent holds. The child has its own session, so that a Ctrl-C does
not reach it. It does not import FFT.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

LOCK = ".job.lock"
"""File in a folder whose lock the process holds that uses the folder."""
_END_S = 10.0
_TRIES = 20
"""Number of attempts to remove a folder, into which processes of this job may still write."""


@contextmanager
def vanishing(path: Path, kept_s: float = 0.0) -> Iterator[Callable[[], None]]:
    """Remove the file or folder at ``path`` when the block is left or this process ends.

    Another file that has replaced it is left alone.

    Args:
        kept_s: Seconds that it stays if this process is killed, or if the function is called that
            is yielded, unless it is empty. It then stays for good if another process has locked
            `LOCK` in it.

    Raises OSError if ``path`` does not exist or the child process cannot be started.
    """
    known = path.stat()
    which = [os.path.abspath(path), str(known.st_dev), str(known.st_ino), str(kept_s)]
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), *which],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # else a pipe of a killed process stays open
        cwd="/",  # keeps no other folder in use
        start_new_session=True,
    )
    assert child.stdin is not None
    try:
        yield child.stdin.close
    finally:
        if not child.stdin.closed:
            with suppress(OSError):
                child.stdin.write(b".")
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
    path, device, inode, kept_s = sys.argv[1:]
    is_left = False
    while os.read(0, 4096):
        is_left = True
    with ExitStack() as undo, suppress(FileNotFoundError, BlockingIOError):  # others use the folder
        if not is_left and float(kept_s) > 0:
            if set(os.listdir(path)) - {LOCK}:
                time.sleep(float(kept_s))
            lock = undo.enter_context(open(os.path.join(path, LOCK)))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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

"""Locks on files, new names in shared folders, full disks, and the folder for temporary files."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import stat
import tempfile
from pathlib import Path
from typing import IO

from fft.errors import FftError

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Error codes of file systems that do not support locks."""


def locked(file: IO[str], operation: int) -> bool:
    """Apply ``fcntl.flock``; the kernel releases the lock when its owner dies.

    Returns:
        False on a file system without locks, else True.

    Raises:
        BlockingIOError: Another process holds the lock, and ``operation`` has ``LOCK_NB``.
        OSError: The lock failed for another reason.
    """
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: OSError) -> bool:
    """Whether ``error`` means that the disk is full or a quota is used up."""
    return error.errno in _NO_ROOM


def why_not_private(folder: Path) -> str | None:
    """Return why another user may have written to ``folder``, or None. Raises OSError."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder (a symlink is not followed)"
    if found.st_uid != os.geteuid():
        return f"belongs to the user with id {found.st_uid}"
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        return f"has mode {mode:04o}, so other users may write to it"
    return None


def claimed(path: Path) -> Path:
    """Create an empty file at ``path``, or at the next free name, and return its path.

    The second file of the name ``g0r0-1.log`` is ``g0r0-1.2.log``. No two callers get one file.

    Raises:
        OSError: The file cannot be created.
    """
    for number in itertools.count(1):
        name = path.name if number == 1 else f"{path.stem}.{number}{path.suffix}"
        try:
            path.with_name(name).open("xb").close()
        except FileExistsError:
            continue
        return path.with_name(name)
    raise AssertionError("the count never ends")


_LONGEST_SOCKET = 107
"""Maximum length of a Unix socket's path in bytes (Linux)."""
_NAME = len("/pymp-12345678/listener-12345678")
"""Length of the part of the path that multiprocessing appends for its socket."""


def refuse_long_temp_dir(what: str) -> None:
    """Raise FftError if TMPDIR is too long for the sockets of ``what``, which would then hang."""
    folder = tempfile.gettempdir()
    longest = _LONGEST_SOCKET - _NAME
    if (length := len(folder.encode())) > longest:
        raise FftError(
            f"{what}: TMPDIR is too long for worker processes: {folder} has {length} bytes, and "
            f"at most {longest} fit, since the path of a Unix socket takes {_LONGEST_SOCKET} "
            "bytes. Set TMPDIR to a shorter folder, such as /tmp"
        )

"""Locks on files that the kernel releases when their owner dies."""

from __future__ import annotations

import errno
import fcntl
from typing import IO

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""The error codes with which some file systems refuse a lock."""


def locked(file: IO[str], operation: int) -> bool:
    """Apply ``fcntl.flock``.

    Returns:
        False on a file system that has no locks.

    Raises:
        BlockingIOError: another process holds the lock, and ``operation`` has ``LOCK_NB``.
        OSError: the lock failed for another reason.
    """
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True

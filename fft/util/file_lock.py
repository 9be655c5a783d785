"""Locks on files that the kernel releases when their owner dies."""

from __future__ import annotations

import errno
import fcntl
from typing import IO

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Error codes of file systems that do not support locks."""


def locked(file: IO[str], operation: int) -> bool:
    """Apply ``fcntl.flock``.

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

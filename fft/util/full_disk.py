"""Detection of errors that mean a full disk."""

from __future__ import annotations

import errno

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: OSError) -> bool:
    """Whether ``error`` means that the disk is full or a quota is used up."""
    return error.errno in _NO_ROOM

"""What a file system says that has no room."""

from __future__ import annotations

import errno

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: OSError) -> bool:
    """Whether it says that there is no room, or that a quota is used up."""
    return error.errno in _NO_ROOM

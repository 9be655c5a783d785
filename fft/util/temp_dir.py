"""Whether worker processes can have their sockets in the folder for temporary files."""

from __future__ import annotations

import tempfile

from fft.util.errors import FftError

_LONGEST_SOCKET = 107
"""Bytes of the path of a Unix socket (Linux)."""
_NAME = len("/pymp-12345678/listener-12345678")
"""What multiprocessing appends for a socket of its own."""


def refuse_long_temp_dir(what: str) -> None:
    """Raise FftError if TMPDIR is too long for the sockets of ``what``, which would hang then."""
    folder = tempfile.gettempdir()
    longest = _LONGEST_SOCKET - _NAME
    if (length := len(folder.encode())) > longest:
        raise FftError(
            f"{what}: TMPDIR is too long for worker processes: {folder} has {length} bytes, and "
            f"at most {longest} fit, since the path of a Unix socket takes {_LONGEST_SOCKET} "
            "bytes. Set TMPDIR to a shorter folder, such as /tmp"
        )

"""A check that worker processes can create their sockets in the folder for temporary files."""

from __future__ import annotations

import tempfile

from fft.errors import FftError

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

"""Read and write timeouts of a socket that the kernel enforces, for all users of the descriptor."""

from __future__ import annotations

import socket
import struct


def limit_in_kernel(end: socket.socket, seconds: float | None) -> None:
    """Set SO_RCVTIMEO and SO_SNDTIMEO, so that reads and writes raise BlockingIOError after that.

    ``None`` removes the limit.
    """
    end.settimeout(None)
    whole = 0.0 if seconds is None else max(seconds, 1e-6)  # 0 means no limit to the kernel
    bound = struct.pack("ll", int(whole), int(whole % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, bound)

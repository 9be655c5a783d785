"""Time limits that the kernel keeps of one socket: also for who uses its descriptor."""

from __future__ import annotations

import socket
import struct


def limit_in_kernel(end: socket.socket, seconds: float | None) -> None:
    """Reading and writing fail with BlockingIOError after so long; None: they wait."""
    end.settimeout(None)
    whole = 0.0 if seconds is None else max(seconds, 1e-6)  # the kernel takes 0 for no limit
    bound = struct.pack("ll", int(whole), int(whole % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, bound)

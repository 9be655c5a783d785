"""Limits of a socket that the kernel enforces, for all users of the descriptor."""

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


_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 10),  # seconds of silence before the first probe
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 25_000),  # milliseconds for sent data, which are not probed
)


def keep_alive(end: socket.socket) -> None:
    """Send probes on an idle TCP connection, and end it after 25 s without any answer.

    The probes also keep the connection in the tables of firewalls and of translating routers.
    """
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        end.setsockopt(socket.IPPROTO_TCP, name, value)

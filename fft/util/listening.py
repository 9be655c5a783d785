"""Listen at an address that a user has given on the command line."""

from __future__ import annotations

import socket

from fft.errors import FftError


def listening_at(address: str, option: str) -> socket.socket:
    """Return a socket that listens at ``[HOST:]PORT``; without a host, on this host alone.

    Args:
        option: The option that has this value, for messages.

    Raises:
        FftError: The address is malformed, or it cannot be listened on.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise FftError(f"{option} {address}: expected PORT or HOST:PORT, such as 9400")
    host = host.strip("[]") or "127.0.0.1"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family)
    except OSError as error:
        raise FftError(
            f"{option} {address}: cannot listen there ({error.strerror}); name another port, 0 "
            "takes a free one"
        ) from error


def url_of(listening: socket.socket) -> str:
    """Return the URL of an HTTP server on the socket."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"

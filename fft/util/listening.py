"""Listening sockets: their addresses, limits for clients that have not authenticated, and HTTP.

A client of these sockets may be any process of the network. It proves that it belongs to the job
by a request with a key, so every connection has a deadline for its request, and the number of
connections without one is limited.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedReader
from typing import Any

from fft.errors import BusError, FftError

MAX_WAITING = 64
"""Maximum number of connections to one listener that have not authenticated."""
REQUEST_S = 5.0
"""Time limit for a client to send a request, also after an earlier one, and to read the answer, in
seconds."""


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


def listening_on(address: str) -> socket.socket:
    """Return a socket that listens at ``address`` alone, on a free port.

    Args:
        address: An IP address at which the other processes of the job reach this host.

    Raises:
        BusError: No network interface of this host has this address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=1024)
    except OSError as error:
        raise BusError(
            f"cannot listen on {address}, the address at which other ranks reach this host "
            f"({error.strerror}); set FFT_HOST_ADDRESS to an address of a network interface of "
            "this host (`ip address` lists them)"
        ) from error


def url_of(listening: socket.socket) -> str:
    """Return the URL of an HTTP server on the socket."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Waiting:
    """The connections to one listener that have not authenticated, at most ``most`` of them.

    A further one displaces the oldest connection of the address that has the most. So silent
    connections cannot keep out a client that sends its request at once. Thread-safe.
    """

    def __init__(self, most: int = MAX_WAITING) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, str] = {}
        """The connections with their addresses, oldest first."""

    def enter(self, connection: socket.socket, address: str) -> None:
        """Add an accepted connection; its owner calls `leave` before it closes it."""
        with self._lock:
            if len(self._connections) >= self._most:
                addresses = list(self._connections.values())
                crowded = max(addresses, key=addresses.count)
                oldest = next(c for c, where in self._connections.items() if where == crowded)
                del self._connections[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
            self._connections[connection] = address

    def leave(self, connection: socket.socket) -> bool:
        """Remove a connection that has authenticated or ends; return False if it was displaced."""
        with self._lock:
            return self._connections.pop(connection, None) is not None


class _Incoming(socket.SocketIO):
    """The bytes that a client sends, with a deadline for each whole request."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, "r")
        self._connection = connection
        self.begin()

    def begin(self) -> None:
        """Start the time limit of the next request."""
        self._until = time.monotonic() + REQUEST_S

    def readinto(self, buffer: Any) -> int | None:
        """Read bytes. Raises TimeoutError at the deadline, which single bytes do not extend."""
        if (left := self._until - time.monotonic()) <= 0:
            raise TimeoutError(f"no whole request within {REQUEST_S:g} s")
        self._connection.settimeout(left)
        return super().readinto(buffer)


class HttpHandler(BaseHTTPRequestHandler):
    """Handler of an `HttpServer`, with deadlines for each request and each answer."""

    server: HttpServer
    timeout = REQUEST_S
    server_version, sys_version = "fft", ""

    def setup(self) -> None:
        """Replace the reader of the connection by one with a deadline."""
        super().setup()
        self._incoming = _Incoming(self.connection)
        self.rfile.close()
        self.rfile = BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        """Serve the next request of the connection."""
        self._incoming.begin()
        super().handle_one_request()

    def end_headers(self) -> None:
        """Send the head of the answer, and start the time limit to read the answer."""
        self.connection.settimeout(REQUEST_S)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log no request: its line could contain a key, and the output may be a terminal."""


class HttpServer(ThreadingHTTPServer):
    """An HTTP server on a given socket; each connection has a thread."""

    daemon_threads = True

    def __init__(self, listening: socket.socket, handler: type[HttpHandler]) -> None:
        super().__init__(listening.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.waiting = Waiting()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread for the connection."""
        self.waiting.enter(request, client_address[0])
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self.waiting.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error of a request, unless the client has gone or was too slow."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

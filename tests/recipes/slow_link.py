"""A link to a server that can be held: nothing goes through it until it is released."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit


class Link:
    """Forwards what comes to a port of its own to the server at ``url``, and back.

    Its threads end with `close`.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._to = (parts.hostname or "", parts.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.url = parts._replace(netloc=f"127.0.0.1:{port}").geturl()
        self._open = threading.Event()
        self._open.set()
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def hold(self) -> None:
        """Keep what comes from now on."""
        self._open.clear()

    def release(self) -> None:
        """Let it through."""
        self._open.set()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            far = socket.create_connection(self._to)
            self._ends += [near, far]
            self._start(self._forward, near, far)
            self._start(self._forward, far, near)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # the other end is gone
            while piece := source.recv(1 << 16):
                self._open.wait()
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End all connections."""
        self.release()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            with suppress(OSError):  # it has ended before
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(5)

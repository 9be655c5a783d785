"""A way to a server of this machine that can be lost and found again, or closed."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

LIMIT_S = 200.0


class Way:
    """Passes on what it is told, from its making until ``close``. Two threads a connection."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open = threading.Event()
        self._open.set()
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                here, _ = self._listener.accept()
                self._ends.append(here)
                there = socket.create_connection(("127.0.0.1", self._target))
                self._ends.append(there)
                for a, b in ((here, there), (there, here)):
                    self._threads.append(threading.Thread(target=self._pump, args=(a, b)))
                    self._threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while said := source.recv(65536):
                self._open.wait()
                sink.sendall(said)
            self._open.wait()
            sink.shutdown(socket.SHUT_WR)

    def lose(self) -> None:
        """What is said from now on stays under way; nobody is told."""
        self._open.clear()

    def find(self) -> None:
        """All of it arrives."""
        self._open.set()

    def close(self) -> None:
        """Nothing comes through any more; nobody is let in. Idempotent."""
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._open.set()
        for thread in self._threads:
            thread.join(LIMIT_S)

"""A connection to a server of this machine that can be interrupted, restored, or closed."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

LIMIT_S = 200.0


class Way:
    """A proxy that forwards until ``close``, with two threads for each connection."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open = threading.Event()
        self._open.set()
        self._ends: list[socket.socket] = []
        self._forgotten: set[socket.socket] = set()
        self.arrived = 0
        """Bytes that have come from either side."""
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
                self.arrived += len(said)
                self._open.wait()
                if source in self._forgotten:
                    continue
                sink.sendall(said)
            self._open.wait()
            sink.shutdown(socket.SHUT_WR)

    def lose(self) -> None:
        """Hold all traffic from now on; no connection is closed."""
        self._open.clear()

    def find(self) -> None:
        """Deliver the held traffic."""
        self._open.set()

    def cut(self) -> None:
        """Reset all connections, as a restarted switch or firewall does; new ones are accepted."""
        ends, self._ends = self._ends, []
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError):
                end.shutdown(socket.SHUT_RD)  # wakes the thread that reads here
            end.close()

    def forget(self) -> None:
        """Drop what arrives on the present connections, which stay open; new ones are forwarded."""
        self._forgotten.update(self._ends)

    def close(self) -> None:
        """End all connections and accept no more. Idempotent."""
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._open.set()
        for thread in self._threads:
            thread.join(LIMIT_S)

"""A link to a server that can be paused or slowed: a TCP proxy.

Run as a file, it serves requests for links on its standard input, and ends with that.
"""

from __future__ import annotations

import json
import queue
import socket
import sys
import threading
import time
from contextlib import suppress
from urllib.parse import urlsplit

_PIECE = 1 << 14


class Link:
    """A proxy that forwards between its own port and the server at ``url``.

    Its threads end with `close`.

    Args:
        latency_s: Additional latency of each byte, in seconds.
        bytes_per_s: Bandwidth of each direction of each connection; 0 for no limit.
        port: The proxy's port; 0 for any free one. It listens on the server's address.
    """

    def __init__(
        self, url: str, latency_s: float = 0.0, bytes_per_s: float = 0.0, port: int = 0
    ) -> None:
        parts = urlsplit(url)
        self._to = (parts.hostname or "", parts.port or 0)
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        self._listener = socket.create_server((self._to[0], port))
        self.port = self._listener.getsockname()[1]
        self.url = parts._replace(netloc=f"{self._to[0]}:{self.port}").geturl()
        self.carried = 0
        """Bytes that were forwarded, both ways."""
        self._open, self._closed = threading.Event(), threading.Event()
        self._open.set()
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def hold(self) -> None:
        """Hold all traffic from now on."""
        self._open.clear()

    def release(self) -> None:
        """Release the held traffic."""
        self._open.set()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                far = socket.create_connection(self._to)
            except OSError:  # the server is gone
                near.close()
                continue
            self._ends += [near, far]
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink in ((near, far), (far, near)):
                on_its_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                self._start(self._take, source, on_its_way)
                self._start(self._give, on_its_way, sink)

    def _take(
        self, source: socket.socket, on_its_way: queue.SimpleQueue[tuple[float, bytes]]
    ) -> None:
        piece, sent = b"-", 0.0
        while piece:
            try:
                piece = source.recv(_PIECE)
            except OSError:  # the other end is gone
                piece = b""
            self.carried += len(piece)
            rate = len(piece) / self._bytes_per_s if self._bytes_per_s else 0.0
            sent = max(sent, time.monotonic()) + rate
            on_its_way.put((sent + self._latency_s, piece))

    def _give(
        self, on_its_way: queue.SimpleQueue[tuple[float, bytes]], sink: socket.socket
    ) -> None:
        with suppress(OSError):  # the other end is gone
            while True:
                due, piece = on_its_way.get()
                self._closed.wait(max(0.0, due - time.monotonic()))
                self._open.wait()
                if not piece:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(piece)

    def close(self) -> None:
        """End all connections."""
        self._closed.set()
        self.release()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            with suppress(OSError):  # it has already ended
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for end in self._ends:
            end.close()


def _serve(latency_s: float, bytes_per_s: float) -> None:
    """Serve one link per line of input (kind, server, ports to try), and answer with its port.

    At the end of the input, print how many bytes the links of each kind have carried.
    """
    links: list[tuple[str, Link]] = []
    for line in sys.stdin:
        kind, host, port, near = json.loads(line)
        for own in near:
            with suppress(OSError):  # the port is taken
                made = Link(f"tcp://{host}:{port}", latency_s, bytes_per_s, own)
                links.append((kind, made))
                print(made.port, flush=True)
                break
        else:
            print(0, flush=True)
    carried: dict[str, int] = {}
    for kind, link in links:
        link.close()
        carried[kind] = carried.get(kind, 0) + link.carried
    with suppress(BrokenPipeError):  # the requesting process was killed
        print(json.dumps(carried), flush=True)


if __name__ == "__main__":
    _serve(float(sys.argv[1]), float(sys.argv[2]))

"""A link to a server that can be held, or is slow: what goes through it, goes through a TCP proxy.

Run as a file, it serves who asks for links on its standard input, and ends with that.
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
    """Forwards what comes to a port of its own to the server at ``url``, and back.

    Its threads end with `close`.

    Args:
        latency_s: how much later each byte arrives than it would.
        bytes_per_s: how many go through in a second, each way, of each connection; 0: all.
        port: its own; 0: any that is free. It listens where the server does.
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
        """Bytes that have gone through, both ways."""
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
            with suppress(OSError):  # it has ended before
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for end in self._ends:
            end.close()


def _serve(latency_s: float, bytes_per_s: float) -> None:
    """A line for each link: its kind, the server, and ports for it to try; the answer is its port.

    At the end of the input: how many bytes links of each kind have carried.
    """
    links: list[tuple[str, Link]] = []
    for line in sys.stdin:
        kind, host, port, near = json.loads(line)
        for own in near:
            with suppress(OSError):  # another has that port
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
    with suppress(BrokenPipeError):  # who asked was killed
        print(json.dumps(carried), flush=True)


if __name__ == "__main__":
    _serve(float(sys.argv[1]), float(sys.argv[2]))

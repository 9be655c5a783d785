"""The process that serves a job's figures to Prometheus: ``python -m fft.operate.metrics FD``.

``fft run --metrics`` starts it. It reads the traces of the job, and loads no torch. It listens on
the inherited socket FD, has a thread for each connection, and ends when its standard input is
closed.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fft.messages.causes import CauseCode
from fft.trace.figures import FIGURES
from fft.trace.tail import TraceTail
from fft.util.listening import HttpHandler, HttpServer

_POLL_S = 5.0
"""Longest time between two reads of the traces, so that a scrape has little to read."""

_ALL_CAUSES: dict[tuple[str, ...], float] = {(str(code),): 0.0 for code in CauseCode}
"""Counters must exist before they rise, because ``increase()`` does not count a first value."""


class _Figures:
    """The figures of the start of a job that was named last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tail: TraceTail | None = None

    def follow(self, folder: Path) -> None:
        """Read the traces in ``folder`` from now on."""
        self.close()
        with self._lock:
            self._tail = TraceTail(folder)

    def poll(self) -> None:
        """Read what was appended to the traces."""
        with self._lock:
            if self._tail is not None:
                self._tail.poll()

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            if self._tail is not None:
                self._tail.close()
            self._tail = None

    def collect(self) -> list[Metric]:
        """Return all figures; prometheus_client calls this for each scrape."""
        self.poll()
        with self._lock:
            return list(self._families())

    def _families(self) -> Iterator[Metric]:
        if self._tail is None:
            return
        for figure in FIGURES:
            kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
            family = kind(f"fft_{figure.name}", figure.text, labels=figure.labels)
            values = dict(_ALL_CAUSES) if figure.labels == ("cause",) else {}
            values.update(figure.values(self._tail.view))
            for labels, value in values.items():
                family.add_metric(labels, float(value))
            yield family


class _Handler(HttpHandler, MetricsHandler):  # type: ignore[misc]
    """Answers each request with the figures; prometheus_client chooses the format."""


def serve(listening: socket.socket, orders: int) -> None:
    """Serve figures until the descriptor ``orders`` is closed.

    Args:
        listening: The socket of the server.
        orders: Each line that can be read from it names the trace directory to follow.
    """
    figures, rest = _Figures(), b""
    _Handler.registry = CollectorRegistry()
    _Handler.registry.register(figures)
    with selectors.DefaultSelector() as selector, HttpServer(listening, _Handler) as server:
        server.timeout = 0  # for a connection that has ended before it was accepted
        selector.register(listening, selectors.EVENT_READ)
        selector.register(orders, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select(_POLL_S)}
            if orders in ready:
                data = os.read(orders, 1 << 16)
                if not data:
                    figures.close()
                    return
                *lines, rest = (rest + data).split(b"\n")
                if lines:
                    figures.follow(Path(os.fsdecode(lines[-1])))
            if listening.fileno() in ready:
                server.handle_request()
            else:
                figures.poll()


def main() -> None:
    """Serve on the socket whose descriptor is the argument."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a job that drains is still watched
    serve(socket.socket(fileno=int(sys.argv[1])), sys.stdin.fileno())


if __name__ == "__main__":
    main()

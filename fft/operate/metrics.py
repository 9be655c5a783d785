"""The process that serves a job's figures to Prometheus: ``python -m fft.operate.metrics FD``.

``fft run --metrics`` starts it. It reads the traces of the job, and loads no torch. It has one
thread, listens on the inherited socket FD, and ends when its standard input is closed.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fft.messages.causes import CauseCode
from fft.trace.figures import FIGURES
from fft.trace.tail import TraceTail

_POLL_S = 5.0
"""Longest time between two reads of the traces, so that a scrape has little to read."""
_SLOWEST_S = 5.0
"""Time in which a client must send its request; meanwhile no other client is served."""


_ALL_CAUSES: dict[tuple[str, ...], float] = {(str(code),): 0.0 for code in CauseCode}
"""Counters must exist before they rise, because ``increase()`` does not count a first value."""


class _Figures:
    """The figures of the start of a job that was named last."""

    def __init__(self) -> None:
        self._tail: TraceTail | None = None

    def follow(self, folder: Path) -> None:
        """Read the traces in ``folder`` from now on."""
        self.close()
        self._tail = TraceTail(folder, with_figures=True)

    def poll(self) -> None:
        """Read what was appended to the traces."""
        if self._tail is not None:
            self._tail.poll()

    def close(self) -> None:
        """Close the files."""
        if self._tail is not None:
            self._tail.close()

    def collect(self) -> Iterator[Metric]:
        """Yield all figures; prometheus_client calls this for each scrape."""
        self.poll()
        if self._tail is None or self._tail.figures is None:
            return
        for figure in FIGURES:
            kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
            family = kind(f"fft_{figure.name}", figure.text, labels=figure.labels)
            values = dict(_ALL_CAUSES) if figure.labels == ("cause",) else {}
            values.update(figure.values(self._tail.figures))
            for labels, value in values.items():
                family.add_metric(labels, float(value))
            yield family


class _Handler(WSGIRequestHandler):
    timeout = _SLOWEST_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log no request: the output is the terminal of ``fft run``."""


class _Server(WSGIServer):
    def __init__(self, listening: socket.socket, figures: _Figures) -> None:
        host, port = listening.getsockname()[:2]
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_name, self.server_port = host, port
        self.setup_environ()
        registry = CollectorRegistry()
        registry.register(figures)
        self.set_app(make_wsgi_app(registry))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error of a request, unless the client has gone."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def serve(listening: socket.socket, orders: int) -> None:
    """Serve figures until the descriptor ``orders`` is closed.

    Args:
        listening: The socket of the server.
        orders: Each line that can be read from it names the trace directory to follow.
    """
    figures, rest = _Figures(), b""
    with selectors.DefaultSelector() as selector, _Server(listening, figures) as server:
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

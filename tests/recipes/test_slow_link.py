"""Tests that a slow link has the given speed, both ways, and does not change the data."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from slow_link import Link


@pytest.fixture
def echo() -> Iterator[str]:
    """Yield the address of a server that returns what it receives, on one connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        end, _ = listener.accept()
        with end:
            while piece := end.recv(1 << 16):
                end.sendall(piece)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    thread.join(10)
    listener.close()
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "size", "takes_s"),
    [(0.1, 0.0, 1, 0.2), (0.0, 1e6, 200_000, 0.2), (0.05, 1e6, 100_000, 0.2)],
)
def test_link_delays_data_without_changing_it(
    echo: str, latency_s: float, bytes_per_s: float, size: int, takes_s: float
) -> None:
    link = Link(echo, latency_s, bytes_per_s)
    try:
        sent, received, began = os.urandom(size), b"", time.monotonic()
        with socket.create_connection(("127.0.0.1", link.port), timeout=30) as end:
            end.sendall(sent)
            while len(received) < size:
                received += end.recv(1 << 16)
            took = time.monotonic() - began
        assert received == sent
        assert took >= takes_s
    finally:
        link.close()
    assert link.carried == 2 * size
    assert not [t for t in link._threads if t.is_alive()]

"""The error bus: one contract (`fft.bus.base`), one backend per URL scheme.

Importing this package imports no torch; `open_bus` loads a backend when a URL asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fft.bus.base import (
    MAX_MESSAGE_BYTES,
    BusClosed,
    BusError,
    BusForgot,
    BusOverrun,
    BusUnreachable,
    ErrorBus,
    Subscription,
)

if TYPE_CHECKING:
    from fft.bus.tcpstore import TcpBusServer

__all__ = [
    "MAX_MESSAGE_BYTES",
    "BusClosed",
    "BusError",
    "BusForgot",
    "BusOverrun",
    "BusUnreachable",
    "ErrorBus",
    "Subscription",
    "open_bus",
    "serve_tcp",
]


def open_bus(url: str, timeout: float = 5.0, generation: str | None = None) -> ErrorBus:
    """Open the bus at `url`: `memory://name`, `tcp://host:port/job` or `nats://…/job`.

    `timeout`, in seconds, bounds the connecting and every later operation. `generation`, if
    given, is the `ErrorBus.generation` seen before: a bus that has lost its memory since then
    raises `BusForgot`. Raises `BusUnreachable` if nothing answers, `BusError` for a bad URL.
    """
    scheme, separator, rest = url.partition("://")
    bus: ErrorBus
    if separator and scheme == "memory":
        from fft.bus.memory import MemoryBus

        bus = MemoryBus(rest)
    elif separator and scheme == "tcp":
        from fft.bus.tcpstore import TcpBus

        bus = TcpBus(url, timeout)
    elif separator and scheme in ("nats", "tls"):
        bus = _nats_bus(url, timeout)
    else:
        raise BusError(f"bus URL {url!r}: write memory://name, tcp://host:port/job or nats://…")
    if generation is not None and bus.generation != generation:
        bus.close()
        raise BusForgot(f"the bus at {url} has come back empty: it is not the one known before")
    return bus


def _nats_bus(url: str, timeout: float) -> ErrorBus:
    try:
        from fft.bus.nats import NatsBus
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "nats":
            raise
        raise BusError(
            "a nats:// bus needs nats-py, which is not installed: pip install 'fft-torch[nats]'"
        ) from error
    return NatsBus(url, timeout)


def serve_tcp(host: str = "127.0.0.1", port: int = 0, job: str | None = None) -> TcpBusServer:
    """Serve a `tcp://` bus from this process; see `fft.bus.tcpstore.serve_tcp`."""
    from fft.bus import tcpstore

    return tcpstore.serve_tcp(host, port, job)

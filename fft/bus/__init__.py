"""The error bus: one contract (`fft.bus.base`) and one backend per URL scheme.

Importing this package does not import torch; `open_bus` loads the backend that the URL needs.
`open_job_bus` opens a bus that ignores messages without the job token.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fft.bus.addresses import without_password
from fft.bus.base import (
    MAX_MESSAGE_BYTES,
    BusClosed,
    BusForged,
    BusForgot,
    BusOverrun,
    BusUnreachable,
    ErrorBus,
    Refusal,
    Subscription,
)
from fft.errors import BusError

if TYPE_CHECKING:
    from fft.bus.tcpserver import TcpBusServer
    from fft.bus.token import JobToken

__all__ = [
    "MAX_MESSAGE_BYTES",
    "BusClosed",
    "BusError",
    "BusForged",
    "BusForgot",
    "BusOverrun",
    "BusUnreachable",
    "ErrorBus",
    "Refusal",
    "Subscription",
    "open_bus",
    "open_job_bus",
    "serve_tcp",
]

logger = logging.getLogger(__name__)


def open_bus(
    url: str,
    timeout: float = 5.0,
    generation: str | None = None,
    token: JobToken | None = None,
) -> ErrorBus:
    """Open the bus at `url`: `memory://name`, `tcp://host:port/job` or `nats://…/job`.

    Args:
        timeout: Limit in seconds for connecting and for every later operation.
        generation: The `ErrorBus.generation` of an earlier connection to the same bus, if any.
        token: The login of NATS servers that FFT has started; the messages are not sealed with it.

    Raises:
        BusForgot: The bus has lost its contents since `generation` was read.
        BusUnreachable: No server answers.
        BusError: The URL is malformed, or the backend's package is not installed.
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
        bus = _nats_bus(url, timeout, token)
    else:
        raise BusError(
            f"bus URL {without_password(url)!r}: write memory://name, tcp://host:port/job or nats://…"
        )
    if generation is not None and bus.generation != generation:
        bus.close()
        raise BusForgot(f"the bus at {bus.url} has come back empty: it is not the one known before")
    return bus


def open_job_bus(
    url: str,
    token: JobToken | None,
    timeout: float = 5.0,
    purpose: str = "bus",
    who: str = "",
) -> ErrorBus:
    """Open the bus at `url` as `open_bus` does, authenticated with `token` (`fft.bus.sealed`).

    Without a token every message is obeyed, whoever its sender is; this logs a warning if other
    machines can reach the bus. `purpose` and `who` are passed to `SealedBus`.
    """
    bus = open_bus(url, timeout, token=token)
    if token is None:
        if not _is_private(url):
            logger.warning(
                "no job token: anybody who reaches the bus at %s can stop this job. "
                "Set FFT_TOKEN_FILE to the path that `fft serve` prints.",
                without_password(url),
            )
        return bus
    from fft.bus.sealed import SealedBus

    return SealedBus(bus, token, purpose, who)


def _is_private(url: str) -> bool:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return parts.scheme == "memory" or host in ("localhost", "::1") or host.startswith("127.")


def _nats_bus(url: str, timeout: float, token: JobToken | None) -> ErrorBus:
    try:
        from fft.bus.nats import NatsBus
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "nats":
            raise
        raise BusError(
            "a nats:// bus needs nats-py, which is not installed: pip install 'fft-torch[nats]'"
        ) from error
    return NatsBus(url, timeout, token)


def serve_tcp(host: str = "127.0.0.1", port: int = 0, job: str | None = None) -> TcpBusServer:
    """Serve a `tcp://` bus from this process; see `fft.bus.tcpserver.serve_tcp`."""
    from fft.bus import tcpserver

    return tcpserver.serve_tcp(host, port, job)

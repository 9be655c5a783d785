"""The server of a `tcp://` bus: one of torch's TCPStores in this process. Imports torch.

torch logs warnings about lost connections to stderr.
"""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fft.bus.addresses import family_of, joined
from fft.bus.base import check_job
from fft.errors import BusError

_TCPStore: Any = dist.TCPStore


class TcpBusServer:
    """A TCPStore server in this process, and the URL of one job on it."""

    def __init__(self, store: Any, url: str) -> None:
        self._store = store
        self.url = url

    def close(self) -> None:
        """Stop serving; every client's next operation fails. Idempotent."""
        self._store = None

    def __enter__(self) -> TcpBusServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_tcp(host: str = "127.0.0.1", port: int = 0, job: str | None = None) -> TcpBusServer:
    """Serve a bus that listens on `host` only.

    Args:
        port: Port to listen on; 0 chooses a free one.
        job: Name of the job; None chooses a random one.

    Raises:
        BusError: The name is invalid, or the address cannot be served.
    """
    job = job if job is not None else "job-" + secrets.token_hex(4)
    check_job(job, f"tcp://{host}:{port}/{job}")
    store, port = host_store(host, port)
    return TcpBusServer(store, f"tcp://{joined(host, port)}/{job}")


def host_store(host: str = "127.0.0.1", port: int = 0) -> tuple[Any, int]:
    """Start a TCPStore server in this process that listens on `host` only.

    FFT passes it the listening socket. torch's own would be an IPv6 socket, on which the server's
    only thread makes a DNS query for every loopback client.

    Returns:
        The store and its port.

    Raises:
        BusError: The address cannot be served, or torch cannot start the server.
    """
    dual = host == "::" and socket.has_dualstack_ipv6()
    try:
        listening = socket.create_server(
            (host, port), family=family_of(host), backlog=1024, dualstack_ipv6=dual
        )
    except (OSError, OverflowError) as error:  # the latter: no port has that number
        raise BusError(
            f"cannot serve on {host}:{port}: {error}; choose another host or port"
        ) from error
    port = listening.getsockname()[1]
    try:
        store = _TCPStore(
            host,
            port,
            None,
            True,
            timedelta(seconds=30),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    except RuntimeError as error:  # torch's own errors are of this class, too
        raise BusError(
            f"cannot serve on {host}:{port}: {error}; may this process open enough files "
            "(ulimit -n), and have enough memory (ulimit -v)?"
        ) from error
    return store, port

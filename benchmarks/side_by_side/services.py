"""The services of a repetition: lighthouse, bus, stores, a token.

The launcher hosts them, as `fft run` does. Ports are free ones; lighthouse and bus can be restarted
at theirs.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from benchmarks.side_by_side.rows import System
from fft.bus.natsserver import NatsServers
from fft.bus.tcpserver import host_store
from fft.bus.token import JobToken
from fft.launch.services import once_free, start_services

HOST = "127.0.0.1"
DEFAULT = {"join_timeout_ms": 60_000, "quorum_tick_ms": 100, "heartbeat_timeout_ms": 5_000}
"""Settings of the command ``torchft_lighthouse``."""
TUNED = {"join_timeout_ms": 100, "quorum_tick_ms": 100, "heartbeat_timeout_ms": 500}


class Services:
    """The services, which run until `close`."""

    def __init__(self, system: System) -> None:
        # Before the lighthouse starts, which otherwise logs every request
        os.environ.setdefault("RUST_LOG", "error")
        self._settings = TUNED if system.tuned else DEFAULT
        self._lighthouse = self._make_lighthouse(0)
        self._lighthouse_port = urlsplit(self._lighthouse.address()).port or 0
        has_bus = system.manager == "fft"
        self._bus = (
            start_services(HOST, bus_kind=system.bus, with_lighthouse=False) if has_bus else None
        )
        self._token = JobToken.fresh()
        self._stores: list[Any] = []

    def _make_lighthouse(self, port: int) -> Any:
        from torchft.coordination import LighthouseServer

        return LighthouseServer(f"{HOST}:{port}", min_replicas=1, **self._settings)

    def environment(self) -> dict[str, str]:
        """Return the environment variables for every worker."""
        found = {"TORCHFT_LIGHTHOUSE": f"http://{HOST}:{self._lighthouse_port}"}
        if self._bus is not None:
            found |= {**self._bus.settings(), "FFT_TOKEN": self._token.text()}
        return found

    def store(self) -> int:
        """Return the port of a store for a group that starts."""
        store, port = host_store(HOST)
        self._stores.append(store)
        return port

    def end_lighthouse(self) -> None:
        """End the lighthouse without notice."""
        if self._lighthouse is not None:
            self._lighthouse.shutdown()
            self._lighthouse = None

    def begin_lighthouse(self) -> None:
        """Start one at the previous address."""
        port = self._lighthouse_port
        self._lighthouse = once_free(lambda: self._make_lighthouse(port), RuntimeError)

    def restart_bus(self) -> None:
        """End the bus without notice and restart it; only NATS keeps its contents."""
        assert self._bus is not None, "only FFT has a bus"
        server = self._bus.bus
        if isinstance(server, NatsServers):
            server.kill(0)
            server.start(0)
        else:
            self._bus.restart_bus()

    def close(self) -> None:
        """End all services."""
        self._stores.clear()
        if self._bus is not None:
            self._bus.close()
        self.end_lighthouse()

"""The two services of a job in one process: FFT's bus and torchft's lighthouse.

Opens listening sockets and the service's native threads, and closes them again. The only
process-wide thing is the signal handling of `serve_forever`, which is a program's main loop.
"""

from __future__ import annotations

import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol
from urllib.parse import urlsplit

from fft.errors import FftError

_FREE_S = 5.0  # for a lighthouse to let go of its port
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WILDCARDS = {"0.0.0.0", "::"}


class _BusServer(Protocol):
    url: str

    def close(self) -> None: ...


class _Lighthouse(Protocol):
    def address(self) -> str: ...

    def shutdown(self) -> None: ...


class ServiceError(FftError):
    """A service could not be started: names the address and the reason."""


class Services:
    """A running bus and lighthouse. `close` ends both; it may be called twice."""

    def __init__(
        self,
        host: str,
        bus: Callable[[int | None], _BusServer],
        lighthouse: Callable[[int | None], _Lighthouse],
    ) -> None:
        """``bus`` and ``lighthouse`` start one, at a port, or (None) at the one first asked for."""
        self._make_bus, self._make_lighthouse = bus, lighthouse
        self._bus = bus(None)
        try:
            made = lighthouse(None)
        except ServiceError:
            self._bus.close()
            raise
        self._lighthouse: _Lighthouse | None = made
        # The lighthouse names itself by host name, which need not resolve; its port is right.
        # A wildcard address cannot be connected to, so there the host name has to do.
        name = socket.gethostname() if host in _WILDCARDS else host
        name = f"[{name}]" if ":" in name else name
        self.lighthouse_url = f"http://{name}:{urlsplit(made.address()).port}"
        bus_parts = urlsplit(self._bus.url)
        self.bus_url = f"tcp://{name}:{bus_parts.port}{bus_parts.path}"

    def announcement(self) -> str:
        """The line by which a job finds both services, as environment settings."""
        return f"TORCHFT_LIGHTHOUSE={self.lighthouse_url} FFT_BUS={self.bus_url}"

    def restart_lighthouse(self) -> None:
        """End the lighthouse and start one at the same address. Raises ServiceError."""
        old, self._lighthouse = self._lighthouse, None
        if old is None:
            return
        port = urlsplit(self.lighthouse_url).port
        old.shutdown()
        del old
        deadline = time.monotonic() + _FREE_S
        while True:  # torchft lets go of the port some time after shutdown(), and says not when
            try:
                self._lighthouse = self._make_lighthouse(port)
            except ServiceError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    def restart_bus(self) -> None:
        """End the bus, and start one there that knows nothing. Raises ServiceError."""
        self._bus.close()
        self._bus = self._make_bus(urlsplit(self.bus_url).port)

    def close(self) -> None:
        """End both services and free their ports."""
        lighthouse, self._lighthouse = self._lighthouse, None
        try:
            if lighthouse is not None:
                lighthouse.shutdown()
        finally:
            self._bus.close()


def start_services(
    host: str = "127.0.0.1",
    port: int = 0,
    lighthouse_port: int = 0,
    job: str | None = None,
    min_groups: int = 1,
) -> Services:
    """Start bus and lighthouse on ``host``; port 0 takes a free one.

    A job name that was not given is a fresh one, so that two jobs never share keys. Raises
    ServiceError when an address cannot be had.
    """
    # imported here: both load torch, which takes seconds
    from torchft.coordination import LighthouseServer

    from fft.bus import BusError, serve_tcp

    job = job or "job-" + secrets.token_hex(4)

    def make_bus(at: int | None) -> _BusServer:
        at = port if at is None else at
        try:
            return serve_tcp(host, at, job)
        except (BusError, RuntimeError, OSError) as error:
            raise ServiceError(_not_started("bus", host, at, error)) from error

    def make_lighthouse(at: int | None) -> _Lighthouse:
        at = lighthouse_port if at is None else at
        bind_host = f"[{host}]" if ":" in host else host
        try:
            made: _Lighthouse = LighthouseServer(f"{bind_host}:{at}", min_replicas=min_groups)
        except (RuntimeError, OSError) as error:
            raise ServiceError(_not_started("lighthouse", host, at, error)) from error
        return made

    return Services(host, make_bus, make_lighthouse)


def serve_forever(services: Services) -> None:
    """Print the announcement as one line, then wait for SIGINT or SIGTERM and end both.

    For the main thread of a program of its own: it takes the two signals.
    """
    ended = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        ended.set()

    previous = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        sys.stdout.write(services.announcement() + "\n")
        sys.stdout.flush()
        ended.wait()
    finally:
        services.close()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _not_started(what: str, host: str, port: int, error: Exception) -> str:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return (
        f"the {what} could not listen on {host}:{port} ({reason}); "
        "choose another port, 0 takes a free one"
    )

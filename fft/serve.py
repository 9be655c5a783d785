"""The two services of a job in one process: FFT's bus and torchft's lighthouse.

Opens listening sockets and the service's native threads, and closes them again. The only
process-wide thing is the signal handling of `serve_forever`, which is a program's main loop.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol
from urllib.parse import urlsplit

from fft.errors import FftError
from fft.jobtoken import JobToken

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

    def __init__(self, host: str, bus: _BusServer, lighthouse: _Lighthouse) -> None:
        self.bus = bus
        self._lighthouse: _Lighthouse | None = lighthouse
        # The lighthouse names itself by host name, which need not resolve; its port is right.
        # A wildcard address cannot be connected to, so there the host name has to do.
        name = socket.gethostname() if host in _WILDCARDS else host
        name = f"[{name}]" if ":" in name else name
        self.lighthouse_url = f"http://{name}:{urlsplit(lighthouse.address()).port}"
        self.bus_url = _seen_as(bus.url, name) if host in _WILDCARDS else bus.url

    def announcement(self) -> str:
        """The line by which a job finds both services, as environment settings."""
        return f"TORCHFT_LIGHTHOUSE={self.lighthouse_url} FFT_BUS={self.bus_url}"

    def close(self) -> None:
        """End both services and free their ports."""
        lighthouse, self._lighthouse = self._lighthouse, None
        if lighthouse is None:
            return
        try:
            lighthouse.shutdown()
        finally:
            self.bus.close()


def start_services(
    host: str = "127.0.0.1",
    port: int = 0,
    lighthouse_port: int = 0,
    job: str | None = None,
    min_groups: int = 1,
    bus_kind: str = "tcp",
    cluster: int = 1,
) -> Services:
    """Start bus and lighthouse on ``host``; port 0 takes a free one.

    ``bus_kind`` "nats" starts NATS servers as child processes, ``cluster`` of them.

    A job name that was not given is a fresh one, so that two jobs never share keys. Raises
    ServiceError when an address cannot be had.
    """
    # imported here: both load torch, which takes seconds
    from torchft.coordination import LighthouseServer

    from fft.bus import BusError

    try:
        bus = _start_bus(bus_kind, host, port, job, cluster)
    except BusError as error:
        raise ServiceError(f"the bus was not started: {error}") from error
    except (RuntimeError, OSError) as error:
        raise ServiceError(_not_started("bus", host, port, error)) from error
    bind_host = f"[{host}]" if ":" in host else host
    try:
        lighthouse = LighthouseServer(f"{bind_host}:{lighthouse_port}", min_replicas=min_groups)
    except (RuntimeError, OSError) as error:
        bus.close()
        raise ServiceError(_not_started("lighthouse", host, lighthouse_port, error)) from error
    return Services(host, bus, lighthouse)


def _start_bus(kind: str, host: str, port: int, job: str | None, cluster: int) -> _BusServer:
    from fft.bus import BusError, serve_tcp

    if kind == "nats":
        from fft.bus.natsserver import NatsServers

        return NatsServers(host, port, job, cluster)
    if cluster != 1:
        raise BusError(f"the {kind} bus is one process; --cluster is for --bus nats")
    return serve_tcp(host, port, job)


def _seen_as(url: str, name: str) -> str:
    """``url`` of a bus on all addresses, with the host name in their place."""
    scheme, _, rest = url.partition("://")
    places, _, job = rest.partition("/")
    ports = (place.rpartition(":")[2] for place in places.split(","))
    return f"{scheme}://{','.join(f'{name}:{port}' for port in ports)}/{job}"


@contextmanager
def handed_over(
    path: Path | None, environ: Mapping[str, str] = os.environ
) -> Iterator[Path | None]:
    """The file in which a job's processes find its token. None: it is ``FFT_TOKEN``'s.

    ``path`` (or ``FFT_TOKEN_FILE``) is used, and made if it is not there; it stays, so that the
    job's next server can use it. Without one a file is made that goes away at the end.

    Raises:
        TokenError: what is given is no usable token.
    """
    if path is None and JobToken.from_env(environ) is not None:
        named = environ.get("FFT_TOKEN_FILE")
        yield Path(named) if named else None
    elif path is not None:
        if not path.exists():
            JobToken.fresh().save(path)
        JobToken.from_file(path)
        yield path.resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="fft-") as directory:
            path = Path(directory, "job.token")
            JobToken.fresh().save(path)
            yield path


def serve_forever(services: Services, token_file: Path | None = None) -> None:
    """Print the announcement as one line, then wait for SIGINT or SIGTERM and end both.

    ``token_file`` is announced too: whoever may read it can take part in the job. For the main
    thread of a program of its own: it takes the two signals.
    """
    ended = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        ended.set()

    previous = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        handed = f" FFT_TOKEN_FILE={token_file}" if token_file else ""
        sys.stdout.write(f"{services.announcement()}{handed}\n")
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

"""The services of a job in one process: FFT's bus and, on request, torchft's lighthouse.

This module opens and closes the listening sockets and the native threads of the services. The only
process-wide effect is the signal handling of `serve_forever`, which is a program's main loop.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from fft.bus.addresses import advertised_address, is_own, joined, listening_address
from fft.bus.token import TOKEN_USER, JobToken
from fft.errors import BusError, FftError
from fft.util.remove_after_death import vanishing
from fft.util.terminal import put

_FREE_S = 5.0  # maximum time until a lighthouse has released its port
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Signals that end `serve_forever`, unless this process was started with them ignored."""
T = TypeVar("T")


class _BusServer(Protocol):
    url: str

    def close(self) -> None: ...


class _Lighthouse(Protocol):
    def address(self) -> str: ...

    def shutdown(self) -> None: ...


class ServiceError(FftError):
    """A service could not be started; the message names the address and the reason."""


def settings_of(bus_url: str, lighthouse_url: str | None) -> dict[str, str]:
    """Return the environment variables by which a process of a job finds its services."""
    found = {} if lighthouse_url is None else {"TORCHFT_LIGHTHOUSE": lighthouse_url}
    return {**found, "FFT_BUS": bus_url}


def in_words(settings: Mapping[str, str]) -> str:
    """Return ``settings`` as one line for a shell."""
    return " ".join(f"{name}={value}" for name, value in settings.items())


def once_free(make: Callable[[], T], taken: type[Exception]) -> T:
    """Call ``make`` until the port that torchft's lighthouse had is free; return its result.

    The lighthouse releases the port some time after its shutdown, without a signal.

    Args:
        make: Creates the service; raises ``taken`` while the port is in use.
        taken: The exception of a port in use; raised if the port is not released within 5 s.
    """
    deadline = time.monotonic() + _FREE_S
    while True:
        try:
            return make()
        except taken:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


SERVERS = 3
"""Number of hosts that serve the bus by NATS; it survives the loss of one of them."""
_PORTS = range(20_000, 32_000, 2)
"""Ports of the bus on several hosts, below the system's range for outgoing connections. The servers
reach each other at the port that follows."""


def nats_is_installed() -> bool:
    """Whether this environment has a client and a server of NATS."""
    from fft.bus.natsserver import find_server

    try:
        find_server()
    except BusError:
        return False
    return importlib.util.find_spec("nats") is not None


def bus_notice(hosts: int, has_nats: bool) -> str | None:
    """Return a warning about the loss of a bus on one host, with the fix; None with NATS."""
    if hosts >= SERVERS and has_nats:
        return None
    lost = (
        "one host serves the bus: if it is lost, the job stops, and resumes from the newest copy "
        "of its state when the bus is served again. "
    )
    if hosts < SERVERS:
        return f"{lost}A job on {SERVERS} hosts or more has NATS servers on {SERVERS} of them"
    return f"{lost}After pip install 'fft-torch[nats]' on all hosts, {SERVERS} of them serve it"


@dataclass(frozen=True)
class BusHosts:
    """The bus of a job on several hosts, as all of them derive it from the same arguments."""

    hosts: Sequence[str]
    """The hosts that have a server: three with NATS, otherwise one."""
    port: int
    job: str

    @classmethod
    def of(cls, hosts: Sequence[str], kind: str, token: JobToken, port: int, job: str) -> BusHosts:
        """Choose the hosts with a server, the port and the name of the job.

        Args:
            hosts: Names or addresses of the hosts of the job.
            kind: ``"nats"`` or ``"tcp"``.
            port: Port of the bus; 0 chooses one by the token and the job.
            job: Name of the job; an empty one is chosen by the token.

        Raises:
            ServiceError: There are fewer than three hosts for NATS, or a host is named twice.
        """
        if len(set(hosts)) < len(hosts) or not all(hosts):
            raise ServiceError(f"--hosts {','.join(hosts)}: expected different hosts, as in A,B,C")
        if kind == "nats" and len(hosts) < SERVERS:
            raise ServiceError(
                f"--hosts {','.join(hosts)}: expected at least {SERVERS} hosts for --bus nats; add "
                "hosts, or leave --bus out"
            )
        job = job or f"job-{token.key('job on hosts')[:4].hex()}"
        number = int.from_bytes(token.key("port on hosts", job)[:4], "big")
        count = SERVERS if kind == "nats" else 1
        return cls(tuple(hosts[:count]), port or _PORTS[number % len(_PORTS)], job)

    @property
    def url(self) -> str:
        """URL of the bus."""
        places = ",".join(joined(host, self.port) for host in self.hosts)
        login = f"nats://{TOKEN_USER}@" if len(self.hosts) > 1 else "tcp://"
        return f"{login}{places}/{self.job}"

    def own(self) -> str | None:
        """Return the entry of `hosts` that is this host, or None if this host has no server.

        Raises:
            ServiceError: Several entries are this host.
        """
        found = [host for host in self.hosts if is_own(host)]
        if len(found) > 1:
            raise ServiceError(
                f"{' and '.join(found)} are all this host: choose one of them with --host"
            )
        return found[0] if found else None

    def start(self, host: str, token: JobToken) -> Services:
        """Start the server of ``host``, and wait until the bus is served.

        Raises:
            ServiceError: The server cannot be started.
        """

        def bus(_at: int | None) -> _BusServer:
            if len(self.hosts) > 1:
                return _started_bus("nats", host, self.port, self.job, token, self.hosts)
            return _started_bus("tcp", listening_address(host), self.port, self.job, token)

        services = Services(host, bus, None)
        services.bus_url = self.url
        return services


class Services:
    """A running bus, and a lighthouse on request. `close` is idempotent."""

    def __init__(
        self,
        host: str,
        bus: Callable[[int | None], _BusServer],
        lighthouse: Callable[[int | None], _Lighthouse] | None,
    ) -> None:
        """Start the services.

        Args:
            host: The host that the services listen on.
            bus: Starts a bus at the given port; None stands for the port first asked for.
            lighthouse: Starts a lighthouse likewise; None if the job has no lighthouse.
        """
        self._make_bus, self._make_lighthouse = bus, lighthouse
        self.bus = bus(None)
        try:
            made = lighthouse(None) if lighthouse is not None else None
        except ServiceError:
            self.bus.close()
            raise
        self._lighthouse: _Lighthouse | None = made
        # The lighthouse names itself by host name, which need not resolve; its port is right.
        name = advertised_address(host)
        self.lighthouse_url: str | None = None
        if made is not None:
            self.lighthouse_url = f"http://{joined(name, urlsplit(made.address()).port or 0)}"
        self.bus_url = self.bus.url if name == host else _seen_as(self.bus.url, name)

    def announcement(self) -> str:
        """Return `settings` as one line for a shell."""
        return in_words(self.settings())

    def settings(self) -> dict[str, str]:
        """Return the environment variables by which a process of the job finds the services."""
        return settings_of(self.bus_url, self.lighthouse_url)

    def restart_lighthouse(self) -> None:
        """End the lighthouse and start another at the same address.

        Raises:
            ServiceError: The job has no lighthouse, or it cannot be started.
        """
        make = self._make_lighthouse
        if make is None:
            raise ServiceError(
                "this job has no lighthouse to restart: start `fft run` with --lighthouse"
            )
        old, self._lighthouse = self._lighthouse, None
        if old is None:
            return
        port = urlsplit(self.lighthouse_url).port
        old.shutdown()
        del old
        self._lighthouse = once_free(lambda: make(port), ServiceError)

    def restart_bus(self) -> None:
        """End the bus and start an empty one at the same address.

        Raises:
            ServiceError: The bus is not a ``tcp://`` bus, or it cannot be started.
        """
        if not self.bus_url.startswith("tcp://"):
            raise ServiceError("only a tcp:// bus can be started again empty at its address")
        self.bus.close()
        self.bus = self._make_bus(urlsplit(self.bus_url).port)

    def close(self) -> None:
        """End the services and free their ports."""
        lighthouse, self._lighthouse = self._lighthouse, None
        try:
            if lighthouse is not None:
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
    with_lighthouse: bool = False,
    token: JobToken | None = None,
) -> Services:
    """Start a bus, and a lighthouse on request, on ``host``.

    Args:
        port: Port of the bus; 0 takes a free one.
        lighthouse_port: Port of the lighthouse; 0 takes a free one.
        job: Name of the job; by default a fresh one, so that two jobs never share keys.
        bus_kind: ``"tcp"``, or ``"nats"`` for a NATS server as a child process.
        token: NATS servers accept only clients that have it; a ``tcp://`` bus needs no login.

    Raises:
        ServiceError: A service cannot listen on its address.
    """
    job = job or "job-" + secrets.token_hex(4)

    def make_bus(at: int | None) -> _BusServer:
        return _started_bus(bus_kind, host, port if at is None else at, job, token)

    def make_lighthouse(at: int | None) -> _Lighthouse:
        from torchft.coordination import LighthouseServer  # imported here: it takes seconds

        at = lighthouse_port if at is None else at
        bind_host = f"[{host}]" if ":" in host else host
        try:
            made: _Lighthouse = LighthouseServer(f"{bind_host}:{at}", min_replicas=min_groups)
        except (RuntimeError, OSError) as error:
            raise ServiceError(_not_started("lighthouse", host, at, error)) from error
        return made

    return Services(host, make_bus, make_lighthouse if with_lighthouse else None)


def _started_bus(
    kind: str,
    host: str,
    port: int,
    job: str,
    token: JobToken | None,
    hosts: Sequence[str] = (),
) -> _BusServer:
    from fft.bus import serve_tcp
    from fft.bus.natsserver import NatsServers

    try:
        if kind == "nats":
            return NatsServers(host, port, job, keep=True, token=token, hosts=hosts)
        return serve_tcp(host, port, job)
    except BusError as error:
        raise ServiceError(f"the bus was not started: {error}") from error
    except (RuntimeError, OSError, OverflowError) as error:  # OverflowError: invalid port
        raise ServiceError(_not_started("bus", host, port, error)) from error


def _seen_as(url: str, name: str) -> str:
    """Return ``url`` with each address, such as 0.0.0.0, replaced by ``name``."""
    scheme, _, rest = url.partition("://")
    places, _, job = rest.partition("/")
    login, at, places = places.rpartition("@")
    ports = (int(place.rpartition(":")[2]) for place in places.split(","))
    return f"{scheme}://{login}{at}{','.join(joined(name, port) for port in ports)}/{job}"


@contextmanager
def handed_over(
    path: Path | None, environ: Mapping[str, str] = os.environ
) -> Iterator[Path | None]:
    """Provide the file in which a job's processes find its token.

    Args:
        path: The file to use. It is created if it does not exist, and stays, so that the job's
            next server can use it. By default the token of the environment is used, or else a
            temporary file with a fresh token that is removed at the end.
        environ: May hold the token in ``FFT_TOKEN`` or name its file in ``FFT_TOKEN_FILE``.

    Yields:
        The file, or None if the token is in ``FFT_TOKEN`` only.

    Raises:
        TokenError: The given token is not usable.
    """
    if path is None and JobToken.from_env(environ) is not None:
        named = environ.get("FFT_TOKEN_FILE")
        yield Path(named) if named else None
    elif path is not None:
        JobToken.fresh().save_new(path)
        JobToken.from_file(path)
        yield path.resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="fft-") as directory:
            path = Path(directory, "job.token")
            JobToken.fresh().save(path)
            with vanishing(path):
                yield path


def announced(settings: str, token_file: Path | None) -> str:
    """Return the line that `fft serve` prints: the settings of a job's processes, and its token."""
    return settings + (f" FFT_TOKEN_FILE={token_file}" if token_file else "") + "\n"


def serve_forever(services: Services, token_file: Path | None = None) -> None:
    """Print the announcement as one line, wait for SIGINT, SIGTERM or SIGHUP, and end the services.

    SIGUSR1 is ignored, because a scheduler may send it to all processes of a step as a warning.
    Call it on the main thread, because it sets signal handlers until it returns.

    Args:
        token_file: Announced as well; every process that may read it can take part in the job.
    """
    ended = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        ended.set()

    ends = [n for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN]  # nohup ignores SIGHUP
    previous: dict[int, Any] = {number: signal.signal(number, on_signal) for number in ends}
    previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        put(announced(services.announcement(), token_file))
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

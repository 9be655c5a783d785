"""Fixtures of the bus tests: a bus of each kind, child processes, and a check for leaked
threads."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from bus_helpers import Child
from nats_servers import NatsServers

from fft.bus import ErrorBus, open_job_bus, serve_tcp
from fft.bus.token import JobToken


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Check that every bus thread has ended once the test's buses are closed.

    A connection attempt that hangs in torch's name lookup is not counted, because it ends by
    itself.
    """
    yield
    deadline = time.monotonic() + 3.0
    ours = "fft-bus-listen", "fft-bus-watch", "fft-bus-loop"
    while left := [t for t in threading.enumerate() if t.name in ours]:
        assert time.monotonic() < deadline, f"threads left behind: {left}"
        left[0].join(0.05)


@pytest.fixture
def tcp_url(no_thread_left: None) -> Iterator[str]:
    with serve_tcp(job="test") as server:
        yield server.url


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServers]:
    with NatsServers(job="test") as server:
        yield server


@pytest.fixture
def nats_url(no_thread_left: None, nats_server: NatsServers) -> str:
    """Return the URL of a job for this test on the shared server."""
    return f"{nats_server.url}-{uuid.uuid4().hex}"


@pytest.fixture(params=["memory", "tcp", "nats"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        request.getfixturevalue("no_thread_left")
        return f"memory://test-{uuid.uuid4().hex}"
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@pytest.fixture(params=[pytest.param("plain", marks=pytest.mark.long), "sealed"])
def token(request: pytest.FixtureRequest) -> JobToken | None:
    return JobToken.fresh() if request.param == "sealed" else None


SHARE = {"nats": 5}
"""Divisors of the rounds of long trials, for a bus whose every operation takes a millisecond,
because it goes through a log on disk in another process. The rounds still exceed the ring many
times."""


@pytest.fixture
def share(url: str) -> int:
    """Return the divisor of the rounds of a long trial."""
    return SHARE.get(url.partition("://")[0], 1)


@pytest.fixture
def connect(url: str, token: JobToken | None) -> Iterator[Callable[[], ErrorBus]]:
    """Open clients of the test's bus; all are closed at the end of the test."""
    opened: list[ErrorBus] = []

    def make() -> ErrorBus:
        opened.append(open_job_bus(url, token))
        return opened[-1]

    yield make
    for bus in opened:
        bus.close()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Start children; all are ended at the end of the test."""
    started: list[Child] = []

    def start(*arguments: str) -> Child:
        started.append(Child(*arguments))
        return started[-1]

    yield start
    for one in started:
        one.kill()

"""Tests of NATS servers of `fft serve` and `fft run` that die: reaped, logged and restarted."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest
from nats_servers import NatsServers
from waiting import wait_until

from fft.bus import open_bus

LIMIT_S = 120.0


Servers = Callable[[], dict[int, psutil.Process]]


def of_this_process() -> dict[int, psutil.Process]:
    found = {}
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # reaped since
            if "nats-server" in child.name():
                found[child.pid] = child
    return found


@pytest.fixture
def servers_of_this_test() -> Servers:
    """Return the servers by pid, including zombies; other tests may keep servers for their
    module."""
    others = set(of_this_process())
    return lambda: {pid: one for pid, one in of_this_process().items() if pid not in others}


@pytest.mark.parametrize("cluster", [1, pytest.param(3, marks=pytest.mark.long)])
def test_dead_server_is_restarted_and_the_bus_continues(
    cluster: int, caplog: pytest.LogCaptureFixture, servers_of_this_test: Servers
) -> None:
    """The servers die one after the other, so often that without restarts the majority would be
    lost."""
    with (
        NatsServers(job="kept", cluster=cluster, keep=True) as servers,
        open_bus(servers.url, 60.0) as bus,
    ):
        bus.write("register", b"0")
        for number in range(2):
            before = servers_of_this_test()
            assert len(before) == cluster
            victim = sorted(before)[number % cluster]
            before[victim].send_signal(signal.SIGKILL)
            wait_until(lambda v=victim: v not in servers_of_this_test(), "reaped", LIMIT_S)  # type: ignore[misc]
            expected = f"(pid {victim}) ended with status -9; it is started again"
            wait_until(lambda t=expected: t in caplog.text, "it is said", LIMIT_S)  # type: ignore[misc]
            wait_until(lambda: len(servers_of_this_test()) == cluster, "back", LIMIT_S)
            servers.wait(LIMIT_S)
            if cluster > 1:
                wait_until(servers.whole, "it has caught up", LIMIT_S)
            assert bus.read("register") == b"%d" % number
            bus.write("register", b"%d" % (number + 1))
    assert not servers_of_this_test()


def test_a_server_that_cannot_run_is_tried_ever_more_seldom(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, servers_of_this_test: Servers
) -> None:
    monkeypatch.setattr("fft.bus.natsserver._PAUSES", (0.0, 0.05, 600.0))
    with NatsServers(job="kept", keep=True) as servers:
        servers._program = "/bin/false"
        (victim,) = servers_of_this_test().values()
        victim.send_signal(signal.SIGKILL)
        wait_until(lambda: "started again in 600 s" in caplog.text, "it gives it time", LIMIT_S)
        began = time.monotonic()
    assert time.monotonic() - began < LIMIT_S, "its end does not wait for the next start"
    assert caplog.text.count("it is started again") == 3

"""Tests of the NATS bus with servers that are killed, stopped, restarted or empty, and clusters."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from bus_helpers import LONG_S, NOISE_S, Child, Heard
from nats_servers import NatsServers
from nats_trial import TIMEOUT_S, WAIT_S, Trial
from waiting import wait_until

from fft.bus import BusClosed, BusForgot, BusOverrun, BusUnreachable, open_bus, open_job_bus
from fft.bus.base import RING_MESSAGES
from fft.bus.nats import _HISTORY, _SHORT_VOTE, NatsBus
from fft.bus.natslink import NOT_FOUND, ApiError, NatsLink, WrongSequence, parse_url
from fft.bus.token import JobToken
from fft.errors import BusError


@pytest.fixture
def server(no_thread_left: None) -> Iterator[NatsServers]:
    with NatsServers(job="mine") as servers:
        yield servers


def restart(server: NatsServers, empty: bool = False) -> None:
    server.kill(0)
    if empty:
        server.forget(0)
    server.start(0)
    server.wait()


def test_the_bus_object_outlives_its_server(server: NatsServers) -> None:
    with open_bus(server.url, timeout=LONG_S) as bus:
        listener, inbox = Heard(bus), Heard(bus, inbox="mine")
        assert bus.compare_set("k", None, b"1") == b"1"
        assert bus.next_number("n") == 1
        assert bus.ballot("s", "t", b"a", 2) is None
        bus.broadcast(b"before")
        bus.send("mine", b"before")
        listener.wait(1)
        inbox.wait(1)
        restart(server)
        assert bus.compare_set("k", b"1", b"2") == b"2"
        assert bus.read("k") == b"2"
        assert bus.next_number("n") == 2
        assert bus.ballot("s", "t", b"b", 2) == [b"a", b"b"]
        bus.broadcast(b"after")
        bus.send("mine", b"after")
        assert listener.wait(2) == [b"before", b"after"]
        assert inbox.wait(2) == [b"before", b"after"]
        with open_bus(server.url, generation=bus.generation) as again:
            assert again.read("k") == b"2"


def test_an_operation_waits_for_its_server(server: NatsServers) -> None:
    """The server is killed before the operation and started while the caller waits."""
    with open_bus(server.url, timeout=LONG_S) as bus:
        bus.compare_set("k", None, b"1")
        server.kill(0)
        found: list[bytes | None] = []
        asking = threading.Thread(target=lambda: found.append(bus.compare_set("k", b"1", b"2")))
        asking.start()
        asking.join(0.3)
        assert asking.is_alive()
        server.start(0)
        asking.join(LONG_S)
        assert found == [b"2"]


def test_a_server_that_came_back_empty_has_forgotten(server: NatsServers) -> None:
    with open_bus(server.url, timeout=20.0) as bus:
        listener = Heard(bus)
        bus.compare_set("k", None, b"1")
        restart(server, empty=True)
        with pytest.raises(BusForgot, match="come back empty"):
            bus.compare_set("k", b"1", b"2")
        assert isinstance(listener.wait_lost(), BusForgot)
        with pytest.raises(BusForgot):
            open_bus(server.url, generation=bus.generation)
        with open_bus(server.url) as fresh:
            assert fresh.generation != bus.generation
            assert fresh.read("k") is None
            with pytest.raises(BusForgot):
                bus.broadcast(b"to the one before")


def test_an_old_client_cannot_write_to_the_next_life(server: NatsServers) -> None:
    """This holds although the server is back and another client has recreated the job's streams."""
    with open_bus(server.url, timeout=20.0) as bus:
        restart(server, empty=True)
        with open_bus(server.url) as fresh:
            received = Heard(fresh)
            with pytest.raises(BusForgot):
                bus.broadcast(b"old")
            with pytest.raises(BusForgot):
                bus.compare_set("k", None, b"old")
            fresh.broadcast(b"new")
            assert received.wait(1) == [b"new"]
            assert fresh.read("k") is None


def test_a_server_that_is_gone(server: NatsServers) -> None:
    with open_bus(server.url, timeout=0.5) as bus:
        listener, inbox = Heard(bus), Heard(bus, inbox="mine")
        server.kill(0)
        start = time.monotonic()
        with pytest.raises(BusUnreachable, match="fft serve"):
            bus.read("k")
        assert time.monotonic() - start < 0.5 + NOISE_S
        for one in (listener, inbox):
            assert isinstance(one.wait_lost(), BusUnreachable)
        with pytest.raises(BusUnreachable):
            bus.broadcast(b"")
        assert (len(listener.lost), len(inbox.lost)) == (1, 1)


def test_silent_server_is_bounded_and_its_late_answer_is_ignored(server: NatsServers) -> None:
    with open_bus(server.url, timeout=2.0) as bus, open_bus(server.url, timeout=LONG_S) as patient:
        listener = Heard(bus)
        assert bus.next_number("n") == 1
        assert patient.compare_set("k", None, b"1") == b"1"
        server.stop(0)
        try:
            start = time.monotonic()
            with pytest.raises(BusUnreachable):
                bus.compare_set("k", b"1", b"doubtful")
            assert time.monotonic() - start < 2.0 + NOISE_S
        finally:
            server.stop(0, stopped=False)
        held = patient.read("k")
        assert held in (b"1", b"doubtful")
        assert patient.compare_set("k", held, b"2") == b"2"
        assert patient.next_number("n") == 2
        assert bus.read("k") == b"2", "who gave up may ask again"
        assert not listener.lost
        patient.broadcast(b"heard still")
        assert listener.wait(1) == [b"heard still"]


def test_close_wakes_an_operation_and_is_prompt(server: NatsServers) -> None:
    bus = open_bus(server.url, timeout=LONG_S)
    errors: list[BusError] = []
    listener = Heard(bus)

    def ask() -> None:
        try:
            bus.read("k")
        except BusError as error:
            errors.append(error)

    server.stop(0)
    try:
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(0.2)
        start = time.monotonic()
        bus.close()
        asking.join(5)
        assert not asking.is_alive()
        assert time.monotonic() - start < NOISE_S
        assert isinstance(errors[0], BusClosed)
        assert not listener.lost
    finally:
        server.stop(0, stopped=False)


class Deaf:
    """A client that loses the acknowledgements of conditional publishes after they were given."""

    def __init__(self, bus: NatsBus, times: int, meanwhile: Any = lambda: None) -> None:
        self._publish = bus._link.publish
        self.times, self._meanwhile = times, meanwhile
        bus._link.publish = self.publish  # type: ignore[method-assign]

    async def publish(
        self, subject: str, payload: bytes, headers: dict[str, str] | None, limit: float
    ) -> dict[str, Any]:
        conditional = headers is not None and "Nats-Expected-Last-Subject-Sequence" in headers
        answer = await self._publish(subject, payload, headers, limit)
        if conditional and self.times > 0:
            self.times -= 1
            self._meanwhile()
            raise TimeoutError
        return answer


def test_lost_acknowledgement_of_a_win_still_counts_as_a_win(nats_url: str) -> None:
    with NatsBus(nats_url) as bus:
        bus.compare_set("k", None, b"1")
        assert bus.compare_set("k", b"1", b"2") == b"2", "nothing is lost yet"
        deaf = Deaf(bus, 1)
        assert bus.compare_set("k", b"2", b"3") == b"3"
        assert deaf.times == 0
        Deaf(bus, 1)
        assert [bus.next_number("n"), bus.next_number("n")] == [1, 2]


@pytest.mark.parametrize("others", [1, 5, _HISTORY + 5])
def test_overwritten_compare_set_without_proof_raises_bus_unreachable(
    nats_url: str, others: int
) -> None:
    """The message after the expected value shows the outcome; once it is gone, no outcome is
    given."""
    with NatsBus(nats_url) as bus, open_bus(nats_url) as other:

        def go_on() -> None:
            held = b"2"
            for number in range(others):
                desired = b"other %d" % number
                assert other.compare_set("k", held, desired) == desired
                held = desired

        bus.compare_set("k", None, b"1")
        Deaf(bus, 1, go_on)
        if others < _HISTORY:
            assert bus.compare_set("k", b"1", b"2") == b"2"
        else:
            with pytest.raises(BusUnreachable, match="overwritten"):
                bus.compare_set("k", b"1", b"2")


def test_refused_retry_reads_back_the_stored_value(nats_url: str) -> None:
    """Without the server's memory of ids, the register shows the outcome while it keeps the
    value."""
    with NatsBus(nats_url) as bus, open_bus(nats_url) as other:
        for number in range(_HISTORY + 3):
            other.write("k", b"%d" % number)
        name = "s.r.k"
        kept = bus._link.run(lambda: bus._page(bus._state, name, 1, 5.0))
        assert len(kept) == _HISTORY

        def became(seq: int, own: str) -> int | None:
            return bus._link.run(lambda: bus._became(name, seq, own, 5.0))

        ours = kept[-3].headers["Nats-Msg-Id"]
        assert became(kept[-4].seq, ours) == kept[-3].seq
        assert became(kept[-4].seq, "mine is not there") is None
        with pytest.raises(BusUnreachable, match="overwritten"):
            became(kept[0].seq - 1, "mine is not there")


def test_a_refusal_stores_nothing(nats_url: str) -> None:
    with NatsBus(nats_url) as bus:
        bus.compare_set("k", None, b"1")
        headers = {"Nats-Expected-Last-Subject-Sequence": "999"}
        with pytest.raises(WrongSequence):
            bus._link.run(lambda: bus._link.publish(bus._subject("s.r.k"), b"2", headers, 5.0))
        assert bus.read("k") == b"1"


def test_unanswered_request_is_applied_once_when_retried(nats_url: str) -> None:
    with NatsBus(nats_url) as bus:
        listener = Heard(bus)
        publish, lost = bus._link.publish, 0

        async def deaf(*arguments: Any) -> dict[str, Any]:
            nonlocal lost
            answer = await publish(*arguments)
            if lost:
                lost -= 1
                raise TimeoutError
            return answer

        bus._link.publish = deaf  # type: ignore[method-assign, assignment]
        lost = 2
        bus.broadcast(b"1")
        bus.broadcast(b"2")
        assert listener.wait(2) == [b"1", b"2"]
        lost = 2
        long = b"x" * _SHORT_VOTE + b"x"
        assert bus.ballot("s", "t", long, 3) is None
        lost = 1
        assert bus.ballot("s", "t", b"b", 3) is None
        lost = 1
        assert bus.ballot("s", "t", b"c", 3) == [long, b"b", b"c"]
        assert lost == 0


def test_a_replica_that_lags_behind_is_asked_again(nats_url: str) -> None:
    with NatsBus(nats_url) as bus, NatsBus(nats_url) as other:
        bus.compare_set("k", None, b"1")
        assert other.read("k") == b"1"
        asked = {"multi_last": [other._subject("s.r.k"), other._subject("s.mark")]}
        get = other._link.get
        stale = [other._link.run(lambda: get(other._state, asked, 5.0)), []]
        assert len(stale[0]) == 2

        async def lag(*arguments: Any) -> Any:
            return stale.pop(0) if stale else await get(*arguments)

        other._link.get = lag  # type: ignore[method-assign, assignment]
        bus.compare_set("k", b"1", b"2")
        assert other.read("k") == b"2"
        assert not stale
        assert bus.ballot("s", "t", b"a", 2) is None
        stale.append([])
        assert other.ballot("s", "t", b"b", 2) == [b"a", b"b"]


def test_clients_that_create_the_bus_at_once_agree_on_its_generation(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster may say that it has no such stream for a while after another client's creation."""
    with NatsBus(nats_url) as first:
        api, missing = NatsLink.api, [1, 2, 3]

        async def late(link: NatsLink, name: str, request: dict[str, Any], limit: float) -> Any:
            if name.startswith("STREAM.INFO") and missing:
                raise ApiError(nats_url, NOT_FOUND, f"stream not found {missing.pop()}")
            return await api(link, name, request, limit)

        monkeypatch.setattr(NatsLink, "api", late)
        with NatsBus(nats_url) as second:
            assert second.generation == first.generation and not missing


def test_overrun_listener_is_notified(nats_url: str) -> None:
    """The listener loses its wake-ups and does not poll until the ring has wrapped around."""
    with NatsBus(nats_url) as bus, NatsBus(nats_url) as other:
        listener = Heard(other)
        held = threading.Event()
        get = other._link.get

        async def late(*arguments: Any) -> Any:
            if not held.is_set():
                raise TimeoutError
            return await get(*arguments)

        other._link.get = late  # type: ignore[method-assign, assignment]
        for number in range(RING_MESSAGES + 10):
            bus.broadcast(b"%d" % number)
        held.set()
        assert isinstance(listener.wait_lost(), BusOverrun)
        assert listener.messages == [b"%d" % n for n in range(len(listener.messages))]


def test_long_and_odd_names(nats_url: str) -> None:
    with open_bus(nats_url) as bus:
        names = ["a.b", "a", "*", ">", "a b", "ä~%", "\N{SNOWMAN}" * 256, "\N{SNOWMAN}" * 255]
        for number, name in enumerate(names):
            assert bus.compare_set(name, None, b"%d" % number) == b"%d" % number
            assert bus.ballot(name, name, b"%d" % number, 1) == [b"%d" % number]
            bus.send(name, b"%d" % number)
        for number, name in enumerate(names):
            assert bus.read(name) == b"%d" % number
            assert Heard(bus, inbox=name).wait(1) == [b"%d" % number]


def test_closing_gives_every_descriptor_back(nats_url: str) -> None:
    def use() -> None:
        with open_bus(nats_url) as bus:
            listener, inbox = Heard(bus), Heard(bus, inbox="mine")
            bus.broadcast(b"1")
            bus.send("mine", b"1")
            listener.wait(1)
            inbox.wait(1)

    use()
    me = psutil.Process()
    before = me.num_fds()
    for _ in range(10):
        use()
    wait_until(lambda: me.num_fds() <= before, "all descriptors are closed", WAIT_S)


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = parse_url("nats://me:p%40ss@a:1,[::1]:2/job.1")
    assert found.servers == ["nats://a:1", "nats://[::1]:2"]
    assert (found.user, found.password, found.job) == ("me", "p@ss", "job.1")
    assert "p%40ss" not in found.shown and "p@ss" not in found.shown
    assert parse_url("tls://a:1/j").tls is not None
    assert parse_url("tls://a:1/j").servers == ["tls://a:1"]
    monkeypatch.setenv("FFT_NATS_TLS", "/nowhere")
    with pytest.raises(BusError, match=r"ca\.crt.*FFT_NATS_TLS"):
        parse_url("tls://a:1/j")
    monkeypatch.setenv("FFT_NATS_CREDS", "/nowhere/me.creds")
    with pytest.raises(BusError, match="FFT_NATS_CREDS"):
        parse_url("nats://a:1/j")


@pytest.mark.long
def test_an_encrypted_bus_with_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_thread_left: None
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.crt"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=test"
    make += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    subprocess.run(make.split(), check=True, capture_output=True)
    settings = f'''
        tls {{ cert_file: "{certificate}", key_file: "{key}" }}
        authorization {{ user: me, password: "p@ss" }}
    '''
    with NatsServers(job="mine", settings=settings) as server:
        url = server.url.replace("nats://", "tls://me:p%40ss@")
        with pytest.raises(BusUnreachable, match=r"(?i)certificate"):
            open_bus(url, timeout=5.0)
        monkeypatch.setenv("FFT_NATS_TLS", str(tmp_path))
        with pytest.raises(BusUnreachable, match=r"(?i)authorization"):
            open_bus(url.replace("p%40ss", "wrong"), timeout=5.0)
        with open_bus(url, timeout=LONG_S) as bus:
            listener = Heard(bus)
            bus.broadcast(b"1")
            assert listener.wait(1) == [b"1"]
            restart(server)
            bus.broadcast(b"2")
            assert listener.wait(2) == [b"1", b"2"]


@pytest.mark.parametrize("cluster", [1, 3])
def test_nats_servers_refuse_clients_and_routes_without_the_token(
    no_thread_left: None, cluster: int
) -> None:
    token = JobToken.fresh()
    with NatsServers(job="mine", cluster=cluster, token=token) as server:
        where = server.url.removeprefix("nats://job-token@")
        for login in ("", "job-token:wrong@", f"job-token:{token.text()}@", "me:mine@"):
            with pytest.raises(BusUnreachable, match=r"(?i)authorization"):
                open_bus(f"nats://{login}{where}", timeout=5.0)
        with pytest.raises(BusUnreachable, match=r"(?i)authorization"):
            open_bus(server.url, timeout=5.0, token=JobToken.fresh())
        with pytest.raises(BusError, match="FFT_TOKEN_FILE"):
            open_bus(server.url, timeout=5.0)
        with open_job_bus(server.url, token, LONG_S) as bus:
            assert bus.compare_set("k", None, b"1") == b"1"
            for number in range(cluster if cluster > 1 else 0):
                assert "Authorization" not in route_answer(server, number, server._route_password)
                assert "Authorization" in route_answer(server, number, "wrong")
        contents = []
        for path in server._directory.rglob("*"):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # a temporary file
                contents.append(path.read_bytes())
        assert contents and not any(token.text().encode() in text for text in contents)
        assert server._directory.stat().st_mode & 0o077 == 0


def route_answer(server: NatsServers, number: int, password: str) -> str:
    """Return what a server of a cluster says to a route that logs in with ``password``."""
    with socket.create_connection(("127.0.0.1", server._routes[number]), 10.0) as link:
        asked = {"user": "route", "pass": password, "name": "x", "server_id": "x", "cluster": "fft"}
        link.sendall(f"CONNECT {json.dumps(asked)}\r\nPING\r\n".encode())
        received = b""
        while b"PONG" not in received and (more := link.recv(65536)):
            received += more
        return received.decode()


def test_without_nats_py_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['nats'] = None\n"
        "from fft.bus import open_bus\nfrom fft.errors import BusError\n"
        "try: open_bus('nats://127.0.0.1:1/j')\n"
        "except BusError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "fft-torch[nats]" in done.stdout


@pytest.mark.long
def test_a_cluster_outlives_its_leaders(no_thread_left: None) -> None:
    with NatsServers(job="mine", cluster=3) as servers:
        trial = Trial(servers)
        try:
            assert len(servers.leaders()) == 3
            for number in range(3):
                elected, back = trial.kill_leader(number)
                print(f"elected after {elected:.2f} s, service after {back:.2f} s")
            print(trial.judge())
        finally:
            trial.close()


@pytest.mark.long
def test_a_deposed_leader_decides_nothing_and_is_not_believed(
    no_thread_left: None, child: Callable[..., Child]
) -> None:
    """The old leader and its client are stopped while another leads, and are asked before they can
    learn of that."""
    with NatsServers(job="mine", cluster=3) as servers, open_bus(servers.url, TIMEOUT_S) as bus:
        assert bus.compare_set("k", None, b"1") == b"1"
        leader = servers.leaders()["fft-mine"]
        client = child("decide", f"nats://127.0.0.1:{servers.ports[leader]}/mine", "k", "mine")
        assert client.line() == "1"
        client.stop()
        servers.stop(leader)
        try:
            assert bus.compare_set("k", b"1", b"2") == b"2"
            client.go()
            client.resume()
            assert client.line() == "asking"
        finally:
            servers.stop(leader, stopped=False)
        assert client.line() == "2 2"
        assert client.wait() == 0
        assert bus.read("k") == b"2"

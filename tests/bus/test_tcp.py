"""Tests of the TCPStore bus only: dead writers, the ring, wrapping numbers, dead servers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from bus_helpers import LONG_S, NOISE_S, Child, Heard
from waiting import wait_until
from way import Way

from fft.bus import BusClosed, BusForgot, BusOverrun, BusUnreachable, open_bus, serve_tcp
from fft.bus.base import RING_MESSAGES, Topic
from fft.bus.tcpclient import length, put
from fft.bus.tcpstore import Ring, TcpBus
from fft.errors import BusError

Start = Callable[..., Child]


class StalledBus(TcpBus):
    """A writer that stops between reserving its number and writing, until it is released."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.stalled = threading.Event()
        self.release = threading.Event()
        self.numbers: list[int] = []
        self._rings["protocol"] = StalledRing(self, "protocol")


class StalledRing(Ring):
    """The ring in which that writer stops."""

    def __init__(self, bus: StalledBus, topic: Topic) -> None:
        super().__init__(bus, topic)
        self._stalled = bus

    def write_slot(self, number: int, frame: bytes) -> bool:
        bus = self._stalled
        bus.numbers.append(number)
        if len(bus.numbers) == 1:
            bus.stalled.set()
            assert bus.release.wait(60)
        return super().write_slot(number, frame)


def test_neither_the_buses_nor_a_monitor_load_torch(tcp_url: str) -> None:
    code = "import fft.health.monitor, fft.bus, sys; fft.bus.open_bus('memory://x').close(); "
    code += f"fft.bus.open_bus('{tcp_url}').close(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_processes_receive_one_order(tcp_url: str, child: Start) -> None:
    with open_bus(tcp_url) as one, open_bus(tcp_url) as two:
        listeners = [Heard(one), Heard(two)]
        writers = [child("write", tcp_url, name, "250") for name in "abc"]
        assert [w.line() for w in writers] == ["ready"] * 3
        for writer in writers:
            writer.go()
        received = [listener.wait(750) for listener in listeners]
        assert received[0] == received[1]
        for name in b"a", b"b", b"c":
            mine = [m for m in received[0] if m.startswith(name)]
            assert mine == [name + b":%d" % n for n in range(250)]
        assert [w.wait() for w in writers] == [0, 0, 0]


@pytest.mark.parametrize("dead", [1, 3])
def test_dead_writers_do_not_stall_the_listeners(tcp_url: str, child: Start, dead: int) -> None:
    with open_bus(tcp_url) as bus:
        listener = Heard(bus)
        bus.broadcast(b"before")
        victims = [child("die-between", tcp_url) for _ in range(dead)]
        assert [v.wait() for v in victims] == [-signal.SIGKILL] * dead
        bus.broadcast(b"after")
        assert listener.wait(2) == [b"before", b"after"]


def test_skipped_writer_sends_again_and_is_delivered_once(tcp_url: str) -> None:
    with StalledBus(tcp_url) as slow, open_bus(tcp_url) as bus:
        listeners = [Heard(bus), Heard(slow)]
        writing = threading.Thread(target=slow.broadcast, args=(b"slow",))
        writing.start()
        assert slow.stalled.wait(10)
        bus.broadcast(b"quick")
        for listener in listeners:
            assert listener.wait(1) == [b"quick"]
        slow.release.set()
        writing.join(10)
        bus.broadcast(b"last")
        for listener in listeners:
            assert listener.wait(3) == [b"quick", b"slow", b"last"]
        assert len(slow.numbers) == 2


def test_writer_stalled_for_a_whole_ring_gets_bus_overrun(tcp_url: str) -> None:
    with StalledBus(tcp_url) as slow, open_bus(tcp_url) as bus:
        errors: list[BusError] = []

        def write() -> None:
            try:
                slow.broadcast(b"slow")
            except BusError as error:
                errors.append(error)

        credit = threading.Semaphore(500)
        listener = Heard(bus, lambda payload: credit.release())
        writing = threading.Thread(target=write)
        writing.start()
        assert slow.stalled.wait(10)
        for number in range(RING_MESSAGES + 10):
            assert credit.acquire(timeout=20)
            bus.broadcast(b"%d" % number)
        received = listener.wait(RING_MESSAGES + 10)
        slow.release.set()
        writing.join(10)
        assert isinstance(errors[0], BusOverrun)
        bus.broadcast(b"last")
        assert listener.wait(len(received) + 1)[-1] == b"last"
        assert b"slow" not in listener.messages
        assert not slow._filled(slow._rings["protocol"].slot_name(slow.numbers[0]))


def test_listener_with_a_removed_slot_is_notified(tcp_url: str) -> None:
    """The next slot of the listener belongs to a dead writer, and the ring has passed it."""
    with TcpBus(tcp_url) as bus, open_bus(tcp_url) as other:
        release, inside = threading.Event(), threading.Event()

        def block(payload: bytes) -> None:
            inside.set()
            assert release.wait(60)

        slow = Heard(other, block)
        bus.broadcast(b"first")
        assert inside.wait(10)
        dead = bus._rings["protocol"].take_number()
        for number in range(RING_MESSAGES + 10):
            bus.broadcast(b"%d" % number)
        release.set()
        assert isinstance(slow.wait_lost(), BusOverrun)
        assert slow.messages == [b"first"]
        name = bus._rings["protocol"].slot_name(dead)
        wait_until(lambda: not bus._filled(name), "the slot is removed again")


def test_slots_of_dead_removers_are_swept(tcp_url: str) -> None:
    with TcpBus(tcp_url) as bus:
        ring = bus._rings["protocol"]
        bus._ask(put(ring.slot(ring.head() - RING_MESSAGES - 5), b"Mold"))
        for _ in range(3):
            bus.broadcast(b"")
        leftover = bus.key_count()
        bus._sweep()
        assert bus.key_count() == leftover - 1


@pytest.mark.parametrize("top", [2**63 - 3, 2**64 - 3])
def test_message_numbers_run_past_their_range(tcp_url: str, top: int) -> None:
    signed = top - 2**64 if top >= 2**63 else top
    with TcpBus(tcp_url) as bus, open_bus(tcp_url) as other:
        bus._ask(put(bus._key("head"), b"%d" % signed))
        credit = threading.Semaphore(500)
        listeners = [Heard(bus, lambda payload: credit.release()), Heard(other)]
        count = RING_MESSAGES + 200
        for number in range(count):
            assert credit.acquire(timeout=20)
            (bus, other)[number % 2].broadcast(b"%d" % number)
        for listener in listeners:
            assert listener.wait(count) == [b"%d" % n for n in range(count)]
        assert bus._rings["protocol"].head() == (top + count) % 2**64
        assert bus.key_count() <= RING_MESSAGES + 3
        bus._sweep()
        assert bus.key_count() >= RING_MESSAGES, "the sweep keeps what is in the ring"


def test_a_dead_writer_at_the_end_of_the_range(tcp_url: str) -> None:
    with TcpBus(tcp_url) as bus:
        bus._ask(put(bus._key("head"), b"%d" % (2**63 - 2)))
        listener = Heard(bus)
        assert bus._rings["protocol"].take_number() == 2**63 - 1
        bus.broadcast(b"after")
        assert listener.wait(1) == [b"after"]
        assert bus._rings["protocol"].head() == 2**63


@pytest.mark.parametrize("top", [2**63 - 3, 2**64 - 3])
def test_next_number_runs_past_its_range(tcp_url: str, top: int) -> None:
    signed = top - 2**64 if top >= 2**63 else top
    with TcpBus(tcp_url) as bus:
        bus._ask(put(bus._key("c/n"), b"%d" % signed))
        numbers = [bus.next_number("n") for _ in range(6)]
        assert numbers == [(top + i) % 2**64 for i in range(1, 7)]


def test_jobs_on_one_server_do_not_meet(tcp_url: str) -> None:
    with open_bus(tcp_url) as a, open_bus(tcp_url + "-2") as b:
        heard_a, heard_b = Heard(a), Heard(b)
        a.broadcast(b"a")
        b.broadcast(b"b")
        assert (heard_a.wait(1), heard_b.wait(1)) == ([b"a"], [b"b"])
        a.compare_set("k", None, b"a")
        assert b.read("k") is None
        assert a.generation != b.generation
        keys = b.key_count()
        a.next_number("n")
        assert b.key_count() == keys


def dead_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def test_open_without_a_server_names_the_address_and_the_fix(
    capfd: pytest.CaptureFixture[str],
) -> None:
    address = dead_address()
    start = time.monotonic()
    with pytest.raises(BusUnreachable) as caught:
        open_bus(f"tcp://{address}/job", timeout=2)
    assert time.monotonic() - start < 2 + NOISE_S
    assert address in str(caught.value)
    assert "fft serve" in str(caught.value)
    assert capfd.readouterr().err == ""


def test_a_late_vote_leaves_no_counter_for_long(tcp_url: str) -> None:
    """The vote was appended before its ballot was removed and counted after; the sweep finds the
    counter."""
    with TcpBus(tcp_url) as bus:
        before = bus.key_count()
        bus._add("n/6/ballot/1.7", 1)
        bus.ballot("ballot", "2.1", b"in use", 2)
        bus._sweep()
        assert bus.ballot("ballot", "2.1", b"last", 2) == [b"in use", b"last"]
        bus.delete("ballot")
        assert bus.key_count() == before


def test_slots_and_tags_with_slashes_do_not_meet(tcp_url: str) -> None:
    with TcpBus(tcp_url) as bus:
        assert bus.ballot("a/b", "c", b"1", 2) is None
        assert bus.ballot("a", "b/c", b"2", 2) is None
        bus._sweep()
        assert bus.ballot("a/b", "c", b"3", 2) == [b"1", b"3"]
        bus.delete("a/b")
        assert bus.ballot("a", "b/c", b"4", 2) == [b"2", b"4"]


def test_only_the_last_voter_reads_the_ballot(tcp_url: str) -> None:
    with TcpBus(tcp_url) as bus, TcpBus(tcp_url) as other:
        peeks = []
        look = bus._peek
        bus._peek = lambda name: peeks.append(name) or look(name)  # type: ignore[method-assign]
        for number in range(63):
            assert bus.ballot("s", "t", b"%d" % number, 64) is None
        assert other.ballot("s", "old", b"", 1) == [b""]
        assert peeks == []
        assert len(bus.ballot("s", "t", b"last", 64) or ()) == 64
        assert peeks == ["b/s"]


def test_server_killed_while_inboxes_are_listened_to(child: Start) -> None:
    server = child("serve", "0")
    with open_bus(server.line()) as bus:
        inboxes = [Heard(bus, inbox=f"inbox{n}") for n in range(3)]
        for n in range(3):
            bus.send(f"inbox{n}", b"1")
        for inbox in inboxes:
            inbox.wait(1)
        server.kill()
        for inbox in inboxes:
            assert isinstance(inbox.wait_lost(), BusUnreachable)
        with pytest.raises(BusUnreachable, match="fft serve"):
            bus.listen("more", lambda payload: None, lambda error: None)
        with pytest.raises(BusUnreachable):
            bus.send("inbox0", b"2")
        assert [len(inbox.lost) for inbox in inboxes] == [1, 1, 1]


def test_an_inbox_misses_nothing_of_a_server_that_was_silent(child: Start) -> None:
    server = child("serve", "0")
    with open_bus(server.line(), timeout=0.5) as bus:
        inbox = Heard(bus, inbox="mine")
        server.stop()
        try:
            start = time.monotonic()
            with pytest.raises(BusUnreachable):
                bus.read("k")
            assert time.monotonic() - start < 0.5 + NOISE_S
        finally:
            server.resume()
        bus.send("mine", b"1")
        assert inbox.wait(1) == [b"1"]
        assert not inbox.lost


def test_an_inbox_closes_promptly_though_the_server_is_silent(child: Start) -> None:
    server = child("serve", "0")
    with open_bus(server.line(), timeout=LONG_S) as bus:
        inbox = Heard(bus, inbox="mine")
        server.stop()
        try:
            start = time.monotonic()
            inbox.subscription.close()
            bus.close()
            assert time.monotonic() - start < NOISE_S
        finally:
            server.resume()
        assert not inbox.lost


def test_sending_to_a_silent_server_is_bounded(child: Start) -> None:
    server = child("serve", "0")
    with open_bus(server.line(), timeout=0.5) as bus:
        server.stop()
        try:
            start = time.monotonic()
            with pytest.raises(BusUnreachable):
                for _ in range(100):  # more than the sockets take
                    bus.send("mine", b"x" * 1024 * 1024)
            assert time.monotonic() - start < 0.5 + NOISE_S
        finally:
            server.resume()


def test_a_close_during_a_callback_is_prompt_and_final(tcp_url: str) -> None:
    inside, release = threading.Event(), threading.Event()

    def block(payload: bytes) -> None:
        inside.set()
        assert release.wait(60)

    with open_bus(tcp_url) as bus:
        inbox = Heard(bus, block, "mine")
        bus.send("mine", b"1")
        bus.send("mine", b"2")
        assert inside.wait(10)
        start = time.monotonic()
        inbox.subscription.close()
        assert time.monotonic() - start < NOISE_S
        release.set()
        bus.close()
        assert inbox.messages == [b"1"]
        assert not inbox.lost


def test_killed_inbox_listener_leaves_its_messages_to_the_remover(
    tcp_url: str, child: Start
) -> None:
    victim = child("listen", tcp_url, "theirs")
    assert victim.line() == "ready"
    with TcpBus(tcp_url) as bus:
        victim.kill()
        for number in range(10):
            bus.send("theirs", b"%d" % number)

        def left() -> int:
            return int(bus._ask(length(bus._key("i/theirs")))[0])

        wait_until(lambda: left() == 10, "all have arrived")
        bus.delete("theirs")
        assert left() == 0


def test_server_that_is_no_bus_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(BusUnreachable, match=str(port)):
            open_bus(f"tcp://127.0.0.1:{port}/job", timeout=0.5)
        assert time.monotonic() - start < 0.5 + NOISE_S


def test_server_killed(child: Start) -> None:
    server = child("serve", "0")
    url = server.line()
    with open_bus(url) as bus:
        listener = Heard(bus)
        bus.broadcast(b"1")
        listener.wait(1)
        server.kill()
        assert isinstance(listener.wait_lost(), BusUnreachable)
        for operation in (lambda: bus.broadcast(b"2"), lambda: bus.read("k")) * 2:
            start = time.monotonic()
            with pytest.raises(BusUnreachable, match="fft serve"):
                operation()
            assert time.monotonic() - start < NOISE_S
        with pytest.raises(BusUnreachable):
            bus.subscribe(lambda payload: None, lambda error: None)
        assert len(listener.lost) == 1


@pytest.fixture
def way(tcp_url: str) -> Iterator[tuple[Way, str]]:
    """Yield a proxy before the server, and the URL of the bus through it."""
    host, _, job = tcp_url.removeprefix("tcp://").partition("/")
    with closing(Way(int(host.rpartition(":")[2]))) as made:
        yield made, f"tcp://127.0.0.1:{made.port}/{job}"


def test_bus_outlives_the_loss_of_all_of_its_connections(
    way: tuple[Way, str], tcp_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server lives. Messages that were sent meanwhile arrive, and nothing takes effect twice"""
    network, url = way
    with open_bus(url) as bus, open_bus(tcp_url) as other:
        listeners = [Heard(bus), Heard(bus, topic="commands"), Heard(bus, inbox="mine")]
        generation = bus.generation
        for turn in range(1, 6):
            network.cut()
            other.broadcast(b"%d" % turn)
            other.broadcast(b"%d" % turn, "commands")
            other.send("mine", b"%d" % turn)
            wait_until(lambda: bus._client is None or bus._client._is_down(), "it is cut")  # type: ignore[attr-defined]
            start = time.monotonic()
            assert bus.next_number("n") == turn, "the request is sent once, on a new connection"
            assert time.monotonic() - start < NOISE_S
            for listener in listeners:
                assert listener.wait(turn) == [b"%d" % n for n in range(1, turn + 1)]
        assert bus.generation == generation
        assert bus.ballot("slot", "tag", b"vote", 1) == [b"vote"]
    assert "answers on a new connection" in caplog.text


def test_request_is_not_repeated_if_its_answer_is_lost(
    way: tuple[Way, str],
) -> None:
    network, url = way
    with open_bus(url, timeout=LONG_S) as bus, ThreadPoolExecutor(1) as pool:
        network.lose()
        before = network.arrived
        lost = pool.submit(bus.next_number, "n")
        wait_until(lambda: network.arrived > before, "it has been sent")
        network.cut()
        assert isinstance(lost.exception(NOISE_S), BusUnreachable)
        network.find()
        assert bus.next_number("n") in (1, 2)


def test_listener_of_forgotten_connections_is_renewed_with_the_others(
    way: tuple[Way, str], tcp_url: str
) -> None:
    """Nothing arrives on the old connections any more, and nothing closes them."""
    network, url = way
    with open_bus(url, timeout=1.0) as bus, open_bus(tcp_url) as other:
        listeners = [Heard(bus), Heard(bus, inbox="mine")]
        wait_until(lambda: all(one.subscription._is_waiting for one in listeners), "they wait")  # type: ignore[attr-defined]
        network.forget()
        with pytest.raises(BusUnreachable):
            bus.read("k")
        assert bus.read("k") is None
        other.broadcast(b"1")
        other.send("mine", b"1")
        start = time.monotonic()
        for listener in listeners:
            assert listener.wait(1) == [b"1"]
        assert time.monotonic() - start < NOISE_S


def test_server_started_again_empty_is_recognised(child: Start) -> None:
    server = child("serve", "0")
    url = server.line()
    port = url.rpartition(":")[2].partition("/")[0]
    with open_bus(url) as bus:
        bus.compare_set("k", None, b"v")
        server.kill()
        again = child("serve", port)
        assert again.line() == url
        with pytest.raises(BusForgot, match="come back empty"):
            bus.read("k")
        with pytest.raises(BusForgot, match="come back empty"):
            open_bus(url, generation=bus.generation)
        with open_bus(url) as fresh, pytest.raises(BusForgot):
            fresh.compare_set("k", b"v", b"w")


def test_a_late_answer_is_never_taken_for_the_next_one(child: Start) -> None:
    server = child("serve", "0")
    with open_bus(server.line(), timeout=0.5) as bus:
        bus.write("k", b"7")
        assert bus.next_number("n") == 1
        server.stop()
        try:
            for _ in range(3):
                with pytest.raises(BusUnreachable):
                    bus.read("k")
        finally:
            server.resume()
        assert [bus.next_number("n") for _ in range(3)] == [2, 3, 4]
        assert bus.read("k") == b"7"


def test_a_server_that_was_silent_is_gone_on_with(child: Start) -> None:
    """With a stopped server operations are bounded; they take effect later, and arrive once."""
    server = child("serve", "0")
    with open_bus(server.line(), timeout=0.5) as bus:
        listener = Heard(bus)
        bus.compare_set("k", None, b"v")
        bus.broadcast(b"1")
        listener.wait(1)
        server.stop()
        try:
            for operation in (lambda: bus.compare_set("k", b"v", b"w"), lambda: bus.read("k")):
                start = time.monotonic()
                with pytest.raises(BusUnreachable):
                    operation()
                # a new connection, and its greeting
                assert time.monotonic() - start < 2 * 0.5 + NOISE_S
        finally:
            server.resume()
        wait_until(lambda: bus.read("k") == b"w", "what was asked in the silence is done")
        bus.broadcast(b"2")
        assert listener.wait(2) == [b"1", b"2"]
        assert not listener.lost


def test_threads_that_wait_for_their_turn_come_back_too(child: Start) -> None:
    server = child("serve", "0")
    with open_bus(server.line(), timeout=0.5) as bus, ThreadPoolExecutor(8) as pool:
        server.stop()
        try:
            silent = [pool.submit(bus.read, "k") for _ in range(8)]
            assert {type(future.exception()) for future in silent} == {BusUnreachable}
        finally:
            server.resume()
        numbers = [pool.submit(bus.next_number, "n") for _ in range(8)]
        assert sorted(future.result() for future in numbers) == list(range(1, 9))


def test_a_server_that_has_ended_in_the_silence_is_lost(child: Start) -> None:
    server = child("serve", "0")
    with open_bus(server.line(), timeout=0.5) as bus:
        listener = Heard(bus)
        server.stop()
        with pytest.raises(BusUnreachable):
            bus.read("k")
        assert not listener.lost
        server.kill()
        assert isinstance(listener.wait_lost(), BusUnreachable)
        start = time.monotonic()
        for _ in range(3):
            with pytest.raises(BusUnreachable):
                bus.read("k")
        assert time.monotonic() - start < NOISE_S


def test_server_that_replaced_a_silent_one_is_recognised(child: Start) -> None:
    """Another server took over the port while no operation was in progress."""
    server = child("serve", "0")
    url = server.line()
    port = url.rpartition(":")[2].partition("/")[0]
    with open_bus(url, timeout=0.5) as bus:
        server.stop()
        with pytest.raises(BusUnreachable):
            bus.read("k")
        server.kill()
        again = child("serve", port)
        assert again.line() == url
        for _ in range(2):
            with pytest.raises(BusForgot, match="come back empty"):
                bus.read("k")


def test_closing_is_prompt_though_the_server_is_silent(child: Start) -> None:
    server = child("serve", "0")
    with open_bus(server.line(), timeout=LONG_S) as bus:
        listener = Heard(bus)
        server.stop()
        try:
            start = time.monotonic()
            listener.subscription.close()
            bus.close()
            assert time.monotonic() - start < NOISE_S
        finally:
            server.resume()
        assert not listener.lost


def test_killed_listener_does_not_disturb_the_others(tcp_url: str, child: Start) -> None:
    victim = child("hear", tcp_url)
    assert victim.line() == "ready"
    with open_bus(tcp_url) as bus:
        listener = Heard(bus)
        victim.kill()
        bus.broadcast(b"1")
        assert listener.wait(1) == [b"1"]


def test_close_wakes_an_operation_in_another_thread(child: Start) -> None:
    server = child("serve", "0")
    bus = open_bus(server.line(), timeout=LONG_S)
    errors: list[BusError] = []

    def ask() -> None:
        try:
            bus.read("k")
        except BusError as error:
            errors.append(error)

    server.stop()
    try:
        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: asleep(asking), "the thread waits for the silent server")
        bus.close()
        asking.join(5)
        assert not asking.is_alive()
        assert isinstance(errors[0], BusClosed)
    finally:
        server.resume()


def asleep(thread: threading.Thread) -> bool:
    with open(f"/proc/self/task/{thread.native_id}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_closing_gives_every_descriptor_back(tcp_url: str) -> None:
    def use() -> None:
        with serve_tcp() as server, open_bus(server.url) as bus, open_bus(tcp_url) as other:
            for one in (bus, other):
                listener = Heard(one)
                one.broadcast(b"1")
                listener.wait(1)

    use()  # torch opens some of its own the first time
    before = descriptors()
    for _ in range(5):
        use()
    wait_until(lambda: descriptors() <= before, "torch's threads have given their sockets back")


def test_server_listens_only_on_its_own_address() -> None:
    with serve_tcp() as server:
        port = int(server.url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), 1).close()
        with pytest.raises(BusError, match=f"127.0.0.1:{port}"):
            serve_tcp(port=port)
    server.close()
    with pytest.raises(BusUnreachable):
        open_bus(server.url, timeout=1)


def test_bad_timeout_and_job() -> None:
    with pytest.raises(BusError, match="timeout"):
        open_bus("tcp://127.0.0.1:1/job", timeout=0)
    with pytest.raises(BusError, match="job name"):
        serve_tcp(job="a/b")

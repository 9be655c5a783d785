"""The tests of the bus contract, which run against every backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from bus_helpers import NOISE_S, Heard

from fft.bus import MAX_MESSAGE_BYTES, BusClosed, BusForgot, BusOverrun, ErrorBus, open_bus
from fft.bus.base import MAX_VALUE_BYTES, RING_MESSAGES, TOPICS, Topic
from fft.errors import BusError

Connect = Callable[[], ErrorBus]
ANY_BYTES = bytes(range(256))


def by_writer(messages: list[bytes], name: str) -> list[int]:
    return [int(m.split(b":")[1]) for m in messages if m.startswith(name.encode() + b":")]


@pytest.mark.one_in(3)
def test_all_listeners_receive_all_writers_in_one_order(connect: Connect) -> None:
    listeners = [Heard(connect()) for _ in range(3)]
    writers = {name: connect() for name in "abcd"}
    start = threading.Barrier(len(writers))

    def write(name: str) -> None:
        start.wait(10)
        for number in range(200):
            writers[name].broadcast(f"{name}:{number}".encode())

    with ThreadPoolExecutor(len(writers)) as pool:
        list(pool.map(write, writers))
    received = [listener.wait(800) for listener in listeners]
    assert received[0] == received[1] == received[2]
    assert len(received[0]) == 800
    for name in writers:
        assert by_writer(received[0], name) == list(range(200))


def test_one_client_may_be_used_by_many_threads(connect: Connect) -> None:
    bus = connect()
    listener = Heard(bus)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: bus.broadcast(b"%d" % n), range(400)))
    assert sorted(map(int, listener.wait(400))) == list(range(400))


def test_subscription_starts_now(connect: Connect) -> None:
    bus = connect()
    bus.broadcast(b"before")
    listener = Heard(connect())
    bus.broadcast(b"after")
    assert listener.wait(1) == [b"after"]


def test_listener_receives_only_its_topics(connect: Connect) -> None:
    buses = [connect(), connect()]
    received: dict[Topic, list[Heard]] = {t: [Heard(b, topic=t) for b in buses] for t in TOPICS}
    for number in range(20):
        for topic in TOPICS:
            buses[number % 2].broadcast(f"{topic}:{number}".encode(), topic)
    for topic, listeners in received.items():
        expected = [f"{topic}:{number}".encode() for number in range(20)]
        assert [listener.wait(20) for listener in listeners] == [expected, expected]
    buses[0].broadcast(b"for the core")
    received["protocol"][1].wait(21)
    for topic, listeners in received.items():
        assert listeners[1].messages[20:] == ([b"for the core"] if topic == "protocol" else [])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("topic", TOPICS)
def test_every_topic_has_one_order(connect: Connect, topic: Topic) -> None:
    listeners = [Heard(connect(), topic=topic) for _ in range(2)]
    writers = {name: connect() for name in "abc"}

    def write(name: str) -> None:
        for number in range(50):
            writers[name].broadcast(f"{name}:{number}".encode(), topic)
            writers[name].broadcast(b"elsewhere", TOPICS[TOPICS.index(topic) - 1])

    with ThreadPoolExecutor(len(writers)) as pool:
        list(pool.map(write, writers))
    received = [listener.wait(150) for listener in listeners]
    assert received[0] == received[1]
    for name in writers:
        assert by_writer(received[0], name) == list(range(50))


def test_a_topic_is_closed_alone(connect: Connect) -> None:
    bus = connect()
    commands, protocol = Heard(bus, topic="commands"), Heard(bus)
    bus.broadcast(b"1", "commands")
    commands.wait(1)
    commands.subscription.close()
    again = Heard(bus, topic="commands")
    bus.broadcast(b"2", "commands")
    bus.broadcast(b"3")
    assert again.wait(1) == [b"2"]
    assert protocol.wait(1) == [b"3"]
    assert commands.messages == [b"1"]
    assert not commands.lost


@pytest.mark.one_in(3)
def test_overrun_in_one_topic_leaves_the_others_working(connect: Connect) -> None:
    bus = connect()
    release = threading.Event()
    slow = Heard(bus, lambda payload: release.wait(60) and None, topic="progress")
    protocol = Heard(bus)
    try:
        for number in range(2 * RING_MESSAGES + 10):  # a listener may have taken some in advance
            bus.broadcast(b"%d" % number, "progress")
        bus.broadcast(b"decided")
        assert protocol.wait(1) == [b"decided"]
    finally:
        release.set()
    assert isinstance(slow.wait_lost(), BusOverrun)
    assert not protocol.lost


def test_keys_of_a_topic_without_listeners_stay_bounded(connect: Connect) -> None:
    bus = connect()
    before = bus.key_count()
    for number in range(RING_MESSAGES + 100):
        bus.broadcast(b"%d" % number, "progress")
    assert bus.key_count() <= before + RING_MESSAGES + 4
    assert bus.key_count(messages=False) <= before + 4


def test_a_topic_that_is_none_is_refused(connect: Connect) -> None:
    bus = connect()
    for attempt in (
        lambda: bus.broadcast(b"", "weather"),  # type: ignore[arg-type]
        lambda: bus.subscribe(lambda p: None, lambda e: None, "weather"),  # type: ignore[arg-type]
    ):
        with pytest.raises(BusError, match=r"no topic 'weather'.*protocol, commands, progress"):
            attempt()


def test_messages_are_any_bytes_up_to_the_limit(connect: Connect) -> None:
    bus = connect()
    listener = Heard(bus)
    sent = [b"", ANY_BYTES, b"x" * MAX_MESSAGE_BYTES]
    for payload in sent:
        bus.broadcast(payload)
    assert listener.wait(3) == sent


def test_too_long_is_refused_with_the_limit(connect: Connect) -> None:
    bus = connect()
    long = b"x" * (MAX_MESSAGE_BYTES + 1)
    for attempt in (
        lambda: bus.broadcast(long),
        lambda: bus.send("i", long),
        lambda: bus.compare_set("k", None, long),
        lambda: bus.ballot("s", "t", long, 1),
    ):
        with pytest.raises(BusError, match=str(MAX_MESSAGE_BYTES)):
            attempt()
    assert bus.read("k") is None


def test_bad_names_are_refused(connect: Connect) -> None:
    bus = connect()
    with pytest.raises(BusError, match="key must be"):
        bus.read("")
    with pytest.raises(BusError, match="tag must be"):
        bus.ballot("s", "t" * 300, b"", 1)
    with pytest.raises(BusError, match="at least one voter"):
        bus.ballot("s", "t", b"", 0)


@pytest.mark.parametrize("inbox", [None, "mine"])
def test_a_listener_that_raises_lives_on(
    connect: Connect, caplog: pytest.LogCaptureFixture, inbox: str | None
) -> None:
    def fail(payload: bytes) -> None:
        if payload == b"bad":
            raise ValueError("cannot read this")

    bus = connect()
    listener = Heard(bus, fail, inbox)
    for payload in (b"bad", b"good"):
        bus.broadcast(payload) if inbox is None else bus.send(inbox, payload)
    assert listener.wait(2) == [b"bad", b"good"]
    assert "cannot read this" in caplog.text


def test_inbox_keeps_messages_sent_before_a_listener_subscribes(connect: Connect) -> None:
    sender, receiver = connect(), connect()
    sent = [b"", ANY_BYTES, b"x" * MAX_MESSAGE_BYTES]
    for payload in sent:
        sender.send("mine", payload)
    sender.send("other", b"not for me")
    sender.next_number("sent")  # its answer shows that everything has arrived
    listener = Heard(receiver, inbox="mine")
    assert listener.wait(3) == sent
    sender.send("mine", b"later")
    receiver.send("mine", b"to myself")
    assert sorted(listener.wait(5)[3:]) == [b"later", b"to myself"]
    assert Heard(connect(), inbox="other").wait(1) == [b"not for me"]


@pytest.mark.one_in(3)
def test_inbox_receives_messages_of_many_senders_in_order_and_once(connect: Connect) -> None:
    names, count = "abcdefgh", 125
    listener = Heard(connect(), inbox="mine")
    broadcasts = Heard(connect())
    clients = {name: connect() for name in names}

    def send(name: str) -> None:
        for number in range(count):
            clients[name].send("mine", f"{name}:{number}".encode())

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(send, names))
    messages = listener.wait(len(names) * count)
    for name in names:
        assert by_writer(messages, name) == list(range(count))
    clients["a"].broadcast(b"for all")
    assert broadcasts.wait(1) == [b"for all"]
    assert len(listener.messages) == len(names) * count


@pytest.mark.one_in(3)
def test_an_inbox_waits_for_a_slow_listener_without_a_bound(connect: Connect) -> None:
    bus = connect()
    release = threading.Event()
    slow = Heard(connect(), lambda payload: release.wait(60) and None, "mine")
    count = 2 * RING_MESSAGES
    for number in range(count):
        bus.send("mine", b"%d" % number)
    release.set()
    assert slow.wait(count) == [b"%d" % number for number in range(count)]


def test_deleted_inbox_loses_its_messages(connect: Connect) -> None:
    bus = connect()
    bus.send("mine", b"first")
    bus.delete("mine")
    before = bus.key_count()  # includes bookkeeping that the first use creates
    for number in range(100):
        bus.send("mine", b"%d" % number)
    bus.delete("mine")
    bus.delete("mine")
    assert bus.key_count() == before
    bus.send("mine", b"after")
    assert Heard(connect(), inbox="mine").wait(1) == [b"after"]
    bus.delete("mine")
    assert bus.key_count() == before


def test_closed_inbox_receives_no_further_messages(connect: Connect) -> None:
    bus = connect()
    listener = Heard(bus, inbox="mine")
    bus.send("mine", b"1")
    listener.wait(1)
    start = time.monotonic()
    listener.subscription.close()
    listener.subscription.close()
    assert time.monotonic() - start < NOISE_S
    bus.send("mine", b"2")
    assert bus.next_number("n") == 1
    assert listener.messages == [b"1"]
    assert not listener.lost


def test_an_inbox_may_be_closed_from_its_callback(connect: Connect) -> None:
    bus = connect()
    ready = threading.Event()

    def close(payload: bytes) -> None:
        assert ready.wait(10)
        listener.subscription.close()

    listener = Heard(bus, close, "mine")
    bus.send("mine", b"1")
    bus.send("mine", b"2")
    ready.set()
    assert listener.wait(1) == [b"1"]
    bus.close()
    assert listener.messages == [b"1"]
    assert not listener.lost


def test_closed_subscription_receives_no_further_messages(connect: Connect) -> None:
    bus = connect()
    closed, open_still = Heard(bus), Heard(bus)
    bus.broadcast(b"1")
    closed.wait(1)
    closed.subscription.close()
    closed.subscription.close()
    bus.broadcast(b"2")
    open_still.wait(2)
    assert closed.messages == [b"1"]
    assert not closed.lost


def test_subscription_may_be_closed_from_its_callback(connect: Connect) -> None:
    bus = connect()
    other = Heard(bus)
    listener = Heard(bus, lambda payload: listener.subscription.close())
    bus.broadcast(b"1")
    bus.broadcast(b"2")
    other.wait(2)
    assert listener.wait(1) == [b"1"]
    assert not listener.lost


def test_listener_that_falls_behind_gets_bus_overrun(connect: Connect) -> None:
    bus = connect()
    release = threading.Event()
    slow = Heard(bus, lambda payload: release.wait(60) and None)
    count = 2 * RING_MESSAGES + 100  # more than the bus and the queue of the slow one hold
    credit = threading.Semaphore(500)  # the fast one must not fall behind, too
    quick = Heard(connect(), lambda payload: credit.release())
    try:
        for number in range(count):
            assert credit.acquire(timeout=20)
            bus.broadcast(b"%d" % number)
        quick.wait(count)
    finally:
        release.set()
    error = slow.wait_lost()
    assert isinstance(error, BusOverrun)
    received = [int(m) for m in slow.messages]
    assert received == list(range(len(received))), "before the loss nothing was left out"
    bus.broadcast(b"later")
    quick.wait(count + 1)
    assert slow.lost == [error]
    assert b"later" not in slow.messages


def test_register(connect: Connect) -> None:
    a, b = connect(), connect()
    assert a.read("k") is None
    assert a.compare_set("k", None, b"") == b""
    assert b.read("k") == b""
    assert b.compare_set("k", None, b"other") == b""
    assert b.compare_set("k", b"wrong", b"other") == b""
    assert b.compare_set("k", b"", ANY_BYTES) == ANY_BYTES
    assert a.read("k") == ANY_BYTES
    assert a.compare_set("k", ANY_BYTES, ANY_BYTES) == ANY_BYTES
    a.delete("k")
    assert b.read("k") is None
    a.delete("k")


@pytest.mark.parametrize("desired", [b"new", b"old"])
def test_a_register_that_is_gone_is_no_win(connect: Connect, desired: bytes) -> None:
    bus = connect()
    with pytest.raises(BusForgot, match="'k'"):
        bus.compare_set("k", b"old", desired)
    assert bus.read("k") is None


def test_only_the_winner_announces_a_decision(connect: Connect) -> None:
    a, b = connect(), connect()
    received = [Heard(a), Heard(b)]
    assert a.decide("k", None, b"1", b"one") == b"1"
    assert b.decide("k", None, b"2", b"lost") == b"1"
    assert b.decide("k", b"1", b"2", b"two") == b"2"
    with pytest.raises(BusForgot, match="'gone'"):
        a.decide("gone", b"1", b"2", b"forgotten")
    b.broadcast(b"end")
    for listener in received:
        listener.wait(3)
        assert listener.messages == [b"one", b"two", b"end"]


def test_compare_set_has_one_winner_seen_by_all_clients(connect: Connect) -> None:
    clients = [connect() for _ in range(6)]
    start = threading.Barrier(len(clients))

    def chain(me: int) -> list[bytes]:
        """Extend the register 50 times; a loser continues from the winner's value."""
        held: bytes | None = None
        seen = []
        for number in range(50):
            start.wait(20)
            held = clients[me].compare_set("head", held, b"%d by %d" % (number, me))
            assert held is not None
            seen.append(held)
            start.wait(20)
            assert clients[me].read("head") == held
        return seen

    with ThreadPoolExecutor(len(clients)) as pool:
        seen = list(pool.map(chain, range(len(clients))))
    assert all(one == seen[0] for one in seen)


def test_compare_set_loses_no_update(connect: Connect) -> None:
    clients = [connect() for _ in range(4)]
    clients[0].compare_set("sum", None, b"0 -")

    def add(me: int) -> None:
        for number in range(50):
            held = clients[me].read("sum")
            while True:
                assert held is not None
                total = int(held.split()[0])
                mine = b"%d %d.%d" % (total + 1, me, number)
                after = clients[me].compare_set("sum", held, mine)
                if after == mine:
                    break
                held = after

    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(add, range(len(clients))))
    held = clients[0].read("sum")
    assert held is not None
    assert held.split()[0] == b"200"


def test_ballot_last_voter_gets_all(connect: Connect) -> None:
    clients = [connect() for _ in range(4)]
    start = threading.Barrier(len(clients))

    def vote(me: int, slot: int) -> list[bytes] | None:
        start.wait(20)
        return clients[me].ballot(f"slot{slot}", "t", b"%d" % me, len(clients))

    with ThreadPoolExecutor(len(clients)) as pool:
        for slot in range(50):
            results = list(pool.map(lambda me, s=slot: vote(me, s), range(len(clients))))
            full = [r for r in results if r is not None]
            assert full, "nobody got the votes"
            assert all(r == full[0] for r in full)
            assert sorted(full[0]) == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("voters", [16, 64])
def test_a_large_ballot_is_complete_for_its_last_voter(connect: Connect, voters: int) -> None:
    clients = [connect() for _ in range(4)]
    for round in range(5):
        results = []
        with ThreadPoolExecutor(len(clients)) as pool:

            def vote(me: int, round: int = round) -> list[bytes] | None:
                return clients[me % 4].ballot("slot", f"t{round}", b"%d" % me, voters)

            results = list(pool.map(vote, range(voters)))
        full = [r for r in results if r is not None]
        assert full
        for votes in full:
            assert sorted(votes) == sorted(b"%d" % me for me in range(voters))


def test_a_vote_may_count_for_many(connect: Connect) -> None:
    a, b = connect(), connect()
    assert a.ballot("s", "t", b"group of 8", 17, weight=8) is None
    assert b.ballot("s", "t", b"alone", 17) is None
    assert b.ballot("s", "other", b"not counted", 17, weight=16) is None
    assert a.ballot("s", "t", b"another 8", 17, weight=8) == [b"group of 8", b"alone", b"another 8"]
    with pytest.raises(BusError, match="counts for 1 to"):
        a.ballot("s", "t", b"", 1, weight=0)


def test_a_vote_cast_twice_never_hides_a_ballot(connect: Connect) -> None:
    """The count runs ahead, so the list comes early; the last voter gets it nevertheless."""
    bus = connect()
    assert bus.ballot("s", "t", b"a", 3) is None
    assert bus.ballot("s", "t", b"a", 3) is None
    assert bus.ballot("s", "t", b"b", 3) == [b"a", b"a", b"b"]
    assert bus.ballot("s", "t", b"c", 3) == [b"a", b"a", b"b", b"c"]


def test_reused_ballots_leave_no_keys(connect: Connect) -> None:
    bus = connect()
    before = bus.key_count()
    for txn in range(300):
        slot = f"ballot{txn % 4}"
        bus.delete(slot)
        assert bus.ballot(slot, f"late.{txn - 8}", b"late", 2) is None
        assert bus.ballot(slot, f"1.{txn}", b"a", 2) is None
        assert bus.ballot(slot, f"1.{txn}", b"b", 2) == [b"a", b"b"]
    for slot in range(4):
        bus.delete(f"ballot{slot}")
    assert bus.key_count() == before


def test_ballot_order_tags_and_bytes(connect: Connect) -> None:
    bus = connect()
    long = b"\xff" * MAX_MESSAGE_BYTES
    assert bus.ballot("s", "old", ANY_BYTES, 2) is None
    assert bus.ballot("s", "new", b"", 2) is None
    assert bus.ballot("s", "newer", b"alone", 1) == [b"alone"]
    assert bus.ballot("s", "new", long, 2) == [b"", long]
    assert bus.ballot("s", "old", b"late", 2) == [ANY_BYTES, b"late"]
    assert bus.ballot("s", "old", b"third", 2) == [ANY_BYTES, b"late", b"third"]
    bus.delete("s")
    assert bus.ballot("s", "old", b"fresh", 2) is None


def test_write(connect: Connect) -> None:
    a, b = connect(), connect()
    a.write("k", ANY_BYTES)
    assert b.read("k") == ANY_BYTES
    b.write("k", b"")
    assert a.read("k") == b""
    long = b"z" * MAX_VALUE_BYTES
    a.write("k", long)
    assert b.read("k") == long
    with pytest.raises(BusError, match=str(MAX_VALUE_BYTES)):
        a.write("k", long + b"z")
    assert a.read("k") == long
    a.delete("k")
    assert b.read("k") is None


def test_numbers_are_unique_and_without_gaps(connect: Connect) -> None:
    clients = [connect() for _ in range(4)]

    def take(me: int) -> list[int]:
        return [clients[me].next_number("n") for _ in range(200)]

    with ThreadPoolExecutor(len(clients)) as pool:
        taken = list(pool.map(take, range(len(clients))))
    assert sorted(number for one in taken for number in one) == list(range(1, 801))
    assert all(one == sorted(one) for one in taken)
    assert clients[0].next_number("other") == 1


def test_the_three_kinds_do_not_mix(connect: Connect) -> None:
    bus = connect()
    assert bus.next_number("x") == 1
    assert bus.read("x") is None
    assert bus.compare_set("x", None, b"7") == b"7"
    assert bus.next_number("x") == 2
    assert bus.ballot("x", "t", b"v", 1) == [b"v"]
    assert bus.read("x") == b"7"
    for gone in range(3):
        bus.delete("x")
        assert (bus.read("x") is None) == (gone >= 1)
    assert bus.next_number("x") == 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize("messages", [4_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_keys_stay_bounded_over_many_messages(connect: Connect, share: int, messages: int) -> None:
    count, writers = messages // share, 3
    credit = threading.Semaphore(RING_MESSAGES // 2)  # paced by the listener
    listener = Heard(connect(), lambda payload: credit.release())
    clients = [connect() for _ in range(writers)]
    before = clients[0].key_count()
    most = [0] * writers

    def write(me: int) -> None:
        for number in range(me, count, writers):
            assert credit.acquire(timeout=30)
            clients[me].broadcast(b"%d:%d" % (me, number))
            if number % 1000 < writers:
                most[me] = max(most[me], clients[me].key_count())

    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(write, range(writers)))
    messages = listener.wait(count, 30)
    assert len(messages) == count
    for me in range(writers):
        assert by_writer(messages, str(me)) == list(range(me, count, writers))
    assert max(most) <= before + RING_MESSAGES + 4 * writers
    assert clients[0].key_count() <= before + RING_MESSAGES


@pytest.mark.parametrize("decisions", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_keys_stay_bounded_over_many_decisions(
    connect: Connect, share: int, decisions: int
) -> None:
    bus = connect()
    assert bus.compare_set("head", None, b"start") == b"start"
    held: bytes | None = b"start"
    bus.ballot("step", "warm", b"", 1)
    bus.delete("step")
    before = bus.key_count()
    for step in range(decisions // share):
        assert bus.ballot(f"step{step}", "t", b"yes", 1) == [b"yes"]
        desired = b"commit %d" % step
        assert (held := bus.compare_set("head", held, desired)) == desired
        bus.delete(f"step{step}")
    assert bus.key_count() == before


def test_close_is_final_and_idempotent(connect: Connect) -> None:
    bus = connect()
    listener, inbox = Heard(bus), Heard(bus, inbox="mine")
    bus.close()
    bus.close()
    listener.subscription.close()
    inbox.subscription.close()
    operations: list[Callable[[], object]] = [
        lambda: bus.broadcast(b""),
        lambda: bus.subscribe(lambda payload: None, lambda error: None),
        lambda: bus.send("i", b""),
        lambda: bus.listen("i", lambda payload: None, lambda error: None),
        lambda: bus.write("k", b""),
        lambda: bus.read("k"),
        lambda: bus.compare_set("k", None, b""),
        lambda: bus.ballot("s", "t", b"", 1),
        lambda: bus.next_number("n"),
        lambda: bus.delete("k"),
        bus.key_count,
    ]
    for operation in operations:
        with pytest.raises(BusClosed):
            operation()
    assert not listener.lost, "closing one's own bus is no loss"
    assert not inbox.lost


def test_generation_identifies_one_lifetime_of_the_bus(connect: Connect, url: str) -> None:
    bus = connect()
    with open_bus(url, generation=bus.generation) as again:
        assert again.generation == bus.generation
    with pytest.raises(BusForgot, match="come back empty"):
        open_bus(url, generation="another")


@pytest.mark.parametrize(
    "bad",
    [
        "memory://",
        "memory://a b",
        "nats://127.0.0.1:4222",
        "nats://127.0.0.1/job",
        "nats://127.0.0.1:4222,127.0.0.1/job",
        "nats://127.0.0.1:4222/a b",
        "nats://127.0.0.1:4222/job?x=1",
        "tls://:4222/job",
        "127.0.0.1:4222",
        "tcp://127.0.0.1:4222",
        "tcp://127.0.0.1:4222/",
        "tcp://127.0.0.1:4222/a/b",
        "tcp://127.0.0.1:4222/" + "j" * 65,
        "tcp://127.0.0.1/job",
        "tcp://:4222/job",
        "tcp://127.0.0.1:99999/job",
        "tcp://127.0.0.1:0/job",
        "tcp://127.0.0.1:4222/job?x=1",
    ],
)
def test_bad_urls_name_themselves_and_the_fix(bad: str) -> None:
    with pytest.raises(BusError) as caught:
        open_bus(bad)
    assert repr(bad) in str(caught.value)
    assert "://" in str(caught.value).replace(bad, "")

"""Tests of jobs of engines in one process, on real buses: the load on the bus, and the remaining
keys."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from engine_job import LIMIT_S, SPEC, EngineJob, Nothing, Rank
from nats_servers import NatsServers
from specs import table_of
from waiting import wait_until

from fft.bus import ErrorBus, Subscription, open_bus, serve_tcp
from fft.bus.base import HEAD, RING_MESSAGES, Topic
from fft.bus.memory import MemoryBus
from fft.bus.sealed import SealedBus
from fft.bus.token import JobToken
from fft.engine.calls import Buses, Publish
from fft.engine.core import EngineCore
from fft.engine.loop import Command, Engine
from fft.errors import BusError
from fft.messages.causes import Cause, LeaveReason
from fft.messages.commands import Evict, encode_command
from fft.messages.effects import Broadcast, Decide, Heal, Restore, SetTimer
from fft.messages.exits import decode_exit, exit_register
from fft.messages.protocol import (
    Begin,
    Drain,
    GroupEntry,
    Healed,
    Peer,
    RankEntry,
    Record,
    Stop,
    Token,
    encode,
)
from fft.messages.wire import (
    Packed,
    Wire,
    decode,
    decode_packed,
    encode_register,
    inbox_name,
    list_name,
)
from fft.protocol.participant import Participant
from fft.protocol.state import Config
from fft.trace.report import RunReport
from fft.trace.writer import TraceWriter


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["memory", "tcp", pytest.param("nats", marks=pytest.mark.long)])
def url(request: pytest.FixtureRequest, stack: ExitStack) -> str:
    if request.param == "memory":
        return f"memory://engine-{uuid.uuid4().hex}"
    if request.param == "nats":
        return stack.enter_context(NatsServers()).url
    return stack.enter_context(serve_tcp()).url


class Counted(MemoryBus):
    """A bus that records the voters in the job's ballots and their weights."""

    votes: list[tuple[str, int]]

    def ballot(
        self, slot: str, tag: str, vote: bytes, voters: int, weight: int = 1
    ) -> list[bytes] | None:
        self.votes.append((tag, weight))
        return super().ballot(slot, tag, vote, voters, weight)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_trains_and_its_keys_stay_bounded(stack: ExitStack, url: str, ranks: int) -> None:
    job = EngineJob(stack, url, 2, ranks).start()
    job.train(12)
    watch = job.open()
    before = watch.key_count()
    job.train(120)
    steps = [[r.step for r in m.committed] for m in job.members]
    assert steps == [list(range(1, 121))] * (2 * ranks)
    # the ring of messages grows to its own bound; ballots and registers do not grow
    assert watch.key_count() <= before + 108 * 2 + 4
    for member in job.members:
        assert member.group_bus is None or member.group_bus.key_count() <= 1 + 2 * 8


def test_group_votes_with_one_message(stack: ExitStack) -> None:
    Counted.votes = []
    name = f"engine-{uuid.uuid4().hex}"
    job = EngineJob(stack, f"memory://{name}", 3, 4, lambda _: Counted(name)).start()
    job.train(20)
    assert [m.restored for m in job.members] == [0] * 12
    by_tag: dict[str, list[int]] = {}
    for tag, weight in Counted.votes:
        by_tag.setdefault(tag, []).append(weight)
    assert by_tag.pop("1.1") == [1] * 12
    assert all(weights == [4, 4, 4] for weights in by_tag.values())
    assert len(by_tag) >= 19


def test_ranks_vote_apart_when_the_store_of_their_group_is_gone(stack: ExitStack, url: str) -> None:
    job = EngineJob(stack, url, 2, 2).start()
    job.train(5)
    job.stores["0"].close()
    job.train(15)
    assert [m.restored for m in job.members] == [0] * 4


def test_one_rank_without_the_bus_of_its_group_costs_one_timeout(
    stack: ExitStack, url: str
) -> None:
    job = EngineJob(stack, url, 2, 2).start(vote_window=2.0)
    job.train(5)
    odd = job.members[0]
    assert odd.group_bus is not None
    odd.group_bus.close()
    job.train(12)
    assert odd.committed[-1].epoch == 2, "a step is aborted and repeated; then all vote apart"


def test_rank_replaced_after_undecided_rollback_votes_with_its_group(
    stack: ExitStack,
) -> None:
    """The replacement has not seen that rollback, and the rank that stayed has."""
    job = EngineJob(stack, f"memory://engine-{uuid.uuid4().hex}", 2, 2)
    windows = {"vote_window": 1.0, "ack_window": 0.5, "reform_window": 0.2}
    job.start(**windows)
    job.train(3)
    stayed, lost, *others = job.members
    lost.bus.close()  # as if its process were killed, and nothing noticed it
    job.members.remove(lost)
    for member in (stayed, *others):
        member.train(6)
    wait_until(lambda: all(m.committed[-1].step == 6 for m in others), "the others go on")
    assert [m.engine.local.epoch.epoch for m in others if m.engine.local.epoch] == [2, 2]
    job.start_rank(Peer("0", 1, 2), **windows)
    job.train(12)
    assert [m.committed[-1].epoch for m in job.members] == [3, 3, 3, 3]


def test_a_commit_is_announced_once(stack: ExitStack, url: str) -> None:
    """The operation that decides a commit announces it, and the winner does not announce it
    again."""
    job = EngineJob(stack, url, 3, 1).start()
    received: list[int] = []

    def hear(payload: bytes) -> None:
        event = decode(payload)
        if isinstance(event, Packed) and event.record.kind == "commit":
            received.append(event.record.step)

    job.open().subscribe(hear, lambda error: None)
    job.train(10)
    wait_until(lambda: 10 in received, "the last commit is heard")
    assert received[: received.index(10)] == list(range(received[0], 10))


def test_message_to_one_participant_is_received_by_it_alone(stack: ExitStack, url: str) -> None:
    """The acknowledgements of a rollback reach the participant that gathers them, and no other
    reads them."""
    job = EngineJob(stack, url, 3, 1).start(vote_window=0.3)
    job.train(3)
    slow = job.members[1:]
    for member in job.members[:1]:
        member.train(4)  # votes, waits in vain, and proposes ABORT
    wait_until(lambda: all(m.restored == 1 for m in job.members), "all have rolled back")
    for member in slow:
        member.train(4)
    job.train(6)


def inbox_holds(url: str, peer: Peer) -> list[bytes]:
    """Return the contents of an inbox.

    Listening removes them; the last message is the test's own.
    """
    received: list[bytes] = []
    end = threading.Event()

    def hear(payload: bytes) -> None:
        end.set() if payload == b"end" else received.append(payload)

    with open_bus(url) as bus:
        bus.listen(inbox_name(peer), hear, lambda error: end.set())
        bus.send(inbox_name(peer), b"end")
        assert end.wait(LIMIT_S)
        bus.delete(inbox_name(peer))
    return received


def test_inboxes_of_departed_peers_are_removed(stack: ExitStack, url: str) -> None:
    job = EngineJob(stack, url, 3, 1).start(ack_window=0.3)
    job.train(3)
    gone = job.members.pop()
    gone.engine.close()
    gone.thread.join(LIMIT_S)
    with open_bus(url) as bus:
        bus.send(inbox_name(gone.peer), b"too late")
    job.train(8)
    # the participant that formed the epoch removes it after its commit, so the next epoch comes
    # later
    assert inbox_holds(url, gone.peer) == []


def test_new_process_of_an_identity_removes_the_previous_inbox(stack: ExitStack, url: str) -> None:
    with open_bus(url) as bus:
        bus.send(inbox_name(Peer("0", 0, 1)), b"unheard")
        job = EngineJob(stack, url, 1, 1)
        job.start_group("0", inc=2)
        job.train(2)
        assert inbox_holds(url, Peer("0", 0, 1)) == []


def test_engine_without_the_member_list_reads_the_list(stack: ExitStack, url: str) -> None:
    job = EngineJob(stack, url, 2, 1).start(vote_window=0.3)
    job.train(2)
    watch = job.open()
    first = job.members[0].engine.local.epoch
    assert first is not None
    assert watch.read(list_name(first)) == encode_register(first.members)
    job.members[0].train(3)  # rolled back: an epoch with the same members
    wait_until(lambda: all(m.restored for m in job.members), "rolled back")
    job.train(4)
    second = job.members[0].engine.local.epoch
    assert second is not None
    assert second.epoch > first.epoch
    assert second.members == first.members
    lists = [watch.read(list_name(r)) for r in {list_name(r): r for r in (first, second)}.values()]
    assert [data for data in lists if data] == [encode_register(second.members)]


def test_a_list_that_is_nowhere_is_a_bus_that_forgot(
    stack: ExitStack, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = EngineJob(stack, url, 1, 1).start()
    job.train(2)
    former = job.members[0]
    record = former.engine.local.epoch
    assert record is not None
    later = Record(99, "epoch", 9, 0, 2, "l", 2, 2, Peer("9", 0, 1), record.members)
    watch = job.open()
    watch.write(HEAD, Wire().encode_record(later))
    newcomer = Rank(job, Peer("5", 0, 1), bus_limit=1.0, bus_retry=0.1)
    stack.callback(newcomer.engine.close)
    wait_until(lambda: newcomer.ended is not None, "it gives up")
    assert newcomer.ended is not None
    assert newcomer.ended.error == "InDoubt"
    assert re.search(r"register 'members/9/0/1/1/[0-9a-f]+' is empty", caplog.text)


class LosesAnswers(MemoryBus):
    """A bus on which the first proposed epoch takes effect, but the answer is lost."""

    lost = False

    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        held = super().compare_set(key, expected, desired)
        if not LosesAnswers.lost:
            LosesAnswers.lost = True
            raise BusError("no answer")
        return held


def test_a_second_attempt_does_not_take_the_list_of_the_first(stack: ExitStack) -> None:
    """The first attempt may have won, so its list must exist for participants that read that
    record."""
    LosesAnswers.lost = False
    bus = stack.enter_context(LosesAnswers(f"engine-{uuid.uuid4().hex}"))
    core, buses = core_of(Peer("0", 0, 1)), Buses(bus)
    first, second, third = record(1, "0"), record(1, "0", "1"), record(2, "0")
    buses.run(core._use_bus(Decide(None, first)))
    buses.run(core._use_bus(Decide(None, second)))
    packed = decode_packed(bus.read(HEAD) or b"")
    assert Wire().complete(packed, bus.read(list_name(packed))) == first
    buses.run(core._use_bus(Decide(first, third)))
    assert bus.read(list_name(second)) is None, "that of the attempt that lost is removed"
    assert bus.read(list_name(third)) == encode_register(third.members)
    assert bus.key_count() == 2, "the head, and the list of the epoch"


def test_engine_keeps_a_command_that_replaces_the_one_being_taken() -> None:
    with MemoryBus(f"engine-{uuid.uuid4().hex}") as bus:
        config = Config(Peer("0", 0, 1), 1, "s:1", "t", 1, "h", SPEC.timeouts)
        participant, trace = Participant(table_of(SPEC), config), TraceWriter(None, config.me)
        engine = Engine(participant, participant.initial(), Buses(bus), trace, Nothing())
        first, second = (Restore(Token(1, txn), Cause()) for txn in (1, 2))
        engine.put(first)
        taken = engine.wait_command(limit=0.0)
        engine.put(second)  # by the engine thread, before the main thread takes the first one
        engine.take(taken)
        assert taken is first and engine.wait_command(limit=0.0) is second
        engine.take(second)
        assert not engine.has_command()
        engine.put(first)
        engine.put(Restore(first.token, Cause()))  # equal, and another command
        engine.take(first)
        assert engine.has_command()


def core_of(peer: Peer) -> EngineCore:
    """Return an engine without a thread and a bus."""
    config = Config(peer, 1, "s:1", "t", 1, "h", SPEC.timeouts)
    participant, host = Participant(table_of(SPEC), config), Nothing()
    return EngineCore(participant, participant.initial(), host, host, TraceWriter(None, peer))


class MovesOn(MemoryBus):
    """A bus whose job forms another epoch while a reader looks for the members of the last one."""

    def read(self, key: str) -> bytes | None:
        if key == list_name(OLD):
            super().write(list_name(NEW), encode_register(NEW.members))
            super().write(HEAD, Wire().encode_record(NEW))
            super().delete(list_name(OLD))
        return super().read(key)


def record(number: int, *groups: str) -> Record:
    entries = tuple(
        GroupEntry(g, f"s{g}:1", (RankEntry(0, 1, True, f"t{g}", 1, "h"),)) for g in groups
    )
    return Record(number, "epoch", number, 0, 0, "l", 0, 0, Peer("0", 0, 1), entries)


OLD, NEW = record(1, "0", "1"), record(2, "0", "1", "7")


def test_members_of_an_epoch_that_has_ended_are_not_missed(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"engine-{uuid.uuid4().hex}"
    job = EngineJob(stack, f"memory://{name}", 2, 1, lambda _: MovesOn(name))
    with open_bus(job.url) as bus:
        bus.write(HEAD, Wire().encode_record(OLD))
        bus.write(list_name(OLD), encode_register(OLD.members))
        newcomer = Rank(job, Peer("5", 0, 1))
        stack.callback(newcomer.engine.close)
        wait_until(lambda: newcomer.engine.local.head is not None, "it has the head")
        assert newcomer.engine.local.head == NEW
        assert "on the bus failed" not in caplog.text


class Unheard(MemoryBus):
    """A bus on which the second subscription fails."""

    def subscribe(
        self,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
        topic: Topic = "protocol",
    ) -> Subscription:
        raise BusError("no place")


def test_an_engine_that_cannot_listen_leaves_nothing() -> None:
    threads = set(threading.enumerate())
    with Unheard(f"engine-{uuid.uuid4().hex}") as bus:
        config = Config(Peer("0", 0, 1), 1, "s:1", "t", 1, "h", SPEC.timeouts)
        participant = Participant(table_of(SPEC), config)
        trace = TraceWriter(None, config.me)
        engine = Engine(participant, participant.initial(), Buses(bus), trace, Nothing())
        with pytest.raises(BusError, match="no place"):
            engine.start()
        engine.close()
        assert bus.key_count() == 0
    assert set(threading.enumerate()) <= threads


def test_report_reads_the_trace_of_an_engine_that_dropped_a_message(tmp_path: Path) -> None:
    name = f"engine-{uuid.uuid4().hex}"
    config = Config(Peer("0", 0, 1), 1, "s:1", "t", 1, "h", SPEC.timeouts)
    participant, trace = Participant(table_of(SPEC), config), TraceWriter(tmp_path, config.me)
    with (
        MemoryBus(name) as other_job,
        SealedBus(MemoryBus(name), JobToken.fresh(), who="a test") as bus,
        closing(Engine(participant, participant.initial(), Buses(bus), trace, Nothing())) as e,
    ):
        e.start()
        other_job.broadcast(encode(Drain(("1",), "a test")))
        wait_until(lambda: bus.refusals() == {"unsealed": 1}, "the message is dropped")
    trace.close()
    assert trace.path is not None and '"unsealed"' in trace.path.read_text()
    assert RunReport(tmp_path).refusals() is None


def test_a_job_outlives_a_silence_of_its_bus(stack: ExitStack) -> None:
    """The silence is longer than any operation waits; operations are abandoned, and retried
    later."""
    servers = stack.enter_context(NatsServers())
    # the bus is lost for good after four of these, which a busy machine must not use up
    job = EngineJob(stack, servers.url, 2, 1, lambda url: open_bus(url, timeout=5.0)).start()
    job.train(5)
    servers.stop(0)
    try:
        for member in job.members:
            member.train(10)
        wait_until(
            lambda: all("bus_limit" in m.engine.local.timers for m in job.members), "all are told"
        )
    finally:
        servers.stop(0, stopped=False)
    job.train(10)
    assert [m.ended for m in job.members] == [None] * 2
    assert len({m.committed[-1].lineage for m in job.members}) == 1


def test_message_in_the_wrong_topic_is_ignored(stack: ExitStack) -> None:
    name = f"engine-{uuid.uuid4().hex}"
    job = EngineJob(stack, f"memory://{name}", 1, 1).start()
    job.train(1)
    (member,) = job.members
    outside = stack.enter_context(MemoryBus(name))
    outside.broadcast(encode(Drain(("0",), "me")), "commands")
    outside.broadcast(encode_command(Evict("0" * 8, "0", "me")))
    wait_until(lambda: member.engine.unreadable == 2, "both were counted")
    job.train(3)
    assert member.ended is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_one_rank_skips_is_skipped_by_all(
    stack: ExitStack, url: str, ranks: int
) -> None:
    job = EngineJob(stack, url, 2, ranks).start()
    job.train(2)
    job.members[0].says = lambda start: {"skip": start.token == (1, 4)}
    job.train(6)
    assert [m.skipped for m in job.members] == [[(1, 4)]] * len(job.members)
    for member in job.members:
        steps = [(r.txn, r.step, r.cursor, r.batches, r.skip) for r in member.committed[2:5]]
        assert steps == [(3, 3, 6, 6, False), (4, 3, 8, 6, True), (5, 4, 10, 8, False)]
    assert [m.restored for m in job.members] == [0] * len(job.members)


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_that_differ_are_not_committed_and_end_the_job(
    stack: ExitStack, url: str, ranks: int
) -> None:
    job = EngineJob(stack, url, 2, ranks).start()
    for member in job.members:
        member.says = lambda start, rank=member.peer.rank: {"digest": f"{start.lineage}{rank}"}
    job.train(3)
    odd = job.members[-1]
    odd.says = lambda start: {"digest": "0dd"}
    for member in job.members:
        member.train(5)
    wait_until(lambda: all(m.ended for m in job.members), "all end")
    for member in job.members:
        assert member.ended is not None and member.ended.error == "Diverged"
        assert f"replicas differ after step 3: rank {odd.peer.rank}: " in member.ended.reason
        assert f"0dd on {odd.peer}" in member.ended.reason
        assert member.committed[-1].step == 3


def test_divergent_rank_of_three_fetches_the_majority_state(stack: ExitStack, url: str) -> None:
    job = EngineJob(stack, url, 3, 1)
    job.on_divergence = "heal"
    job.start()
    job.train(3)
    odd = job.members[1]
    for member in job.members:
        member.says = lambda start: {"digest": start.lineage}
    odd.says = lambda start: {"digest": "0dd" if odd.fetched == 0 else start.lineage}
    job.train(6)
    assert [m.fetched for m in job.members] == [0, 1, 0]
    assert [m.restored for m in job.members] == [1, 1, 1]
    assert [m.ended for m in job.members] == [None] * 3


class DeafToCommands(MemoryBus):
    """A bus that loses every listener of commands."""

    def subscribe(
        self,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
        topic: Topic = "protocol",
    ) -> Subscription:
        if topic == "commands":
            threading.Thread(target=on_lost, args=(BusError("deaf"),)).start()
        return super().subscribe(on_message, on_lost, topic)


def test_engine_without_the_command_topic_keeps_training(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"engine-{uuid.uuid4().hex}"
    job = EngineJob(stack, f"memory://{name}", 2, 1, lambda _: DeafToCommands(name)).start()
    job.train(5)
    wait_until(
        lambda: caplog.text.count("no longer receives the topic commands: deaf") == 2,
        "both have said so",
    )
    job.train(10)
    assert [member.ended for member in job.members] == [None, None]


@pytest.mark.parametrize("url", ["memory", "tcp"], indirect=True)
def test_engine_catches_up_after_a_bus_overrun(
    stack: ExitStack, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It receives nothing while the others decide more records than the bus keeps."""
    hears: list[threading.Event] = []

    def opens(url: str) -> ErrorBus:
        bus, may_hear = open_bus(url), threading.Event()
        may_hear.set()
        hears.append(may_hear)
        plain = bus.subscribe

        def subscribe(
            on_message: Callable[[bytes], None],
            on_lost: Callable[[BusError], None],
            topic: Topic = "protocol",
        ) -> Subscription:
            def hear(payload: bytes) -> None:
                assert may_hear.wait(LIMIT_S)
                on_message(payload)

            return plain(hear if topic == "protocol" else on_message, on_lost, topic)

        bus.subscribe = subscribe  # type: ignore[method-assign]
        return bus

    job = EngineJob(stack, url, 2, 1, opens).start()
    stack.callback(lambda: [may_hear.set() for may_hear in hears])
    job.train(3)
    hears[0].clear()
    first, second = job.members
    for member in (first, second):
        member.train(8)
    wait_until(lambda: second.committed[-1].step > 3, "the other one has committed")
    noise = stack.enter_context(closing(open_bus(url)))
    for _ in range(RING_MESSAGES + 10):
        noise.broadcast(b"noise")
    hears[0].set()
    job.train(8)
    missed = f"participant {first.peer} missed messages of the topic protocol"
    wait_until(lambda: missed in caplog.text, "it has said so")  # the decisions it may have read
    assert [m.ended for m in job.members] == [None, None]
    assert not first.engine.local.deaf


def test_stopping_rank_is_released_from_collectives(stack: ExitStack) -> None:
    """Its peers may have left the collectives, and gloo does not notify every waiter of that."""
    job = EngineJob(stack, f"memory://engine-{uuid.uuid4().hex}", 2, 1).start()
    job.train(2)
    older, freed = job.members[0], list[str]()
    older.host.abort_groups = freed.append  # type: ignore[method-assign]
    job.start_group("0", inc=2)
    wait_until(lambda: older.ended is not None, "the older one is told to stop")
    assert older.ended is not None and older.ended.error == "Fenced"
    assert [cause for cause in freed if "is replaced by" in cause]


@pytest.mark.parametrize(
    ("how", "reason", "error"),
    [
        ("drained", LeaveReason.DRAINED, ""),
        ("last step", LeaveReason.LAST_STEP, ""),
        ("shut down", LeaveReason.SHUT_DOWN, ""),
        ("end of its shard", LeaveReason.SHARD_ENDED, ""),
        ("diverged", None, "Diverged"),
    ],
)
def test_process_writes_why_it_ends_into_its_register(
    stack: ExitStack, how: str, reason: LeaveReason | None, error: str
) -> None:
    job = EngineJob(stack, f"memory://engine-{uuid.uuid4().hex}", 2, 1).start()
    job.train(2)
    first, second = job.members
    if how == "drained":
        first.engine.post(Drain((first.peer.group,), "an operator"))
    elif how == "last step":
        for member in job.members:
            member.says = lambda start: {"last": True}
    elif how == "diverged":
        first.says, second.says = (lambda start, d=d: {"digest": d} for d in ("a", "b"))
    else:
        first.engine.post(Stop("over", LeaveReason(reason)))
    for member in job.members:
        member.train(9)
    wait_until(lambda: first.ended is not None, "it ends")
    held = job.open().read(exit_register(first.peer.group, 0))
    found = decode_exit(held or b"")
    assert (found.reason, found.error) == (reason, error)
    assert found.took_part and found.step >= 2 and found.status is None


def test_the_silence_of_the_bus_is_not_held_against_peers() -> None:
    core = core_of(Peer("0", 0, 1))
    for serial, timer in enumerate(("bus_limit", "ack_window")):
        assert not list(core._carry_out(SetTimer(timer, 10.0, serial)))
    core.add_chore(Broadcast(Begin(Peer("0", 0, 1), 1)))
    assert isinstance(core.step(1.0), Publish)
    assert core.at_bus == ("Broadcast", 1.0)
    assert core.step(1.5) is None
    after = {name: due for due, _, name in core._timers}
    assert after == {"bus_limit": 10.0, "ack_window": 10.5}


def test_waiting_joiner_wakes_when_its_state_is_available(
    stack: ExitStack, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has no pending command for it, because the other group is not ready."""
    woken = threading.Event()

    def do(rank: Rank, command: Command) -> None:
        if not isinstance(command, Heal) or rank.peer.group == "1":
            return
        engine, asked = rank.engine, []

        def is_healed() -> bool:
            if not asked:  # as requested just before the engine has received it
                asked.append(engine.post(Healed(command.record.epoch)))
                wait_until(lambda: engine.local.healed, "the engine has heard of it")
                return False
            return engine.local.healed

        if engine.wait_for(is_healed):
            woken.set()

    monkeypatch.setattr(Rank, "_do", do)
    EngineJob(stack, url, 2, 1).start()
    assert woken.wait(LIMIT_S)

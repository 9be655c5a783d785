"""Tests of the roll of hosts on a bus: beating hosts are on it, silent ones are suspected and
removed."""

from __future__ import annotations

import queue
import uuid
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest
from waiting import wait_until

from fft.bus import ErrorBus, open_bus
from fft.health.hosts import ROLL, HostWatch, Process, beat_name
from fft.messages.protocol import GroupEntry, Peer, RankEntry, Record, Suspect, decode
from fft.messages.wire import EPOCH, Wire, encode_register, list_name

LIMIT = 1.0
WITHIN = 60.0
until = partial(wait_until, within=WITHIN)


@pytest.fixture
def bus() -> Iterator[ErrorBus]:
    with open_bus(f"memory://hosts-{uuid.uuid4().hex[:12]}") as made:
        yield made


@pytest.fixture
def broadcasts(bus: ErrorBus) -> queue.Queue[bytes]:
    """Return the messages that are broadcast to the participants."""
    received: queue.Queue[bytes] = queue.Queue()
    bus.subscribe(received.put, lambda error: None)
    return received


def on_roll(bus: ErrorBus, *senders: str) -> bool:
    held = (bus.read(ROLL) or b"").decode()
    return all(sender in held for sender in senders)


def enter(bus: ErrorBus, sender: str, beat: bytes) -> None:
    """Let a sender beat once, enter the roll, and fall silent."""
    bus.write(beat_name(sender), beat)
    held = bus.read(ROLL)
    if held is None:
        new = b'{"senders":["%b"],"v":1}' % sender.encode()
    else:
        new = held.replace(b'"]', b'","%b"]' % sender.encode())
    assert bus.compare_set(ROLL, held, new) == new


def form_epoch(bus: ErrorBus, *hosts: str) -> None:
    """Form an epoch with one group of two ranks on each host, named as in the beats of ``beat``."""
    members = tuple(
        GroupEntry(
            group=host,
            store="",
            ranks=tuple(RankEntry(rank, 1, True, "", 11 + rank, host) for rank in range(2)),
        )
        for host in hosts
    )
    numbers = {"n": 1, "epoch": 1, "txn": 1, "step": 0, "cursor": 0, "batches": 0}
    record = Record(kind="epoch", lineage="", by=Peer("0", 0, 1), members=members, **numbers)
    bus.write(list_name(record), encode_register(record.members))
    bus.write(EPOCH, Wire().encode_record(record))


def beat(host: str, *pids: int) -> bytes:
    places = ",".join(f'["{host}",{rank},{pid}]' for rank, pid in enumerate(pids))
    return f'{{"number":5,"host":"{host}","limit":{LIMIT},"processes":[{places}]}}'.encode()


def test_hosts_that_come_and_go_cause_no_suspicion(
    bus: ErrorBus, broadcasts: queue.Queue[bytes]
) -> None:
    here = HostWatch(bus, "a test", LIMIT)
    with closing(here):
        there = HostWatch(bus, "a test", LIMIT)
        with closing(there):
            until(lambda: not here.alone and not there.alone, "they find each other")
        assert not on_roll(bus, there.sender) and bus.read(beat_name(there.sender)) is None
        until(lambda: here.alone, "it has left the roll")
    assert not on_roll(bus, here.sender) and bus.read(beat_name(here.sender)) is None
    assert broadcasts.empty()


def test_silent_host_is_suspected_with_all_its_processes_and_removed(
    bus: ErrorBus, broadcasts: queue.Queue[bytes]
) -> None:
    """This also holds for a judge that starts after the host has vanished."""
    form_epoch(bus, "node7")
    enter(bus, "gone", beat("node7", 11, 12))
    with closing(HostWatch(bus, "a test", LIMIT)) as watch:
        words = [decode(broadcasts.get(timeout=WITHIN)) for _ in range(2)]
        until(lambda: not on_roll(bus, "gone"), "it is struck off")
        until(lambda: bus.read(beat_name("gone")) is None, "its beats are removed")
        assert on_roll(bus, watch.sender)
    assert all(isinstance(word, Suspect) for word in words)
    reported = sorted((w.group, w.rank, w.pid, w.host) for w in words if isinstance(w, Suspect))
    assert reported == [("node7", 0, 11, "node7"), ("node7", 1, 12, "node7")]
    assert isinstance(words[0], Suspect) and "nothing was heard from host node7" in words[0].cause
    assert broadcasts.empty(), "it is said once"


def test_suspect_outside_the_epoch_is_reported_once_admitted(
    bus: ErrorBus, broadcasts: queue.Queue[bytes]
) -> None:
    """It vanished while it waited to be admitted, when no participant would have reacted."""
    enter(bus, "gone", beat("node7", 11, 12))
    with closing(HostWatch(bus, "a test", LIMIT)) as watch:
        until(lambda: "gone" in watch._told, "it has vanished")
        assert broadcasts.empty() and on_roll(bus, "gone")
        form_epoch(bus, "node7")
        words = [decode(broadcasts.get(timeout=WITHIN)) for _ in range(2)]
        until(lambda: not on_roll(bus, "gone"), "it is struck off")
    assert {word.rank for word in words if isinstance(word, Suspect)} == {0, 1}


def test_removed_host_that_beats_registers_again(bus: ErrorBus) -> None:
    with closing(HostWatch(bus, "a test", LIMIT, [Process("0", 0, 1)])) as watch:
        until(lambda: on_roll(bus, watch.sender), "it comes in")
        held = bus.read(ROLL)
        empty = b'{"senders":[],"v":1}'
        assert bus.compare_set(ROLL, held, empty) == empty
        until(lambda: on_roll(bus, watch.sender), "it comes in again")


def test_unreadable_beat_does_not_hide_another_host(
    bus: ErrorBus, broadcasts: queue.Queue[bytes]
) -> None:
    form_epoch(bus, "node7")
    enter(bus, "strange", b'{"number": true}')
    enter(bus, "gone", beat("node7", 11))
    with closing(HostWatch(bus, "a test", LIMIT)):
        word = decode(broadcasts.get(timeout=WITHIN))
    assert isinstance(word, Suspect) and word.host == "node7"


def test_late_hosts_watch_the_first_three_and_these_watch_all(
    bus: ErrorBus, broadcasts: queue.Queue[bytes]
) -> None:
    """The judges vanish together; a host that only watched them replaces them, and finds more."""
    form_epoch(bus, *(f"node{number}" for number in range(5)))
    for number in range(5):
        enter(bus, f"gone{number}", beat(f"node{number}", 11))
    with closing(HostWatch(bus, "a test", LIMIT)) as watch:
        words = [decode(broadcasts.get(timeout=WITHIN)) for _ in range(5)]
        until(lambda: bus.read(ROLL) == b'{"senders":["%b"],"v":1}' % watch.sender.encode(), "all")
    hosts = [word.host for word in words if isinstance(word, Suspect)]
    assert sorted(hosts) == [f"node{number}" for number in range(5)]
    assert set(hosts[:3]) == {"node0", "node1", "node2"}

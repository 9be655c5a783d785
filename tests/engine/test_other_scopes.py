"""Tests of the state that a scope reads of another one on its bus: its position and its end."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from jobs import Job

from fft.bus import ErrorBus, open_bus
from fft.bus.base import HEAD
from fft.engine.calls import Buses, Call, Write
from fft.engine.other_scopes import OtherScope
from fft.errors import BusError
from fft.messages.protocol import GroupEntry, Peer, RankEntry, Record, ScopeRecord
from fft.messages.wire import EPOCH, Wire, encode_register, left_name, list_name

A, B = Peer("0", 1, 3), Peer("1", 1, 2)


def entry(peer: Peer) -> GroupEntry:
    return GroupEntry(
        peer.group, f"s{peer.group}", (RankEntry(peer.rank, peer.inc, True, "t", 1, "h"),)
    )


@pytest.fixture
def bus() -> Iterator[ErrorBus]:
    """The bus of a scope of two groups at record 2, a skip that took two slices."""
    bus = open_bus(f"memory://scope-{uuid.uuid4().hex}")
    epoch = Record(1, "epoch", 1, 0, 0, "x", 0, 0, A, members=(entry(A), entry(B)))
    commit = Record(2, "commit", 1, 1, 0, "y", 2, 0, A, skip=True)
    bus.write(list_name(epoch), encode_register(epoch.members))
    bus.write(EPOCH, Wire().encode_record(epoch))
    assert bus.compare_set(HEAD, None, Wire().encode_record(commit))
    yield bus
    bus.close()


def leave(bus: ErrorBus, peer: Peer) -> None:
    Buses(bus).perform(Write(left_name(peer.group, peer.rank), peer.inc))


def test_scope_record_follows_its_cursor(bus: ErrorBus) -> None:
    assert OtherScope("stage0", bus).read() == ScopeRecord("stage0", 2, 2, ("0", "1"))


def test_a_scope_has_ended_when_all_of_its_groups_have_left(bus: ErrorBus) -> None:
    """Only groups of the newest epoch count; an older incarnation does not stand for them."""
    stands, other = ScopeRecord("stage0", 2, 2, ("0", "1")), OtherScope("stage0", bus)
    leave(bus, A)
    assert other.read() == stands
    leave(bus, B._replace(inc=1))
    assert other.read() == stands
    leave(bus, B)
    assert other.read() == ScopeRecord("stage0", 2, 2, ())


class EpochLost(Job):
    """A job on a bus that fails while the first epoch is published for observers."""

    failures = 1

    def _perform(self, call: Call) -> object:
        if isinstance(call, Write) and call.key == EPOCH and self.failures:
            self.failures -= 1
            raise BusError("no answer")
        return super()._perform(call)


def test_epoch_is_published_again_after_the_bus_failed() -> None:
    """Without it a stage that starts later cannot read the position of this one."""
    job = EpochLost(2).until_running()
    job.step()
    assert EPOCH not in job.registers
    job.fire("bus_retry")
    job.settle()
    assert job.registers[EPOCH] == Wire().pack(job.history[0])

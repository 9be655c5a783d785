"""Tests of when checkpoints of local groups are due, and which groups are awaited.

`tests/e2e/test_durable_async.py` runs whole jobs.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from waiting import wait_until

from fft.bus import ErrorBus, open_bus
from fft.checkpoints.plan import Checkpointing
from fft.messages.effects import StartTxn
from fft.messages.protocol import (
    GroupEntry,
    Manifest,
    Peer,
    RankEntry,
    Record,
    Standing,
    Token,
    Vote,
)
from fft.protocol.state import Local
from fft.protocol.tally import Tally
from fft.train.paradigms.asynchronous import DueToLocal
from fft.train.session.checkpoint_schedule import CheckpointSchedule, departed_groups

INTERVAL_S = 0.2


def entry(group: str, inc: int = 1) -> GroupEntry:
    return GroupEntry(group, f"{group}:{inc}", (RankEntry(0, inc, True, "", 1, "host"),))


def vote(peer: Peer, last: bool, skip: bool, asks: bool) -> Vote:
    return Vote(peer, Manifest(1, 4), last=last, skip=skip, checkpoint=asks)


class Group:
    """The part of a group that its checkpoints use: its position, its bus and its trace."""

    def __init__(self, bus: ErrorBus, group: str, every: int | str) -> None:
        self.bus, self.peer = bus, Peer(group, 0, 1)
        self.local: Local | None = None
        self.notes: list[dict[str, Any]] = []
        self.is_busy = False
        plan = Checkpointing("somewhere", every)
        self.due = DueToLocal(plan, self, lambda: self.is_busy)  # type: ignore[arg-type]

    def report_checkpoint(self, name: str, data: dict[str, Any]) -> None:
        assert name == "checkpoint_skipped"
        self.notes.append(data)


class Job:
    """Groups, and the register's records as their txns would leave them."""

    def __init__(self, bus: ErrorBus, every: int | str = 4) -> None:
        self.groups = {name: Group(bus, name, every) for name in "012"}
        self.step, self.n, self.checkpoint = 0, 0, 0
        self.apart: dict[str, GroupEntry] = {}
        """Groups of the job, with the process of each."""

    def txn(
        self,
        members: str,
        aborts: bool = False,
        skip: bool = False,
        last: bool = False,
        foreseen: bool = True,
    ) -> set[str]:
        """Run a txn of these members; return those that report a due checkpoint.

        ``foreseen``: the voters know of the skip.
        """
        epoch = self._epoch(members)
        token, inside = Token(epoch.epoch, 1), tuple(members)
        plan = StartTxn(token, self.step, "", 0, 0, len(members), inside, 0)
        votes = []
        for name in members:
            self.groups[name].local = Local("PREPARED", "prepared", "", head=epoch, epoch=epoch)
            asks = self.groups[name].due.asks(plan, last, skip and foreseen)
            votes.append(vote(self.groups[name].peer, last, skip, asks))
        self.n += 1
        if aborts:
            return set()
        if Tally.of(votes).commit.checkpoint:
            self.checkpoint = self.n
        self.step += not skip
        self.apart |= {name: self.apart.get(name) or entry(name) for name in members}
        commit = replace(
            epoch, n=self.n, kind="commit", txn=1, step=self.step, members=(), skip=skip,
            last=last, standing=self._standing(), checkpoint=self.checkpoint,
        )  # fmt: skip
        found = {name: self.groups[name].due.due(commit, epoch) for name in members}
        assert len({named.name for named in found.values() if named}) <= 1, "one attempt"
        return {name for name, named in found.items() if named}

    def _epoch(self, members: str) -> Record:
        self.n += 1
        entries = tuple(self.apart.get(name) or entry(name) for name in members)
        return Record(
            self.n, "epoch", self.n, 0, self.step, "", 0, 0, Peer(members[0], 0, 1),
            members=entries, bound=4, standing=self._standing(), checkpoint=self.checkpoint,
        )  # fmt: skip

    def _standing(self) -> tuple[Standing, ...]:
        return tuple(Standing(self.apart[name], 0, 0) for name in sorted(self.apart))


@pytest.fixture
def bus() -> Iterator[ErrorBus]:
    with open_bus(f"memory://due-{uuid.uuid4().hex}") as made:
        yield made


def test_only_the_members_of_the_txn_take_the_checkpoint(bus: ErrorBus) -> None:
    job = Job(bus, every=2)
    found = [job.txn(members) for members in ("012", "01", "12", "02", "01", "12")]
    assert found == [set(), {"0", "1"}, set(), {"0", "2"}, set(), {"1", "2"}]


def test_local_writer_is_not_lost_and_a_lost_one_is_replaced(
    bus: ErrorBus,
) -> None:
    job = Job(bus)
    assert [job.txn(members) for members in 3 * ["012"]] == [set()] * 3
    assert job.txn("012") == {"0", "1", "2"}
    assert job.txn("12") == set(), "it stands apart"
    del job.apart["0"]
    assert job.txn("12") == {"1", "2"}, "the first without it"
    assert job.txn("12") == set()
    assert job.txn("12") == {"1", "2"}, "by its step"
    job.apart["1"] = entry("1", inc=2)
    assert job.txn("2", aborts=True) == set()
    assert job.txn("2") == {"2"}, "asked for again, because the txn was rolled back"
    assert job.txn("2") == set()


def test_rolled_back_or_skipped_txn_has_no_checkpoint(bus: ErrorBus) -> None:
    job = Job(bus, every=2)
    job.txn("01")
    assert job.txn("01", aborts=True) == set()
    assert job.txn("12", skip=True) == set()
    assert job.txn("12", skip=True, foreseen=False) == set()
    assert job.txn("12") == {"1", "2"}, "though others have voted for that step before"


def test_checkpoint_interval_in_seconds_counts_for_the_whole_job(bus: ErrorBus) -> None:
    job = Job(bus, every=f"{INTERVAL_S}s")
    assert job.txn("01") == {"0", "1"}, "the first"
    began = time.monotonic()
    named = job.txn("02") | job.txn("12") | job.txn("012")
    assert not named or time.monotonic() - began > INTERVAL_S, "a group without one has the record"
    wait_until(lambda: time.monotonic() - began > 2 * INTERVAL_S, "an interval", 10)
    assert job.txn("12") == {"1", "2"}


def test_last_commit_is_due_whatever_the_interval(bus: ErrorBus) -> None:
    assert Job(bus, every=1000).txn("01", last=True) == {"0", "1"}


def test_skipped_last_commit_still_takes_its_checkpoint(bus: ErrorBus) -> None:
    """Otherwise the steps before it would be in no checkpoint."""
    assert Job(bus, every=1000).txn("01", last=True, skip=True) == {"0", "1"}


def test_data_that_end_with_a_skip_end_with_a_checkpoint(bus: ErrorBus) -> None:
    """No commit is the last then. A checkpoint of a second skip would contain nothing new."""
    group = Group(bus, "0", 1000)
    due = CheckpointSchedule(group.due._plan, group, lambda: False)  # type: ignore[arg-type]
    epoch = Record(1, "epoch", 1, 0, 7, "", 0, 0, Peer("0", 0, 1), (entry("0"),))
    head, found = epoch, []
    for txn, last, skip in ((1, False, True), (2, True, True), (3, True, True)):
        group.local = Local("PREPARED", "prepared", "", head=head, epoch=epoch)
        asks = due.asks(StartTxn(Token(1, txn), 7, "", 0, 0, 1, ("0",), 0), last, skip)
        is_due = Tally.of([vote(group.peer, last, skip, asks)]).commit.checkpoint
        checkpoint = txn + 1 if is_due else head.checkpoint
        head = replace(
            epoch, n=txn + 1, kind="commit", txn=txn, members=(), skip=skip, checkpoint=checkpoint
        )
        found.append(due.due(head, epoch) is not None)
    assert found == [False, True, False]


def test_new_first_member_asks_after_an_interval_of_its_own(bus: ErrorBus) -> None:
    job = Job(bus, every=f"{INTERVAL_S}s")
    assert job.txn("12") == {"1", "2"}
    assert job.txn("012") == set(), "0 does not know when the newest checkpoint was taken"
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 2 * INTERVAL_S, "an interval", 10)
    assert job.txn("012") == {"0", "1", "2"}


def test_rank_still_writing_proposes_no_checkpoint_and_reports_it(bus: ErrorBus) -> None:
    job = Job(bus, every=1)
    job.groups["0"].is_busy = True
    assert job.txn("01") == set()
    assert [note["step"] for note in job.groups["0"].notes] == [1]
    assert job.txn("12") == {"1", "2"}


def test_local_group_is_awaited_and_lost_group_is_not(bus: ErrorBus) -> None:
    job = Job(bus)
    job.txn("012")
    epoch = job._epoch("012")
    commit = replace(epoch, n=epoch.n + 1, kind="commit", members=(), leavers=("2",))
    group = job.groups["0"]

    def left(head: Record, **more: Any) -> frozenset[str]:
        group.local = Local("APART", "apart", "", head=head, **more)
        return group.due.left(commit, epoch)

    del job.apart["2"]
    next_epoch = replace(job._epoch("0"), n=commit.n + 1)
    assert left(next_epoch) == frozenset(), "1 is apart, and 2 has left with the commit"
    assert left(next_epoch, dead=frozenset({Peer("1", 0, 1)})) == {"1"}
    job.apart["1"] = entry("1", inc=2)
    assert left(replace(job._epoch("01"), n=commit.n + 1)) == {"1"}, "another process"


@pytest.mark.parametrize("role", ["terminal", "prepared"])
def test_files_of_a_group_that_left_in_good_order_are_awaited(bus: ErrorBus, role: str) -> None:
    """The protocol counts its process as gone, but it may still be writing its files."""
    job = Job(bus)
    epoch, group = job._epoch("01"), job.groups["0"]
    left = frozenset({Peer("1", 0, 1)})
    group.local = Local("any", role, "", head=epoch, epoch=epoch, dead=left)  # type: ignore[arg-type]
    assert departed_groups(group, epoch) == frozenset()  # type: ignore[arg-type]

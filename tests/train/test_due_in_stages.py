"""Tests of where checkpoints cut stages that step by themselves, on buses in memory.

`tests/e2e/test_durable_ahead.py` runs whole jobs.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from fft.bus import ErrorBus, open_bus
from fft.bus.base import HEAD
from fft.checkpoints.plan import Checkpointing
from fft.engine.other_scopes import OtherScope
from fft.errors import CheckpointError
from fft.messages.effects import StartTxn
from fft.messages.protocol import GroupEntry, Manifest, Peer, RankEntry, Record, Token, Vote
from fft.messages.wire import EPOCH, Wire, encode_register, list_name
from fft.protocol.load import load_spec
from fft.protocol.spec import FsmSpec
from fft.protocol.state import Elsewhere, Local
from fft.protocol.tally import Tally
from fft.train.paradigms.stages.due import (
    AT,
    FirstStageSchedule,
    LaterStageSchedule,
    announcements_on,
    refuse_forks,
)
from fft.train.session.checkpoint_schedule import CheckpointSchedule, Named


class Rank:
    """The part of a rank of one group and stage that its checkpoints use."""

    def __init__(self, of_job: ErrorBus, group: str, stage: int) -> None:
        self.bus, self.peer = of_job, Peer(group, stage, 1)
        self.local: Local | None = None
        self.notes: list[str] = []
        self.is_busy = False
        self.due: CheckpointSchedule

    def report_checkpoint(self, name: str, data: dict[str, Any]) -> None:
        assert name == "checkpoint_skipped"
        self.notes.append(data["reason"])


class Stage:
    """The ranks of one stage, and its scope's records as its txns would leave them."""

    def __init__(self, number: int, buses: list[ErrorBus], every: int | str, groups: int) -> None:
        self.number, self.step, self.cursor, self.n, self.checkpoint = number, 0, 0, 0, 0
        self.next = Elsewhere("stage1", 2, n=1, takers=groups)
        self.ranks = {str(g): Rank(buses[0], str(g), number) for g in range(groups)}
        for rank in self.ranks.values():
            plan = Checkpointing("somewhere", every)
            if number:
                scope = OtherScope("stage0", buses[0])
                pair = buses[number], buses[number - 1]
                rank.due = LaterStageSchedule(plan, rank, pair, scope, 5.0)  # type: ignore[arg-type]
            else:
                busy = lambda rank=rank: rank.is_busy  # noqa: E731
                rank.due = FirstStageSchedule(plan, rank, buses[0], busy)  # type: ignore[arg-type]

    def txn(
        self,
        members: str = "01",
        aborts: bool = False,
        asked: str = "",
        foreseen: bool = True,
        **record: Any,
    ) -> dict[str, Named]:
        """Run a txn of these groups; return what each has due after it.

        ``asked``: groups known to be leaving, including those that have left. ``foreseen``: the
        voters know of a skip.
        """
        self.n += 1
        skip = record.get("skip", False)
        after = self.cursor + len(members)
        epoch = self.epoch_of(members)
        by = epoch.by
        token = Token(epoch.epoch, 1)
        plan = StartTxn(
            token, self.step, "", self.cursor, 0, len(members), tuple(members), 0, None, after
        )
        leaving = frozenset(Peer(group, self.number, 1) for group in asked)
        leaving |= frozenset({by} if record.get("last") else ())
        seen = (self.next,) if self.number == 0 else ()
        votes = []
        for name in members:
            local = Local("NORMAL", "", "", head=epoch, epoch=epoch, elsewhere=seen)
            self.ranks[name].local = replace(local, leaving=leaving)
            asks = self.ranks[name].due.asks(plan, False, foreseen and skip)
            peer, leaves = self.ranks[name].peer, name in asked
            votes.append(Vote(peer, Manifest(1, 4), leaves, skip=skip, checkpoint=asks))
        if aborts:
            return {}
        self.n += 1
        if Tally.of(votes).commit.checkpoint:
            self.checkpoint = self.n
        self.step, self.cursor = self.step + (not skip), after
        commit = replace(
            epoch,
            n=self.n,
            kind="commit",
            txn=1,
            step=self.step,
            cursor=after,
            members=(),
            checkpoint=self.checkpoint,
            **record,
        )
        found = {name: self.ranks[name].due.due(commit, epoch) for name in members}
        return {name: named for name, named in found.items() if named is not None}

    def epoch_of(self, members: str) -> Record:
        entries = tuple(
            GroupEntry(g, g, (RankEntry(self.number, 1, True, "", 1, "host"),)) for g in members
        )
        by = Peer(members[0], self.number, 1)
        return Record(
            self.n,
            "epoch",
            self.n,
            0,
            self.step,
            "",
            self.cursor,
            0,
            by,
            entries,
            checkpoint=self.checkpoint,
        )


class Job:
    """Two or more stages, with two groups."""

    def __init__(self, stack: ExitStack, every: int | str = 2, stages: int = 2) -> None:
        name = f"cut-{uuid.uuid4().hex}"
        urls = [f"memory://{name}.{number}" for number in range(stages)]
        self.buses = [stack.enter_context(open_bus(url)) for url in urls]
        self.stages = [Stage(number, self.buses, every, 3) for number in range(stages)]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_all_stages_are_cut_at_one_place(stack: ExitStack) -> None:
    first, middle, last = Job(stack, stages=3).stages
    assert not first.txn()
    named = first.txn()
    assert named.keys() == {"0", "1"} and len(set(named.values())) == 1
    assert named["0"][1:] == (2, "0", False)
    first.txn()
    for stage in (middle, last):
        assert not stage.txn()
        assert stage.txn() == named
        assert not stage.txn()


def test_a_txn_that_came_to_nothing_is_named_again(stack: ExitStack) -> None:
    first, last = Job(stack).stages
    first.txn()
    assert not first.txn(aborts=True)
    named = first.txn()
    assert named.keys() == {"0", "1"}
    last.txn()
    assert not last.txn(aborts=True)
    assert last.txn() == named
    assert not last.txn()
    assert not first.txn()
    again = first.txn()
    assert again and again != named


def test_stage_that_steps_over_the_named_cursor_is_cut_before(stack: ExitStack) -> None:
    """This happens after a txn of one group alone, if the other stage's had both groups."""
    first, last = Job(stack).stages
    first.txn("0")
    named = first.txn()
    assert (first.cursor, named.keys()) == (3, {"0", "1"})
    assert last.txn() == named and last.cursor == 2
    assert not last.txn()
    first.txn()
    named = first.txn()
    assert last.cursor == 4
    assert last.txn() == named and (first.cursor, last.cursor) == (7, 6)
    assert not last.txn(), "it has been taken"


def test_rank_past_the_checkpoint_step_reports_it_and_delivers_nothing(stack: ExitStack) -> None:
    first, last = Job(stack).stages
    first.txn("0")
    named = first.txn("0")["0"]
    assert first.cursor == 2
    rank, later = (last.ranks[name].due for name in "02")
    epoch = last.epoch_of("0")
    assert rank.due(_commit(1), epoch) is None
    assert rank.due(_commit(4), epoch) == named._replace(is_missed=True)
    assert rank.due(_commit(5), epoch) is None, "once"
    assert later.due(_commit(5), epoch) is None, "it was not there then"


def test_rank_past_its_checkpoint_step_reports_it_at_the_next_commit(
    stack: ExitStack,
) -> None:
    first, last = Job(stack).stages
    first.txn()
    named = first.txn()["0"]
    rank, epoch = last.ranks["0"].due, last.epoch_of("0")
    assert rank.due(_commit(first.cursor), epoch) is None, "it may be named yet"
    assert rank.due(_commit(first.cursor + 1), epoch) == named._replace(is_missed=True)


def test_stage_that_ends_with_the_first_is_in_its_last_checkpoint(
    stack: ExitStack,
) -> None:
    """Both end by a skip; the first stage names its place when it finds that the data have
    ended."""
    first, last = Job(stack, every=1000).stages
    first.txn()
    last.txn()
    begun, ended = first.ranks["0"].due, last.ranks["0"].due
    assert isinstance(begun, FirstStageSchedule) and isinstance(ended, LaterStageSchedule)
    named = begun.ended(_commit(first.cursor), first.epoch_of("01"))
    assert named is not None
    for members in ("01", "1"):
        other = first.ranks["1"].due
        assert isinstance(other, FirstStageSchedule)
        assert other.ended(_commit(first.cursor), first.epoch_of(members)) == named, "or alone"
    assert next(ended.after_end(threading.Event())) == named


def test_stage_ends_with_the_last_message_and_not_the_newest(stack: ExitStack) -> None:
    """It finds the last place only afterwards, and then names it for the stage after it."""
    first, last = Job(stack).stages
    first.txn()
    assert first.txn()
    assert not last.txn(last=True)


def test_checkpoint_taken_is_not_repeated_after_failed_proposals(
    stack: ExitStack,
) -> None:
    first, last = Job(stack).stages
    last.txn()
    due, stops = last.ranks["0"].due, threading.Event()
    assert isinstance(due, LaterStageSchedule)
    later = due.after_end(stops)
    first.txn()
    found = [first.txn()["0"]]
    assert next(later) == found[0]
    first.txn()
    for _ in range(2):
        first.txn(aborts=True)
        assert next(later) not in found
    found.append(first.txn()["0"])
    assert next(later) == found[1]
    stops.set()
    assert list(later) == []


def test_next_stage_is_awaited_until_reaching_the_named_cursor(stack: ExitStack) -> None:
    first = Job(stack).stages[0]
    rank, after = first.ranks["0"], first.next
    for cursor, takers, is_awaited in ((3, 2, True), (4, 2, False), (5, 2, False), (3, 0, False)):
        known = replace(after, cursor=cursor, takers=takers)
        rank.local = Local("NORMAL", "", "", elsewhere=(known,))
        assert rank.due.is_awaited(_commit(4)) is is_awaited


def test_ended_stage_waits_only_for_the_last_message_of_the_first(
    stack: ExitStack,
) -> None:
    """The newest message may be about a checkpoint in which this stage takes no part."""
    job = Job(stack)
    first, last = job.stages
    first.txn()
    assert first.txn()
    due, epoch, wire = last.ranks["0"].due, first.epoch_of("01"), Wire()
    assert isinstance(due, LaterStageSchedule)
    due.stands_at(_commit(first.cursor + 1), last.epoch_of("01"))
    job.buses[0].write(list_name(epoch), encode_register(epoch.members))
    job.buses[0].write(EPOCH, wire.encode_record(epoch))
    head = replace(epoch, n=9, kind="commit", txn=1, members=(), leavers=("0", "1"))
    job.buses[0].compare_set(HEAD, None, wire.encode_record(head))
    began = time.monotonic()
    assert list(due.after_end(threading.Event())) == []
    assert time.monotonic() - began < 3.0, "not until the limit"


def _commit(cursor: int) -> Record:
    return Record(cursor, "commit", 1, cursor, cursor, "", cursor, 0, Peer("0", 1, 1))


def test_each_stage_is_cut_at_its_own_end_when_the_job_ends(stack: ExitStack) -> None:
    first, last = Job(stack, every=1000).stages
    for _ in range(2):
        assert not first.txn()
    named = first.txn(last=True)
    assert named.keys() == {"0", "1"}
    assert last.txn(last=True) == named and (first.cursor, last.cursor) == (6, 2)
    first, last = Job(stack, every=1000).stages
    named = first.txn(last=True)
    assert last.txn() == named, "at the same place"
    assert not last.txn(last=True), "once"


def test_drained_rank_triggers_no_checkpoint(stack: ExitStack) -> None:
    first, _ = Job(stack, every=1000).stages
    assert first.txn(asked="1"), "all may leave with it, as far as it is known here"
    assert not first.txn("0", asked="1")


def test_a_last_commit_that_is_a_skip_is_cut_too(stack: ExitStack) -> None:
    first, last = Job(stack, every=1000).stages
    first.txn()
    named = first.txn(last=True, skip=True)
    assert named.keys() == {"0", "1"} and named["0"].step == first.step == 1
    assert last.txn(last=True) == named
    first, last = Job(stack, every=1000).stages
    first.txn()
    assert not first.txn(last=True, skip=True, foreseen=False)
    assert "is a skip, which was not known when it was voted for" in first.ranks["0"].notes[0]


def test_unknown_last_txn_has_no_checkpoint_and_is_reported(stack: ExitStack) -> None:
    first, last = Job(stack, every=1000).stages
    rank = first.ranks["0"]
    assert rank.due.due(replace(_commit(1), last=True), first.epoch_of("0")) is None
    assert "which was not known when it was voted for" in rank.notes[0]
    assert not last.txn("0", last=True)


def test_ended_stage_takes_part_in_checkpoints_of_the_others(stack: ExitStack) -> None:
    """Its part is the state in which it has ended; the stage after it is informed."""
    job = Job(stack, stages=3)
    first, middle, last = job.stages
    for _ in range(2):
        named = first.txn()
    middle.txn()
    assert middle.txn(last=True) == named, "the first goes on"
    due, stops = middle.ranks["0"].due, threading.Event()
    assert isinstance(due, LaterStageSchedule)
    later = due.after_end(stops)
    for place in (4, 8, 12):
        while first.cursor < place:
            named = first.txn() or named
        if place > 4:
            assert next(later) == named["0"]
            (*_, word) = announcements_on(job.buses[1])
            assert (word.name, word.cursor) == (named["0"].name, middle.cursor)
    assert last.txn() == {}
    assert last.txn(last=True)["0"].name == named["0"].name, "where the middle has ended"
    ended = last.ranks["0"].due
    assert isinstance(ended, LaterStageSchedule)
    while first.cursor < 16:
        named = first.txn() or named
    assert next(later) == next(ended.after_end(stops)) == named["0"], "both have ended there"
    stops.set()
    assert list(later) == []


def test_rank_still_writing_proposes_only_the_last_checkpoint(stack: ExitStack) -> None:
    first, _ = Job(stack, every=1).stages
    first.ranks["0"].is_busy = True
    assert not first.txn()
    assert first.ranks["0"].notes == ["the one before is still being written"]
    assert first.txn(last=True)


def test_stage_that_cannot_read_the_due_message_logs_it(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(stack, every=1)
    job.buses[0].write(AT, b"9")
    assert not job.stages[1].txn()
    assert "no announcements of checkpoints" in caplog.text


def test_checkpoint_that_cannot_be_announced_is_not_taken(stack: ExitStack) -> None:
    job = Job(stack, every=1)
    job.buses[0].write(AT, b"9")
    assert job.stages[0].txn() == {}
    assert "no announcements of checkpoints" in job.stages[0].ranks["0"].notes[0]
    job.buses[0].close()
    assert job.stages[0].txn() == {} and len(job.stages[0].ranks["0"].notes) == 2


def test_stages_that_fork_are_refused() -> None:
    spec = load_spec("pipeline_ahead")
    refuse_forks(spec)
    refuse_forks(load_spec("hsdp"))
    edge = spec.flow[0].model_dump(by_alias=True)
    turned = {**edge, "from": edge["to"], "to": edge["from"]}
    other = FsmSpec.model_validate({**spec.model_dump(by_alias=True), "flow": [turned]})
    with pytest.raises(CheckpointError, match="'stage1' follows no other in the flow"):
        refuse_forks(other)

"""What is an end: of a group, whose ranks end one by one, and of the job, by what its bus says."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from supervisor_stage import Job, Stage

from fft.bus import ErrorBus, open_bus
from fft.bus.base import HEAD
from fft.launch.supervisor.ending import last_epoch
from fft.messages.protocol import GroupEntry, Peer, RankEntry, Record
from fft.messages.wire import EPOCH, Wire, encode_members, list_name

StartJob = Callable[..., AbstractContextManager[Job]]


def test_a_group_has_not_finished_if_one_rank_ended_well_and_then_another_died(
    run_job: StartJob, stage: Stage
) -> None:
    with run_job(groups=1, ranks=2) as job:
        actors = stage.enter(2)
        actors["0", "0"].order("exit 0")
        actors["0", "0"].gone()
        os.kill(actors["0", "1"].pid, signal.SIGKILL)
        again = stage.enter(2)
        assert set(again) == {("0", "0"), ("0", "1")}
        for actor in again.values():
            actor.order("exit 0")
        assert job.verdict().ok


@pytest.fixture
def bus() -> Iterator[ErrorBus]:
    with open_bus(f"memory://ends-{uuid.uuid4().hex}") as bus:
        yield bus


def formed(epoch: int, *groups: str) -> Record:
    ranks = (RankEntry(0, 1, True, "", 1, "here"),)
    members = tuple(GroupEntry(group, "here:1", ranks) for group in groups)
    return Record(epoch, "epoch", epoch, 0, 7, "line", 0, 0, Peer("0", 0, 1), members)


def left(epoch: int, *leavers: str) -> Record:
    by = Peer("0", 0, 1)
    return Record(9, "commit", epoch, 1, 8, "line", 2, 2, by, change=True, leavers=leavers)


def show(bus: ErrorBus, listed: Record, head: Record) -> None:
    """``listed``: the newest epoch that its winner has written down; that may be late."""
    wire = Wire()
    bus.write(list_name(listed), encode_members(listed))
    bus.write(EPOCH, wire.encode_record(listed))
    assert bus.compare_set(HEAD, None, wire.encode_record(head)) == wire.encode_record(head)


def test_a_job_is_over_when_the_last_commit_has_all_groups_leave(bus: ErrorBus) -> None:
    show(bus, formed(2, "0", "1"), left(2, "0", "1"))
    assert last_epoch(bus) == formed(2, "0", "1")


def test_a_job_goes_on_while_somebody_stays(bus: ErrorBus) -> None:
    show(bus, formed(2, "0", "1"), left(2, "0"))
    assert last_epoch(bus) is None


def test_the_members_of_an_older_epoch_are_not_those_who_must_leave(bus: ErrorBus) -> None:
    """Group 1 has come since, and trains on; only the list of the epoch with it is late."""
    show(bus, formed(1, "0"), left(2, "0"))
    assert last_epoch(bus) is None

"""Tests of the rows of a stage's scope: held by another scope, and the end of a held
participant."""

from __future__ import annotations

import pytest
from cluster import Node
from jobs import Job

from fft.messages.causes import LeaveReason
from fft.messages.effects import Finish
from fft.messages.protocol import ScopeRecord
from fft.protocol.invariants import judge
from fft.protocol.load import load_spec
from fft.protocol.state import ScopePosition

SPEC = load_spec("pipeline_ahead")
BOTH = ("0", "1")
FOLLOWS = (ScopePosition("stage0", 0),)
LEADS = (ScopePosition("stage1", 2),)


def at(scope: str, n: int, cursor: int, *groups: str) -> ScopeRecord:
    """Return a record of ``scope`` with these groups."""
    return ScopeRecord(scope, n, cursor, groups)


def job_of(flow: tuple[ScopePosition, ...], *received: ScopeRecord) -> Job:
    """Return a job of two groups whose first epoch has formed."""
    job = Job(2, spec=SPEC, flow=flow)
    job.settle()
    hear(job, *received)
    return job


def hear(job: Job, *records: ScopeRecord) -> None:
    for record in records:
        job.scopes[record.scope] = record
        for node in job.live():
            job.post(node, record)
    job.settle()


def states(job: Job) -> set[str]:
    return {node.local.state for node in job.live()}


def ended(node: Node) -> Finish:
    assert node.finished is not None
    return node.finished


def assert_sound(job: Job) -> None:
    assert [f for f in judge(job.record) if f.violation] == []


def cursor(job: Job) -> int:
    assert job.head is not None
    return job.head.cursor


def skip(job: Job) -> None:
    """Run a txn that takes its slices without a step."""
    job.compute(skip=True)
    job.settle()


def test_follower_takes_only_slices_that_were_taken_before() -> None:
    job = job_of(FOLLOWS)
    assert states(job) == {"NORMAL.held"}
    hear(job, at("stage0", 2, 3, *BOTH))
    assert states(job) == {"NORMAL.computing"}
    job.step()
    assert states(job) == {"NORMAL.held"}  # one slice is available, and a txn takes two
    assert (cursor(job), job.steps()) == (2, {1})
    assert_sound(job)


def test_leader_is_held_at_its_bound() -> None:
    job = job_of(LEADS, at("stage1", 1, 0, *BOTH))
    for _ in range(2):
        assert states(job) == {"NORMAL.computing"}
        job.step()
    assert states(job) == {"NORMAL.held"}
    job.fire("flow_interval")
    job.settle()
    held = job.held[0]
    assert (held.step, held.scope, held.cursor, held.needed) == (2, "stage1", 0, 1)
    assert_sound(job)


@pytest.mark.parametrize("flow", [FOLLOWS, LEADS])
def test_a_skipped_step_counts_in_the_flow(flow: tuple[ScopePosition, ...]) -> None:
    """It takes its slices, and its entries are given and taken as those of a step."""
    job = job_of(flow, at("stage1", 1, 0, *BOTH), at("stage0", 2, 4, *BOTH))
    skip(job)
    job.step()
    assert (cursor(job), job.steps()) == (4, {1})
    assert states(job) == {"NORMAL.held"}
    assert_sound(job)


def test_next_stage_counts_as_one_group_before_its_begin() -> None:
    """It has one group at least.

    This lets the first stage bring all its groups to the job's weights.
    """
    job = job_of(LEADS)
    job.step()
    assert (cursor(job), states(job)) == (2, {"NORMAL.held"})
    hear(job, at("stage1", 1, 0, "0"))
    assert states(job) == {"NORMAL.held"}
    hear(job, at("stage1", 2, 0, *BOTH))
    assert states(job) == {"NORMAL.computing"}
    assert_sound(job)


def test_flow_bound_counts_txns_of_the_next_stage_without_withdrawal() -> None:
    job = job_of(LEADS, at("stage1", 1, 0, "0", "1", "2"))
    for _ in range(3):
        job.step()
    assert (cursor(job), states(job)) == (6, {"NORMAL.held"})
    hear(job, at("stage1", 2, 3, "0", "1", "2"))
    assert states(job) == {"NORMAL.computing"}
    hear(job, at("stage1", 3, 3, "0"))  # two of its groups are lost while this stage computes
    job.step()
    assert (cursor(job), states(job)) == (8, {"NORMAL.computing"})
    assert job.kinds().count("abort") == 0
    assert_sound(job)


@pytest.mark.parametrize("left", range(4))
def test_stages_of_unlike_groups_do_not_hold_each_other(left: int) -> None:
    """The earlier stage may begin as long as the next one lacks the slices for one txn."""
    groups = tuple("0123")
    leads = job_of((ScopePosition("stage1", 1),), at("stage1", 1, left, *groups))
    while states(leads) == {"NORMAL.computing"}:
        leads.step()
    assert cursor(leads) >= left + len(groups)
    assert_sound(leads)


def test_missed_record_is_read_from_the_register() -> None:
    job = job_of(FOLLOWS)
    job.scopes["stage0"] = at("stage0", 2, 2, *BOTH)
    job.fire("flow_interval")
    job.settle()
    assert states(job) == {"NORMAL.computing"}
    assert_sound(job)


def test_an_older_record_changes_nothing() -> None:
    job = job_of(FOLLOWS, at("stage0", 5, 6, *BOTH))
    hear(job, at("stage0", 4, 4, *BOTH), at("stage9", 9, 9, *BOTH))
    assert {node.local.others[0].cursor for node in job.live()} == {6}


def test_waiting_for_a_stalled_scope_times_out() -> None:
    job = job_of(FOLLOWS)
    a, b = job.live()
    job.fire("flow_limit")
    job.settle()
    assert {ended(node).error for node in (a, b)} == {"UpstreamTimeout"}
    assert "waits until scope 'stage0' has taken 2 slices of the data" in ended(a).reason
    assert_sound(job)


def test_follower_leaves_with_its_last_txn_with_data() -> None:
    """This also holds if that txn is a skip, and whatever its own last step is."""
    for last in (Job.step, skip):
        job = job_of(FOLLOWS, at("stage0", 3, 4))
        job.step()
        assert states(job) == {"NORMAL.computing"}
        last(job)
        assert job.live() == []
        assert job.head is not None
        assert (job.head.cursor, job.head.last) == (4, True)
        assert set(job.head.reasons) == {LeaveReason.UPSTREAM_ENDED}
        assert_sound(job)


def too_little_is_left() -> Job:
    """The rest of the data is too small for a txn of its groups."""
    job = job_of(FOLLOWS, at("stage0", 2, 3, *BOTH))
    job.step()
    assert states(job) == {"NORMAL.held"}
    hear(job, at("stage0", 3, 3))
    return job


def the_end_is_heard_late() -> Job:
    """The leader ended with the slices that had been taken before."""
    job = job_of(FOLLOWS, at("stage0", 2, 2, *BOTH))
    job.step()
    job.scopes["stage0"] = at("stage0", 3, 2)
    job.fire("flow_interval")
    job.settle()
    return job


def all_leave_it_at_once() -> Job:
    """All leave by a `break`, without a record of it; its newest record is read as one without
    groups."""
    job = job_of(FOLLOWS, at("stage0", 2, 2, *BOTH))
    job.step()
    job.scopes["stage0"] = at("stage0", 2, 2)
    job.fire("flow_interval")
    job.settle()
    return job


@pytest.mark.parametrize("life", [too_little_is_left, the_end_is_heard_late, all_leave_it_at_once])
def test_ended_scope_releases_the_held_one(life: object) -> None:
    assert callable(life)
    job = life()
    gone = [ended(node) for node in job.nodes.values()]
    assert {finish.error for finish in gone} == {None}
    assert "scope 'stage0' has ended after " in gone[0].reason
    assert_sound(job)


@pytest.mark.parametrize("number", [1, 3])
def test_leader_continues_after_the_next_stage_ended(number: int) -> None:
    """The end may be recorded or not."""
    job = job_of(LEADS, at("stage1", 1, 0, *BOTH))
    job.step()
    job.step()
    assert states(job) == {"NORMAL.held"}
    hear(job, at("stage1", number, 0))
    for _ in range(5):
        job.step()
    assert (cursor(job), states(job)) == (14, {"NORMAL.computing"})
    assert_sound(job)


def test_a_group_leaves_scopes_in_the_order_of_the_flow() -> None:
    job = job_of(FOLLOWS, at("stage0", 2, 8, *BOTH))
    job.drain("1")
    job.step()
    hear(job, at("stage0", 4, 10, "0"))
    job.step()
    commits = [record for record in job.history if record.kind == "commit"]
    assert [(record.step, record.leavers) for record in commits] == [(1, ()), (2, ("1",))]
    assert commits[1].why_left("1") is LeaveReason.DRAINED
    assert_sound(job)


def test_spares_of_the_next_stage_count_in_no_bound() -> None:
    """A txn of three groups, one of which is a spare, takes two slices."""
    job = Job(3, spec=SPEC, flow=LEADS, min_groups=2, fixed_with_spares=True)
    job.settle()
    job.scopes["stage1"] = at("stage1", 1, 0, "0", "1", "2")
    job.step()  # as if the next stage had one group, before it is read
    job.fire("flow_interval")
    job.settle()
    job.step()
    assert (cursor(job), states(job)) == (4, {"NORMAL.held"})
    assert_sound(job)

"""Rows of a stage's scope: held by another one, and what becomes of who is held."""

from __future__ import annotations

import pytest
from jobs import Job

from fft.messages.effects import Finish
from fft.messages.protocol import Drain, ScopeRecord
from fft.protocol.flow import Elsewhere
from fft.protocol.invariants import judge
from fft.protocol.load import load_spec
from fft.prove.cluster import Node

SPEC = load_spec("pipeline_ahead")
FOLLOWS = (Elsewhere("stage0", 0),)
LEADS = (Elsewhere("stage1", 2),)
BOTH = ("0", "1")


def job_of(flow: tuple[Elsewhere, ...], *heard: ScopeRecord) -> Job:
    """Two groups whose first epoch has formed."""
    job = Job(2, spec=SPEC, flow=flow)
    job.settle()
    hear(job, *heard)
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


def test_who_follows_computes_what_was_committed_before_and_no_more() -> None:
    job = job_of(FOLLOWS)
    assert states(job) == {"NORMAL.held"}
    hear(job, ScopeRecord("stage0", 2, 1, BOTH))
    assert states(job) == {"NORMAL.computing"}
    job.step()
    assert states(job) == {"NORMAL.held"}
    assert job.head is not None
    assert (job.head.step, [tuple(seen) for seen in job.head.seen]) == (1, [("stage0", 1, 0)])
    assert_sound(job)


def test_who_leads_is_held_at_its_bound() -> None:
    job = job_of(LEADS)
    for _ in range(2):
        assert states(job) == {"NORMAL.computing"}
        job.step()
    assert states(job) == {"NORMAL.held"}
    job.fire("flow_interval")
    job.settle()
    told = job.held[0]
    assert (told.step, told.scope, told.version, told.needed) == (2, "stage1", 0, 1)
    assert_sound(job)


def test_a_record_that_was_not_heard_is_read() -> None:
    job = job_of(FOLLOWS)
    job.scopes["stage0"] = ScopeRecord("stage0", 2, 1, BOTH)
    job.fire("flow_interval")
    job.settle()
    assert states(job) == {"NORMAL.computing"}
    assert_sound(job)


def test_an_older_record_changes_nothing() -> None:
    job = job_of(FOLLOWS, ScopeRecord("stage0", 5, 3, BOTH))
    hear(job, ScopeRecord("stage0", 4, 2, BOTH), ScopeRecord("stage9", 9, 9, BOTH))
    assert {node.local.elsewhere[0].version for node in job.live()} == {3}


def test_who_waits_for_a_scope_that_stands_still_stops() -> None:
    job = job_of(FOLLOWS)
    a, b = job.live()
    job.fire("flow_limit")
    job.settle()
    assert {ended(node).error for node in (a, b)} == {"FlowStalled"}
    assert "waits for version 1 of scope 'stage0'" in ended(a).reason
    assert_sound(job)


def the_other_scope_ends_before() -> Job:
    """It had another last step."""
    job = job_of(FOLLOWS, ScopeRecord("stage0", 2, 1, ()))
    a, b = job.live()
    job.step()
    job.fire("flow_interval")
    job.settle()
    assert {ended(node).error for node in (a, b)} == {"FlowStalled"}
    assert "give all stages the same max_steps" in ended(a).reason
    return job


def asked_last_to_leave() -> Job:
    """All have left the other scope; the word that asks this one to has come late."""
    job = job_of(FOLLOWS, ScopeRecord("stage0", 2, 1, ()))
    a, b = job.live()
    job.step()
    job.broadcast(Drain(BOTH, "somebody"))
    job.settle()
    assert {ended(node).error for node in (a, b)} == {None}
    return job


@pytest.mark.parametrize("life", [the_other_scope_ends_before, asked_last_to_leave])
def test_who_is_held_by_a_scope_that_has_ended_goes(life: object) -> None:
    assert callable(life)
    assert_sound(life())


def test_a_group_leaves_scopes_in_the_order_of_the_flow() -> None:
    job = job_of(FOLLOWS, ScopeRecord("stage0", 2, 2, BOTH))
    job.drain("1")
    job.step()
    hear(job, ScopeRecord("stage0", 4, 3, ("0",)))
    job.step()
    commits = [record for record in job.history if record.kind == "commit"]
    assert [(record.step, record.leavers) for record in commits] == [(1, ()), (2, ("1",))]
    assert_sound(job)

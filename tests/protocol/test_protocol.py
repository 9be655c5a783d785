"""Tests of the protocol's guarantees, one scenario each, on the simulated job without thread or
clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cluster import Node
from jobs import Job

from fft.engine.core import SLOTS
from fft.messages.causes import CauseCode, LeaveReason
from fft.messages.effects import ClearTimers, Finish, SetTimer
from fft.messages.protocol import (
    Ack,
    BusDown,
    Death,
    Decision,
    Drain,
    Event,
    Fault,
    Join,
    Leave,
    Manifest,
    Prepared,
    Ready,
    Record,
    Stop,
    Suspect,
    Timer,
    Token,
    Vote,
)
from fft.protocol.effects import commit_record
from fft.protocol.invariants import Finding
from fft.protocol.state import hello, unproven


def clean(job: Job) -> list[Finding]:
    """Let all events settle, and check that no guarantee is broken."""
    job.settle()
    return job.verdict()


def error_of(node: Node) -> tuple[str | None, str]:
    assert node.finished is not None, f"{node.peer} is still in {node.state}"
    return node.finished.error, node.finished.reason


def why(job: Job, number: int) -> tuple[CauseCode, list[str]]:
    """Return the code of a record of the register, and whom it accuses."""
    record = job.history[number]
    return record.code, [str(peer) for peer in record.accused]


# --- the txn --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "ranks"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_all_yes_commits_on_everyone(groups: int, ranks: int) -> None:
    job = Job(groups, ranks).until_running()
    for step in (1, 2, 3):
        job.step()
        assert job.steps() == {step}
    assert job.kinds() == ["epoch", "commit", "commit", "commit"]
    assert job.head is not None and job.head.cursor == 3 * groups
    assert len({n.local.lineage for n in job.live()}) == 1
    assert len(job.ballots) <= SLOTS // 2, "the ballots of older txns are removed"
    assert job.fetches() == {} and clean(job) == []


def test_single_no_vote_aborts_all_and_repeats_without_a_fetch() -> None:
    job = Job(2, 2).until_running()
    *others, last = job.live()
    job.compute(others)
    job.refuse(last)
    job.settle()
    assert job.kinds() == ["epoch", "abort", "epoch"] and job.steps() == {0}
    assert job.states() == {"NORMAL"}
    assert {n.local.token for n in job.live()} == {Token(2, 1)}
    assert job.history[1].cause.endswith("nan")
    job.step()
    assert job.steps() == {1} and job.head is not None and job.head.cursor == 2
    assert job.fetches() == {} and clean(job) == []


def test_a_fault_on_one_rank_aborts_on_all() -> None:
    job = Job(2, 2).until_running()
    job.fail(job.node("1", 1), "out of memory")
    job.settle()
    assert job.kinds() == ["epoch", "abort", "epoch"]
    assert "1/1#1: out of memory" in job.history[1].cause
    assert why(job, 1) == (CauseCode.STEP_FAILED, ["1/1#1"])
    assert job.fetches() == {} and clean(job) == []


def test_faults_on_all_ranks_at_once_make_one_abort() -> None:
    job = Job(3, 2).until_running()
    for node in job.live():
        job.fail(node)
    job.settle()
    assert job.kinds() == ["epoch", "abort", "epoch"] and clean(job) == []


def test_fault_after_the_vote_aborts_an_undecided_txn() -> None:
    job = Job(2).until_running()
    job.compute([job.node("0")])
    job.settle()
    job.fail(job.node("0"), "late writer")
    job.settle()
    assert job.kinds() == ["epoch", "abort", "epoch"]
    job.step()
    assert job.steps() == {1} and clean(job) == []


def test_a_fault_after_the_last_vote_obeys_the_commit() -> None:
    job = Job(2).until_running()
    a, b = job.live()
    job.compute([a])
    job.settle()
    job.compute([b])
    job.deliver(b)  # votes, and now holds the whole ballot
    job.fail(a)
    job.deliver(b)  # proposes COMMIT and wins
    job.settle()
    assert job.kinds() == ["epoch", "commit"] and job.steps() == {1} and clean(job) == []


def test_votes_with_mismatched_manifests_cannot_commit() -> None:
    job = Job(2).until_running()
    job.compute([job.node("0")], reductions=1)
    job.compute([job.node("1")], reductions=2)
    job.settle()
    assert job.kinds() == ["epoch", "abort", "epoch"]
    assert "manifests do not fit together (" in job.history[1].cause
    assert "0/0#1: 1x/4B" in job.history[1].cause and "1/0#1: 2x/8B" in job.history[1].cause
    assert why(job, 1) == (CauseCode.MANIFESTS_DIFFER, [])
    assert clean(job) == []


def test_one_vote_makes_a_checkpoint_due_and_later_records_keep_its_number() -> None:
    job = Job(2).until_running()
    job.compute([job.node("0")], checkpoint=True)
    job.fail(job.node("1"))
    job.settle()
    assert [record.checkpoint for record in job.history] == [0, 0, 0], "it was rolled back"
    job.compute([job.node("0")])
    job.compute([job.node("1")], checkpoint=True)
    job.settle()
    due = job.history[-1]
    assert (due.kind, due.checkpoint) == ("commit", due.n)
    job.step()
    job.compute(skip=True, checkpoint=True)
    job.settle()
    job.fail(job.node("0"))
    job.settle()
    later = job.history[due.n :]
    assert [record.kind for record in later] == ["commit", "commit", "abort", "epoch"]
    assert {record.checkpoint for record in later} == {due.n}, "a skip changes no step"
    assert clean(job) == []


def test_last_txn_that_is_skipped_is_due_for_a_checkpoint() -> None:
    job = Job(2).until_running()
    for node in job.live():
        assert node.txn is not None
        skips = {"skip": True, "last": True, "checkpoint": True}
        job.post(node, Prepared(node.txn.token, True, Manifest(1, 4, "x"), **skips))
    job.settle()
    assert job.history[-1].skip and job.history[-1].checkpoint == job.history[-1].n
    assert clean(job) == []


def test_ranks_that_have_drawn_different_data_cannot_commit() -> None:
    job = Job(2).until_running()
    for node, data in zip(job.live(), ("d", "e"), strict=True):
        assert node.txn is not None
        job.post(node, Prepared(node.txn.token, True, Manifest(1, 4, "x", data=data)))
    job.settle()
    assert job.kinds() == ["epoch", "abort", "epoch"] and job.steps() == {0}
    expected = "the ranks have drawn different data (d on 0/0#1; e on 1/0#1)"
    assert job.history[1].cause.endswith(expected)
    assert clean(job) == []


def test_a_rank_without_reductions_cannot_vote_yes() -> None:
    job = Job(2).until_running()
    job.compute([job.node("0")], reductions=0)
    job.compute([job.node("1")], reductions=0)
    job.settle()
    assert job.kinds() == ["epoch", "abort", "epoch"] and job.steps() == {0}
    assert "a step that reduced nothing must not be committed" in job.history[1].cause
    (accused,) = job.history[1].accused
    assert (job.history[1].code, accused) == (CauseCode.TOO_FEW_REDUCTIONS, job.history[1].by)


def test_vote_without_reductions_counts_if_the_policy_allows() -> None:
    job = Job(1, min_reductions=0).until_running()
    job.compute(reductions=0)
    job.settle()
    assert job.kinds() == ["epoch", "commit"]


def test_silence_after_a_yes_aborts_by_the_window() -> None:
    job = Job(2).until_running()
    a, b = job.live()
    job.compute([a])
    job.settle()
    assert a.state == "PREPARED" and b.state == "NORMAL"
    job.fire("vote_window", [a])
    job.settle()
    assert job.kinds() == ["epoch", "abort", "epoch"]
    assert "no decision in time" in job.history[1].cause
    assert why(job, 1) == (CauseCode.NO_DECISION, [])
    job.step()
    assert job.steps() == {1} and clean(job) == []


def until_committing() -> tuple[Job, Node, Node]:
    """Return a job whose first node applies a commit."""
    job = Job(2).until_running()
    a, b = job.live()
    job.compute()
    while a.state != "COMMIT":
        job.deliver(next(node for node in (b, a) if node.inbox))
    return job, a, b


@pytest.mark.parametrize(
    ("code", "expected"), [(CauseCode.LEFT, "left: over"), (CauseCode.DIED, "died: SIGKILL")]
)
def test_abort_names_member_that_was_lost_during_the_update(code: CauseCode, expected: str) -> None:
    job, a, b = until_committing()
    died = Death(b.peer.group, b.peer.rank, 1001, "sim", "a monitor", "SIGKILL")
    job.crash(b, tell=False)
    a.inbox.appendleft(Leave(b.peer, "over") if code == CauseCode.LEFT else died)
    job.settle()
    abort = job.history[2]
    assert (abort.kind, abort.by) == ("abort", a.peer)
    assert expected in abort.cause and why(job, 2) == (code, [str(b.peer)])


def test_abort_names_member_that_asks_to_join_during_the_update() -> None:
    job, a, b = until_committing()
    a.inbox.appendleft(Join(hello(b.local, b.participant.config)))
    job.settle()
    assert why(job, 2) == (CauseCode.LEFT, [])
    assert f"not in the epoch any more: {b.peer}" in job.history[2].cause


def test_an_abort_that_does_not_come_back_is_proposed_again() -> None:
    job = Job(2).until_running()
    a = job.node("0")
    job.bus_up = False
    job.fail(a)
    job.settle()
    assert a.state == "ROLLBACK_REQ" and job.kinds() == ["epoch"]
    job.bus_up = True
    job.fire("vote_window", [a])
    job.settle()
    assert job.kinds() == ["epoch", "abort", "epoch"] and clean(job) == []


# --- in doubt -------------------------------------------------------------------------------------


def in_doubt() -> tuple[Job, Node, Node]:
    """Both voted YES, but the bus was lost before the second vote was in the ballot."""
    job = Job(2).until_running()
    a, b = job.live()
    job.compute([a])
    job.settle()
    job.bus_up = False
    job.compute([b])
    job.settle()
    assert job.states() == {"PREPARED"} and job.kinds() == ["epoch"]
    return job, a, b


def test_participants_in_doubt_take_no_action() -> None:
    job, a, b = in_doubt()
    job.fire("vote_window")
    job.settle()
    assert job.states() == {"PREPARED"}
    assert a.applied == b.applied == [] and not a.finished and not b.finished


def test_in_doubt_and_the_bus_comes_back_everyone_decides() -> None:
    job, _, b = in_doubt()
    job.bus_up = True
    job.fire("bus_retry", [b])
    job.settle()
    assert job.kinds() == ["epoch", "commit"] and job.steps() == {1}
    assert job.states() == {"NORMAL"} and clean(job) == []


def test_in_doubt_and_the_commit_was_written_but_not_announced() -> None:
    job = Job(2).until_running()
    a, b = job.live()
    job.compute([a])
    job.settle()
    job.compute([b])
    job.loses_decision = True
    job.deliver(b)  # COMMIT is in the register
    assert job.kinds() == ["epoch", "commit"]
    job.settle()
    assert a.state == b.state == "PREPARED"
    job.fire("bus_retry", [b])  # b reads its decision
    job.settle()
    assert b.local.step == 1 and a.state == "PREPARED"
    job.fire("vote_window", [a])  # a proposes ABORT, and accepts the register's COMMIT
    job.settle()
    assert job.steps() == {1} and job.kinds() == ["epoch", "commit"] and clean(job) == []


def test_the_bus_is_away_for_good_stops_in_doubt() -> None:
    job, a, b = in_doubt()
    job.fire("vote_window", [a])
    job.settle()
    job.fire("bus_limit")
    job.settle()
    for node in (a, b):
        error, reason = error_of(node)
        assert error == "InDoubt" and reason.startswith("in doubt: voted YES, decision unknown;")
        assert "out of reach for 30 s or more after an operation on it was given up" in reason
        assert reason.endswith("at step 0, epoch 1, txn 1")
    assert [f.name for f in job.verdict()] == ["decided"], "blocking for good shows in the audit"


def test_bus_lost_for_good_after_a_decision_stops_without_doubt() -> None:
    job = Job(2).until_running()
    a, b = job.live()
    job.compute()
    while a.state != "COMMIT":
        job.deliver(a if a.inbox else b)
    assert a.local.vote is not None
    a.inbox.clear()  # its optimizer step takes long
    job.post(a, BusDown("read", "away"))
    job.deliver(a)
    job.fire("bus_limit", [a])
    job.deliver(a)
    error, reason = error_of(a)
    assert error == "InDoubt" and reason.startswith("the bus was out of reach for 30 s")


def test_the_bus_is_away_for_good_without_a_vote_stops_without_doubt() -> None:
    job = Job(2).until_running()
    a = job.node("0")
    job.bus_up = False
    job.fail(a)
    job.settle()
    job.fire("bus_limit", [a])
    job.settle()
    error, reason = error_of(a)
    assert error == "InDoubt" and not reason.startswith("in doubt")
    assert clean(job) == []


def test_the_bus_limit_means_nothing_once_the_bus_has_spoken() -> None:
    job, a, _ = in_doubt()
    job.bus_up = True
    job.fire("bus_retry")
    job.settle()
    job.bus_up = False
    job.fail(a)
    job.settle()
    job.bus_up = True
    job.broadcast(Ready(a.peer, 1))
    job.settle()
    job.fire("bus_limit", [a])
    job.settle()
    assert a.finished is None


def test_past_bus_trouble_does_not_shorten_the_next_limit() -> None:
    job = Job(2).until_running()
    a = job.node("0")
    job.post(a, BusDown("read", "away"))
    job.broadcast(Ready(a.peer, 1))
    job.settle()
    assert "bus_limit" in a.local.timers
    job.fire("bus_quiet", [a])
    job.settle()
    assert "bus_limit" not in a.local.timers
    job.post(a, BusDown("read", "away"))
    job.settle()
    assert "bus_limit" in a.local.timers


def test_bus_trouble_lasts_until_operations_and_messages_succeed() -> None:
    """Messages alone do not prove that the register can be read."""
    job = Job(2).until_running()
    a = job.node("0")
    job.post(a, BusDown("read", "away"))
    job.settle()
    first = dict(a.local.timers)
    job.fire("bus_quiet", [a])
    job.settle()
    assert a.local.timers["bus_limit"] == first["bus_limit"], "nothing was heard"
    assert a.local.timers["bus_quiet"] > first["bus_quiet"]
    for _ in range(3):
        before = a.local.timers["bus_quiet"]
        job.broadcast(Ready(a.peer, 1))
        job.settle()
        job.post(a, BusDown("read", "away"))
        job.settle()
        assert a.local.timers["bus_limit"] == first["bus_limit"]
        assert a.local.timers["bus_quiet"] > before, "it has to be quiet from now on"


@pytest.mark.parametrize("operation", ["listen", "forgot"])
def test_participant_that_lost_the_order_stops_despite_a_working_bus(operation: str) -> None:
    job = Job(2).until_running()
    a = job.node("0")
    job.post(a, BusDown(operation, "fell behind"))
    job.broadcast(Ready(a.peer, 1))
    job.settle()
    job.fire("bus_limit", [a])
    job.settle()
    assert error_of(a)[0] == "InDoubt"


def test_a_missed_commit_is_settled_by_the_abort_of_the_next_txn() -> None:
    job = Job(2).until_running()
    a, b = job.live()
    job.compute([a])
    job.settle()
    job.compute([b])
    while b.inbox:
        job.deliver(b)
    job.lose_decisions(a)
    assert b.local.step == 1 and a.state == "PREPARED"
    job.fail(b)
    job.settle()
    assert job.kinds() == ["epoch", "commit", "abort", "epoch"]
    assert job.steps() == {1} and job.states() == {"NORMAL"}
    assert len(a.applied) == 1, "a finished the commit from the gradients it held"
    assert job.fetches() == {} and clean(job) == []


def test_a_missed_commit_is_settled_by_the_epoch_that_left_me_out() -> None:
    job = Job(3).until_running()
    a, b, c = job.live()
    job.compute([a, b])
    job.settle()
    job.compute([c])
    while b.inbox or c.inbox:
        for node in (b, c):
            if node.inbox:
                job.deliver(node)
    job.lose_decisions(a)
    job.fail(b)
    while b.inbox or c.inbox:
        for node in (b, c):
            if node.inbox:
                job.deliver(node)
    job.lose_decisions(a)
    job.fire("ack_window", [b, c])
    job.settle()
    assert job.history[3].kind == "epoch" and len(job.history[3].members) == 2
    assert a.local.step == 1 and len(a.applied) == 1, "settled by lineage, then fenced"
    assert a.state == "INIT"
    job.fail(b)  # an epoch without a commit: a is current and needs nothing when it comes back
    job.settle()
    assert job.states() == {"NORMAL"} and len(job.live()) == 3
    assert job.fetches() == {} and clean(job) == []


def test_an_abort_that_was_missed_is_settled_by_the_next_epoch() -> None:
    job = Job(3).until_running()
    a, b, c = job.live()
    job.compute([a])
    job.settle()
    job.fail(b)
    for _ in range(40):
        for node in (b, c):
            if node.inbox:
                job.deliver(node)
    job.lose_decisions(a)
    job.fire("ack_window", [b, c])
    job.settle()
    assert a.applied == [] and a.state == "INIT"
    assert clean(job) == []


def test_a_vote_cast_twice_counts_once() -> None:
    job, a, b = in_doubt()
    job.bus_up = True
    job.fire("bus_retry", [b])
    job.fire("bus_retry", [b])
    for _ in range(3):
        job.deliver(b)
    job.settle()
    assert job.kinds() == ["epoch", "commit"] and a.local.step == b.local.step == 1


# --- after COMMIT ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_apply_that_fails_after_commit_heals_that_rank_from_a_peer(ranks: int) -> None:
    job = Job(2, ranks).until_running()
    job.step()
    victim = job.node("1")
    job.apply_fails = frozenset({victim.peer})
    job.step()
    assert job.kinds() == ["epoch", "commit", "commit", "abort", "epoch"]
    assert "optimizer step failed after COMMIT: cuda error" in job.history[3].cause
    assert job.history[3].code == CauseCode.UPDATE_FAILED
    assert job.history[3].accused == (job.history[3].by,)
    assert job.fetches() == {str(victim.peer): 1} and job.steps() == {2}
    job.step()
    assert job.steps() == {3} and len({n.local.lineage for n in job.live()}) == 1
    assert clean(job) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_apply_that_fails_everywhere_ends_the_job_at_once(ranks: int) -> None:
    """One failing rank of each group is enough, because no other rank has its shard."""
    job = Job(2, ranks).until_running()
    job.apply_fails = frozenset(n.peer for n in job.live() if n.peer.rank == ranks - 1)
    job.step()
    for node in job.nodes.values():
        error, reason = error_of(node)
        assert error == "NoState" and "the state of the job at step 1" in reason
        assert "from a checkpoint if it has one; the same job name may be used again" in reason


def test_apply_that_fails_on_different_ranks_of_the_groups_heals_both() -> None:
    job = Job(2, ranks=2).until_running()
    job.apply_fails = frozenset({job.node("0", 0).peer, job.node("1", 1).peer})
    job.step()
    assert {str(peer): n for peer, n in job.fetches().items()} == {"0/0#1": 1, "1/1#1": 1}
    job.step()
    assert job.steps() == {2} and clean(job) == []


def test_apply_that_fails_while_the_other_group_leaves_ends_at_once() -> None:
    """The group that leaves with the commit provides its state to no other group."""
    job = Job(2).until_running()
    job.drain("1")
    job.settle()
    job.apply_fails = frozenset({job.node("0").peer})
    job.step()
    error, reason = error_of(job.node("0"))
    assert error == "NoState" and "the state of the job at step 1" in reason


def test_failed_apply_at_the_end_of_an_epoch_heals_in_the_next() -> None:
    job = Job(2).until_running()
    job.start_group("2")
    job.settle()
    job.apply_fails = frozenset({job.node("0").peer})
    job.step()
    job.settle()
    assert "0/0#1" in job.fetches() and job.steps() == {1}
    assert job.states() == {"NORMAL"} and len(job.live()) == 3
    job.step()
    assert job.steps() == {2} and clean(job) == []


def test_decision_during_the_apply_of_a_commit_is_deferred() -> None:
    job = Job(2).until_running()
    a, b = job.live()
    job.compute([a])
    job.settle()
    job.compute([b])
    while b.inbox:
        job.deliver(b)
    job.fail(b)
    while b.inbox:
        job.deliver(b)  # the next txn is aborted before a has applied this one
    verdicts = []
    while a.inbox:
        verdicts.append(job.deliver(a).verdict)
    assert "deferred" in verdicts
    assert len(a.applied) == 1
    job.settle()
    assert job.states() == {"NORMAL"} and job.fetches() == {} and clean(job) == []


@pytest.mark.parametrize("torn", [False, True])
def test_apply_behind_a_closed_successor_rolls_back_or_heals(torn: bool) -> None:
    job = Job(2).until_running()
    a, b = job.live()
    job.compute([a])
    job.settle()
    job.compute([b])
    while b.inbox:
        job.deliver(b)
    job.lose_decisions(a)
    if torn:
        job.apply_fails = frozenset({a.peer})
    job.fail(b)
    job.settle()
    assert job.steps() == {1} and job.states() == {"NORMAL"}
    assert job.fetches() == ({"0/0#1": 1} if torn else {}) and clean(job) == []


# --- who dies, who comes --------------------------------------------------------------------------


def test_a_death_notice_rolls_back_and_goes_on_without_the_dead() -> None:
    job = Job(3).until_running()
    job.step()
    job.kill_group("1")
    job.settle()
    assert job.kinds() == ["epoch", "commit", "abort", "epoch"]
    assert "1/0#1 died" in job.history[2].cause and "(seen by sim)" in job.history[2].cause
    assert why(job, 2)[0] == CauseCode.DIED and "1/0#1" in why(job, 2)[1]
    job.step()
    assert job.steps() == {2} and job.fetches() == {}
    assert job.head is not None and job.head.cursor == 3 + 2, "its share is not lost with it"
    assert clean(job) == []


def test_unreported_death_is_detected_by_silence() -> None:
    job = Job(3).until_running()
    job.kill_group("1", tell=False)
    job.fail(job.node("0"), "connection closed by peer")
    job.settle()
    assert job.states() == {"HEALING"}, "all have stopped but one that is awaited"
    assert job.kinds() == ["epoch", "abort"], "and nothing is formed without it before the window"
    job.fire("ack_window")
    job.settle()
    assert job.kinds() == ["epoch", "abort", "epoch"] and len(job.history[2].members) == 2
    job.step()
    assert job.steps() == {1} and job.fetches() == {} and clean(job) == []


@pytest.mark.parametrize("moment", ["PREPARED", "HEALING", "ROLLBACK_SYNC"])
def test_a_death_at_any_moment_is_survived(moment: str) -> None:
    job = Job(3).until_running()
    a, b, _ = job.live()
    if moment == "PREPARED":
        job.compute([a, b])
    else:
        job.fail(a)
    for _ in range(200):
        if a.state == moment:
            break
        waiting = [n for n in job.live() if n.inbox]
        job.deliver(waiting[0])
    assert a.state == moment
    job.kill_group("2")
    job.settle()
    job.step()
    assert job.steps() == {1} and len(job.live()) == 2 and clean(job) == []


def test_the_death_of_one_rank_takes_its_group_out_of_the_next_epoch() -> None:
    job = Job(2, ranks=2).until_running()
    job.step()
    job.crash(job.node("1", 1))
    job.settle()
    assert [g.group for g in job.history[-1].members] == ["0"]
    assert job.node("1", 0).state == "INIT", "a rank without its group is outside"
    job.step()
    assert job.node("0").local.step == 2
    job.crash(job.node("1", 0))
    new = job.start_group("1")
    job.settle()
    job.step()
    job.settle()
    assert {n.state for n in new} == {"NORMAL"}
    assert job.fetches() == {"1/0#2": 1, "1/1#2": 1}
    job.step()
    assert len({(n.local.step, n.local.lineage) for n in job.live()}) == 1 and clean(job) == []


def test_a_group_that_is_started_again_heals_once_and_takes_part() -> None:
    job = Job(2, ranks=2).until_running()
    job.step()
    job.kill_group("1")
    job.settle()
    job.step()
    job.start_group("1")
    job.settle()
    before = job.kinds().count("abort")
    job.step()  # the commit that ends the epoch
    job.step()
    assert job.kinds().count("abort") == before, "a joiner costs nobody a rollback"
    assert job.fetches() == {"1/0#2": 1, "1/1#2": 1}
    assert job.steps() == {4} and clean(job) == []


def test_a_joiner_during_a_rollback_is_in_the_next_epoch() -> None:
    job = Job(2).until_running()
    job.step()
    (joiner,) = job.start_group("2")
    job.deliver(joiner)  # it asks to join
    job.fail(job.node("0"))
    job.settle()
    assert job.kinds() == ["epoch", "commit", "abort", "epoch"]
    assert [g.group for g in job.history[-1].members] == ["0", "1", "2"]
    assert job.fetches() == {"2/0#1": 1} and clean(job) == []


def test_joiner_with_a_lost_request_asks_again() -> None:
    job = Job(2).until_running()
    job.bus_up = False
    job.start_group("2")
    job.settle()
    job.bus_up = True
    job.fire("bus_retry", job.group("2"))
    job.settle()
    job.step()
    job.settle()
    assert len(job.live()) == 3 and job.states() == {"NORMAL"} and clean(job) == []


def test_first_epoch_waits_a_bounded_time_for_an_announced_group() -> None:
    job = Job(2, expected_groups=3)
    job.settle()
    assert job.states() == {"INIT"}
    job.fire("join_window")
    job.settle()
    assert job.states() == {"NORMAL"} and len(job.history[0].members) == 2


def test_a_second_incarnation_of_a_live_identity_fences_the_older() -> None:
    job = Job(2).until_running()
    job.step()
    old = job.node("1")
    job.start_group("1")
    job.settle()
    error, reason = error_of(old)
    assert error == "Fenced" and "1/0#1 is replaced by 1/0#2 (pid 1002 on sim)" in reason
    assert "end the older one" in reason
    job.step()
    job.step()
    assert job.states() == {"NORMAL"} and job.fetches() == {"1/0#2": 1} and clean(job) == []


def test_new_incarnation_fences_an_older_one_waiting_to_join() -> None:
    job = Job(2, expected_groups=3)
    job.settle()
    old = job.node("1")
    job.start_group("1")
    job.settle()
    assert error_of(old)[0] == "Fenced"
    job.fire("join_window")
    job.settle()
    assert job.states() == {"NORMAL"} and {n.peer.inc for n in job.live()} == {1, 2}


def test_member_that_stops_itself_is_not_awaited() -> None:
    job = Job(2).until_running()
    job.post(job.node("1"), Stop("user asked"))
    job.settle()
    assert error_of(job.node("1")) == (None, "user asked")
    assert "1/0#1 left: user asked" in job.history[1].cause
    assert why(job, 1) == (CauseCode.LEFT, ["1/0#1"])
    job.step()
    assert job.steps() == {1} and clean(job) == []


# --- drain ----------------------------------------------------------------------------------------


SHARD = Manifest(shard="1")


@pytest.mark.parametrize(
    ("votes", "reasons"),
    [
        ({"0": {}, "1": {"leaving": True}}, {"1": LeaveReason.DRAINED}),
        ({"0": {"last": True}, "1": {}}, {"0": LeaveReason.LAST_STEP}),
        ({"0": {"last": True, "leaving": True}, "1": {}}, {"0": LeaveReason.LAST_STEP}),
        ({"0": {}, "1": {"last": True, "manifest": SHARD}}, {"1": LeaveReason.SHARD_ENDED}),
        (
            {
                "0": {"last": True, "leaving": True, "skip": True, "manifest": SHARD},
                "1": {"leaving": True, "skip": True},
            },
            {"0": LeaveReason.LAST_STEP, "1": LeaveReason.DRAINED},
        ),
    ],
    ids=["asked", "last step", "asked at its last step", "end of its shard", "stop by one asked"],
)
def test_commit_names_why_each_group_leaves(
    votes: dict[str, dict[str, Any]], reasons: dict[str, LeaveReason]
) -> None:
    a, b = Job(2).until_running().live()
    fields = {node.peer: {"manifest": Manifest(), **votes[node.peer.group]} for node in (a, b)}
    cast = [Vote(peer, **values) for peer, values in fields.items()]
    record = commit_record(a.local, a.participant.config, cast)
    assert dict(zip(record.leavers, record.reasons, strict=True)) == reasons
    assert record.why_left("2") is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_drained_group_leaves_after_a_commit_without_a_rollback(ranks: int) -> None:
    job = Job(3, ranks).until_running()
    job.step()
    leavers = job.group("1")
    job.drain("1")
    job.step()
    assert job.kinds() == ["epoch", "commit", "commit", "epoch"]
    assert job.history[2].leavers == ("1",)
    assert job.history[2].reasons == (LeaveReason.DRAINED,)
    for node in leavers:
        assert error_of(node) == (None, "left after a commit") and node.local.step == 2
    assert len(job.live()) == 2 * ranks
    job.step()
    assert job.steps() == {3} and job.fetches() == {} and clean(job) == []


def test_a_drain_asked_for_in_one_rank_takes_its_whole_group_along() -> None:
    job = Job(2, ranks=2).until_running()
    job.post(job.node("1", 0), Drain(groups=("1",), by="1/0", local=True))
    job.step()
    assert {n.finished is not None for n in job.nodes.values() if n.peer.group == "1"} == {True}
    assert clean(job) == []


def test_all_groups_can_drain_at_one_commit() -> None:
    job = Job(2, ranks=2).until_running()
    job.drain("0", "1")
    job.step()
    assert job.live() == [] and job.kinds() == ["epoch", "commit"]
    assert all(error_of(n)[0] is None and n.local.step == 1 for n in job.nodes.values())
    assert job.verdict() == []


def test_a_drain_asked_for_twice_is_one_drain() -> None:
    job = Job(2).until_running()
    job.drain("1")
    job.drain("1")
    job.step()
    job.drain("1")
    job.step()
    assert job.kinds() == ["epoch", "commit", "epoch", "commit"]
    assert job.steps() == {2} and len(job.live()) == 1 and clean(job) == []


def test_a_drain_during_a_rollback_leaves_with_the_next_commit() -> None:
    job = Job(2).until_running()
    job.fail(job.node("0"))
    job.drain("1")
    job.settle()
    assert job.kinds() == ["epoch", "abort", "epoch"] and len(job.live()) == 2
    job.step()
    assert job.node("1").finished is not None and job.node("1").local.step == 1
    assert job.history[3].leavers == ("1",) and clean(job) == []


def test_a_drained_group_can_come_back() -> None:
    job = Job(2).until_running()
    job.drain("1")
    job.step()
    job.start_group("1")
    job.settle()
    job.step()
    job.step()
    assert job.steps() == {3} and len(job.live()) == 2
    assert job.fetches() == {"1/0#2": 1} and "abort" not in job.kinds() and clean(job) == []


def test_leaver_waits_a_bounded_time_for_the_others() -> None:
    job = Job(2).until_running()
    a, b = job.live()
    job.drain("1")
    for node in (a, b):
        while node.inbox:
            job.deliver(node)
    job.compute([a])
    job.deliver(a)
    job.compute([b])
    while b.inbox and b.state != "DRAIN_WAIT":
        job.deliver(b)
    assert b.state == "DRAIN_WAIT"
    job.fire("drain_window", [b])
    while b.inbox and not b.finished:
        job.deliver(b)
    assert error_of(b) == (None, "left after a commit") and clean(job) == []


def test_leaver_with_a_failed_last_update_still_leaves() -> None:
    job = Job(2).until_running()
    job.drain("1")
    job.apply_fails = frozenset({job.node("1").peer})
    job.step()
    assert error_of(job.node("1")) == (None, "left after a commit")
    job.step()
    assert job.steps() >= {2} and job.kinds() == ["epoch", "commit", "epoch", "commit"]


def test_a_drain_before_the_first_epoch_ends_at_once() -> None:
    job = Job(2, expected_groups=3)
    job.settle()
    job.drain("1")
    job.settle()
    assert error_of(job.node("1"))[0] is None and job.node("0").state == "INIT"
    job.fire("join_window")
    job.settle()
    assert [g.group for g in job.history[0].members] == ["0"] and clean(job) == []


# --- suspicion ------------------------------------------------------------------------------------


def suspected(**config: object) -> tuple[Job, Node]:
    """Return three groups after a fault; the third is alive but silent when the window closes."""
    job = Job(3, **config).until_running()
    job.step()
    a, b, c = job.live()
    job.fail(a)
    for _ in range(40):
        for node in (a, b):
            if node.inbox:
                job.deliver(node)
    assert c.inbox and a.state == b.state == "HEALING"
    assert job.kinds() == ["epoch", "commit", "abort"], "the next epoch waits for the third"
    return job, c


def test_a_suspect_that_speaks_in_time_is_in_the_next_epoch() -> None:
    job, c = suspected(min_groups=3)
    a, b = job.node("0"), job.node("1")
    job.fire("ack_window", [a, b])
    while a.inbox or b.inbox:
        job.deliver(a if a.inbox else b)
    assert a.local.suspected == {c.peer} and b.local.suspected == frozenset(), "one counts"
    assert job.kinds()[-1] == "abort", "without the third there are too few"
    job.settle()
    assert a.local.suspected == frozenset()
    assert len(job.history[-1].members) == 3 and job.fetches() == {} and clean(job) == []


def test_false_suspect_with_a_current_lineage_returns_without_a_fetch() -> None:
    job, c = suspected()
    a, b = job.node("0"), job.node("1")
    job.fire("ack_window", [a, b])
    for _ in range(60):
        for node in (a, b):
            if node.inbox:
                job.deliver(node)
    assert len(job.history[-1].members) == 2 and a.state == b.state == "NORMAL"
    job.settle()
    assert c.state == "INIT" and c.finished is None
    job.fail(a)
    job.settle()
    assert c.state == "NORMAL" and c.local.step == 1
    assert job.fetches() == {} and clean(job) == []


def test_a_false_suspect_that_missed_a_commit_fetches_once() -> None:
    job, c = suspected()
    job.fire("ack_window", [job.node("0"), job.node("1")])
    job.settle()
    job.step()
    assert c.state == "NORMAL" and c.learning is not None, "it fetches while the others compute"
    job.step()
    assert job.steps() == {3}
    assert job.fetches() == {str(c.peer): 1} and clean(job) == []


def joined(groups: int = 2, **config: object) -> tuple[Job, Node]:
    """Return a job that the last group has just rejoined, and that group, which is fetching in its
    first txn.

    No participant has computed the second step yet.
    """
    job = Job(groups, **config).until_running()
    last = str(groups - 1)
    job.start_anew(last)
    job.step()
    return job, job.node(last)


def test_joiner_computes_along_and_counts_from_the_next_step() -> None:
    job, late = joined(3)
    a, b = job.node("0"), job.node("1")
    assert job.head.learners == ("2",) and {a.state, b.state, late.state} == {"NORMAL"}
    plans = [n.txn for n in (a, b, late)]
    assert [p.index for p in plans] == [0, 1, None] and {p.participants for p in plans} == {2}
    assert {(p.step, p.lineage, p.cursor) for p in plans} == {(1, a.local.lineage, 2)}
    job.step()
    plans = [n.txn for n in (a, b, late)]
    assert [p.index for p in plans] == [0, 1, 2] and {p.cursor for p in plans} == {4}
    assert job.steps() == {2} and clean(job) == []


def test_nothing_is_committed_before_a_learner_has_its_state() -> None:
    job, late = joined()
    a = job.node("0")
    job.compute([a])
    job.settle()
    assert a.state == "PREPARED" and late.state == "NORMAL" and late.local.step == 0
    job.post(late, Prepared(late.txn.token, True, Manifest(1)))  # an engine never sends this
    job.settle()
    assert job.kinds()[-2:] == ["abort", "epoch"], "a YES without the state is none"


def refused_for_differing(job: Job) -> list[Record]:
    return [r for r in job.history if r.code == CauseCode.REPLICAS_DIFFER]


def test_divergent_joiner_fetches_again_without_a_majority() -> None:
    """Two groups have no majority, but only one of them has just fetched its state."""
    job, late = joined()
    others = [n for n in job.live() if n is not late]
    job.compute([late], digest="parameters=1\noptimizers[0].lr=a")
    job.compute(others, digest="parameters=1\noptimizers[0].lr=b")
    job.settle()
    (record,) = refused_for_differing(job)
    assert record.odd == (late.peer,) and not record.diverged
    assert f"optimizers[0].lr: b on {others[0].peer}" in record.cause
    assert f"a on {late.peer}" in record.cause and "parameters" not in record.cause
    job.compute(digest="the same")
    job.settle()
    assert {n.local.step for n in job.live()} == {2} and clean(job) == []


def test_joiner_is_not_to_blame_if_the_others_differ_too() -> None:
    job, _ = joined(3)
    for node in job.live():
        job.compute([node], digest=f"of {node.peer.group}")
    job.settle()
    (record,) = refused_for_differing(job)
    assert record.diverged and record.odd == () and not job.live()


def test_joiner_is_unproven_until_a_step_is_committed() -> None:
    """A rollback, another joiner, and a skip do not make it an old member; a step does."""
    job, early = joined()
    job.learn(early)
    job.settle()
    job.start_group("2")
    job.settle()
    job.fail(job.node("0"))
    job.settle()
    late = job.node("2")
    assert [r.current for g in job.head.members for r in g.ranks] == [True, True, False]
    assert {unproven(n.local) for n in job.live()} == {frozenset({early.peer, late.peer})}
    job.compute(skip=True)
    job.settle()
    assert job.head.skip
    assert {unproven(n.local) for n in job.live()} == {frozenset({early.peer, late.peer})}
    job.compute([early], digest="a")
    job.compute([n for n in job.live() if n is not early], digest="b")
    job.settle()
    (record,) = refused_for_differing(job)
    assert record.odd == (early.peer,) and not record.diverged
    job.step()
    assert {unproven(n.local) for n in job.live()} == {frozenset()}
    job.compute([early], digest="a")
    job.compute([n for n in job.live() if n is not early], digest="b")
    job.settle()
    assert refused_for_differing(job)[-1].diverged and not job.live()


def test_joiner_alone_with_the_state_is_proven_for_the_next_joiner() -> None:
    job, early = joined()
    job.learn(early)
    job.settle()
    job.start_anew("0")
    job.settle()
    job.fail(early)
    job.settle()
    assert {unproven(n.local) for n in job.live()} == {frozenset({job.node("0").peer})}


def test_after_a_rollback_a_learner_is_waited_for() -> None:
    """The attempt is lost; in the next epoch it fetches in the barrier, and counts at once."""
    job, late = joined()
    job.fail(job.node("0"))
    job.settle()
    assert job.head.learners == () and job.steps() == {1}
    assert [n.txn.index for n in (job.node("0"), late)] == [0, 1]
    job.step()
    assert job.steps() == {2} and clean(job) == []


def test_joiner_with_its_state_does_not_fetch_after_a_rollback() -> None:
    job, late = joined()
    job.learn(late)
    job.settle()
    job.fail(job.node("0"))
    job.settle()
    job.step()
    assert job.fetches() == {str(late.peer): 1} and job.steps() == {2} and clean(job) == []


def test_with_too_few_to_compute_meanwhile_a_joiner_is_waited_for() -> None:
    job = Job(3, min_groups=2).until_running()
    job.start_anew("2")
    job.drain("1")
    job.step()
    assert [g.group for g in job.head.members] == ["0", "2"]
    assert job.head.learners == (), "one group alone must not commit here"
    job.step()
    assert job.steps() == {2} and clean(job) == []


@pytest.mark.parametrize("edited", [True, False])
def test_where_bodies_change_gradients_a_joiner_is_waited_for(edited: bool) -> None:
    """A joiner that is still fetching would change them by the weights that it is about to
    replace."""
    job = Job(3).until_running()
    job.start_anew("2")
    job.settle()
    for node in job.live():
        if node.txn is not None:
            manifest = Manifest(1, 4, "x")
            job.post(node, Prepared(node.txn.token, True, manifest, edited=edited))
    job.settle()
    assert [g.group for g in job.head.members] == ["0", "1", "2"]
    assert job.head.learners == (() if edited else ("2",))
    assert [job.node(g).txn.index for g in "012"] == [0, 1, 2 if edited else None]
    job.step()
    assert job.steps() == {2} and clean(job) == []


def test_joiner_chosen_by_rules_has_its_state_before_computing() -> None:
    job = Job(3, rules=(("max_active", 2),)).until_running()
    job.start_anew("0")
    job.step()
    assert job.head.active == ("0", "1") and job.head.learners == ()
    assert [job.node(g).txn.index for g in "012"] == [0, 1, None]
    job.step()
    assert job.steps() == {2} and clean(job) == []


def test_joiner_that_rules_leave_out_fetches_while_the_others_compute() -> None:
    job = Job(3, rules=(("max_active", 2),)).until_running()
    job.start_anew("2")
    job.step()
    assert job.head.active == ("0", "1") and job.head.learners == ("2",)
    job.step()
    assert job.steps() == {2} and clean(job) == []


def test_a_spare_computes_in_the_place_of_a_learner() -> None:
    job = Job(3, min_groups=2, fixed_with_spares=True).until_running()
    job.start_anew("0")
    job.step()
    assert job.head.learners == ("0",)
    assert [job.node(g).txn.index for g in "012"] == [None, 0, 1]
    job.step()
    assert [job.node(g).txn.index for g in "012"] == [0, 1, None] and clean(job) == []


def test_member_that_misses_the_barrier_is_excluded_from_the_next_epoch() -> None:
    job = Job(3).until_running()
    a, b, c = job.live()
    job.fail(a)
    for _ in range(200):
        if c.heals and len(c.heals) == 2:
            break
        waiting = [n for n in job.live() if n.inbox]
        job.deliver(waiting[0])
    c.inbox.clear()  # c hangs in the rendezvous
    for _ in range(60):
        for node in (a, b):
            if node.inbox:
                job.deliver(node)
    assert a.state == b.state == "HEALING"
    job.fire("ready_window", [a])
    for _ in range(80):
        for node in (a, b):
            if node.inbox:
                job.deliver(node)
    job.fire("ack_window", [a, b])
    for _ in range(80):
        for node in (a, b):
            if node.inbox:
                job.deliver(node)
    assert a.state == b.state == "NORMAL" and len(job.history[-1].members) == 2
    assert "not in the barrier in time: 2/0#1" in job.history[-2].cause
    assert why(job, -2) == (CauseCode.ABSENT, ["2/0#1"])


# --- the coordinator ------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_messages_between_epochs_grow_linearly_with_the_job(groups: int) -> None:
    """Each participant reports its stop and its arrival in the barrier to one; that one announces
    to all."""
    job = Job(groups).until_running()
    before = {n.peer: len(job.record.moves[n.peer]) for n in job.live()}
    job.fail(job.node("0"))
    job.settle()
    words = [
        m.event.type
        for n in job.live()
        for m in job.record.moves[n.peer][before[n.peer] :]
        if m.event.type in ("ack", "ready", "begin", "here")
    ]
    assert words.count("ack") == words.count("ready") == groups - 1
    assert words.count("begin") == groups and "here" not in words


@pytest.mark.parametrize("tell", [True, False])
def test_coordinator_ending_while_it_gathers_is_alone_excluded(tell: bool) -> None:
    """Main threads that still unwind from this very rollback are not stuck, so the others wait for
    them."""
    job = Job(4).until_running()
    a, *others = job.live()
    job.fail(a)
    while a.state != "ROLLBACK_SYNC":
        job.deliver(a)
    job.crash(a, tell)
    late = []
    for node in others:
        while node.state != "ROLLBACK_SYNC":
            job.deliver(node)
        late.append((node, next(e for e in node.inbox if e.type == "restored")))
        node.inbox.remove(late[-1][1])
    job.settle()
    if not tell:
        assert job.kinds() == ["epoch", "abort"]
        job.fire("coordinator_window", others)
        job.settle()
    for node, restored in late:
        job.post(node, restored)
        job.settle()
    assert [g.group for g in job.history[2].members] == ["1", "2", "3"]
    assert job.states() == {"NORMAL"} and job.kinds() == ["epoch", "abort", "epoch"]
    assert job.fetches() == {} and clean(job) == []


def test_sign_of_life_of_the_coordinator_causes_no_suspicion() -> None:
    """A pause runs and the coordinator sends a sign of life while a main thread still unwinds."""
    job = Job(3).until_running()
    a, _, c = job.live()
    for _ in range(3):
        job.fail(a)
        job.settle()
    job.fail(a)
    while c.state != "ROLLBACK_SYNC":
        job.deliver(next(n for n in (c, a) if n.inbox))
    restored = next(e for e in c.inbox if e.type == "restored")
    c.inbox.remove(restored)
    job.settle()
    job.fire("ack_window")
    job.settle()
    job.fire("pause")
    job.settle()
    assert job.head is not None and len(job.head.members) == 3
    job.post(c, restored)
    job.settle()
    assert job.states() == {"NORMAL"} and job.fetches() == {} and clean(job) == []


def test_the_coordinator_dies_between_the_epoch_and_its_begin() -> None:
    """The others are in its barrier; they give the epoch up, and form one without it."""
    job = Job(3).until_running()
    a, b, c = job.live()
    job.fail(a)
    while not all(n.local.token == Token(2, 1) and n.local.healed for n in (b, c)):
        job.deliver(next(n for n in (b, c, a) if n.inbox))
    assert job.history[-1].by == a.peer and a.state != "NORMAL"
    job.crash(a, tell=False)
    job.settle()
    assert job.states() == {"HEALING"}
    job.fire("ready_window")
    job.settle()
    assert f"{a.peer} did not report the barrier complete" in job.history[3].cause
    assert why(job, 3) == (CauseCode.NO_BEGIN, [str(a.peer)])
    for _ in range(2):
        job.fire("ack_window")
        job.settle()
    assert [g.group for g in job.history[4].members] == ["1", "2"]
    assert job.states() == {"NORMAL"} and job.fetches() == {} and clean(job) == []


def test_lost_acknowledgement_is_a_cheap_false_suspicion() -> None:
    job = Job(3, min_groups=2).until_running()
    a, _, c = job.live()
    job.fail(a)
    while not any(isinstance(e, Ack) and e.hello.peer == c.peer for e in a.inbox):
        job.deliver(next(n for n in (c, a) if n.inbox))
    a.inbox = type(a.inbox)(e for e in a.inbox if not isinstance(e, Ack))
    job.settle()
    job.fire("ack_window")
    job.settle()
    assert [g.group for g in job.history[2].members] == ["0", "1"] and c.state == "INIT"
    job.fail(a)
    job.settle()
    assert job.states() == {"NORMAL"} and len(job.live()) == 3
    assert job.fetches() == {} and clean(job) == []


def test_live_coordinator_that_cannot_form_an_epoch_is_awaited() -> None:
    job = Job(3, min_groups=3).until_running()
    job.kill_group("2")
    job.settle()
    assert job.states() == {"HEALING"} and job.kinds() == ["epoch", "abort"], "too few groups"
    (waits,) = (n for n in job.live() if n.peer != job.history[1].by)
    for _ in range(5):
        armed = waits.timers["coordinator_window"]
        job.fire("ack_window")
        job.settle()
        assert waits.timers["coordinator_window"].serial > armed.serial, "it has heard: here"
        assert waits.local.suspected == frozenset()
    job.start_group("2")
    job.settle()
    assert job.states() == {"NORMAL"} and len(job.history[2].members) == 3
    assert job.fetches() == {} and clean(job) == []


def test_begin_lost_with_the_bus_is_sent_again() -> None:
    job = Job(2).until_running()
    a, b = job.live()
    job.fail(a)
    while not any(isinstance(e, Ready) for e in a.inbox):
        job.deliver(next(n for n in (b, a) if n.inbox))
    while a.state != "NORMAL":
        job.bus_up = not isinstance(a.inbox[0], Ready)
        job.deliver(a)
    assert b.state == "HEALING" and b.local.healed
    job.settle()
    assert b.state == "HEALING"
    job.bus_up = True
    job.fire("bus_retry", [a])
    job.settle()
    assert job.states() == {"NORMAL"} and job.kinds() == ["epoch", "abort", "epoch"]
    assert clean(job) == []


def test_writer_of_the_last_commit_leaves_and_all_others_gather() -> None:
    job = Job(3).until_running()
    a, b, c = job.live()
    job.drain("0")
    job.settle()
    job.compute([b, c])
    job.settle()
    job.compute([a])  # the last voter writes the commit
    job.settle()
    assert job.history[1].by == a.peer and job.history[1].leavers == ("0",)
    assert error_of(a) == (None, "left after a commit")
    assert [g.group for g in job.history[2].members] == ["1", "2"]
    received = [m.event.hello.peer for m in job.record.moves[c.peer] if isinstance(m.event, Ack)]
    assert {b.peer, c.peer} <= set(received), "who stays tells everybody"
    job.step()
    assert job.steps() == {2} and job.fetches() == {} and clean(job) == []


# --- healing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", [False, True])
def test_a_fault_in_healing_goes_back_to_rollback(torn: bool) -> None:
    job = Job(2).until_running()
    job.step()
    victim = job.node("1")
    job.heal_fails = {victim.peer: torn}
    job.fail(job.node("0"))
    job.settle()
    assert job.kinds() == ["epoch", "commit", "abort", "epoch", "abort", "epoch"]
    assert "connection reset" in job.history[4].cause
    assert job.fetches() == ({str(victim.peer): 1} if torn else {})
    job.step()
    assert job.steps() == {2} and clean(job) == []


def test_a_fault_reported_while_healing_ends_that_epoch() -> None:
    job = Job(2).until_running()
    a = job.node("0")
    job.fail(a)
    for _ in range(200):
        if a.state == "HEALING" and a.local.token == Token(2, 1):
            break
        waiting = [n for n in job.live() if n.inbox]
        job.deliver(waiting[0])
    job.post(a, Fault(Token(2, 1), "watchdog"))
    job.settle()
    assert job.kinds() == ["epoch", "abort", "epoch", "abort", "epoch"]
    assert job.states() == {"NORMAL"} and clean(job) == []


def test_pauses_grow_with_rollbacks_in_a_row_and_end_with_a_commit() -> None:
    job = Job(2).until_running()
    a = job.node("0")
    pauses = []
    for _ in range(12):
        job.fail(a)
        job.settle()
        if timer := a.timers.get("pause"):
            assert a.state == "HEALING"
            pauses.append(timer.seconds)
            job.fire("pause")
            job.settle()
        assert job.states() == {"NORMAL"}
    assert pauses == pytest.approx([0.1 * f for f in (1, 2, 4, 8, 16, 32, 64, 64, 64)])
    job.step()
    job.fail(a)
    job.settle()
    assert "pause" not in a.timers and job.states() == {"NORMAL"} and clean(job) == []


def test_state_is_fetched_per_rank_and_spread_over_the_sources() -> None:
    job = Job(2, ranks=2).until_running()
    job.step()
    job.start_group("2")
    job.start_group("3")
    job.settle()
    job.apply_fails = frozenset({job.node("0", 1).peer})
    job.step()
    job.settle()
    plans = {n.peer[:2]: n.heals[-1] for n in job.live()}
    assert {k: p.fetch_from for k, p in plans.items()} == {
        ("0", 0): None, ("1", 0): None, ("2", 0): 0, ("3", 0): 1,
        ("0", 1): 1, ("1", 1): None, ("2", 1): 1, ("3", 1): 1,
    }  # fmt: skip
    assert plans["0", 0].send_to == (2,) and plans["1", 0].send_to == (3,)
    assert plans["1", 1].send_to == (0, 2, 3) and plans["0", 1].send_to == ()
    assert job.states() == {"NORMAL"} and clean(job) == []


def test_groups_that_lost_different_ranks_heal_each_other() -> None:
    job = Job(2, ranks=2).until_running()
    job.apply_fails = frozenset({job.node("0", 0).peer, job.node("1", 1).peer})
    job.step()
    job.settle()
    assert job.fetches() == {"0/0#1": 1, "1/1#1": 1}
    job.step()
    assert job.steps() == {2} and clean(job) == []


def test_equal_step_with_another_lineage_must_heal() -> None:
    job = Job(1, expected_groups=2)
    job.start_group("1", lineage="another run", step=0)
    job.settle()
    assert job.fetches() == {"1/0#1": 1} and job.states() == {"NORMAL"}
    job.step()
    assert len({n.local.lineage for n in job.live()}) == 1 and clean(job) == []


def test_before_the_first_epoch_the_furthest_state_wins() -> None:
    job = Job(1, expected_groups=2)
    job.start_group("1", lineage="checkpoint 7", step=7)
    job.settle()
    assert job.fetches() == {"0/0#1": 1} and job.steps() == {7}


# --- how an epoch cannot be -----------------------------------------------------------


def test_too_few_groups_stop_with_the_count_and_the_fix() -> None:
    job = Job(1, min_groups=2)
    job.settle()
    job.fire("join_window")
    job.settle()
    assert job.history == [] and job.states() == {"INIT"}
    job.fire("quorum")
    job.settle()
    error, reason = error_of(job.node("0"))
    assert error == "NotEnoughGroups"
    assert reason.startswith("1 whole replica groups within 60 s, but min_replica_size is 2;")


def test_too_few_groups_after_a_kill_wait_for_one_to_come_back() -> None:
    job = Job(2, min_groups=2).until_running()
    job.kill_group("1")
    job.settle()
    assert job.states() == {"HEALING"} and job.kinds() == ["epoch", "abort"]
    job.start_group("1")
    job.settle()
    assert job.states() == {"NORMAL"} and clean(job) == []
    job.kill_group("1")
    job.settle()
    job.fire("quorum")
    job.settle()
    assert error_of(job.node("0"))[0] == "NotEnoughGroups"


def test_newcomer_ends_with_no_state_if_the_head_state_is_lost() -> None:
    job = Job(1).until_running()
    job.step()
    job.kill_group("0")
    job.start_group("0")
    job.settle()
    job.fire("join_window")
    job.settle()
    assert job.states() == {"INIT"}, "an empty newcomer does not start the job over"
    job.fire("quorum")
    job.settle()
    error, reason = error_of(job.node("0"))
    assert error == "NoState" and "of the job at step 1" in reason


def test_the_state_is_lost_before_anything_was_committed() -> None:
    """The job may have begun at any step, which is not reported as committed."""
    job = Job(0)
    job.start_group("0", step=40, lineage="a checkpoint")
    job.settle()
    assert job.head is not None and (job.head.step, job.kinds()) == (40, ["epoch"])
    job.start_anew("0")
    job.settle()
    job.fire("quorum")
    job.settle()
    error, reason = error_of(job.node("0"))
    assert error == "NoState" and "of the job at step 40" in reason
    assert "committed" not in reason


def test_ranks_with_files_of_different_steps_are_named_with_the_steps() -> None:
    job = Job(0)
    for rank, step in enumerate((40, 41)):
        job.add("0", rank, 2, lineage=f"step {step}", step=step, store="0.0", **job.config)
    job.settle()
    job.fire("quorum")
    job.settle()
    for rank in range(2):
        error, reason = error_of(job.node("0", rank))
        assert error == "NoState"
        assert "different steps (0/0#1 step 40, 0/1#1 step 41)" in reason


def test_ranks_of_two_instances_of_a_group_are_no_whole_group() -> None:
    job = Job(2, ranks=2).until_running()
    job.crash(job.node("1", 1))
    job.settle()
    job.add("1", 1, 2, store="another", **job.config)
    job.settle()
    job.step()
    job.settle()
    last = [r for r in job.history if r.kind == "epoch"][-1]
    assert [g.group for g in last.members] == ["0"]


def test_spares_take_no_slice_and_the_cursor_moves_by_participants() -> None:
    job = Job(3, min_groups=2, fixed_with_spares=True).until_running()
    indexes = {n.peer.group: n.txn.index for n in job.live() if n.txn}
    assert indexes == {"0": 0, "1": 1, "2": None}
    assert {n.txn.participants for n in job.live() if n.txn} == {2}
    job.step()
    assert job.head is not None and job.head.cursor == 2 and job.head.batches == 2
    job.kill_group("0")
    job.settle()
    assert {n.peer.group: n.txn.index for n in job.live() if n.txn} == {"1": 0, "2": 1}
    assert job.fetches() == {}, "a spare has the state"


# --- fencing --------------------------------------------------------------------------------------


def moved_on() -> tuple[Job, Node]:
    """Return a job in its second epoch whose group 1 is in its second incarnation."""
    job = Job(2).until_running()
    job.kill_group("1")
    job.settle()
    job.start_group("1")
    job.settle()
    job.step()
    job.settle()
    assert job.states() == {"NORMAL"}
    return job, job.node("0")


def stale_events() -> dict[str, Event]:
    job, node = moved_on()
    old = next(n for p, n in job.nodes.items() if p == ("1", 0, 1))
    events = {e.event.type: e.event for e in job.record.moves[old.peer]}
    hello = job.node("1").local
    join = next(
        m.event for m in job.record.moves[node.peer]
        if isinstance(m.event, Join) and m.event.hello.peer == old.peer
    )  # fmt: skip
    c = old.participant.config
    assert events and hello
    return {
        "old ack": Ack(replace(join.hello, peer=node.peer), Token(1, 1)),
        "ack of a dead peer": Ack(join.hello, Token(9, 1)),
        "join of a replaced incarnation": join,
        "ready for an old epoch": Ready(job.node("1").peer, 1),
        "ready of a replaced incarnation": Ready(old.peer, 3),
        "leave of a replaced incarnation": Leave(old.peer, "late"),
        "suspicion of nobody": Suspect("1", 0, 4711, "elsewhere", "sim"),
        "death of nobody": Death("1", 0, 4711, "elsewhere", "sim"),
        "death of another rank with that pid": Death("1", 1, c.pid, c.host, "sim"),
        "prepared in an old txn": Prepared(Token(1, 1), True),
        "fault of an old txn": Fault(Token(1, 1), "late"),
    }


@pytest.mark.parametrize("name", stale_events())
def test_stale_events_are_fenced_and_change_nothing(name: str) -> None:
    _, node = moved_on()
    event = stale_events()[name]
    after, out = node.participant.handle(node.local, event, 0.0)
    assert out.verdict == "fenced" and out.reason and out.effects == out.steps == []
    assert after == node.local


def test_repeated_decision_is_known() -> None:
    job, node = moved_on()
    for record in job.history:
        after, out = node.participant.handle(node.local, Decision(record), 0.0)
        assert out.verdict == "known" and out.effects == [] and after == node.local


def test_two_values_for_one_register_record_are_a_protocol_error() -> None:
    job, node = moved_on()
    assert job.head is not None
    forged = replace(job.head, cause="forged")
    after, out = node.participant.handle(node.local, Decision(forged), 0.0)
    assert out.verdict == "refused" and "two values for record" in out.reason
    assert after == node.local


def test_a_timer_that_was_cleared_does_nothing() -> None:
    job = Job(1).until_running()
    node = job.node("0")
    after, out = node.participant.handle(node.local, Timer("ack_window", 1), 0.0)
    assert out.verdict == "known" and after == node.local


def test_event_without_a_row_is_refused() -> None:
    job = Job(1).until_running()
    node = job.node("0")
    node.local = replace(node.local, timers={"ack_window": 77})
    after, out = node.participant.handle(node.local, Timer("ack_window", 77), 0.0)
    assert out.verdict == "refused" and out.reason == "NORMAL has no row for 'timer.ack_window'"
    assert after.state == "NORMAL"


def test_nothing_moves_a_participant_that_is_out() -> None:
    job = Job(2).until_running()
    node = job.node("1")
    job.post(node, Stop())
    job.settle()
    after, out = node.participant.handle(node.local, Stop(), 0.0)
    assert (
        out.verdict == "ignored" and out.reason == "the state is terminal" and after == node.local
    )


def test_an_entered_state_clears_the_timers_of_the_one_before() -> None:
    job = Job(1)
    node = job.node("0")
    out = job.deliver(node)
    armed = [e.name for e in out.effects if isinstance(e, SetTimer)]
    assert armed == ["join_interval", "join_window", "quorum"]
    job.settle()
    assert any(isinstance(e, ClearTimers) for o in node.outcomes for e in o.effects)
    assert node.timers == {} and not any(isinstance(e, Finish) for e in node.outcomes[-1].effects)


def test_empty_barrier_suspects_no_participant() -> None:
    """One fault may have kept all of them from coming; the acknowledgements that follow will show
    it."""
    job = Job(2).until_running()
    a, _ = job.live()
    job.fail(a)
    while waiting := [node for node in job.live() if node.inbox]:
        if waiting[0].inbox[0].type == "healed":
            waiting[0].inbox.popleft()
        else:
            job.deliver(waiting[0])
    assert job.states() == {"HEALING"} and job.history[-1].kind == "epoch"
    job.fire("ready_window", [a])
    assert job.deliver(a).steps[-1].dest == "ROLLBACK_REQ"
    assert not a.local.suspected
    job.settle()
    assert job.states() == {"NORMAL"} and len(job.history[-1].members) == 2


def test_signs_of_life_do_not_delay_a_joiner_without_its_mate() -> None:
    """Its mate left with a drain, and that message was lost."""
    job = Job(2, ranks=2).until_running()
    alone = job.add("7", 0, 2, store="7.0", **job.config)
    job.settle()
    limit = alone.local.timers["quorum"]
    job.fire("join_interval", [alone])
    job.settle()
    assert alone.local.timers["quorum"] == limit
    job.fire("quorum", [alone])
    job.settle()
    error, reason = error_of(alone)
    assert error == "NotEnoughGroups" and "rank 1 of group 7" in reason
    assert clean(job) == []


def test_ranks_wait_for_mates_of_a_lost_host_as_long_as_the_job_goes_on() -> None:
    job = Job(2, ranks=2, spans_hosts=True).until_running()
    job.crash(job.node("1", 1))
    job.settle()
    alone = job.node("1", 0)
    limit = alone.local.timers["quorum"]
    job.step()
    job.settle()
    assert alone.local.state == "INIT" and alone.local.timers["quorum"] > limit
    job.add("1", 1, 2, store="1.0", **job.config)
    job.settle()
    job.step()
    job.settle()
    assert job.states() == {"NORMAL"} and len(job.live()) == 4
    assert clean(job) == []


def test_a_group_meets_at_the_store_of_its_first_rank() -> None:
    job = Job(2, ranks=2).until_running()
    assert [g.meets_at for g in job.history[-1].members] == ["0.0", "1.0"]
    for rank, home in ((1, "other:1"), (0, "other:0")):
        job.crash(job.node("1", rank))
        job.settle()
        job.add("1", rank, 2, store="1.0", home=home, **job.config)
        job.settle()
        job.step()
        job.settle()
        newest = [r for r in job.history if r.kind == "epoch"][-1]
        meets = {g.group: g.meets_at for g in newest.members}
        assert meets == {"0": "0.0", "1": "1.0" if rank else "other:0"}
        assert {g.store for g in newest.members} == {"0.0", "1.0"}
    assert clean(job) == []


def test_a_whole_group_that_joins_waits_as_long_as_members_live() -> None:
    job = Job(2, ranks=2).until_running()
    mates = job.start_group("7")
    job.settle()
    limits = [mate.local.timers["quorum"] for mate in mates]
    job.fire("join_interval", mates)
    job.settle()
    assert all(m.local.timers["quorum"] > was for m, was in zip(mates, limits, strict=True))

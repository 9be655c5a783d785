"""Tests of rows of async.yaml that the checker's searches never take, and of the states of
leavers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cluster import Node
from jobs import Job

from fft.messages.effects import Finish
from fft.messages.protocol import (
    Begin,
    Decision,
    Drain,
    Fault,
    HealFailed,
    Here,
    Join,
    Leave,
    Manifest,
    Peer,
    Prepared,
    Record,
    Restored,
    Synchronise,
    Timer,
)
from fft.protocol.load import find_spec, load_spec
from fft.protocol.state import committed, hello, missing_mates

ASYNC = load_spec("async")


def apart(groups: int = 3, **config: Any) -> Job:
    """Return a job after its first synchronization, in which all groups are local."""
    job = Job(groups, spec=ASYNC, leases=True, bound=4, **config).until_running()
    job.step()
    assert job.states() == {"APART"}
    return job


def ask(job: Job, *groups: str) -> None:
    """Let these groups ask to synchronize."""
    for group in groups:
        job.post(job.node(group), Synchronise())
    job.settle()


def synchronising(*groups: str, **config: Any) -> Job:
    """Return such a job in which these groups are in the next synchronization, without the
    others."""
    job = apart(**config)
    ask(job, *groups)
    job.fire("join_window")
    job.settle()
    assert {job.node(group).state for group in groups} == {"NORMAL"}
    return job


def epoch_after(job: Job, *groups: str, **more: Any) -> Record:
    """Return the record of one more epoch with these members, after writing it to the register."""
    head = job.head
    assert head is not None
    entries = {at.entry.group: at.entry for at in head.standing}
    entries |= {entry.group: entry for record in job.history for entry in record.members}
    values: dict[str, Any] = {
        "n": head.n + 1, "kind": "epoch", "epoch": head.epoch + 1, "txn": 0, "cause": "",
        "members": tuple(entries[group] for group in groups), "change": False, **more,
    }  # fmt: skip
    job.head = replace(head, **values)
    return job.head


def take(job: Job, node: Node, event: Any) -> tuple[str, str, list[str]]:
    """Return the node's reaction to an event, before any other event: (from, to, effects)."""
    node.inbox.appendleft(event)
    (step, *_) = job.deliver(node).steps
    return step.source, node.local.state, step.effects


def until(job: Job, node: Node, state: str) -> None:
    """Deliver only to this node until it is in the state."""
    while node.local.state != state:
        job.deliver(node)


def assert_sound(job: Job) -> None:
    """Check every guarantee. `Job` records the slices of a txn for jobs without leases."""
    job.record.consumed.clear()
    assert not job.verdict()


# --- the rows -------------------------------------------------------------------------------------


def replaced_unheard() -> None:
    job = apart()
    node = job.node("0")
    record = epoch_after(job, "0", "1")
    entry = record.members[0]
    newer = replace(entry, ranks=(replace(entry.ranks[0], inc=2),))
    record = replace(record, members=(newer, record.members[1]))
    assert take(job, node, Decision(record))[:2] == ("APART", "EXIT")
    assert node.finished is not None and node.finished.error == "Fenced"


def replaced_unheard_and_asks() -> None:
    job = apart()
    node = job.node("0")
    assert take(job, node, Synchronise())[:2] == ("APART", "INIT")
    assert take(job, node, Here(node.peer._replace(inc=2)))[:2] == ("INIT", "EXIT")
    assert node.finished is not None and node.finished.error == "Fenced"


def the_job_diverged() -> None:
    job = apart()
    node = job.node("2")
    assert job.head is not None
    ends = replace(job.head, n=job.head.n + 1, kind="abort", diverged=True, cause="they differ")
    assert take(job, node, Decision(ends))[:2] == ("APART", "EXIT")
    assert node.finished is not None and node.finished.error == "Diverged"


def the_job_ended() -> None:
    """Two groups vote that no step comes after this one; the third is local, the fourth asks
    already."""
    job = synchronising("0", "1", "2", groups=5)
    ask(job, "4")
    for group in ("0", "1", "2"):
        node = job.node(group)
        assert node.txn is not None
        manifest = Manifest(count=1, bytes=4, shapes="x")
        job.post(node, Prepared(node.txn.token, True, manifest, last=True))
    job.settle()
    assert job.head is not None and job.head.last
    ends = [job.node(str(g)).finished for g in range(5)]
    assert all(end is not None and end.error is None for end in ends), ends
    assert all(job.node(str(g)).core.why_left is not None for g in range(5)), "all left well"
    (late,) = job.start_group("5")
    job.settle()
    assert late.finished is not None and late.finished.error == "JobEnded"


def _rolling_back() -> tuple[Job, Node]:
    job = synchronising("0", "1")
    node = job.node("0")
    job.fail(job.node("1"))
    until(job, job.node("1"), "ROLLBACK_SYNC.formed")
    until(job, node, "ROLLBACK_SYNC.formed")
    return job, node


def an_old_word_of_a_newcomer() -> None:
    job, node = _rolling_back()
    record = epoch_after(job, "0", "2")
    seen = take(job, node, Decision(record))
    assert seen[:2] == ("ROLLBACK_SYNC.formed", "ROLLBACK_SYNC.formed")
    assert node.local.restoring is not None
    seen = take(job, node, Restored(node.local.restoring))
    assert seen[:2] == ("ROLLBACK_SYNC.formed", "HEALING.formed")
    assert "heal" in seen[2]


def an_old_word_and_given_up() -> None:
    job, node = _rolling_back()
    record = epoch_after(job, "0", "2")
    take(job, node, Decision(record))
    ends = replace(record, n=record.n + 1, kind="abort", txn=1, members=())
    seen = take(job, node, Decision(ends))
    assert seen[:2] == ("ROLLBACK_SYNC.formed", "ROLLBACK_SYNC.formed")


def left_out_in_doubt_and_committed() -> None:
    """It has voted; the others commit, and form an epoch without it before it learns of that."""
    job = synchronising("0", "1")
    node = job.node("0")
    job.compute([node])
    until(job, node, "PREPARED")
    after = committed(node.local, node.participant.config)
    record = epoch_after(job, "1", "2", n=5, step=after.step, lineage=after.lineage)
    assert take(job, node, Decision(record))[:2] == ("PREPARED", "COMMIT")
    job.settle()
    assert node.local.step == after.step
    assert node.local.state == "APART"


def an_old_word_of_who_is_torn() -> None:
    job, node = _rolling_back()
    take(job, node, Decision(epoch_after(job, "0", "2")))
    assert node.local.restoring is not None
    seen = take(job, node, Restored(node.local.restoring, torn=True, cause="half"))
    assert seen[:2] == ("ROLLBACK_SYNC.formed", "ROLLBACK_REQ")
    assert node.local.lineage == "" and node.local.lease is None


def _building() -> tuple[Job, Node]:
    """It is in the next epoch, building its groups; group 0 missed that the epoch was given up."""
    job = apart()
    node = job.node("0")
    for group in ("0", "1", "2"):
        job.post(job.node(group), Synchronise())
    while node.local.state != "HEALING.formed":
        job.deliver(next(n for n in job.live() if n.inbox))
    assert job.head is not None and job.head.kind == "epoch"
    job.head = replace(job.head, n=job.head.n + 1, kind="abort", txn=1, members=())
    return job, node


def in_another_epoch() -> None:
    job, node = _building()
    seen = take(job, node, Decision(epoch_after(job, "0", "2")))
    assert seen[:2] == ("HEALING.formed", "HEALING.formed")
    assert "heal" in seen[2]


def torn_and_in_another_epoch() -> None:
    job, node = _building()
    node.local.lineage = ""
    seen = take(job, node, Decision(epoch_after(job, "0", "2")))
    assert seen[:2] == ("HEALING.formed", "ROLLBACK_REQ")


def left_out_of_another_epoch() -> None:
    job, node = _building()
    seen = take(job, node, Decision(epoch_after(job, "1", "2")))
    assert seen[:2] == ("HEALING.formed", "ROLLBACK_SYNC.formed")


def begin_of_another_epoch() -> None:
    job, node = _building()
    epoch = node.local.token.epoch
    node.inbox.appendleft(Begin(Peer("1", 0, 1), epoch + 1))
    assert job.deliver(node).verdict == "ignored"
    assert (node.local.state, node.local.token.epoch) == ("HEALING.formed", epoch)


def a_fetch_that_fails_late() -> None:
    job, node = _building()
    job.bus_up = False  # else the answer to its ABORT comes first
    take(job, node, Fault(node.local.token, "boom"))
    assert node.local.state == "ROLLBACK_REQ"
    failed = HealFailed(node.local.token.epoch, "the source is gone", torn=True)
    assert take(job, node, failed)[:2] == ("ROLLBACK_REQ", "ROLLBACK_REQ")
    assert node.local.lineage == "" and node.local.lease is None


def left_out_in_doubt_and_compared() -> None:
    job = synchronising("0", "1")
    node = job.node("0")
    job.compute([node], digest="state")
    until(job, node, "PREPARED")
    assert job.head is not None
    later = {"lineage": "another", "n": job.head.n + 2}
    seen = take(job, node, Decision(epoch_after(job, "1", "2", **later)))
    assert seen[:2] == ("PREPARED", "ROLLBACK_SYNC.formed")
    assert "give_up_state" in seen[2]
    assert node.local.lineage == ""


def leaving_and_nobody_was_heard_to_stay() -> None:
    job = synchronising("0", "1")
    job.drain("0")
    job.step()
    node = job.node("0")
    assert node.state == "DRAIN_WAIT", "who stays has not asked again"
    assert job.head is not None
    seen = take(job, node, Decision(replace(job.head, n=job.head.n + 1, kind="abort")))
    assert seen[0] == "DRAIN_WAIT"
    assert "take_head" in seen[2]


LIVES: dict[str, Callable[[], None]] = {
    "replaced unheard": replaced_unheard,
    "replaced unheard, and asks": replaced_unheard_and_asks,
    "the job diverged": the_job_diverged,
    "the job ended": the_job_ended,
    "an old word of a newcomer": an_old_word_of_a_newcomer,
    "an old word, and given up": an_old_word_and_given_up,
    "left out in doubt, and committed": left_out_in_doubt_and_committed,
    "an old word of who is torn": an_old_word_of_who_is_torn,
    "in another epoch": in_another_epoch,
    "torn, and in another epoch": torn_and_in_another_epoch,
    "left out of another epoch": left_out_of_another_epoch,
    "begin of another epoch": begin_of_another_epoch,
    "a fetch that fails late": a_fetch_that_fails_late,
    "left out in doubt, and compared": left_out_in_doubt_and_compared,
    "leaving, and nobody was heard to stay": leaving_and_nobody_was_heard_to_stay,
}
SHARED = {"an old word, and given up", "left out of another epoch", "a fetch that fails late"} | {
    "begin of another epoch"
}
"""Lives without rows of their own: those of ``common``, which searches take in other states."""


def test_excluded_group_without_a_missed_decision_keeps_its_state() -> None:
    """The epoch's record directly follows the newest one that it knows, so its txn has no decision.

    Its state may be the only one left.
    """
    job = synchronising("0", "1")
    node = job.node("0")
    job.compute([node], digest="state")
    until(job, node, "PREPARED")
    lineage = node.local.lineage
    seen = take(job, node, Decision(epoch_after(job, "1", "2")))
    assert seen[:2] == ("PREPARED", "ROLLBACK_SYNC.formed")
    assert "give_up_state" not in seen[2]
    assert node.local.lineage == lineage != ""


@pytest.mark.parametrize("name", LIVES)
def test_row_outside_of_every_search_takes_effect(name: str) -> None:
    LIVES[name]()


def test_the_rows_name_these_tests() -> None:
    paths = [find_spec("async"), find_spec("async").parent / "parts" / "apart.yaml"]
    text = " ".join(" ".join(path.read_text("utf-8").split()) for path in paths)
    named = set(re.findall(r"test_apart_rows\.py, '([^']*)'", text))
    assert named | SHARED == LIVES.keys() and not named & SHARED


# --- who is waited for ----------------------------------------------------------------------------


def test_more_than_half_of_the_job_synchronise_and_a_minority_waits() -> None:
    job = apart(5)
    ask(job, "0", "1")
    job.fire("join_window")
    job.settle()
    assert job.node("0").state == "INIT", "2 of 5"
    ask(job, "2")
    assert job.node("0").state == "INIT", "enough; the others have a moment"
    job.fire("join_window")
    job.settle()
    assert {job.node(g).state for g in "012"} == {"NORMAL"}
    assert {job.node(g).state for g in "34"} == {"APART"}
    assert_sound(job)


def test_all_that_are_ready_do_not_wait_for_the_end_of_a_window() -> None:
    job = apart()
    ask(job, "0", "1", "2")
    assert job.states() == {"NORMAL"}


def _step(job: Job, *groups: str) -> None:
    ask(job, *groups)
    if job.node(groups[0]).state == "INIT":
        job.fire("join_window")
        job.settle()
    job.step()


def test_ready_group_waits_before_a_living_group_exceeds_the_bound() -> None:
    job = Job(3, spec=ASYNC, leases=True, bound=2).until_running()
    job.step()
    _step(job, "0", "1")
    ask(job, "0", "1")
    for _ in range(3):
        job.fire("join_interval")
        job.settle()
        job.fire("join_window")
        job.settle()
    assert {job.node(g).state for g in "01"} == {"INIT"}
    assert job.node("0").local.awaits == {"2"}
    assert "held for 2 (at step 1)" in job.node("0").local.cause.text
    ask(job, "2")
    job.step()
    assert job.head is not None and job.head.step == 3
    assert job.head.batches == 3 + 2 + 3
    assert_sound(job)


@pytest.mark.parametrize("how", ["killed", "silent", "asked to leave"])
def test_lost_or_leaving_group_holds_up_no_other(how: str) -> None:
    job = Job(3, spec=ASYNC, leases=True, bound=1).until_running()
    job.step()
    ask(job, "0", "1")
    assert {job.node(g).state for g in "01"} == {"INIT"}
    if how == "asked to leave":
        job.drain("2")
    else:
        job.crash(job.node("2"), tell=how == "killed")
    job.settle()
    if how == "silent":
        job.fire("join_interval")
        job.settle()
        job.fire("apart_window")
        job.settle()
    assert {job.node(g).state for g in "01"} == {"NORMAL"}, "all who live are ready"
    assert job.head is not None
    assert {at.entry.group for at in job.head.standing} == {"0", "1"}
    assert len(job.head.returned) == 1, "its lease goes back"
    assert_sound(job)


def test_a_living_group_answers_and_is_not_taken_for_lost() -> None:
    job = apart(2)
    ask(job, "0")
    serial = job.node("0").timers["apart_window"].serial
    job.fire("join_interval")
    job.settle()
    assert job.node("0").timers["apart_window"].serial > serial
    assert job.node("0").local.suspected == frozenset()


# --- what counts ----------------------------------------------------------------------------------


def test_a_newcomer_does_not_count_before_its_own_steps() -> None:
    job = apart(2)
    job.start_group("2")
    job.settle()
    ask(job, "0", "1")
    assert job.states() == {"NORMAL"}
    epoch = job.node("2").local.epoch
    assert epoch is not None and {lease.group for lease in epoch.leases} == {"0", "1"}
    assert job.node("2").txn is not None and job.node("2").txn.index is None
    job.step()
    assert job.head is not None and {x.group for x in job.head.leases} == {"0", "1", "2"}
    _step(job, "0", "1", "2")
    assert job.head.batches == 2 + 2 + 3
    assert_sound(job)


def _without(job: Job, deaf: Node) -> None:
    """Run the job while this node receives no message, except those of its own thread."""
    for _ in range(100_000):
        job.lose_decisions(deaf)
        own = [e for e in deaf.inbox if isinstance(e, Prepared)]
        deaf.inbox.clear()
        deaf.inbox.extend(own)
        waiting = [n for n in job.live() if n.inbox]
        if not waiting:
            return
        job.deliver(waiting[0])
    raise AssertionError("it does not settle")


def test_missed_record_does_not_count_steps_twice() -> None:
    """It is excluded while in doubt, and learns of the COMMIT from a later commit's record."""
    job = synchronising("0", "1", "2", groups=5)
    node = job.node("0")
    lease = node.local.lease
    job.compute()
    _without(job, node)
    assert node.state == "PREPARED", "it has voted, and hears no decision"
    for group in "1234":
        job.post(job.node(group), Synchronise())
    _without(job, node)
    job.fire("join_window", [job.node(g) for g in "1234"])
    _without(job, node)
    assert {job.node(g).state for g in "1234"} == {"NORMAL"}
    job.compute([job.node(g) for g in "1234"])
    _without(job, node)
    assert job.head is not None and job.head.step == 3
    job.fire("vote_window", [node])
    job.settle()
    assert node.local.lease == lease, "it still has it"
    assert node.state == "INIT"
    ask(job, "1", "2", "3", "4")
    job.fire("join_interval")
    job.settle()
    job.fire("join_window")
    job.settle()
    epoch = job.history[-1]
    assert epoch.kind == "epoch" and "0" in {g.group for g in epoch.members}
    assert "0" not in {x.group for x in epoch.leases}, "it brings nothing"
    assert_sound(job)


# --- leaving --------------------------------------------------------------------------------------


def test_groups_with_the_only_copy_of_the_newest_state_do_not_leave() -> None:
    job = synchronising("0", "1")
    job.step()
    job.drain("0", "1")
    job.settle()
    assert {job.node(g).state for g in "01"} == {"APART"}, "group 2 has not got it"
    ask(job, "2")
    ask(job, "0", "1")
    job.step()
    job.fire("drain_window")
    job.settle()
    assert [n.peer.group for n in job.live()] == ["2"]
    assert all(job.node(g).finished == Finish("left after a commit") for g in "01")
    assert_sound(job)


def test_all_can_leave_at_once() -> None:
    job = apart()
    job.broadcast(Drain(groups=("0", "1", "2"), by="test"))
    job.settle()
    assert job.live() == []
    assert {job.node(g).finished for g in "012"} == {Finish("left after a commit")}


def test_a_torn_update_is_fetched_again_and_brings_nothing() -> None:
    job = apart()
    ask(job, "0", "1", "2")
    job.apply_fails = frozenset({job.node("2").peer})
    job.step()
    assert job.node("2").local.state == "INIT"
    ask(job, "0", "1")
    job.settle()
    assert job.states() == {"NORMAL"}
    epoch = job.history[-1]
    assert {x.group for x in epoch.leases} == {"0", "1"}
    assert job.node("2").heals[-1].fetch_from is not None
    assert_sound(job)


# --- words that are lost, or late -----------------------------------------------------------------


def test_asking_group_counts_itself_although_its_message_is_lost() -> None:
    job = apart()
    node = job.node("0")
    job.post(node, Synchronise())
    job.deliver(node)
    assert node.peer in node.local.joining
    assert node.local.hellos["0", 0].lease == node.local.lease


def test_older_hello_does_not_replace_a_newer_one() -> None:
    """Its state has been lost since; the message from before arrives late."""
    job = apart()
    node, other = job.node("0"), job.node("1")
    old = hello(other.local, other.participant.config)
    assert job.head is not None
    new = replace(old, lineage="", lease=None, head=job.head.n + 2)
    for word in (new, old):
        take(job, node, Join(word))
    assert node.local.hellos["1", 0] == new


def _shards() -> tuple[Job, Node, Node]:
    job = Job(2, 2, spec=ASYNC, leases=True, bound=4).until_running()
    job.step()
    return job, job.node("0", 0), job.node("0", 1)


def test_a_rank_leaves_with_its_mate() -> None:
    job, node, mate = _shards()
    assert take(job, node, Leave(mate.peer, "drained"))[:2] == ("APART", "EXIT")
    assert node.finished is not None and node.finished.error is None


def test_mate_silent_while_the_job_goes_on_is_not_counted_as_asking() -> None:
    job, node, mate = _shards()
    job.post(node, Synchronise())
    job.post(mate, Synchronise())
    job.settle()
    assert missing_mates(node.local, node.participant.config) == []
    assert job.head is not None
    later = replace(job.head, n=job.head.n + 1, kind="abort")
    take(job, node, Decision(later))
    for silent in ([], [1]):
        timer = node.timers["join_interval"]
        take(job, node, Timer(timer.name, timer.serial))
        assert missing_mates(node.local, node.participant.config) == silent

"""Tests that each row of hsdp.yaml matters: without it the program behaves differently.

The corpus is a set of deterministic lives of whole jobs under the shipped table: storms with fixed
seeds, and scenarios for events that storms seldom meet. For each row it keeps moments (participant,
state before, event) at which that row was taken. With the row removed, either the checks refuse the
file and name the place, or one of these moments ends differently.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from cluster import Node
from jobs import HSDP, Job, calm

from fft.messages.causes import Cause, CauseCode
from fft.messages.protocol import (
    Ballot,
    Begin,
    BusDown,
    Decision,
    Drain,
    Event,
    Fault,
    Healed,
    HealFailed,
    Manifest,
    Peer,
    Prepared,
    Ready,
    Stop,
    Suspect,
    Timer,
    Token,
)
from fft.protocol.participant import Outcome, Participant
from fft.protocol.spec import FsmSpec, Part, SubState
from fft.protocol.spec_checks import check_spec
from fft.protocol.state import Config, Local
from fft.protocol.table import EXIT_ROWS, Table

Place = tuple[str | int, ...]
"""Keys from the top of the file down to a row."""

STORMS = 24
KEPT = 3
"""Moments kept per row, as a row's absence may not show at the first one."""


def places() -> list[Place]:
    """Every row of the file."""
    found: list[Place] = []
    for place, owner in HSDP.row_owners():
        for event, rows in owner.on.items():
            found += [(*place, "on", event, i) for i in range(len(rows))]
        if isinstance(owner, SubState):
            found += [(*place, EXIT_ROWS, i) for i in range(len(owner.exit))]
    for name, parts in HSDP.sequences.items():
        found += [("sequences", name, i) for i, part in enumerate(parts) if isinstance(part, Part)]
    return found


def row_at(place: Place, spec: FsmSpec = HSDP) -> Part:
    """Return the row, or part of a sequence, at a place."""
    *path, event, index = place
    if path == ["sequences"]:
        part = spec.sequences[str(event)][int(index)]
        assert isinstance(part, Part)
        return part
    owner = dict(spec.row_owners())[tuple(str(p) for p in path if p != "on")]
    rows = owner.exit if event == EXIT_ROWS else owner.on[str(event)]  # type: ignore[union-attr]
    return rows[int(index)]


PLACES = {id(row_at(place)): place for place in places()}


@dataclass(frozen=True)
class Moment:
    """One event that was handled in a life, and its outcome under the shipped table."""

    config: Config
    before: Local
    event: Event
    after: Local
    out: Outcome
    life: str


# --- storms ---------------------------------------------------------------------------------------


class Storm:
    """A seeded life with faults of all kinds: loss, suspicion, lost states, outages, second
    starts."""

    def __init__(self, seed: int, groups: int, ranks: int) -> None:
        self.rng = random.Random(seed)
        self.job = Job(groups, ranks, min_groups=self.rng.choice([1, 1, 2]))

    def run(self, actions: int) -> Job:
        """Run this many actions."""
        weighted = [
            (70, self.deliver), (14, self.compute), (3, self.fault), (6, self.fire),
            (2, self.lose), (1, self.kill), (2, self.start), (1, self.drain), (1, self.tear),
            (1, self.fail_heal), (2, self.bus), (1, self.refuse), (1, self.stop), (3, self.rest),
        ]  # fmt: skip
        weights, acts = zip(*weighted, strict=True)
        for _ in range(actions):
            if self.job.live():
                self.rng.choices(acts, weights)[0](self.rng.choice(self.job.live()))
        return self.job

    def deliver(self, _: Node) -> None:
        waiting = [n for n in self.job.live() if n.inbox]
        if waiting:
            node = self.rng.choice(waiting)
            for _ in range(min(len(node.inbox), self.rng.choice([1, 2, 6]))):
                if node.inbox:
                    self.job.deliver(node)

    def compute(self, node: Node) -> None:
        self.job.compute([node], reductions=self.rng.choice([1] * 30 + [2]))

    def refuse(self, node: Node) -> None:
        if node.txn is not None:
            self.job.refuse(node)

    def fault(self, node: Node) -> None:
        self.job.post(node, Fault(node.local.token, "storm"))

    def fire(self, node: Node) -> None:
        final = set() if self.rng.random() < 0.1 else {"quorum", "bus_limit"}
        if armed := sorted(node.timers.keys() - final):
            self.job.fire(self.rng.choice(armed), [node])

    def lose(self, node: Node) -> None:
        self.job.lose_decisions(node)

    def kill(self, node: Node) -> None:
        self.job.kill_group(node.peer.group, tell=self.rng.random() < 0.5)

    def start(self, _: Node) -> None:
        present = {n.peer.group for n in self.job.live()}
        absent = {"0", "1", "2"} - present
        if absent or self.rng.random() < 0.1:
            self.job.start_group(self.rng.choice(sorted(absent or present)))

    def drain(self, node: Node) -> None:
        self.job.drain(node.peer.group)

    def tear(self, node: Node) -> None:
        self.job.apply_fails |= {node.peer}

    def fail_heal(self, node: Node) -> None:
        self.job.heal_fails[node.peer] = self.rng.random() < 0.5

    def bus(self, _: Node) -> None:
        self.job.bus_up = not self.job.bus_up

    def rest(self, _: Node) -> None:
        self.job.bus_up = True
        calm(self.job, 1)

    def stop(self, node: Node) -> None:
        if self.rng.random() < 0.1:
            self.job.post(node, Stop("storm"))


def storm(seed: int) -> Job:
    job = Storm(seed, 2 + seed % 2, 1 + seed // 2 % 2).run(400)
    calm(job, 3)
    return job


# --- scenarios: what storms seldom meet -----------------------------------------------------------


def only(job: Job, *nodes: Node) -> None:
    """Let only these participants handle their events, and the events that follow from them."""
    while any(n.inbox for n in nodes):
        for node in nodes:
            if node.inbox:
                job.deliver(node)


def first(job: Job, *nodes: Node) -> None:
    """Let these participants handle all their events before any other participant does."""
    only(job, *nodes)
    job.settle()


def hold_back(job: Job, node: Node, kind: str) -> Event:
    """Let all participants run, but hold back the answer of one node's main thread."""
    while True:
        if node.inbox and node.inbox[0].type == kind:
            answer = node.inbox.popleft()
            job.settle()
            return answer
        waiting = [n for n in job.live() if n.inbox]
        job.deliver(waiting[0])


def bus_away_for_good() -> Job:
    job = Job(2).until_running()
    job.compute([job.node("0")])
    job.settle()
    job.bus_up = False
    job.compute([job.node("1")])
    job.settle()
    job.fire("bus_limit")
    job.settle()
    return job


def bus_back_before_its_limit_in_doubt() -> Job:
    """A message of a peer shows that the bus is back; the timer of its limit is still armed."""
    job = Job(2).until_running()
    a, b = job.live()
    job.compute([a])
    job.bus_up = False
    only(job, a)
    job.bus_up = True
    job.post(a, Ready(b.peer, 1))
    only(job, a)
    assert a.state == "PREPARED" and not a.local.bus_down
    job.fire("bus_limit", [a])
    job.settle()
    return job


def bus_away_for_good_without_a_vote() -> Job:
    job = Job(2).until_running()
    job.bus_up = False
    job.fail(job.node("0"))
    job.settle()
    job.fire("bus_limit")
    job.settle()
    return job


def deaf_in_doubt() -> Job:
    """The listener is lost and receives nothing more, but the register can be read."""
    job = Job(2).until_running()
    a, b = job.live()
    job.compute([a])
    only(job, a)
    job.post(a, BusDown("listen", "fell behind"))
    job.post(a, Ready(b.peer, 1))
    only(job, a)
    assert a.local.deaf and not a.local.bus_down
    job.fire("bus_limit", [a])
    job.settle()
    return job


def fell_behind_in_doubt() -> Job:
    """A misses the COMMIT that it has voted for, and then gets an overrun."""
    job = Job(2).until_running()
    a, b = job.live()
    for node in (a, b):
        job.compute([node])
    only(job, b)
    a.inbox.clear()
    job.post(a, BusDown("overrun", "fell behind"))
    job.settle()
    assert not a.local.deaf
    return job


def bus_away_for_a_while() -> Job:
    job = Job(2)
    job.bus_up = False
    job.settle()
    job.bus_up = True
    job.fire("bus_retry")
    job.settle()
    job.step()
    job.fire("bus_limit")
    job.settle()
    for node in job.live():
        job.post(node, BusDown("vote", "away"))
    job.settle()
    job.fire("bus_retry")
    job.settle()
    return job


def second_starts() -> Job:
    job = Job(2, expected_groups=3)
    job.settle()
    job.start_group("1")
    job.settle()
    job.fire("join_window")
    job.settle()
    job.start_group("0")
    job.settle()
    return job


def second_start_that_the_older_one_misses() -> Job:
    """It misses that its identity was taken, but receives the epoch with the newer process."""
    job = Job(2).until_running()
    a, old = job.live()
    (new,) = job.start_group("1")
    only(job, a, new)
    old.inbox = type(old.inbox)(e for e in old.inbox if isinstance(e, Decision))
    job.settle()
    assert old.finished is not None and old.finished.error == "Fenced"
    assert a.state == new.state == "NORMAL"
    return job


def second_start_that_the_older_one_learns_of_by_asking() -> Job:
    """It learns nothing until the newer one has committed, when the register names no
    participant."""
    job = Job(2).until_running()
    a, old = job.live()
    (new,) = job.start_group("1")
    only(job, a, new)
    job.compute([a, new])
    only(job, a, new)
    old.inbox.clear()
    job.post(old, BusDown("overrun", "fell behind"))
    job.settle()
    assert old.finished is not None and old.finished.error == "Fenced"
    return job


def asked_to_leave_before_the_first_epoch() -> Job:
    job = Job(2, expected_groups=3)
    job.settle()
    job.drain("1")
    job.settle()
    return job


def a_mate_leaves_before_the_first_epoch() -> Job:
    """One rank of a group of two shuts down while both wait, so the other has nothing to wait
    for."""
    job = Job(2, ranks=2, expected_groups=3)
    job.settle()
    job.post(job.node("1", 1), Stop("enough"))
    job.settle()
    assert job.node("1").finished is not None and job.node("0").finished is None
    return job


def stopped_by_the_user() -> Job:
    job = Job(2).until_running()
    job.post(job.node("1"), Stop("enough"))
    job.settle()
    return job


def too_few() -> Job:
    job = Job(1, min_groups=2)
    job.settle()
    job.fire("join_window")
    job.settle()
    job.fire("quorum")
    job.settle()
    return job


def too_few_ranks() -> Job:
    """One rank of a group comes without its mate."""
    job = Job(2, ranks=2).until_running()
    alone = job.add("7", 0, 2, store="7.0", **job.config)
    job.settle()
    job.fire("quorum", [alone])
    job.settle()
    assert alone.finished is not None and alone.finished.error == "NotEnoughGroups"
    return job


def newcomers_without_the_state() -> Job:
    job = Job(1).until_running()
    job.step()
    job.start_anew("0")
    job.settle()
    job.fire("quorum")
    job.settle()
    (error,) = {n.finished.error for n in job.nodes.values() if n.finished is not None}
    assert error == "NoState"
    return job


def torn_everywhere() -> Job:
    """No process has the state any more, so all end without waiting for one."""
    job = Job(2).until_running()
    job.apply_fails = frozenset(job.nodes)
    job.step()
    errors = [n.finished.error for n in job.nodes.values() if n.finished is not None]
    assert errors == ["NoState", "NoState"]
    return job


def torn_beside_a_silent_group() -> Job:
    """The silent group may have the state, so the others wait for it until the quorum limit."""
    job = Job(3).until_running()
    silent = job.node("2")
    job.apply_fails = frozenset(job.nodes) - {silent.peer}
    job.compute()
    while silent.local.step == 0:
        job.deliver(silent if silent.inbox else next(n for n in job.live() if n.inbox))
    job.crash(silent, tell=False)
    job.settle()
    job.fire("ack_window")
    job.settle()
    waiting = job.live()
    assert {n.state for n in waiting} == {"HEALING"} and len(waiting) == 3 - 1
    assert all(n.local.lineage == "" for n in waiting)
    job.fire("quorum")
    job.settle()
    errors = {n.finished.error for n in job.nodes.values() if n.finished is not None}
    assert errors == {"NoState", "NoEpoch"}
    return job


def left_in_good_order(node: Node) -> bool:
    return node.finished is not None and node.finished.error is None


def asked_to_leave_with_too_few() -> Job:
    """It waits for the others like any group, and its end is not an error."""
    job = too_few_to_go_on()
    job.drain("0")
    job.settle()
    assert job.states() == {"HEALING"}, "the other group may come back"
    job.fire("quorum")
    job.settle()
    assert left_in_good_order(job.nodes[Peer("0", 0, 1)])
    return job


def asked_in_its_own_process_to_leave() -> Job:
    job = Job(2).until_running()
    job.post(job.node("1"), Drain(("1",), by="SIGTERM", local=True))
    job.settle()
    job.step()
    assert job.history[1].leavers == ("1",)
    return job


def asked_last_to_leave() -> Job:
    """All are asked to leave, and the last one receives the request after its vote."""
    job = Job(2, min_groups=2).until_running()
    a, b = job.live()
    job.drain("0")
    job.settle()
    for node in (b, a):
        job.compute([node])
        only(job, node)
    job.drain("1")
    job.settle()
    assert left_in_good_order(a) and left_in_good_order(b)
    return job


def too_few_to_go_on() -> Job:
    job = Job(2, min_groups=2).until_running()
    job.kill_group("1")
    job.settle()
    job.fire("ready_window")
    job.settle()
    job.fire("ack_window")
    job.settle()
    return job


def too_few_after_a_kill() -> Job:
    job = too_few_to_go_on()
    job.fire("quorum")
    job.settle()
    return job


def hangs(node: Node) -> Suspect:
    """Return its monitor's report of a hang."""
    me, c = node.peer, node.participant.config
    return Suspect(me.group, me.rank, c.pid, c.host, "monitor", "no movement")


def a_hang_is_told(state: str) -> Job:
    """A hang of one of three is reported; the others continue without it until its main thread
    unwinds."""
    job = Job(3).until_running()
    a, b, c = job.live()
    if state == "PREPARED":
        job.compute([a, b])
        only(job, a, b)
    if state == "ROLLBACK_REQ":
        job.bus_up = False
        job.fail(a)
        job.fail(b)
        job.fail(c)
        only(job, a, b, c)
        job.bus_up = True
    assert a.state == state
    job.broadcast(hangs(c))
    if state != "ROLLBACK_REQ":
        job.post(c, hold_back(job, c, "restored"))
    job.settle()
    job.fire("bus_retry", job.live())
    job.settle()
    job.step()
    return job


def a_barrier_that_waits() -> Job:
    """All windows of HEALING close while one member's main thread is still rebuilding."""
    job = Job(3).until_running()
    a, b, c = job.live()
    job.fail(a)
    healed = hold_back(job, c, "healed")
    for node in (a, b, c):
        job.post(node, BusDown("read", "away"))
        job.settle()
        job.fire("bus_retry", [node])
        job.fire("quorum", [node])
        job.fire("ack_window", [node])
        job.settle()
    job.fire("ready_window", [a])
    job.settle()
    job.post(c, healed)
    job.settle()
    return job


def learner() -> Job:
    """Return a group that joins, in its first txn, while its state is on its way."""
    job = Job(2).until_running()
    job.start_anew("1")
    job.step()
    assert job.node("1").learning is not None and job.node("1").state == "NORMAL"
    return job


def a_learner_gets_its_state() -> Job:
    job = learner()
    job.step()
    return job


def a_learner_gets_its_state_in_the_barrier() -> Job:
    """The state arrives before the others are in the barrier."""
    job = Job(2).until_running()
    job.start_anew("1")
    job.settle()
    job.compute()
    late = job.node("1")
    while late.local.ready.get(late.peer) != late.local.token.epoch:
        job.deliver(late if late.inbox else next(n for n in job.live() if n.inbox))
    job.learn(late)
    only(job, late)
    assert late.local.healed and late.local.state == "HEALING.formed"
    job.settle()
    job.step()
    return job


def a_joiner_has_another_state() -> Job:
    """It alone loses its state, since the others held theirs before."""
    job = learner()
    job.compute([job.node("0")], digest="the job's")
    job.compute([job.node("1")], digest="its own")
    job.settle()
    assert job.kinds()[-2:] == ["abort", "epoch"] and job.history[-2].odd == (job.node("1").peer,)
    job.step()
    return job


def a_learner_gets_no_state() -> Job:
    job = learner()
    late = job.node("1")
    job.post(late, HealFailed(late.local.token.epoch, "connection reset"))
    job.settle()
    job.step()
    return job


def an_epoch_that_waits() -> Job:
    """It has stopped, but the pause after many rollbacks runs; the bus is lost and comes back
    meanwhile."""
    job = Job(2).until_running()
    a, b = job.live()
    for _ in range(3):
        job.fail(a)
        job.settle()
    job.fail(a)
    job.settle()
    for node in (a, b):
        job.post(node, BusDown("read", "away"))
    job.settle()
    job.fire("bus_retry")
    job.fire("ack_window")
    job.fire("ready_window")
    job.settle()
    job.fire("pause")
    job.settle()
    return job


def faults_in_healing() -> Job:
    job = Job(2).until_running()
    a, b = job.live()
    job.heal_fails = {b.peer: True}
    job.fail(a)
    job.settle()
    job.fail(b)
    while a.state != "HEALING" or a.local.token == Token(1, 1) or a.local.healed:
        job.deliver(next(n for n in (b, a) if n.inbox))
    job.post(a, Fault(a.local.token, "watchdog"))
    job.settle()
    return job


def an_abort_that_is_lost(timer: str) -> Job:
    """The proposal does not reach the register, and is repeated."""
    job = Job(2).until_running()
    a, b = job.live()
    job.bus_up = False
    job.refuse(a)
    job.settle()
    job.compute([b])
    job.settle()
    job.bus_up = True
    job.fire(timer, [a, b] if timer == "bus_retry" else [a])
    job.fail(b)
    job.settle()
    return job


def fault_between_epochs() -> Job:
    job = Job(2, min_groups=2).until_running()
    a = job.node("0")
    job.kill_group("1")
    job.settle()
    job.post(a, Fault(a.local.token, "watchdog"))
    job.settle()
    return job


def manifests_that_differ() -> Job:
    job = Job(2).until_running()
    job.compute([job.node("0")], reductions=1)
    job.compute([job.node("1")], reductions=2)
    job.settle()
    return job


def gradients_that_differ() -> Job:
    job = Job(2).until_running()
    for node, own in zip(job.live(), "ab", strict=True):
        job.post(node, Prepared(node.local.token, True, Manifest(1, 4, "x", fingerprint=own)))
    job.settle()
    return job


def data_that_differ() -> Job:
    job = Job(2).until_running()
    job.compute([job.node("0")], data="a")
    job.compute([job.node("1")], data="b")
    job.settle()
    abort = next(r for r in job.history if r.kind == "abort")
    assert "the ranks have drawn different data (a on 0/0#1; b on 1/0#1)" in abort.cause
    assert abort.why == Cause(CauseCode.DATA_DIFFERS, abort.cause)
    return job


def no_reductions(skip: bool) -> Job:
    """One step function ends without an error and without reductions, for a skip or by mistake."""
    job = Job(2).until_running()
    job.compute([job.node("0")], reductions=0, skip=skip)
    job.settle()
    abort = next(r for r in job.history if r.kind == "abort")
    assert abort.skip is skip and ("skipped" in abort.cause) is skip
    return job


def a_skip_that_does_not_fit() -> Job:
    job = Job(2).until_running()
    job.compute([job.node("0")], reductions=1, skip=True)
    job.compute([job.node("1")], reductions=2)
    job.settle()
    abort = next(r for r in job.history if r.kind == "abort")
    assert abort.skip and "the user skipped this step on 0/0#1; the votes'" in abort.cause
    assert abort.why == Cause(CauseCode.SKIPPED, abort.cause)
    return job


def a_live_block() -> Job:
    """Two groups enter and end a live block, and then run a step."""
    job = Job(2).until_running()
    for block in ("entry of a.py:1", "end of a.py:1"):
        job.compute(reductions=0, skip=True, block=block)
        job.settle()
    job.compute()
    job.settle()
    commits = [r for r in job.history if r.kind == "commit"]
    assert [r.live for r in commits] == ["entry", "end", ""]
    assert [(r.step, r.cursor) for r in commits] == [(0, 0), (0, 0), (1, 2)]
    return job


def different_live_blocks(other: str, named: str) -> Job:
    """One group enters a live block, and the other group enters another one or runs a step."""
    job = Job(2).until_running()
    job.compute([job.node("0")], reductions=0, skip=True, block="entry of a.py:1")
    job.compute([job.node("1")], skip=True, block=other)
    job.settle()
    abort = next(r for r in job.history if r.kind == "abort")
    assert f"in the same live block (0/0#1: entry of a.py:1, 1/0#1: {named})" in abort.cause
    is_step = named == "a step"
    code = CauseCode.BLOCK_BESIDE_STEP if is_step else CauseCode.BLOCKS_DIFFER
    assert abort.code == code and not abort.skip
    return job


def states_that_differ(*digests: str, **config: Any) -> Job:
    """Each group brings its digest; later a group joins that has received none of them."""
    job = Job(len(digests), **config).until_running()
    for node, digest in zip(job.live(), digests, strict=True):
        job.compute([node], digest=digest)
    job.settle()
    job.start_group("9")
    job.settle()
    return job


def joins_when_all_have_left() -> Job:
    job = Job(2).until_running()
    job.drain("0", "1")
    job.step()
    job.fire("drain_window")
    job.settle()
    assert not job.live()
    (late,) = job.start_group("2")
    job.settle()
    assert late.finished is not None and late.finished.error == "JobEnded"
    return job


def vote_cast_twice() -> Job:
    """A ballot counts entries, so a repeated vote can fill it."""
    job = Job(2).until_running()
    a = job.node("0")
    job.compute([a])
    job.settle()
    assert a.local.vote is not None
    job.post(a, Ballot(a.local.token, (a.local.vote, a.local.vote)))
    job.settle()
    return job


def commit_missed(torn: bool) -> Job:
    """The commit is missed; the abort of the next txn, which is already closed, proves it."""
    job = Job(2).until_running()
    a, b = job.live()
    job.compute([a])
    job.settle()
    job.compute([b])
    only(job, b)
    job.lose_decisions(a)
    if torn:
        job.apply_fails = frozenset({a.peer})
    job.fail(b)
    job.settle()
    return job


def torn_by_its_commit(joiner: bool) -> Job:
    job = Job(2).until_running()
    if joiner:
        job.start_group("2")
        job.settle()
    job.apply_fails = frozenset({job.node("0").peer})
    job.step()
    job.settle()
    return job


def torn_after_it_had_acknowledged() -> Job:
    """It acknowledged that it holds the last commit; the next epoch relies on it; then the step
    fails."""
    job = Job(2).until_running()
    a, b = job.live()
    job.start_group("2")
    job.settle()
    job.compute()
    job.apply_fails = frozenset({a.peer})
    failed = hold_back(job, a, "apply_failed")
    assert job.history[-1].kind == "epoch" and b.state == "HEALING"
    job.post(a, failed)
    job.settle()
    return job


def torn_by_a_rollback(late: bool) -> Job:
    """Its step function changed unsaved state; ``late``: after the next epoch relies on it."""
    job = Job(3).until_running()
    a, b, _ = job.live()
    job.restore_fails = frozenset({a.peer})
    if late:
        job.fail(b)
        job.post(a, hold_back(job, a, "restored"))
        job.settle()
        return job
    job.fail(b)
    only(job, a, b)
    job.settle()
    return job


def drained(how: str) -> Job:
    job = Job(3).until_running()
    a, b, c = job.live()
    job.drain("2")
    job.settle()
    if how == "torn":
        job.apply_fails = frozenset({c.peer})
    job.compute()
    if how == "settled":
        job.settle()
        return job
    while c.state != "DRAIN_WAIT":
        waiting = [n for n in job.live() if n.inbox]
        job.deliver(waiting[-1])
    if how == "alone":
        job.fire("drain_window", [c])
        only(job, c)
    else:
        only(job, a)
        job.fire("ack_window", [a])
        only(job, a)
        assert job.history[-1].kind == "epoch" and b.inbox
    job.settle()
    return job


def left_out(state: str, digest: str | None = None) -> Job:
    """One participant receives nothing while the others close its epoch and form the next."""
    job = Job(3).until_running()
    a, b, c = job.live()
    if state == "PREPARED":
        job.compute([c], digest=digest)
        only(job, c)
    job.fail(b)
    only(job, a, b)
    job.lose_decisions(c)
    if state == "ROLLBACK_REQ":
        job.bus_up = False
        job.fail(c)
        only(job, c)
        job.bus_up = True
    assert c.state == state
    job.fire("ack_window", [a, b])
    only(job, a, b)
    assert [g.group for g in job.history[-1].members] == ["0", "1"]
    job.settle()
    return job


def left_out_and_perhaps_odd() -> Job:
    """The decision that it has missed may have declared its state lost, so it fetches another."""
    job = left_out("PREPARED", digest="a")
    assert job.node("2").local.lineage == ""
    job.step()
    job.step()
    assert job.node("2").fetched and job.states() == {"NORMAL"}
    return job


def a_rank_without_its_group() -> Job:
    """It has acknowledged, but its group is incomplete by now, so the next epoch excludes it."""
    job = Job(2, ranks=2).until_running()
    job.crash(job.node("1", 1))
    restored = hold_back(job, job.node("1", 0), "restored")
    job.post(job.node("1", 0), restored)
    job.settle()
    return job


def a_rank_is_waited_for_in_vain() -> Job:
    """It was lost, and another was to replace it; the others continue when the window is over."""
    job = Job(2, ranks=2).until_running()
    job.crash(job.node("1", 1), replaced=True)
    job.settle()
    assert job.states() == {"HEALING"}
    job.fire("reform_window", job.live())
    job.settle()
    assert [g.group for g in job.history[-1].members] == ["0"]
    return job


def slow_to_unwind(**config: Any) -> tuple[Job, Event]:
    """The next epoch is formed, but the main thread of one member still unwinds."""
    job = Job(3, **config).until_running()
    job.fail(job.node("0"))
    restored = hold_back(job, job.node("2"), "restored")
    assert job.node("2").state == "ROLLBACK_SYNC" and job.history[-1].kind == "epoch"
    return job, restored


def aborted_again_meanwhile() -> Job:
    job, restored = slow_to_unwind()
    job.post(job.node("0"), Fault(Token(2, 1), "again"))
    job.settle()
    job.post(job.node("2"), restored)
    job.settle()
    return job


def unwound_at_last() -> Job:
    """The others cannot continue without it, and consider it stuck until it reports otherwise."""
    job, restored = slow_to_unwind(min_groups=3)
    job.post(job.node("0"), Fault(Token(2, 1), "again"))
    job.settle()
    job.fire("ack_window")
    job.settle()
    assert job.kinds()[-2:] == ["epoch", "abort"] and job.states() == {"ROLLBACK_SYNC", "HEALING"}
    job.fire("quorum", [job.node("2")])
    job.settle()
    job.post(job.node("2"), restored)
    job.settle()
    assert job.states() == {"NORMAL"}
    return job


def the_coordinator_unwinds() -> Job:
    """Its main thread is slow, but it gathers, and the one that has answered waits for it."""
    job = Job(3, min_groups=3).until_running()
    a, b, c = job.live()
    job.fail(a)
    while a.state != "ROLLBACK_SYNC":
        job.deliver(a)
    restored = next(e for e in a.inbox if e.type == "restored")
    a.inbox.remove(restored)
    only(job, a, b)
    job.fire("ack_window", [a, b])
    only(job, a, b)
    assert a.local.suspected == {c.peer} and b.local.suspected == frozenset()
    job.post(a, restored)
    job.settle()
    assert job.states() == {"NORMAL"} and len(job.live()) == 3
    return job


def the_coordinator_ends(tell: bool) -> Job:
    """It dies after its ABORT is received, while the main threads of the others unwind."""
    job = Job(3).until_running()
    a, b, c = job.live()
    job.fail(a)
    while b.state != "ROLLBACK_SYNC" or c.state != "ROLLBACK_SYNC":
        job.deliver(next(n for n in (a, b, c) if n.inbox and n.state != "ROLLBACK_SYNC"))
    restored = {n.peer: n.inbox.pop() for n in (b, c)}
    assert {e.type for e in restored.values()} == {"restored"}
    job.crash(a, tell)
    job.settle()
    if not tell:
        job.fire("coordinator_window", [b, c])
        job.settle()
    job.fire("ack_window", [b, c])
    job.settle()
    for node in (b, c):
        job.post(node, restored[node.peer])
    job.settle()
    assert "NORMAL" in job.states() and "0" not in {g.group for g in job.history[-1].members}
    return job


def nobody_coordinates() -> Job:
    """The coordinator is killed and another is silent; the third, still unwinding, counts."""
    job = Job(3).until_running()
    a, b, c = job.live()
    job.fail(a)
    while b.state != "ROLLBACK_SYNC":
        job.deliver(next(n for n in (b, a) if n.inbox))
    restored = next(e for e in b.inbox if e.type == "restored")
    b.inbox.remove(restored)
    job.crash(a)
    only(job, b)
    job.fire("ack_window", [b])
    only(job, b)
    job.post(b, restored)
    job.settle()
    assert b.state == "NORMAL" and c.state in ("NORMAL", "INIT")
    return job


def formed_while_it_unwinds() -> Job:
    job, restored = slow_to_unwind()
    c = job.node("2")
    assert c.local.state == "ROLLBACK_SYNC.formed"
    job.post(c, Fault(c.local.token, "boom"))
    job.settle()
    job.post(c, restored)
    job.settle()
    return job


def left_out_while_it_heals() -> Job:
    """It is slow to heal. The others form an epoch without it, and it learns of that late."""
    job = Job(3).until_running()
    a, b, c = job.live()
    job.fail(a)
    hold_back(job, c, "healed")
    job.fire("ready_window", [a])
    only(job, a, b)
    assert job.kinds()[-2:] == ["abort", "epoch"]
    c.inbox.popleft()  # misses the abort
    job.deliver(c)
    assert c.local.state == "ROLLBACK_SYNC.formed"
    timer = Timer("ready_window", c.timers["ready_window"].serial)
    c.inbox.extendleft([Begin(c.peer, 2), Healed(2), timer])
    job.settle()
    assert job.kinds()[-1] == "epoch"
    job.step()
    assert c.state == "NORMAL"
    return job


def bus_away_while_it_unwinds() -> Job:
    job, restored = slow_to_unwind()
    c = job.node("2")
    job.post(c, BusDown("read", "away"))
    job.settle()
    job.fire("bus_retry", [c])
    job.settle()
    job.post(c, restored)
    job.settle()
    return job


def fetch_fails_late(state: str) -> Job:
    """The rollback of the new epoch has begun when its main thread reports that fetching failed."""
    job = Job(3).until_running()
    a, _, c = job.live()
    job.heal_fails = {c.peer: True}
    job.fail(a)
    failed = hold_back(job, c, "heal_failed")
    job.post(c, Fault(Token(2, 1), "watchdog"))
    job.bus_up = state != "ROLLBACK_REQ"  # else the answer to its ABORT comes first
    while c.state != state:
        job.deliver(c)
    c.inbox.appendleft(failed)
    job.deliver(c)
    job.bus_up = True
    job.fire("bus_retry", [c])
    job.settle()
    assert c.fetched and job.states() == {"NORMAL"}
    return job


def behind_in_commit(torn: bool) -> Job:
    """It votes, and the next message that it receives is the next epoch, which excludes it."""
    job = Job(3).until_running()
    a, b, c = job.live()
    job.compute()
    only(job, c)
    only(job, a, b)
    job.fail(a)
    only(job, a, b)
    job.fire("ack_window", [a, b])
    only(job, a, b)
    received = [e for e in c.inbox if isinstance(e, Decision) and e.record]
    assert [e.record.kind for e in received if e.record] == ["commit", "abort", "epoch"]
    job.lose_decisions(c)
    if torn:
        job.apply_fails = frozenset({c.peer})
    job.post(c, received[-1])
    job.settle()
    job.step()
    return job


def let_in_again(state: str) -> Job:
    """It acknowledged so late that the message counts for the next epoch; then it misses the
    abort."""
    job, restored = slow_to_unwind()
    a, b, c = job.live()
    job.fire("ack_window", [c])
    job.settle()
    if state == "torn":
        job.heal_fails = {c.peer: True}
        job.post(a, Fault(Token(2, 1), "again"))
        job.deliver(a)
        job.lose_decisions(c)
        job.post(c, restored)
        while c.inbox[0].type != "heal_failed":
            job.deliver(c)
        job.bus_up = False  # else the answer to its ABORT comes first
        job.deliver(c)
        job.bus_up = True
    else:
        job.post(c, restored)
        job.settle()
        if state == "PREPARED":
            job.compute([c])
            only(job, c)
        job.fail(a)
        job.deliver(a)
        job.lose_decisions(c)
        if state == "ROLLBACK_REQ":
            job.bus_up = False  # else the answer to its ABORT comes first
            c.inbox.appendleft(Fault(c.local.token, "boom"))
            job.deliver(c)
            job.bus_up = True
    only(job, a, b)
    assert job.history[-1].kind == "abort"
    job.lose_decisions(c)
    job.post(c, Decision(job.history[-1]))
    job.settle()
    return job


LIVES: dict[str, Callable[[], Job]] = {
    "a learner gets its state": a_learner_gets_its_state,
    "a learner gets its state in the barrier": a_learner_gets_its_state_in_the_barrier,
    "behind in COMMIT": lambda: behind_in_commit(torn=False),
    "behind in COMMIT, and torn": lambda: behind_in_commit(torn=True),
    "a joiner has another state": a_joiner_has_another_state,
    "a learner gets no state": a_learner_gets_no_state,
    "bus away for good": bus_away_for_good,
    "bus away for good, no vote": bus_away_for_good_without_a_vote,
    "deaf in doubt": deaf_in_doubt,
    "fell behind in doubt": fell_behind_in_doubt,
    "bus away for a while": bus_away_for_a_while,
    "second starts": second_starts,
    "second start that the older one learns of by asking": (
        second_start_that_the_older_one_learns_of_by_asking
    ),
    "second start that the older one misses": second_start_that_the_older_one_misses,
    "asked to leave before the first epoch": asked_to_leave_before_the_first_epoch,
    "a mate leaves before the first epoch": a_mate_leaves_before_the_first_epoch,
    "stopped by the user": stopped_by_the_user,
    "too few": too_few,
    "too few after a kill": too_few_after_a_kill,
    "too few ranks": too_few_ranks,
    "newcomers without the state": newcomers_without_the_state,
    "torn everywhere": torn_everywhere,
    "torn beside a silent group": torn_beside_a_silent_group,
    "asked to leave with too few": asked_to_leave_with_too_few,
    "bus back before its limit, in doubt": bus_back_before_its_limit_in_doubt,
    "asked last to leave": asked_last_to_leave,
    "asked in its own process to leave": asked_in_its_own_process_to_leave,
    "a hang is told": lambda: a_hang_is_told("NORMAL"),
    "a hang is told to who voted": lambda: a_hang_is_told("PREPARED"),
    "a hang is told in a rollback": lambda: a_hang_is_told("ROLLBACK_REQ"),
    "a barrier that waits": a_barrier_that_waits,
    "an epoch that waits": an_epoch_that_waits,
    "faults in healing": faults_in_healing,
    "an abort that is lost": lambda: an_abort_that_is_lost("vote_window"),
    "an abort that is lost, the bus comes back": lambda: an_abort_that_is_lost("bus_retry"),
    "fault between epochs": fault_between_epochs,
    "manifests that differ": manifests_that_differ,
    "gradients that differ": gradients_that_differ,
    "data that differ": data_that_differ,
    "no reductions": lambda: no_reductions(skip=False),
    "skipped before its reductions": lambda: no_reductions(skip=True),
    "a skip that does not fit": a_skip_that_does_not_fit,
    "a live block": a_live_block,
    "two live blocks": lambda: different_live_blocks("entry of a.py:9", "entry of a.py:9"),
    "a live block and a step": lambda: different_live_blocks("", "a step"),
    "states that differ": lambda: states_that_differ("a", "b"),
    "one state that differs": lambda: states_that_differ("a", "b", "a", on_divergence="heal"),
    "joins when all have left": joins_when_all_have_left,
    "vote cast twice": vote_cast_twice,
    "commit missed": lambda: commit_missed(torn=False),
    "commit missed, then torn": lambda: commit_missed(torn=True),
    "torn by its commit": lambda: torn_by_its_commit(joiner=False),
    "torn by the commit that ends the epoch": lambda: torn_by_its_commit(joiner=True),
    "torn after it had acknowledged": torn_after_it_had_acknowledged,
    "torn by a rollback": lambda: torn_by_a_rollback(late=False),
    "torn by a rollback, told late": lambda: torn_by_a_rollback(late=True),
    "drained": lambda: drained("settled"),
    "drained, the last step torn": lambda: drained("torn"),
    "drained, nobody answers": lambda: drained("alone"),
    "drained, hears the next epoch first": lambda: drained("next epoch"),
    "left out in NORMAL": lambda: left_out("NORMAL"),
    "left out in PREPARED": lambda: left_out("PREPARED"),
    "left out in PREPARED, perhaps odd": left_out_and_perhaps_odd,
    "left out in ROLLBACK_REQ": lambda: left_out("ROLLBACK_REQ"),
    "a rank without its group": a_rank_without_its_group,
    "aborted again meanwhile": aborted_again_meanwhile,
    "unwound at last": unwound_at_last,
    "the coordinator unwinds": the_coordinator_unwinds,
    "the coordinator is killed": lambda: the_coordinator_ends(tell=True),
    "a lost rank is waited for in vain": a_rank_is_waited_for_in_vain,
    "the coordinator dies silently": lambda: the_coordinator_ends(tell=False),
    "nobody coordinates": nobody_coordinates,
    "formed while it unwinds": formed_while_it_unwinds,
    "left out while it heals": left_out_while_it_heals,
    "bus away while it unwinds": bus_away_while_it_unwinds,
    "fetch fails late, in ROLLBACK_REQ": lambda: fetch_fails_late("ROLLBACK_REQ"),
    "fetch fails late, in ROLLBACK_SYNC": lambda: fetch_fails_late("ROLLBACK_SYNC"),
    "let in again in NORMAL": lambda: let_in_again("NORMAL"),
    "let in again in PREPARED": lambda: let_in_again("PREPARED"),
    "let in again in ROLLBACK_REQ": lambda: let_in_again("ROLLBACK_REQ"),
    "let in again, but torn": lambda: let_in_again("torn"),
    **{f"storm {seed}": lambda seed=seed: storm(seed) for seed in range(STORMS)},  # type: ignore[misc]
}


# --- the corpus, and what a row's absence changes -------------------------------------------------

Corpus = dict[Place, list[Moment]]


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """Return a few moments for each row of the table at which it was taken."""
    found: Corpus = {place: [] for place in places()}
    for name, live in LIVES.items():
        for peer, moves in (job := live()).record.moves.items():
            config = job.nodes[peer].participant.config
            for m in moves:
                for place in (PLACES[id(p)] for s in m.out.steps for p in (s.row, *s.parts)):
                    if len(found[place]) < KEPT:
                        moment = Moment(config, m.before, m.event, m.after, m.out, name)
                        found[place].append(moment)
    return found


def without(place: Place) -> FsmSpec:
    """Return the shipped spec without the row."""
    data = HSDP.model_dump()
    *path, key, index = place
    owner: Any = data
    for part in path:
        owner = owner[part]
    del owner[key][index]
    if not owner[key] and key != EXIT_ROWS:
        del owner[key]
    return FsmSpec.model_validate(data)


def changes(table: Table, moment: Moment) -> str | None:
    """Return how the moment ends differently under another table, or None."""
    try:
        after, out = Participant(table, moment.config).handle(
            moment.before, moment.event, moment.after.since
        )
    except AssertionError as error:
        return f"stopped by an assertion: {error}"
    if out.verdict != moment.out.verdict:
        return f"{moment.out.verdict} becomes {out.verdict}: {out.reason}"
    if out.effects != moment.out.effects:
        return f"effects {out.effects} instead of {moment.out.effects}"
    if after != moment.after:
        return f"ends in {after.state} instead of {moment.after.state}, or knows something else"
    return None


@pytest.mark.one_in(5)
@pytest.mark.parametrize("place", places(), ids=lambda p: ".".join(map(str, p)))
def test_removed_row_changes_the_behaviour_of_the_program(place: Place, corpus: Corpus) -> None:
    assert corpus[place], "no life in the corpus takes this row: add a scenario that does"
    spec = without(place)
    if problems := check_spec(spec):
        assert any(_names_what_is_gone(place, *problem) for problem in problems), problems
        return
    table = Table(spec)
    assert any(changes(table, moment) for moment in corpus[place]), (
        f"the row makes no difference in {[m.life for m in corpus[place]]}: it says nothing"
    )


def _names_what_is_gone(place: Place, where: Place, message: str) -> bool:
    """Whether a refusal names the row's event, its effects or the state it led to."""
    row = row_at(place)
    names = [repr(name) for name in (place[-2], *row.effects)]
    to = getattr(row, "to", None)
    return any(name in message for name in names) or (to is not None and to in message)


def test_shipped_table_reproduces_the_outcome_of_each_corpus_moment(corpus: Corpus) -> None:
    """So only the absence of a row can make a difference."""
    table = Table(HSDP)
    for moment in (m for moments in corpus.values() for m in moments):
        assert changes(table, moment) is None, moment.life

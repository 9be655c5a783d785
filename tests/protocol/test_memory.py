"""Tests of what a participant remembers and for how long, and of who counts as divergent or
late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster import Node
from jobs import Job

from fft.messages.causes import NO_CAUSE, Cause, CauseCode
from fft.messages.effects import Decide, ReadHead
from fft.messages.protocol import (
    Ballot,
    Decision,
    Event,
    Manifest,
    Peer,
    Prepared,
    Ready,
    Start,
    Timer,
    Token,
    Vote,
)
from fft.protocol.effects import EFFECTS
from fft.protocol.equality import divergent_ranks
from fft.protocol.guards import GUARDS
from fft.protocol.state import Local

STRANGER = Peer("9", 0, 1)


def after(node: Node, effect: str, event: Event, **held: object) -> Local:
    """Return the memory of ``node``, which holds the given values, after the effect."""
    local = replace(node.local, **held)  # type: ignore[arg-type]
    list(EFFECTS[effect](local, node.participant.config, event))
    return local


def test_ready_message_clears_the_suspicion() -> None:
    job = Job(3).until_running()
    a, b, c = job.live()
    suspected = frozenset({b.peer, c.peer})
    held = after(a, "note_ready", Ready(b.peer, 2), suspected=suspected)
    assert held.suspected == {c.peer} and held.ready[b.peer] == 2


def test_ready_for_a_new_epoch_counts_before_its_record_arrives() -> None:
    """Messages from older barriers are forgotten, so that a long run does not grow."""
    job = Job(3).until_running()
    a, b, c = job.live()
    job.fail(a)
    job.settle()
    record = job.history[-1]
    assert (record.kind, record.epoch) == ("epoch", 2)
    ready = {b.peer: 2, c.peer: 1}
    assert after(a, "adopt_epoch", Decision(record), ready=ready).ready == {b.peer: 2}


def test_member_outside_the_barrier_is_suspected_and_not_the_observer() -> None:
    """The member may still be building its groups."""
    job = Job(3).until_running()
    a, b, c = job.live()
    ready = {b.peer: a.local.token.epoch}
    held = after(a, "suspect_absent", Timer("ready_window", 1), ready=ready)
    assert held.suspected == {c.peer}


def test_outside_of_every_epoch_nothing_of_the_last_one_counts() -> None:
    """A participant that asked to join there has been admitted since or asks again; the same holds
    for one that has stopped."""
    node = Job(2).until_running().node("0")
    held = after(
        node,
        "forget_epoch",
        Start(),
        joining=frozenset({STRANGER}),
        stopped={STRANGER: Token(9, 9)},
        ready={STRANGER: 9},
        proposed=True,
        cause=Cause(CauseCode.DIED, "an old one"),
    )
    assert held.epoch is None and held.vote is None and not held.proposed and held.cause == NO_CAUSE
    assert (held.joining, held.stopped, held.ready) == (frozenset(), {}, {})


def test_coordinator_gives_up_the_barrier_before_the_members() -> None:
    """It knows the absent members and names them; the others would only lack its message to
    begin."""
    job = Job(3).until_running()
    a, *others = job.live()
    job.fail(a)
    windows: dict[Peer, float] = {}
    while waiting := [node for node in job.live() if node.inbox]:
        job.deliver(waiting[0])
        if waiting[0].local.state == "HEALING.formed":
            windows[waiting[0].peer] = waiting[0].timers["ready_window"].seconds
    assert job.history[-1].kind == "epoch" and job.history[-1].by == a.peer
    assert all(windows[other.peer] > windows[a.peer] for other in others)


def test_silent_coordinator_is_doubted_and_the_register_is_read() -> None:
    job = Job(3, min_groups=3).until_running()
    job.kill_group("2")  # too few are left to form an epoch
    job.settle()
    by = job.history[1].by
    for node in job.live():
        assert node.state == "HEALING"
        job.fire("coordinator_window", [node])
        out = job.deliver(node)
        assert any(isinstance(effect, ReadHead) for effect in out.effects)
        assert node.local.suspected == (set() if node.peer == by else {by})


def test_gradient_edits_are_judged_by_the_last_txn() -> None:
    """A step function that clipped once does not keep joiners waiting for ever."""
    job = Job(3).until_running()

    def step(edited: bool) -> None:
        for node in job.live():
            if node.txn is not None:
                done = Prepared(node.txn.token, True, Manifest(1, 4, "x"), edited=edited)
                job.post(node, done)
        job.settle()

    step(edited=True)
    job.start_anew("2")
    job.settle()
    step(edited=False)
    assert job.head is not None and job.head.learners == ("2",)


@pytest.mark.parametrize(
    ("held", "odd"),
    [
        ({"00": "a", "10": "a", "20": "b"}, ["20"]),
        ({"00": "a", "10": "b"}, None),  # there is no majority
        ({"00": "a", "10": "a", "20": "b", "30": "b"}, None),
        ({"00": "a", "10": "a", "20": "b", "30": "c"}, None),
        ({"00": "a", "10": "a", "20": "a", "30": "b"}, ["30"]),
        ({"00": "a", "10": "a", "20": "a"}, []),
        # A participant without a digest is in no majority
        ({"00": "a", "10": None, "20": "b"}, None),
        # one majority per rank number, as shards differ
        ({"00": "a", "10": "a", "20": "b", "01": "x", "11": "y", "21": "x"}, ["11", "20"]),
        ({"00": "a", "10": "a", "20": "b", "01": "x", "11": "y"}, None),
        ({"00": "a", "10": "a", "20": "a", "01": "b", "11": "b", "21": "b"}, []),
    ],
)
def test_rank_that_differs_from_a_strict_majority_is_divergent(
    held: dict[str, str | None], odd: list[str] | None
) -> None:
    """``held``: the digest by group and rank number."""
    votes = [
        Vote(Peer(group, int(rank), 1), Manifest(1), digest=digest)
        for (group, rank), digest in held.items()
    ]
    found = divergent_ranks(votes)
    assert odd == (None if found is None else [f"{peer.group}{peer.rank}" for peer in found])


@pytest.mark.parametrize(
    ("prints", "odd"), [("aab", ["2"]), ("ab", []), ("abc", []), ("aabb", []), ("aaaab", ["4"])]
)
def test_unequal_gradients_are_aborted_and_accuse_a_minority(prints: str, odd: list[str]) -> None:
    job = Job(len(prints)).until_running()
    for node, own in zip(job.live(), prints, strict=True):
        manifest = Manifest(1, 4, "x", fingerprint=own)
        job.post(node, Prepared(node.local.token, True, manifest))
    job.settle()
    abort = next(r for r in job.history if r.kind == "abort")
    assert abort.code == CauseCode.GRADIENTS_DIFFER and not abort.odd and not abort.diverged
    assert [peer.group for peer in abort.accused] == odd
    assert "the reduced gradients of replicas differ (rank 0: a on 0/0#1" in abort.cause


@pytest.mark.parametrize(("policy", "heals"), [("heal", True), ("stop", False)])
def test_divergent_ranks_are_identified_only_if_the_policy_heals(policy: str, heals: bool) -> None:
    job = Job(3, on_divergence=policy).until_running()
    node = job.node("0")
    held = zip(job.live(), "aab", strict=True)
    votes = tuple(Vote(n.peer, Manifest(1), digest=digest) for n, digest in held)
    ballot = Ballot(node.local.token, votes)
    refuse = EFFECTS["propose_refusal"](replace(node.local), node.participant.config, ballot)
    (effect,) = refuse
    assert isinstance(effect, Decide)
    odd = (votes[2].peer,) if heals else ()
    assert (effect.proposal.odd, effect.proposal.diverged) == (odd, not heals)


def test_only_named_ranks_lose_their_state() -> None:
    job = Job(3).until_running()
    assert job.head is not None
    record = replace(job.head, kind="abort", n=2, txn=1, members=(), odd=(job.node("1").peer,))
    gives_up = GUARDS["gives_my_state_up"]
    found = [gives_up(n.local, n.participant.config, Decision(record)) for n in job.live()]
    assert found == [False, True, False]

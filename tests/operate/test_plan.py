"""Tests that the rounds of checks name every set of bad ranks and no other rank.

They start no processes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced import a_record

from fft.messages.causes import CauseCode
from fft.messages.protocol import Peer, Record
from fft.operate.diagnosis.plan import (
    Diagnosis,
    Findings,
    Meeting,
    Outcome,
    Pair,
    judge,
    next_pairs,
)
from fft.trace.course import Place, Rollback, named_by_all
from fft.trace.history import History

Meet = Callable[[Pair], tuple[bool, float]]


def places(count: int) -> list[Place]:
    return [(str(number // 2), number % 2) for number in range(count)]


def played(ranks: list[Place], meet: Meet, findings: Findings | None = None) -> Findings:
    """Play all rounds; ``meet`` returns the result of a meeting as (good, seconds)."""
    findings = findings or Findings()
    for rank in ranks:
        findings.alone.setdefault(rank, {"compute": Outcome(True, 0.1)})
    met: set[frozenset[Place]] = set()
    for number in range(1, len(ranks) ** 2 + 2):
        pairs = next_pairs(ranks, findings)
        if not pairs:
            return findings
        taken = [rank for pair in pairs for rank in pair]
        assert len(set(taken)) == len(taken), "each at most once in a round"
        for pair in pairs:
            assert frozenset(pair) not in met, "nothing is learned from the same meeting again"
            met.add(frozenset(pair))
            ok, seconds = meet(pair)
            findings.meetings.append(Meeting(number, pair, ok, seconds, "" if ok else "failed"))
    raise AssertionError("the rounds do not end")


def rollback(n: int, step: int, *named: Place) -> Rollback:
    return Rollback(n, step, "1/0#1", "1/0#1: ValueError: bad", frozenset(named))


def fails(*bad: Place) -> Meet:
    return lambda pair: (not set(bad) & set(pair), 0.1)


def named(verdict: Diagnosis) -> set[Place]:
    return {culprit.rank for culprit in verdict.culprits}


@pytest.mark.parametrize("count", range(2, 8))
def test_only_bad_ranks_are_named(count: int) -> None:
    """This covers every set of bad ranks that leaves three sound ones; with fewer, no sound rank is
    named."""
    ranks = places(count)
    for size in range(count + 1):
        for bad in map(set, combinations(ranks, size)):
            verdict = judge(ranks, played(ranks, fails(*bad)))
            assert named(verdict) <= bad, (bad, verdict)
            if count - size >= 2:
                assert named(verdict) == bad, (bad, verdict)
                assert all(culprit.how == "failed" for culprit in verdict.culprits)
            elif bad:
                assert verdict.notes, "what cannot be told is said"


@given(st.integers(3, 40), st.data())
@settings(deadline=None, max_examples=60)
def test_few_bad_among_many_take_few_rounds(count: int, data: st.DataObject) -> None:
    ranks = places(count)
    bad = data.draw(st.sets(st.sampled_from(ranks), max_size=max(1, count // 8)))
    findings = played(ranks, fails(*bad))
    assert named(judge(ranks, findings)) == bad
    assert max((meeting.round for meeting in findings.meetings), default=0) <= 5


@given(st.integers(3, 24), st.data())
@settings(deadline=None, max_examples=60)
def test_slow_ranks_are_distinguished_from_failed_ones(count: int, data: st.DataObject) -> None:
    ranks = places(count)
    slow = data.draw(st.sampled_from(ranks))
    jitter = data.draw(st.lists(st.floats(0.05, 0.14), min_size=count, max_size=count))

    def meet(pair: Pair) -> tuple[bool, float]:
        return True, 2.0 if slow in pair else jitter[ranks.index(pair[0])]

    verdict = judge(ranks, played(ranks, meet))
    assert [(c.rank, c.how, c.confidence) for c in verdict.culprits] == [(slow, "slow", "medium")]


@given(st.integers(3, 12), st.data())
@settings(deadline=None, max_examples=60)
def test_a_broken_link_is_no_broken_rank(count: int, data: st.DataObject) -> None:
    ranks = places(count)
    cut = data.draw(st.sampled_from(list(combinations(ranks, 2))))
    findings = played(ranks, lambda pair: (set(pair) != set(cut), 0.1))
    verdict = judge(ranks, findings)
    assert not verdict.culprits
    if any(not meeting.ok for meeting in findings.meetings):
        assert "the connection between these two" in " ".join(verdict.notes)


def test_two_ranks_are_undecided_without_a_history_of_rollbacks() -> None:
    ranks = [("0", 0), ("1", 0)]
    findings = played(ranks, fails(("1", 0)))
    verdict = judge(ranks, findings)
    assert not verdict.culprits and "not enough sound ranks to tell" in verdict.notes[0]
    run = [rollback(n, 5, ("1", 0)) for n in range(4)]
    (culprit,) = judge(ranks, findings, run).culprits
    assert (culprit.rank, culprit.how, culprit.confidence) == (("1", 0), "rollbacks", "medium")
    assert "all 4 at step 5 name 1/0" in culprit.evidence[0]


def test_own_checks_are_conclusive_and_keep_a_rank_out_of_the_pairs() -> None:
    ranks = places(4)
    findings = Findings(alone={ranks[1]: {"compute": Outcome(False, 0.1, "3 of 3 came out wrong")}})
    verdict = judge(ranks, played(ranks, fails(ranks[1]), findings))
    (culprit,) = verdict.culprits
    assert (culprit.rank, culprit.confidence) == (ranks[1], "high")
    assert culprit.evidence == ("compute: 3 of 3 came out wrong",)
    assert all(ranks[1] not in meeting.pair for meeting in findings.meetings)


def test_failure_on_every_rank_blames_none() -> None:
    ranks = places(4)
    bad = {"compute": Outcome(False, 0.1, "not finished in 20 s")}
    verdict = judge(ranks, played(ranks, fails(), Findings(alone=dict.fromkeys(ranks, bad))))
    assert not verdict.culprits and "compute failed on every rank" in verdict.notes[0]


def test_check_that_could_not_run_accuses_no_rank() -> None:
    ranks = places(4)
    findings = Findings(alone={ranks[1]: {"memory": Outcome(None, 0.0, "no room")}})
    assert not judge(ranks, played(ranks, fails(), findings)).culprits


def test_silent_rank_is_suspected_unless_all_are_silent_or_it_left() -> None:
    ranks = places(3)
    silent = Findings(silent={ranks[2]: "does not answer"})
    (culprit,) = judge(ranks, played(ranks, fails(), silent)).culprits
    assert (culprit.rank, culprit.how, culprit.confidence) == (ranks[2], "silent", "medium")
    nobody = judge(ranks, Findings(silent=dict.fromkeys(ranks, "does not answer")))
    assert not nobody.culprits and "no rank answers" in nobody.notes[0]
    silent.left.add(ranks[2])
    left = judge(ranks, silent)
    assert not left.culprits and "left the job" in left.notes[0]


def test_departed_rank_is_judged_by_its_checks_only() -> None:
    ranks = places(5)
    findings = played(ranks, fails(ranks[3]))
    findings.left.add(ranks[3])
    assert not judge(ranks, findings).culprits
    findings.alone[ranks[3]] = {"memory": Outcome(False, 0.1, "1 words came back changed")}
    assert named(judge(ranks, findings)) == {ranks[3]}


def test_slow_by_itself_is_held_against_the_median() -> None:
    ranks = places(5)
    times = dict(zip(ranks, (0.1, 0.2, 1.5, 0.15, 0.1), strict=True))
    alone = {rank: {"compute": Outcome(True, seconds)} for rank, seconds in times.items()}
    (culprit,) = judge(ranks, played(ranks, fails(), Findings(alone))).culprits
    assert (culprit.rank, culprit.how) == (ranks[2], "slow")
    assert "1.50 s; the median is 0.15 s" in culprit.evidence[0]
    two = ranks[1:3]
    assert not judge(two, played(two, fails(), Findings({r: alone[r] for r in two}))).culprits


# --- history -----------------------------------------------------------------------------


def record(n: int, kind: str, step: int, *accused: Peer, **more: Any) -> Record:
    """Return a record; its text names a rank that the code does not accuse."""
    text = "9/9#9 died: SIGKILL (seen by supervisor)"
    more = {"by": Peer("1", 0, 2), "code": CauseCode.DIED, **more}
    return a_record(n, kind, step, cause=text, accused=accused, **more)


def test_history_names_the_accused_and_ignores_the_text() -> None:
    history = History()
    history.take_record(record(1, "abort", 4), 0.0)
    history.take_record(record(2, "abort", 4, Peer("a/b", 1, 3), Peer("0", 0, 1)), 0.0)
    assert [one.named for one in history.course.run] == [frozenset(), {("a/b", 1), ("0", 0)}]


@given(st.permutations(range(8)), st.lists(st.integers(0, 7), max_size=8))
def test_records_count_once_in_any_order(order: list[int], again: list[int]) -> None:
    """A commit ends a run, even if it is received after its successors."""
    kinds = ["epoch", "abort", "commit", "abort", "epoch", "abort", "epoch", "abort"]
    history = History()
    for n in [*order, *again]:
        history.take_record(record(n + 1, kinds[n], 4, Peer("1", 0, 2)), 0.0)
    assert [one.n for one in history.course.run] == [4, 6, 8]
    assert named_by_all(history.course.run, 3) == ("1", 0)
    assert named_by_all(history.course.run, 4) is None


def test_step_that_the_user_skips_is_blamed_on_no_rank() -> None:
    history = History()
    for n in (1, 2, 3):
        history.take_record(record(n, "abort", 4, Peer("1", 0, 2)), 0.0)
    history.take_record(record(4, "abort", 4, skip=True), 0.0)
    assert [one.n for one in history.course.run] == [1, 2, 3]


def test_one_rollback_that_names_another_ends_the_suspicion() -> None:
    run = [rollback(n, 1, ("1", 0)) for n in range(3)]
    assert named_by_all([*run, rollback(3, 1, ("0", 0))], 3) is None
    assert named_by_all([*run, rollback(3, 1)], 3) is None


def test_open_rollbacks_neither_name_a_rank_nor_clear_one_named_twice() -> None:
    """Gradients that differed without a majority say that one of two replicas is wrong."""
    named, unclear = rollback(1, 4, ("1", 0)), Rollback(0, 4, "1/0#1", "", frozenset(), True)
    assert named_by_all([unclear, named, named], 3) == ("1", 0)
    assert named_by_all([unclear, unclear, named], 3) is None, "it was named only once"
    assert named_by_all([unclear, unclear, unclear], 3) is None
    history = History()
    differ, died = CauseCode.GRADIENTS_DIFFER, CauseCode.DIED
    for n, code in enumerate((differ, died, differ), 1):
        accused = [Peer("1", 0, 2)] if code == died else []
        history.take_record(record(n, "abort", 4, *accused, code=code), 0.0)
    assert [one.is_open for one in history.course.run] == [True, False, True]


def test_rank_is_named_only_after_failing_with_two_sound_ranks() -> None:
    ranks = places(5)
    bad, sound = ranks[0], ranks[1:]
    good = [Meeting(1, (one, other), True, 0.1) for one, other in combinations(sound, 2)]
    failed = [Meeting(2, (bad, other), False, 0.1, "failed") for other in sound]
    for count, culprits in ((1, set()), (2, {bad})):
        findings = played(ranks, fails(), Findings(meetings=[*good, *failed[:count]]))
        findings.meetings = [*good, *failed[:count]]
        verdict = judge(ranks, findings)
        assert named(verdict) == culprits
    once = Meeting(3, (bad, sound[3]), True, 0.1)  # two broken links at a rank that is sound
    assert not judge(ranks, Findings(findings.alone, [*good, *failed[:2], once])).culprits

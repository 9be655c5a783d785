"""Tests of the facts that a judge of long runs forgets and keeps."""

from __future__ import annotations

import random

import pytest

from fft.messages.protocol import Peer, Token
from fft.protocol.invariants import Judge
from fft.protocol.invariants.facts import Facts, Numbers


@pytest.mark.parametrize("seed", range(20))
def test_numbers_are_a_set(seed: int) -> None:
    dice, numbers, known = random.Random(seed), Numbers(), set[int]()
    for _ in range(200):
        number = dice.randrange(60)
        numbers.add(number)
        known.add(number)
        assert len(numbers) == len(known)
        assert all((n in numbers) == (n in known) for n in range(-1, 61))


@pytest.mark.parametrize("seed", range(20))
def test_nearly_ordered_numbers_are_counted_with_few_kept(seed: int) -> None:
    dice, numbers, known = random.Random(seed), Numbers(runs=16), set[int]()
    for at in range(0, 3000, 2):
        number = max(0, at - 2 * dice.randrange(8))
        numbers.add(number)
        known.add(number)
        assert len(numbers) == len(known)
        assert number in numbers and at + 2 not in numbers
    assert len(vars(numbers)["_begins"]) == 16


def reach(facts: Facts, record: int, epoch: int = 1) -> set[object]:
    """Advance to a record, and return the facts that are forgotten."""
    return {key for bucket in facts.due(record, epoch) for key in facts.forget(bucket)}


def test_facts_mentioned_again_are_kept() -> None:
    facts = Facts(window=10)
    for key in ("once", "again"):
        facts.put((key,), 1)
    assert reach(facts, 19) == set()
    facts.put(("again",), 2)
    assert facts[("again",)] == 1, "what was known first"
    assert reach(facts, 20) == {("once",)}
    assert ("again",) in facts and ("once",) not in facts
    assert reach(facts, 30) == {("again",)}


def test_epoch_facts_are_kept_for_two_epochs() -> None:
    facts = Facts(window=10)
    for epoch in (1, 2):
        facts.put(("members", epoch), "them")
    assert reach(facts, 1000, epoch=2) == set()
    assert reach(facts, 1010, epoch=3) == {("members", 1)}


def test_early_fact_waits_for_its_epoch() -> None:
    """A participant that was away for long and then receives the newest record brings such a
    fact."""
    facts = Facts(window=10)
    facts.at = 500
    facts.put(("record", 500), "it")
    assert reach(facts, 499) == set()
    assert reach(facts, 520) == {("record", 500)}


def test_a_slice_that_was_served_long_ago_is_not_served_again() -> None:
    judge, peer = Judge(window=10), Peer("0", 0, 1)
    for record, txn, number in ((1, 1, 7), (1000, 900, 8), (1001, 901, 7)):
        judge.reach(record, 1)
        judge._facts.put(("data of", Token(1, txn)), (number,))
        judge.consumed(peer, Token(1, txn), number, f"at {record}")
    found = {finding.name: finding for finding in judge.finish()}["samples_once"]
    assert found.violation is not None and found.place == "at 1001"
    assert "and to another, long before" in found.violation

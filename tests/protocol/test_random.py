"""Seeded random lives of whole jobs: no invariant is broken, and the job progresses without
faults."""

from __future__ import annotations

import copy
import dataclasses
import random

import pytest
from jobs import Job, calm, wander

SEEDS = range(60)


def holds_the_head(job: Job) -> bool:
    """Whether a complete live group has the state of the last decision, so that the job can
    continue."""
    lineage = job.head.lineage if job.head else "genesis"
    groups: dict[str, list[str]] = {}
    for node in job.live():
        groups.setdefault(node.peer.group, []).append(node.local.lineage)
    return any(len(ls) == job.ranks and set(ls) == {lineage} for ls in groups.values())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_run_breaks_no_invariant_and_commits_when_calm(seed: int) -> None:
    rng = random.Random(seed)
    job = Job(rng.choice([2, 3]), rng.choice([1, 2]))
    wander(job, rng, rng.choice([50, 200, 400]))
    commits = calm(job, rounds=25)
    assert [(f.name, f.violation, f.place) for f in job.verdict()] == []
    assert commits > 0 or not holds_the_head(job)


def test_the_same_seed_lives_the_same_life() -> None:
    lives = []
    for _ in range(2):
        job = Job(3, 2)
        wander(job, random.Random(5), 400)
        lives.append((job.history, [n.local for n in job.nodes.values()]))
    assert lives[0] == lives[1]


def test_handling_an_event_does_not_change_the_previous_state() -> None:
    job = Job(3)
    checked = 0
    observe = job.observer
    for node in job.nodes.values():
        handle = node.participant.handle

        def watched(before, event, now, handle=handle):  # type: ignore[no-untyped-def]
            nonlocal checked
            kept = copy.deepcopy(before)
            after = handle(before, event, now)
            assert dataclasses.asdict(before) == dataclasses.asdict(kept)
            checked += 1
            return after

        node.participant.handle = watched  # type: ignore[method-assign]
    assert observe is job.observer
    wander(job, random.Random(7), 300)
    assert checked > 100

"""Tests of a job whose register was closed by the starter of the next job
(`fft.operate.entering`)."""

from __future__ import annotations

import random

import pytest
from jobs import Job, calm, wander

from fft.messages.protocol import Decision
from fft.operate.entering import closing


@pytest.mark.one_in(4)
@pytest.mark.parametrize("is_heard", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_all_participants_end_in_a_closed_job_from_any_state(seed: int, is_heard: bool) -> None:
    rng = random.Random(seed)
    job = Job(rng.choice([2, 3]), rng.choice([1, 2])).until_running()
    wander(job, rng, rng.choice([20, 100, 300]))
    job.bus_up = True
    assert job.head is not None
    if job.head.last:
        return
    last = closing(job.head)
    job.put_head(last)
    there = job.live()
    if is_heard:
        job.broadcast(Decision(last))
    wander(job, rng, 50)
    calm(job, rounds=25)
    assert job.head == last
    assert [(f.name, f.violation, f.place) for f in job.verdict()] == []
    job.fire("quorum")  # of a participant that was forming an epoch and missed the end of the job
    job.settle()
    assert job.live() == []
    ends = {node.finished.error for node in there if node.finished is not None}
    late = set() if is_heard else {"NotEnoughGroups", "NoEpoch", "NoState"}
    assert ends <= {"JobEnded", "Fenced", None, *late}  # None: it was leaving

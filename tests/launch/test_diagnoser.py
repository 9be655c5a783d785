"""Tests of when the supervisor looks for a culprit, and of its reaction.

They start no processes.
"""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import pytest

from fft.launch.supervisor.culprit import Diagnoser, act
from fft.operate.client import JobClient
from fft.operate.diagnosis.plan import Culprit, Diagnosis, Findings, How
from fft.operate.diagnosis.rounds import Report
from fft.trace.course import Rollback

RUN = [Rollback(n, 3, "1/0#1", "1/0#1: ValueError", frozenset({("1", 0)})) for n in range(6)]


def diagnoser(directory: Path, after: int) -> Diagnoser:
    """Return a diagnoser whose diagnoses end at once, because this bus has no job."""
    return Diagnoser(f"memory://culprit-{uuid.uuid4().hex}", None, directory, after)


@pytest.mark.parametrize(("after", "runs", "begun"), [(4, 3, 0), (4, 4, 1), (6, 6, 1), (0, 6, 0)])
def test_diagnosis_begins_after_n_rollbacks_and_once_per_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, after: int, runs: int, begun: int
) -> None:
    made = diagnoser(tmp_path, after)
    for _ in range(3):
        made.look(RUN[:runs], 1)
        made.close()
    reported = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len([text for text in reported if "looking for the culprit" in text]) == begun
    gave_up = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(gave_up) == begun and all("was given up" in r.getMessage() for r in gave_up)


def report(*culprits: tuple[str, How]) -> Report:
    found = tuple(Culprit((group, 0), how, "high", ("why",)) for group, how in culprits)
    return Report(3, 1, [("0", 0), ("1", 0)], Findings(), RUN, Diagnosis(found))


@pytest.mark.parametrize("how", ["slow", "silent"])
def test_slow_or_silent_rank_is_named_and_kept(how: How) -> None:
    with JobClient(f"memory://culprit-{uuid.uuid4().hex}") as desk:
        found = report(("1", how))
        act(desk, found, spare=1)
    assert found.actions == []


def test_a_group_that_the_job_needs_is_not_evicted() -> None:
    with JobClient(f"memory://culprit-{uuid.uuid4().hex}") as desk:
        found = report(("1", "failed"))
        act(desk, found, spare=0)
    assert found.actions == ["group 1 was not evicted: the job cannot do without it"]


def test_eviction_after_the_end_of_the_job_names_the_end() -> None:
    with JobClient(f"memory://culprit-{uuid.uuid4().hex}") as desk:
        found = report(("1", "failed"))
        act(desk, found, spare=1, has_ended=lambda: True)
    assert found.actions == ["group 1 was not evicted: the job has ended meanwhile"]

"""Tests of `fft run` with wrong scripts, and at the end of a job: it ends at once with a reason."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from forked_run import fft, running
from stage import notes, records
from waiting import wait_until

from fft.trace.audit import audit_dir
from fft.trace.report import RunReport
from fft.trace.resumed import audit_job

WORKER = Path(__file__).with_name("mistake_worker.py")
LIMIT_S = 240

pytestmark = pytest.mark.multiprocess


def command(traces: Path, where: str, steps: int, groups: int = 2, *options: str) -> list[str]:
    fft_run = ["run", "--groups", str(groups), "--no-progress", "--no-lighthouse"]
    fft_run += ["--trace-dir", str(traces), *options]
    return [*fft_run, str(WORKER), where, str(steps)]


def run(
    traces: Path, where: str, steps: int = 4, groups: int = 2, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run a job to its end, with the limit of the test, not of the job: nothing else may end it."""
    started = command(traces, where, steps, groups, *options)
    return fft(*started, folder=traces.parent, within=LIMIT_S)


def starts(traces: Path, group: int) -> int:
    return len(list(traces.glob(f"logs/g{group}r0-*.log")))


def test_a_typo_is_shown_once_and_nothing_is_tried_again(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "start")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "NameError: name 'undefined_name' is not defined" in done.stderr
    assert f'File "{WORKER}", line' in done.stderr
    assert max(starts(tmp_path / "run", group) for group in (0, 1)) <= 2


@pytest.mark.parametrize("groups", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_mistake_in_the_body_is_shown_with_the_batch(tmp_path: Path, groups: int) -> None:
    traces = tmp_path / "run"
    done = run(traces, "body", groups=groups)
    assert done.returncode == 1
    assert done.stderr.count("\nAttributeError: 'Tensor' object has no attribute") == 1
    assert done.stderr.count(": AttributeError: 'Tensor' object has no attribute") == 1, "last line"
    assert "in the txn of step 2, on " in done.stderr and "slice " in done.stderr
    assert sum(starts(traces, group) for group in range(groups)) <= groups + 1
    assert not list(traces.glob("diagnosis-*"))
    found = RunReport(traces).errors()
    assert {(e.step, e.error.partition(":")[0]) for e in found} == {(2, "AttributeError")}
    assert {e.where.rpartition(":")[0] for e in found} == {str(WORKER)}
    logs = [path.read_text() for path in traces.glob("logs/*.log")]
    assert any("error of this rank in step 2: AttributeError at" in log for log in logs)
    assert audit_dir(traces).ok


def test_a_sample_that_cannot_be_had_ends_the_job(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "data")
    assert done.returncode == 1
    assert done.stderr.count("KeyError: 'no such sample'") == 1
    assert "__getitem__" in done.stderr


@pytest.mark.long
def test_a_group_that_fails_alone_is_left_out_and_the_others_train_on(tmp_path: Path) -> None:
    traces = tmp_path / "run"
    started = [word for word in command(traces, "body1", 1_000_000) if word != "--no-progress"]
    with running(*started, folder=tmp_path) as job:
        wait_until(lambda: "group 1 given up" in job.stdout_text, "that it is given up", LIMIT_S)
        job.signal(signal.SIGINT)
        assert job.wait(LIMIT_S) == 75  # drained before its end
    output = job.stderr_text
    assert output.count("\nAttributeError: 'Tensor' object has no attribute") == 1
    assert "group 1 was given up" in output
    assert starts(traces, 0) == 1 and starts(traces, 1) == 2
    assert audit_dir(traces).ok


def test_failure_after_the_last_step_fails_the_job(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "after")
    assert done.returncode == 1
    assert done.stderr.count("ValueError: what comes after the loop is wrong") == 1
    assert sum(starts(tmp_path / "run", group) for group in (0, 1)) <= 3


@pytest.mark.long
def test_job_finishes_without_waiting_for_a_group_killed_at_the_end(tmp_path: Path) -> None:
    """It comes back when there is no group left to join."""
    traces, plan = tmp_path / "run", tmp_path / "plan.yaml"
    kill = {"name": "late", "kind": "kill", "step": 3, "group": 1, "phase": "vote"}
    plan.write_text(json.dumps({"faults": [kill]}))
    began = time.monotonic()
    done = run(traces, "none", 5, 2, "--faults", str(plan))
    assert done.returncode == 0, done.stderr
    assert len(notes(traces, "inject")) == 1
    assert max(r["step"] for r in records(traces) if r["kind"] == "commit") == 5
    assert starts(traces, 1) <= 2
    assert time.monotonic() - began < 60, "it has waited for somebody who does not come"
    found = audit_job(traces)
    assert found.ok and found.ends.checks == len(list(traces.glob("*.jsonl")))


def test_a_group_killed_after_its_last_vote_is_not_started_again(tmp_path: Path) -> None:
    traces, plan = tmp_path / "run", tmp_path / "plan.yaml"
    kill = {"name": "last", "kind": "kill", "step": 4, "group": 1, "phase": "apply"}
    plan.write_text(json.dumps({"faults": [kill]}))
    done = run(traces, "none", 5, 2, "--faults", str(plan))
    assert done.returncode == 0, done.stderr
    assert "group 1 ended with SIGKILL, and was no longer needed" in done.stderr
    assert starts(traces, 1) == 1


@pytest.mark.parametrize(
    ("where", "status", "outcome", "rollbacks"),
    [
        ("stop", 0, "complete, at step 3", {"stopped"}),
        ("any", 0, "complete, at step 3", set()),
        ("term", 75, "drained before its end, at step 3", {"stopped"}),
    ],
)
def test_job_stops_on_all_groups_after_the_step_one_group_decides(
    tmp_path: Path, where: str, status: int, outcome: str, rollbacks: set[str]
) -> None:
    traces = tmp_path / "run"
    done = run(traces, where, 400)
    logs = [log.read_text() for log in sorted(traces.glob("logs/*.log"))]
    text = "\n".join([done.stdout, done.stderr, *logs])
    assert done.returncode == status and f"the job has ended: {outcome}" in text, text
    ends = {line for log in logs for line in log.splitlines() if "done at" in line}
    assert len(logs) == 2 and len(ends) == 1 and ends.pop().startswith("done at step 3:"), text
    found = records(traces)
    aborts = {
        r["code"]
        for r in found
        if r.get("event", {}).get("type") == "decision" and r.get("code", "none") != "none"
    }
    assert aborts <= rollbacks, aborts
    assert audit_dir(traces).ok

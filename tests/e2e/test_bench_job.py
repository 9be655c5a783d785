"""Tests of single jobs of `make bench`: real processes, one of them killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.diloco.__main__ import measured
from benchmarks.diloco.plan import KINDS, Schedule
from benchmarks.side_by_side.events import lines

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 200


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("row", "system"), [("sigkill", "fft"), ("from-nvrx-sigkill", "fft-restartable")]
)
def test_a_killed_group_is_left_out_and_nothing_is_left_behind(
    tmp_path: Path, row: str, system: str
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "benchmarks.side_by_side", "run", "--dir", str(run)]
    command += ["--row", row, "--system", system, "--reps", "1"]
    for _ in range(2):  # the second run finds its results
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ
        )
        assert done.returncode == 0, done.stdout + done.stderr
    kinds = [json.loads(line)["kind"] for line in (run / "results.jsonl").read_text().splitlines()]
    assert kinds == ["machine", "repetition"]
    found = list(lines(run / "results.jsonl"))[1]
    assert not found["never"] and found["next_commit_ms"] > 0
    zeros = ("splits", "phantoms", "mismatches", "transfers", "died")
    assert {name: found[name] for name in zeros} == dict.fromkeys(zeros, 0)
    events = list(lines(run / "events" / f"{row}.{system}.1.jsonl"))
    pids = {event["pid"] for event in events if event["g"] >= 0}
    assert len(pids) == 3
    left = [one.info for one in psutil.process_iter(["pid", "status"]) if one.pid in pids]
    # a process of the system reaps those that outlived their parent
    assert all(info["status"] == psutil.STATUS_ZOMBIE for info in left), left


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_diloco_job_goes_through_each_kind_of_fault(tmp_path: Path) -> None:
    job = tmp_path / "fft"
    found = measured("fft", Schedule(outer=46, every=8), job)
    costs = {cost["kind"]: cost for cost in found["costs"]}
    assert [kind for _, kind in found["faults"]] == [*KINDS, KINDS[0]][: len(found["faults"])]
    assert len(found["faults"]) >= len(KINDS)
    zeros = ("twice", "never", "splits", "unequal")
    for kind in KINDS:
        assert {name: costs[kind][name] for name in zeros} == dict.fromkeys(zeros, 0), found
    assert costs["exception"]["lost_steps"] == costs["exception"]["faults"]
    assert costs["one_sided"]["lost_steps"] == costs["one_sided"]["transfer_bytes"] == 0
    assert costs["kill"]["transfer_bytes"] > 0
    assert found["audit"].startswith("no violation")
    steps, losses = zip(*found["curve"], strict=True)
    assert list(steps) == list(range(1, 47))
    assert losses[-1] < losses[0]

"""Tests of those cases of `make chaos` that no other test covers, through the command itself.

They are real jobs of 3 groups x 1 rank and 2 groups x 2 FSDP2 ranks. Each has several faults.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.slices import slices
from fft.trace.audit import read_lines

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 280
CASES = {  # one suite for each layout, as a second job would take longer than its cases
    "3x1": ["kill/during_allreduce/all-but-one", "evict/-/1-group"],
    "2x2": [
        "exception/apply/1-group",
        "network_cut/backward/1-rank",
        "network_cut/after_vote/1-group",
        "one_sided/after_allreduce/1-group",
    ],
}


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", [pytest.param("3x1", marks=pytest.mark.long), "2x2"])
def test_a_job_is_whole_again_after_each_fault(tmp_path: Path, layout: str) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", "tests.acceptance.chaos", "matrix", "--layout", layout]
    command += [f"--case={case}" for case in CASES[layout]]
    command += ["--traces", str(tmp_path / "jobs"), "--json", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["problems"] == []
    rows = {f"{r['kind']}/{r['phase']}/{r['place']}".replace(" ", "-"): r for r in found["rows"]}
    assert set(rows) == set(CASES[layout])
    for name, row in rows.items():
        assert row["audit"] == "clean", name
        assert row["heard_ms"] is not None and row["next_commit_ms"] is not None, (name, row)
        assert row["attempts_lost"] >= 1, (name, row)
        comes_back = row["kind"] in ("kill", "evict", "exception")
        assert (row["bytes_healed"] > 0) == comes_back, (name, row)


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("trainer", ["diloco", "local_sgd"])
def test_groups_that_step_alone_live_through_faults_and_lose_no_data(
    tmp_path: Path, trainer: str
) -> None:
    command = [sys.executable, "-m", "tests.acceptance.chaos", "random", "--trainer", trainer]
    command += ["--seconds", "30", "--seed", "5", "--traces", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    data = slices(read_lines(tmp_path / "random-3x1" / "traces"))
    assert data.exact and data.once > 0, done.stdout

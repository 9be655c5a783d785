"""Tests that a group with a notice leaves before its deadline: with a commit, or with a reason.

The jobs are real processes, whose notice is a file; the long ones run under ``fft run``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
from stage import aborts, events, notes, records, slices

from fft.trace.audit import audit_dir

WORKER = Path(__file__).with_name("notice_worker.py")
LIMIT_S = 200
STEPS = 30


def run_job(directory: Path, case: str, ranks: int = 1, notice: str = "{group}") -> dict[str, Any]:
    """Return the final state of each rank, by its place."""
    directory.mkdir()
    command = [sys.executable, "-m", "fft.cli", "run", "--groups", "2", "--ranks", str(ranks)]
    command += ["--trace-dir", str(directory / "run"), "--timeout", str(LIMIT_S - 30)]
    command += [str(WORKER), str(STEPS), str(directory), case]
    env = {**os.environ, "FFT_NOTICE": f"file:{directory}/notice-{notice}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env)
    logs = "".join(path.read_text()[-3000:] for path in (directory / "run" / "logs").iterdir())
    assert done.returncode == 3, done.stdout + done.stderr + logs  # one group has left the job
    return ended_with(directory)


def ended_with(directory: Path) -> dict[str, Any]:
    """Audit the job and return the final state of each rank, by its place."""
    report = audit_dir(directory / "run")
    assert report.ok, report.render()
    found = sorted(directory.glob("result-*.json"))
    return {p.stem.removeprefix("result-"): json.loads(p.read_text()) for p in found}


@pytest.mark.multiprocess
def test_a_group_that_is_given_time_leaves_with_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "job"
    monkeypatch.setenv("FFT_NOTICE", f"file:{folder}/notice-{{group}}")
    run = forked.run_job(WORKER, str(STEPS), str(folder), "soon", folder=folder, within=LIMIT_S)
    ended = ended_with(folder)
    assert ended["1-0"]["commits"] == ended["1-0"]["steps"] < STEPS and not ended["1-0"]["unwound"]
    assert ended["0-0"]["steps"] == STEPS
    assert not aborts(run)
    left_with = next(r for r in records(run) if r.get("leavers"))
    assert left_with["kind"] == "commit" and left_with["leavers"] == ["1"]
    (given,) = notes(run, "notice")
    assert given["group"] == "1" and given["data"]["reason"] == "the machine goes"
    (left,) = (n for n in notes(run, "drained") if n["group"] == "1")
    assert 0 < left["data"]["left"] < 120
    assert not notes(run, "drain_late")
    print(f"\nleft {left['data']['left']:.1f} s before the deadline")


@pytest.mark.long
@pytest.mark.multiprocess
def test_group_with_too_long_a_step_leaves_uncommitted_with_reason(tmp_path: Path) -> None:
    ended = run_job(tmp_path / "job", "long")
    run = tmp_path / "job" / "run"
    assert ended["1-0"]["unwound"].startswith("Interrupted: ")
    assert ended["1-0"]["steps"] == ended["1-0"]["commits"] == 4
    assert ended["0-0"]["steps"] == STEPS
    (late,) = notes(run, "drain_late")
    assert late["group"] == "1" and late["data"]["left"] > 0
    why = late["data"]["why"]
    assert "its main thread has not voted; NORMAL for" in why and "notice_worker.py" in why
    assert not notes(run, "drain_untold")
    assert len(aborts(run)) == 1, aborts(run)
    (attempt,) = aborts(run)
    assert "1/0#1 left: the machine goes; not out" in attempt["cause"]
    assert attempt["step"] == 4  # that attempt, and nothing before it
    assert sorted(slices(run)[0]) == list(range(4 * 2 + STEPS - 4))
    (gone,) = (e for e in events(run, "leave") if e["group"] == "0")
    given = notes(run, "notice")[0]
    took = gone["mono"] - given["mono"]
    assert took < given["data"]["within"], "the others must hear of it before the deadline"
    log = (run / "logs" / "g1r0-1.log").read_text()
    assert "leaves now, without waiting for a commit: the machine goes" in log
    print(f"\nleft {given['data']['within'] - took:.1f} s before the deadline: {why}")


@pytest.mark.long
@pytest.mark.multiprocess
def test_the_ranks_of_a_group_go_with_the_one_that_had_the_notice(tmp_path: Path) -> None:
    ended = run_job(tmp_path / "job", "long", ranks=2, notice="{group}.{rank}")
    run = tmp_path / "job" / "run"
    assert {n["rank"] for n in notes(run, "notice")} == {0}
    assert ended["1-0"]["steps"] == 4
    assert "1-1" not in ended, "the code after the loop of a rank that was rolled back and left"
    assert json.loads((run / "g1r1i1.jsonl").read_text().splitlines()[-1])["step"] == 4
    assert ended["0-0"]["steps"] == ended["0-1"]["steps"] == STEPS
    assert len(aborts(run)) == 1, aborts(run)
    assert not list(run.glob("g1r*i2.jsonl")), "nobody of it was started again"
    given = notes(run, "notice")[0]
    (mate,) = (e for e in events(run, "leave") if (e["group"], e["rank"]) == ("0", 0)
               and e["event"]["peer"][:2] == ["1", 1])  # fmt: skip
    assert mate["mono"] < given["mono"] + given["data"]["within"]

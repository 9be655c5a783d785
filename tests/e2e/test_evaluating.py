"""Tests of work that the ranks of a group do alone between two txns, such as an FSDP2 evaluation.

It is not repeated, so a rollback of the step after it must not end it, unless a mate is lost.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_run import fft

from fft.trace.audit import audit_dir
from fft.trace.report import RunReport

SCRIPT = Path(__file__).with_name("evaluating_script.py")
LIMIT_S = 100


def run(folder: Path, kind: str, *options: str) -> dict[str, str]:
    """Return the results of the four ranks."""
    (folder / "found").mkdir(parents=True)
    command = ["--groups", "2", "--ranks", "2", "--trace-dir", str(folder / "run")]
    command += ["--timeout", str(LIMIT_S - 20), *options, str(SCRIPT), kind, str(folder / "found")]
    done = fft("run", *command, folder=folder, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    report = audit_dir(folder / "run")
    assert report.ok, report.render()
    return {path.name: path.read_text() for path in (folder / "found").iterdir()}


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_rollback_of_the_next_step_ends_no_evaluation(tmp_path: Path) -> None:
    clean, faulty = run(tmp_path / "clean", "nothing"), run(tmp_path / "faulty", "fault")
    assert [len(clean[f"0.{rank}"].split()) for rank in range(2)] == [2, 2]
    assert clean == faulty
    noticed = [incident.noticed for incident in RunReport(tmp_path / "faulty" / "run").incidents]
    assert [what.partition(": ")[2] for what in noticed] == ["ValueError: once", "group 0, 1"]


@pytest.mark.long
@pytest.mark.multiprocess
def test_last_evaluation_finds_its_shards_with_and_without_a_checkpoint(tmp_path: Path) -> None:
    """FSDP2 leaves its root gathered then; the group that takes the last checkpoint shards it."""
    without = run(tmp_path / "without", "last")
    place = tmp_path / "checkpoints"
    taken = run(tmp_path / "with", "last", "--checkpoint", str(place), "--every", "100")
    assert (place / "step-6").exists()
    assert without == taken
    for found in taken.values():
        assert found.split()[:2] == ["gathered", "sharded"], taken


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_rank_of_another_group_that_is_killed_ends_no_evaluation(tmp_path: Path) -> None:
    found = run(tmp_path / "killed", "kill")
    assert [len(found[f"0.{rank}"].split()) for rank in range(2)] == [2, 2]
    logs = {path.name for path in (tmp_path / "killed" / "run" / "logs").iterdir()}
    assert "g1r0-2.log" in logs and "g0r0-2.log" not in logs


@pytest.mark.long
@pytest.mark.multiprocess
def test_evaluation_waiting_for_a_stopped_rank_is_released(tmp_path: Path) -> None:
    found = run(tmp_path / "stopped", "stop")
    assert len(set(found.values())) == 2, "its group began again, without an evaluation"
    log = (tmp_path / "stopped" / "run" / "logs" / "g0r0-1.log").read_text()
    assert "GroupAborted" in log

"""Tests of durable checkpoints of stages that step by themselves: 2 groups x 2 stages, resumed.

A checkpoint is one cut through both stages. The criteria are the final bits, which must equal those
of an undisturbed run, the data that each stage consumed, and the audit of all starts.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from forged import nth_note, rewrite, saying
from forked_run import fft, running
from stage import notes
from test_durable import LIMIT_S, began_at, ends, folders, run_with_kills
from waiting import wait_until

from fft.checkpoints.files import Checkpoints, Manifest
from fft.checkpoints.stores import open_store
from fft.trace.audit import trace_files
from fft.trace.format import scope_folder
from fft.trace.resumed import audit_job

SCRIPT = Path(__file__).with_name("durable_ahead_script.py")
STEPS, EVERY = 16, 4
SKIPS = {"overflow": [0.08, 0.04]}
"""The means above which batches are skipped: some steps of each stage, but not the same ones."""

pytestmark = pytest.mark.multiprocess


def arguments(root: Path, steps: int, every: int | str = EVERY, **more: Any) -> list[str]:
    """Return the arguments of `fft run`; they are the same for each start of a job."""
    (root / "out").mkdir(parents=True, exist_ok=True)
    given = {"groups": 2, "ranks": 2, "trace-dir": root / "traces", "timeout": LIMIT_S - 20}
    given |= {"checkpoint": root / "checkpoints", "every": every, "keep": 0}
    if "faults" in more:
        given["faults"] = more.pop("faults")
    flags = ["run", "--no-lighthouse", "--no-progress", "--resume"]
    for name, value in given.items():
        flags += [f"--{name}", str(value)]
    return [*flags, str(SCRIPT), str(steps), str(root / "out"), json.dumps(more)]


def run(root: Path, steps: int, **more: Any) -> str:
    """Run a start of the job to its end. Return its output."""
    done = fft(*arguments(root, steps, **more), folder=root, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def manifests(root: Path) -> dict[int, Manifest]:
    """Return the manifests by step of the first stage; each checkpoint is complete."""
    found = Checkpoints(open_store(str(root / "checkpoints")))
    steps = [entry.manifest.step for entry in found.found() if entry.manifest is not None]
    return {step: found.verify(step) for step in steps}


def cursors(manifest: Manifest) -> list[int]:
    return [manifest.scopes[f"stage{number}"].cursor for number in range(2)]


def assert_data(root: Path) -> None:
    """Check that each stage has consumed each slice once, on the resulting lineage."""
    for name in ("", "stage1"):
        there = (scope_folder(folder, name) for folder in folders(root))
        places = [place for place in there if any(place.glob("*.jsonl"))]
        begins = [began_at(place, "cursor") for place in places]
        taken: list[int] = []
        for i, place in enumerate(places):
            found = [n["data"]["slice"] for n in notes(place, "consumed")]
            until = min([*begins[i + 1 :], sys.maxsize])
            taken += [each for each in found if each is not None and each < until]
        assert sorted(taken) == list(range(len(taken))), name or "stage0"


def judge(root: Path, expected: dict[str, list[object]], starts: int) -> None:
    assert ends(root) == expected
    assert len(folders(root)) >= starts
    assert_data(root)
    report = audit_job(root / "traces")
    assert report.ok and report.resumed.checks, report.render()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    root = tmp_path_factory.mktemp("undisturbed")
    run(root, STEPS, every=1000)
    found = ends(root)
    assert len(found) == 4
    return found


@pytest.mark.long
def test_a_job_that_is_resumed_twice_has_the_bits_of_one_run(
    undisturbed: dict[str, list[object]], tmp_path: Path
) -> None:
    """The starts follow a normal end and a power cut; all checkpoints are at one place."""
    # A checkpoint that is due while another is in progress is skipped
    run(tmp_path, 7, pause=[0.1, 0.1])
    assert {step: cursors(m) for step, m in manifests(tmp_path).items()} == {
        4: [8, 8], 7: [14, 14],
    }  # fmt: skip
    for mark in (tmp_path / "out").glob("final-*"):
        mark.unlink()
    output = run(tmp_path, STEPS, cut=8, pause=[0.1, 0.1])
    assert "the job starts again from the checkpoint of step 8" in output
    judge(tmp_path, undisturbed, starts=3)
    found = manifests(tmp_path)
    assert sorted(found) == [4, 7, 8, 12, 16]
    for manifest in found.values():
        assert manifest.groups == ("0", "1") and len(set(cursors(manifest))) == 1
    odd(tmp_path)


def odd(root: Path) -> None:
    """Modify the traces in ways that only the audit of all starts can detect."""
    traces = shutil.copytree(root / "traces", root / "another checkpoint")
    change = nth_note("resumed", 0, saying(attempt="x"))
    rewrite(trace_files(traces / "start2" / "scopes" / "stage1")[0], change)
    assert "begins with the checkpoint x" in str(audit_job(traces).resumed.violation)


@pytest.mark.long
def test_skipped_steps_take_their_slices_in_checkpoints_too(tmp_path: Path) -> None:
    """The stages are at one place in the data, with different numbers of steps."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, STEPS, every=1000, **SKIPS)
    run(parts, STEPS, cut=8, **SKIPS)
    found = manifests(parts)
    steps = [[m.scopes[f"stage{k}"].step for k in range(2)] for m in found.values()]
    assert any(first != last for first, last in steps), "something was skipped"
    judge(parts, ends(whole), starts=2)


@pytest.mark.long
@pytest.mark.parametrize("kills", [2, 20])
def test_all_ranks_are_killed_at_random_moments(kills: int, tmp_path: Path) -> None:
    steps, pause = (60, [0.05, 0.1]) if kills == 2 else (120, [0.05, 0.15])
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, steps, every=1000)
    parts.mkdir()
    command = arguments(parts, steps, pause=pause)
    run_with_kills(parts, command, kills, is_ready=lambda: bool(manifests(parts)))
    judge(parts, ends(whole), starts=2)


@pytest.mark.long
def test_stopped_job_resumes_each_stage_at_its_own_step(
    undisturbed: dict[str, list[object]], tmp_path: Path
) -> None:
    """SIGTERM drains it: the first stage is ahead, and entries in flight are in the checkpoint."""
    command = arguments(tmp_path, STEPS, every=1000, pause=[0.0, 0.4])
    traces = tmp_path / "traces"
    with running(*command, folder=tmp_path) as process:
        wait_until((tmp_path / "out" / "middle").exists, "a moment without a vote", LIMIT_S)
        process.signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 75, process.tail()
    for mark in (tmp_path / "out").glob("final-*"):
        mark.unlink()
    (found,) = manifests(tmp_path).values()
    first, last = cursors(found)
    assert 0 < last < first < 2 * STEPS
    done = fft(*command, folder=tmp_path, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert began_at(traces / "start2") == found.step
    given = {n["data"]["slice"] for n in notes(traces / "start2", "entry_restored")}
    assert set(range(last, first)) <= given
    assert not notes(traces / "start2", "entry_made_anew")
    judge(tmp_path, undisturbed, starts=2)
    path = trace_files(traces / "start2")[0]
    for text, change in (
        ("has neither computed that slice at that step", saying(version=0)),
        ("is said to be from the checkpoint", saying(slice=10**6)),
    ):
        rewrite(path, nth_note("entry_restored", 1, change))
        assert text in audit_job(traces).render()


@pytest.mark.long
def test_a_group_that_was_lost_for_a_while_costs_no_later_checkpoint(tmp_path: Path) -> None:
    """The stages step over each other's places then; each is cut where possible."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "faults:\n  - {name: kill, kind: kill, step: 6, group: 1, rank: 1, phase: forward}\n"
    )
    run(tmp_path, 60, faults=plan, pause=[0.1, 0.1])
    found = manifests(tmp_path)
    assert [m.groups for m in found.values()][-1] == ("0", "1")
    for step, manifest in found.items():
        first, last = cursors(manifest)
        assert last <= first and (first - 2 < last or step == 60)
    assert max(found) == 60 and len(found) > 10
    assert audit_job(tmp_path / "traces").ok


@pytest.mark.long
def test_ended_stage_is_in_the_later_checkpoints_of_the_other(
    tmp_path: Path,
) -> None:
    run(tmp_path, 16, last_steps=6, pause=[0.1, 0.0])
    found = manifests(tmp_path)
    assert sorted(found) == [4, 8, 12, 16]
    assert [cursors(found[step]) for step in (4, 8, 16)] == [[8, 8], [16, 12], [32, 12]]
    run(tmp_path, 20, last_steps=16)
    assert cursors(manifests(tmp_path)[20]) == [40, 32]
    assert_data(tmp_path)
    report = audit_job(tmp_path / "traces")
    assert report.ok and report.resumed.checks, report.render()


@pytest.mark.long
def test_stage_that_ends_long_before_the_checkpoint_is_copied_at_once(
    tmp_path: Path,
) -> None:
    run(tmp_path, 16, every=1000, last_steps=4, pause=[0.2, 0.0])
    assert {step: cursors(m) for step, m in manifests(tmp_path).items()} == {16: [32, 8]}
    waited = notes(tmp_path / "traces" / "scopes" / "stage1", "checkpoint_waited")
    assert all(note["data"]["stall_ms"] < 1000 for note in waited)


@pytest.mark.long
def test_killed_last_stage_resumes_after_the_first_stage_has_ended(
    tmp_path: Path,
) -> None:
    """Its end is not that of the job, which restarts by itself."""
    plan = tmp_path / "plan.yaml"
    kill = "  - {{name: kill{0}, kind: kill, step: 7, group: {0}, rank: 1, phase: forward}}\n"
    plan.write_text("faults:\n" + "".join(kill.format(group) for group in range(2)))
    output = run(tmp_path, 8, faults=plan, waits=6)
    assert "the job starts again from the checkpoint of step 4" in output
    found = manifests(tmp_path)
    assert {step: cursors(m) for step, m in found.items()} == {4: [8, 8], 8: [16, 16]}
    assert_data(tmp_path)
    assert audit_job(tmp_path / "traces").ok


@pytest.mark.long
def test_by_time_both_stages_take_the_same(tmp_path: Path) -> None:
    run(tmp_path, 60, every="0.5s", pause=[0.03, 0.05])
    found = manifests(tmp_path)
    assert len(found) >= 3 and max(found) == 60
    for manifest in found.values():
        assert manifest.groups == ("0", "1") and len(set(cursors(manifest))) == 1


@pytest.mark.long
def test_pipeline_checkpoint_is_not_exported_for_torch(tmp_path: Path) -> None:
    """torch's checkpoint has one state, and this one has two."""
    run(tmp_path, 4)
    place = str(tmp_path / "checkpoints")
    done = fft(
        "checkpoint", "export", place, "4", str(tmp_path / "dcp"), folder=tmp_path, within=60
    )
    assert done.returncode == 2 and "each at its own step" in done.stderr

"""Tests of copies in memory: a job whose ranks are all SIGKILLed goes on from them, without a disk.

The criteria are those of test_durable.py: equal bits, each slice once, and the audit of all starts;
and that at most one step is lost if there is a copy of each step.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked_run import FftRun, fft, running
from test_durable import (
    LIMIT_S,
    SCRIPT,
    STEPS,
    began_at,
    ends,
    folders,
    judge_starts,
    kill_now_and_then,
    living,
    run_undisturbed,
)
from test_durable import arguments as durable_arguments
from typer.testing import CliRunner
from waiting import wait_until

from fft.cli import app
from fft.trace.audit import read_lines, trace_files
from fft.trace.resumed import audit_job

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """The final states of a run without kills."""
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), STEPS)


arguments = partial(durable_arguments, memory=1, checkpoint=None, every=None)


def is_of_a_copy(line: dict[str, Any]) -> bool:
    """Return whether a line of a trace describes a copy in memory."""
    return line.get("note") == "memory_copy"


def copied(root: Path) -> list[int]:
    """Return the steps that the newest start has copied into memory, of all ranks."""
    newest = folders(root)[-1:]
    lines = (line for f in newest for line in read_lines(f, is_of_a_copy))
    return sorted(line["data"]["step"] for line in lines)


def has_copies(root: Path, least: int) -> bool:
    """Return whether all ranks of the newest start have copied ``least`` steps or more."""
    return len(copied(root)) >= 4 * least


def is_at_work(root: Path) -> bool:
    """Return whether the running ranks have copied a step; so no three starts die at one."""
    lines = [p.open().readline() for f in folders(root)[-1:] for p in trace_files(f)]
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    pids = {head["config"]["pid"] for head in whole}
    return bool(pids) and pids <= set(living(root)) and has_copies(root, 1)


def reached(folder: Path) -> int:
    """Return the newest step that a start has committed, by its traces."""
    notes = read_lines(folder, lambda line: line.get("note") == "consumed")
    return max((line["data"]["step"] + 1 for line in notes), default=0)


def judge(
    root: Path,
    expected: dict[str, list[object]],
    starts: int,
    steps: int = STEPS,
    most_lost: int = 1,
) -> None:
    """Check for equal bits, each slice once, an audit without findings, and the steps lost."""
    assert ends(root) == expected
    judge_starts(root, starts, steps)
    for before, after in itertools.pairwise(folders(root)):
        assert began_at(after) >= max(reached(before), began_at(before) % sys.maxsize) - most_lost


def place_of(process: FftRun) -> Path:
    """Return the folder of the copies, from the messages of the command."""
    (place, *_) = re.findall(r"in memory \((/dev/shm/[^)]*)\)", process.stderr_text)
    return Path(place)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_job_goes_on_from_memory_when_all_ranks_are_killed(
    kills: int, undisturbed: dict[str, list[object]], tmp_path: Path
) -> None:
    steps, limit_s = (STEPS, LIMIT_S) if kills == 2 else (100, 5 * LIMIT_S)
    command = arguments(tmp_path, steps, tmp_path / "out", 0.2, timeout=limit_s)
    with running(*command, folder=tmp_path) as process:
        dice = random.Random(kills)
        ready = partial(is_at_work, tmp_path)
        assert kill_now_and_then(tmp_path, process, kills, dice, is_ready=ready) == kills
        assert process.wait(LIMIT_S) == 0, process.tail()
        place = place_of(process)
    assert not place.exists()
    if steps != STEPS:
        (tmp_path / "undisturbed").mkdir()
        undisturbed = run_undisturbed(tmp_path / "undisturbed", steps)
    judge(tmp_path, undisturbed, kills + 1, steps)


def folder_of(root: Path) -> Path:
    """Return the folder of the copies of a job, from its newest trace."""
    (*_, newest) = folders(root)
    return Path(next(iter(read_lines(newest, is_of_a_copy)))["data"]["place"])


@pytest.mark.parametrize("is_damaged", [False, True])
def test_same_command_resumes_from_memory_after_a_kill_of_fft_run(
    is_damaged: bool, undisturbed: dict[str, list[object]], tmp_path: Path
) -> None:
    command = arguments(tmp_path, STEPS, tmp_path / "out", 0.2)
    with running(*command, folder=tmp_path) as process:
        wait_until(lambda: has_copies(tmp_path, 4), "some copies", LIMIT_S)
        place = folder_of(tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)
        wait_until(lambda: not list(living(tmp_path)), "the end of the ranks")
    if is_damaged:
        (only,) = folders(tmp_path)
        lines = [x for x in read_lines(only, is_of_a_copy) if (x["group"], x["rank"]) == ("1", 0)]
        newest = max(line["data"]["step"] for line in lines)
        (path,) = place.glob(f"step-{newest}.*/g1r0.safetensors")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    done = fft(*command, folder=tmp_path, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"in memory ({place})" in done.stderr
    assert ("a copy in memory is not used: " in done.stderr) == is_damaged
    assert not place.exists()
    (_, start2) = folders(tmp_path)
    notes = [x["data"] for x in read_lines(start2, lambda x: x.get("note") == "resumed")]
    assert len(notes) == 4 and {note["tier"] for note in notes} == {"memory"}
    report = CliRunner().invoke(app, ["report", str(tmp_path / "traces")]).output
    assert f"from the checkpoint of step {notes[0]['step']} in memory: fft report" in report
    assert ("a copy in memory was not used: step-" in report) == is_damaged
    lacks = "has no buffers and random states of group 1" in done.stderr
    assert is_damaged or not lacks
    # the copy before the damaged one may still be whole
    most_lost = 1 + is_damaged
    judge(tmp_path, ends(tmp_path) if lacks else undisturbed, 2, most_lost=most_lost)


def test_job_leaves_a_consistent_but_bad_state_for_an_older_one(tmp_path: Path) -> None:
    """Every copy and checkpoint from step 8 on leads to a NaN; that of step 5 does not."""
    kill = "  - {name: kill%d, kind: kill, step: 11, group: %d, phase: backward}\n"
    (tmp_path / "plan.yaml").write_text("faults:\n" + kill % (0, 0) + kill % (1, 1))
    given = {"ranks": 1, "checkpoint": tmp_path / "kept", "every": 5, "keep": 9}
    command = arguments(tmp_path, faults=tmp_path / "plan.yaml", **given)[:-1]
    script = [str(SCRIPT.with_name("bad_state_script.py")), str(tmp_path / "out")]
    done = fft(*command, *script, folder=tmp_path, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "which may be bad: an older one is looked for" in done.stderr
    assert f"from the checkpoint of step 5 at {tmp_path}/kept" in done.stderr
    began = [began_at(folder) for folder in folders(tmp_path)]
    assert began[0] == 0 and began[-1] == 5 and len(began) <= 7, began
    assert min(began[1:-1]) == 10, began
    report = audit_job(tmp_path / "traces")
    assert report.ok, report.render()
    text = CliRunner().invoke(app, ["report", str(tmp_path / "traces")]).output
    found = re.search(r"that all ranks completed is of step (\d+), the newest checkpoint of", text)
    assert found is not None and int(found[1]) in (10, 11), text

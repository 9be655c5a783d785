"""Tests of durable checkpoints: all ranks of 2 x 2 FSDP2 are SIGKILLed, and the job resumes.

The criteria are the bits of the final state, which must equal those of a run without kills, the
slices of data on the resulting lineage, and the audit of all starts.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from forked_run import FftRun, fft, running
from typer.testing import CliRunner
from waiting import wait_until

from fft.checkpoints.files import Checkpoints
from fft.checkpoints.stores import open_store
from fft.cli import app
from fft.trace.audit import read_lines, trace_files
from fft.trace.resumed import audit_job
from fft.trace.starts import start_folders

SCRIPT = Path(__file__).with_name("durable_script.py")
STEPS, EVERY = 24, 4
LIMIT_S = 240
STAGES = ("copying", "writing", "delivering", "publishing", "renaming", "renamed")

pytestmark = pytest.mark.multiprocess


def arguments(root: Path, *script: object, **options: object) -> list[str]:
    """Return the arguments of `fft run`; they are the same for each start of a job."""
    (root / "out").mkdir(exist_ok=True)
    given = {"groups": 2, "ranks": 2, "trace-dir": root / "traces", "timeout": LIMIT_S - 20}
    given |= {"checkpoint": root / "checkpoints", "every": EVERY, "memory": "off"}
    given |= options
    flags = ["run", "--no-lighthouse", "--no-progress", "--resume"]
    for name, value in given.items():
        flags += [] if value is None else [f"--{name}", str(value)]
    return [*flags, str(SCRIPT), *map(str, script)]


def ends(root: Path) -> dict[str, list[object]]:
    """Return the final state of each rank: its digest, the step, and its random numbers."""
    found = sorted((root / "out").glob("final-*.json"))
    return {path.name: json.loads(path.read_text()) for path in found}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """The final states of a run without kills."""
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), STEPS)


def run_undisturbed(root: Path, steps: int) -> dict[str, list[object]]:
    """Return the final states of such a run."""
    done = fft(*arguments(root, steps, root / "out"), folder=root, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = ends(root)
    assert len(found) == 4
    return found


def folders(root: Path) -> list[Path]:
    """Return the folders of the starts that have traces, in order."""
    return [f for f in start_folders(root / "traces") if any(f.glob("*.jsonl"))]


def began_at(folder: Path, what: str = "step") -> int:
    """Return the step that a start began with, or another entry ``what`` of the headers of its
    ranks."""
    lines = [path.open().readline() for path in trace_files(folder)]
    # Else the process was killed at once
    heads = [json.loads(line) for line in lines if line.endswith("\n")]
    return max((head["start"][what] for head in heads), default=sys.maxsize)


def consumed(root: Path, steps: int) -> dict[int, list[int]]:
    """Return the slices that each rank number consumed on the resulting lineage, of all groups
    together."""
    starts, found = folders(root), dict[int, list[int]]()
    begins = [*map(began_at, starts[1:]), steps]
    for number, folder in enumerate(starts):
        until = min(begins[number:])  # a later start may have resumed from an earlier step
        for line in read_lines(folder, lambda line: line.get("note") == "consumed"):
            data = line["data"]
            if data["step"] < until and data["slice"] is not None:
                found.setdefault(line["rank"], []).append(data["slice"])
    return found


def judge(root: Path, expected: dict[str, list[object]], starts: int, steps: int = STEPS) -> None:
    """Check for equal bits, each slice once, and an audit without findings."""
    assert ends(root) == expected
    judge_data(root, starts, steps)


def judge_starts(root: Path, starts: int, steps: int = STEPS) -> None:
    """Check for each slice once, and an audit without findings."""
    assert len(folders(root)) >= starts
    for slices in consumed(root, steps).values():
        assert sorted(slices) == list(range(2 * steps))
    report = audit_job(root / "traces")
    assert report.ok, report.render()


def judge_data(root: Path, starts: int, steps: int = STEPS) -> None:
    """The same, and a newest checkpoint of the last step."""
    judge_starts(root, starts, steps)
    whole = Checkpoints(open_store(str(root / "checkpoints")))
    newest, problems = whole.newest()
    assert newest is not None and newest.step == steps and not problems


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_a_power_cut_in_the_midst_of_a_checkpoint_costs_no_bit(
    stage: str, undisturbed: dict[str, list[object]], tmp_path: Path
) -> None:
    script = (STEPS, tmp_path / "out", 0.02, stage, 2 * EVERY)
    done = fft(*arguments(tmp_path, *script), folder=tmp_path, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / f"cut-{stage}").exists()
    # Its manifest is written before it gets its name
    last = 2 if stage in ("renaming", "renamed") else 1
    assert f"the job starts again from the checkpoint of step {last * EVERY}" in done.stderr
    assert "" not in done.stderr.splitlines(), "of a process that has said nothing"
    report = CliRunner().invoke(app, ["report", str(tmp_path / "traces")]).output
    # the processes are killed one after the other, which another one may notice in time
    assert "no fault was noticed" in report or "died: it was killed" in report
    went_on = f"the job was started again from the checkpoint of step {last * EVERY}: fft report"
    assert f"when it ended; {went_on} {tmp_path}/traces/start2\n" in report
    judge(tmp_path, undisturbed, starts=2)


@pytest.mark.long
def test_forgotten_job_resumes_from_the_last_checkpoint(
    undisturbed: dict[str, list[object]], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("faults:\n  - {name: forget, kind: bus_restart, step: 10}\n")
    given = arguments(tmp_path, STEPS, tmp_path / "out", 0.05, faults=plan)
    done = fft(*given, folder=tmp_path, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the bus has forgotten the job: the job starts again from the" in done.stderr
    judge(tmp_path, undisturbed, starts=2)


@pytest.mark.long
def test_if_the_group_that_writes_dies_the_next_one_does(tmp_path: Path) -> None:
    """The next group does so at its first commit without it, as the next due step is far away."""
    plan = tmp_path / "plan.yaml"
    plan.write_text("faults:\n  - {name: kill, kind: kill, step: 10, group: 0, phase: backward}\n")
    script = (STEPS, tmp_path / "out", 0.02, "stall", 8)
    done = fft(*arguments(tmp_path, *script, faults=plan, every=8), folder=tmp_path, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = Checkpoints(open_store(str(tmp_path / "checkpoints")))
    steps = {e.step: e.manifest for e in found.found() if e.step is not None}
    assert 8 not in steps and 11 in steps, "the first commit after the kill"
    assert steps[11] is not None and (steps[11].writer, steps[11].groups) == ("1", ("1",))
    assert audit_job(tmp_path / "traces").ok


@pytest.mark.long
def test_by_time_all_ranks_take_the_same_steps(tmp_path: Path) -> None:
    given = arguments(tmp_path, 60, tmp_path / "out", 0.03, every="0.5s", keep=0)
    done = fft(*given, folder=tmp_path, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = Checkpoints(open_store(str(tmp_path / "checkpoints"))).found()
    assert len(found) >= 3 and found[-1].step == 60
    for entry in found:
        assert entry.manifest is not None and entry.manifest.groups == ("0", "1"), entry


def kill_group(traces: Path, group: int) -> None:
    """SIGKILL the ranks of one group."""
    for path in traces.glob(f"g{group}r*.jsonl"):
        header = json.loads(path.read_text().partition("\n")[0])
        os.kill(header["config"]["pid"], signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("lost", [None, 0])
def test_job_stopped_by_its_operator_resumes_from_its_last_commit(
    undisturbed: dict[str, list[object]], tmp_path: Path, lost: int | None
) -> None:
    """SIGTERM drains the job, even if one of two needed groups has just been killed."""
    command = arguments(tmp_path, STEPS, tmp_path / "out", 0.3, every=1000)
    traces = tmp_path / "traces"
    with running(*command, folder=tmp_path) as process:

        def have_all_written_a_step() -> bool:
            return sum('"consumed"' in p.read_text() for p in traces.glob("*.jsonl")) == 4

        wait_until(have_all_written_a_step, "the first step in all traces")
        if lost is not None:
            kill_group(traces, lost)
        began = time.monotonic()
        process.signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 75, process.tail()
        assert time.monotonic() - began < 30, "it waited for the killed group"
    for mark in (tmp_path / "out").glob("final-*"):
        mark.unlink()
    found = Checkpoints(open_store(str(tmp_path / "checkpoints"))).newest()[0]
    assert found is not None and 0 < found.step < STEPS
    assert found.groups == (("0", "1") if lost is None else ("1",))
    notes = read_lines(traces, lambda line: line.get("note") == "consumed")
    assert found.step == 1 + max(line["data"]["step"] for line in notes)
    done = fft(*command, folder=tmp_path, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert began_at(traces / "start2") == found.step
    if lost is None:
        judge(tmp_path, undisturbed, starts=2)
    else:  # the random numbers of the killed group are lost, and the model has a dropout
        judge_data(tmp_path, starts=2)


def living(root: Path) -> Iterator[int]:
    """Return the running processes of the job, as they have reported themselves."""
    for mark in (root / "out").glob("pid-*"):
        pid = int(mark.name.removeprefix("pid-"))
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                yield pid


def kill_ranks(root: Path) -> None:
    """Kill as a power cut does: no rank outlives another by more than the time of a system call."""
    for pid in list(living(root)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for mark in (root / "out").glob("pid-*"):
        mark.unlink()


def kill_now_and_then(
    root: Path,
    process: FftRun,
    times: int,
    dice: random.Random,
    ranks: int = 4,
    is_ready: Callable[[], bool] = lambda: True,
) -> int:
    """SIGKILL all ranks ``times`` times, each some time after they have begun and ``is_ready`` is
    true. Return the number of kills."""
    done = 0
    while done < times and process.runs:

        def are_there() -> bool:
            return (len(list(living(root))) == ranks and is_ready()) or not process.runs

        wait_until(are_there, "all ranks", LIMIT_S)
        time.sleep(dice.uniform(0.0, 2.5))  # a random moment, which waits for no event
        if process.runs and not ends(root):
            kill_ranks(root)
            done += 1
    return done


def run_with_kills(
    root: Path,
    command: Sequence[str],
    kills: int,
    ranks: int = 4,
    is_ready: Callable[[], bool] = lambda: True,
) -> None:
    """Run a job to its end while all ranks are killed so often; every other time with the
    supervisor, which is then restarted by the same command."""
    dice, done = random.Random(kills), 0
    while not ends(root):
        with running(*command, folder=root) as process:
            done += kill_now_and_then(root, process, min(kills - done, 2), dice, ranks, is_ready)
            if done < kills:
                process.end()  # and with it its ranks
                continue
            code = process.wait(LIMIT_S)
            assert code == 0, process.tail()
    assert done == kills, "it was through before it was killed so often"


@pytest.mark.long
@pytest.mark.parametrize(("kills", "steps"), [(2, STEPS), (20, 100)])
def test_all_ranks_are_killed_at_random_moments(
    kills: int, steps: int, undisturbed: dict[str, list[object]], tmp_path: Path
) -> None:
    command = arguments(tmp_path, steps, tmp_path / "out", 0.25)
    place = tmp_path / "checkpoints"
    run_with_kills(
        tmp_path, command, kills, is_ready=lambda: any(place.glob("step-*/manifest.json"))
    )
    if steps != STEPS:
        (tmp_path / "undisturbed").mkdir()
        undisturbed = run_undisturbed(tmp_path / "undisturbed", steps)
    judge(tmp_path, undisturbed, starts=2, steps=steps)

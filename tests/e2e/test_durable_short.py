"""Tests of jobs whose disk has no room for a checkpoint: the remaining files, and the messages."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from forked_run import fft, running
from typer.testing import CliRunner
from waiting import wait_until

from fft.cli import app

SCRIPT = Path(__file__).with_name("durable_short_script.py")
LIMIT_S = 120

pytestmark = pytest.mark.multiprocess


def command(root: Path, *script: object, every: int = 2) -> list[str]:
    """Return the command of a job of two groups."""
    given = {"groups": 2, "trace-dir": root / "traces", "timeout": LIMIT_S - 20}
    given |= {"checkpoint": root / "checkpoints", "every": every, "memory": "off"}
    flags = ["run", "--no-lighthouse", "--no-progress", "--resume"]
    for name, value in given.items():
        flags += [f"--{name}", str(value)]
    return [*flags, str(SCRIPT), *map(str, script)]


def run(root: Path, *script: object, every: int = 2) -> str:
    """Run such a job to its end. Return its output."""
    done = fft(*command(root, *script, every=every), folder=root, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def report(root: Path) -> str:
    """Return its `fft report`."""
    done = CliRunner().invoke(app, ["report", str(root / "traces")])
    assert done.exit_code == 0, done.output
    return done.output


def left(root: Path) -> list[str]:
    """Return the directories at the place of the checkpoints."""
    return sorted(path.name for path in (root / "checkpoints").glob("step-*"))


@pytest.mark.long
def test_attempts_that_have_failed_leave_nothing(tmp_path: Path) -> None:
    """Group 0, which publishes, has no room; group 1 has written all of its files."""
    output = run(tmp_path, 6)
    assert output.count("no checkpoint of step") == 3
    assert left(tmp_path) == []
    (line,) = [line for line in output.splitlines() if "there is no checkpoint at" in line]
    assert "the last attempt, of step 6, has failed: rank 0/0: OSError" in line
    reported = report(tmp_path)
    assert "checkpoints: 0 taken, 3 failed, 0 left out\n" in reported
    assert "step 2 failed: rank 0/0: OSError" in reported and "File too large" in reported


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("room", [17, 0], ids=["room comes", "it stays full"])
def test_lost_checkpoint_is_reported_while_traces_cannot_be_written(
    room: int, tmp_path: Path
) -> None:
    """`fft run` receives it on the bus and reports it; the report names the gaps of the traces.

    Failed checkpoints cost neither a thread each nor time at the end.
    """
    output = run(tmp_path, 20, room or 20, 99, 5)
    steps = sorted(int(n) for n in re.findall(r"no checkpoint of step (\d+) from rank 0/0", output))
    full = [6, 8, 10, 12, 14, 16] if room else [6, 8, 10, 12, 14, 16, 18, 20]
    assert steps == full, output
    gaps = re.findall(r"the trace of rank (\d/0) cannot be written: .*File too large", output)
    assert sorted(gaps) == ["0/0", "1/0"], output
    reported = report(tmp_path)
    assert "according to the traces, which have gaps" in reported
    newest = "step-20" if room else "step-4"
    behind = "of the last step of" if room else "16 steps behind the last one of"
    (line,) = [line for line in output.splitlines() if "the newest checkpoint is" in line]
    assert f"the newest checkpoint is {newest} at" in line
    assert ("the last attempt, of step 20, has failed: rank" in line) == (not room)
    assert f", {behind} the job" in line and "unasked" not in output
    if room:
        logs = "".join(path.read_text() for path in (tmp_path / "traces").rglob("*.log"))
        found = re.findall(r"threads that write checkpoints: (\d+)", logs)
        assert len(found) == 2 and max(map(int, found)) <= 3, logs


@pytest.mark.long
def test_job_reports_the_lag_of_its_newest_checkpoint(tmp_path: Path) -> None:
    output = run(tmp_path, 6, 3)
    assert left(tmp_path) == ["step-4", "step-6"]
    place = tmp_path / "checkpoints"
    assert f"the newest checkpoint is step-6 at {place}, of the last step of the job\n" in output
    assert "checkpoints: 2 taken (the newest of step 6), 1 failed, 0 left out\n" in report(tmp_path)


def test_job_killed_by_its_operator_reports_its_newest_checkpoint(tmp_path: Path) -> None:
    """A second signal kills it; the checkpoint of step 4 is in progress, and the drain waits for
    it."""
    with running(*command(tmp_path, 6, 0, 4), folder=tmp_path) as process:
        wait_until(lambda: len(left(tmp_path)) >= 2, "that of step 4", LIMIT_S)
        for number in (signal.SIGINT, signal.SIGTERM):  # two of one kind may come as one
            process.signal(number)
        assert process.wait(LIMIT_S) == 1
        output = process.stderr_text
    assert "interrupted a second time" in output, output
    place = re.escape(str(tmp_path / "checkpoints"))
    line = (
        rf"fft: the newest checkpoint is step-2 at {place}, \d steps behind the last one of the job"
    )
    assert re.search(line, output), output


def test_too_frequent_checkpoints_are_logged_once_with_the_fix(tmp_path: Path) -> None:
    output = run(tmp_path, 9, 0, 1, every=1)
    logs = "".join(path.read_text() for path in (tmp_path / "traces").rglob("*g0*.log"))
    assert output.count("take them less often (--every)") == 1
    assert logs.count("take them less often (--every)") == 1
    assert "were due while the one before was being written: take" in report(tmp_path)

"""Tests that a slow rank of a real job is named by the supervisor and by `fft watch`.

Half a minute.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_run import FftRun, running
from waiting import wait_until

from fft.trace.audit import audit_dir

SCRIPT = Path(__file__).with_name("fault_script.py")
LIMIT_S = 150.0
SLOW = """
faults:
  - {name: slow, kind: slow, step: 20, group: 1, rank: 0, seconds: 0.2, steps: 40}
"""


def lines_until(output: Callable[[], str], what: str) -> list[str]:
    """Return the complete lines up to one that contains all these words."""

    def found() -> list[str]:
        whole = output().splitlines(keepends=True)
        numbers = (n for n, line in enumerate(whole, 1) if all(w in line for w in words))
        return whole[: next(numbers, 0)]

    words = what.split(" … ")
    wait_until(lambda: bool(found()) and found()[-1].endswith("\n"), what, LIMIT_S)
    return found()


def drained(job: FftRun) -> None:
    """Drain the job to its successful end."""
    job.signal(signal.SIGTERM)
    assert job.wait(LIMIT_S) == 75, job.tail()


FOR_EVER = """
faults:
  - {name: slow, kind: slow, step: 20, group: 1, rank: 0, seconds: 0.2, steps: 100000}
"""


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_slow_rank_is_started_again_if_asked_to(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(FOR_EVER)
    traces = tmp_path / "run"
    arguments = ["run", "--groups", "3", "--no-progress", "--trace-dir", str(traces)]
    arguments += ["--faults", str(plan), "--evict-stragglers", "2", str(SCRIPT), "report=0.3"]
    quick = {"FFT_MONITOR": "0"}
    with running(*arguments, folder=tmp_path, env=quick) as job:
        output = lines_until(lambda: job.stderr_text, "group 1 is started again")
        assert sum(line.startswith("straggler: rank 1/0 takes") for line in output) == 1
        wait_until(lambda: committed(traces, "g1r0i2") > 3, "it trains again", LIMIT_S)
        drained(job)
    assert {path.stem for path in traces.glob("g*.jsonl")} == {
        "g0r0i1",
        "g1r0i1",
        "g1r0i2",
        "g2r0i1",
    }
    report = audit_dir(traces)
    assert report.ok, report.render()


def committed(traces: Path, process: str) -> int:
    """Return the number of txns that a process has committed so far."""
    found = list(traces.glob(f"{process}.jsonl"))
    return sum(path.read_text().count('"consumed"') for path in found)


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_slow_rank_is_named_and_the_others_are_not(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(SLOW)
    arguments = ["run", "--groups", "3", "--no-progress", "--trace-dir", str(tmp_path / "run")]
    arguments += ["--faults", str(plan), "--min-groups", "1", str(SCRIPT), "report=0.3"]
    quick = {"FFT_MONITOR": "0"}
    with running(*arguments, folder=tmp_path, env=quick) as job:
        settings = lines_until(lambda: job.stderr_text, "FFT_TOKEN_FILE=")[-1].split()
        reach: dict[str, str | None] = dict(
            word.split("=", 1) for word in settings if word.startswith("FFT_")
        )
        with running("watch", "--json", folder=tmp_path, env=reach) as watch:
            seen = lines_until(lambda: watch.stdout_text, '"straggler" … "slow": false')
        output = lines_until(lambda: job.stderr_text, "no longer a straggler")
        drained(job)
    named = [line for line in output if line.startswith("straggler: ")]
    assert [line.split(" takes ")[0] for line in named] == ["straggler: rank 1/0"]
    assert "the median body time over its last" in named[0]
    events = [json.loads(line) for line in seen if '"straggler"' in line]
    assert [(event["rank"], event["slow"]) for event in events] == [("1/0", True), ("1/0", False)]
    assert events[0]["factor"] > 3
    report = audit_dir(tmp_path / "run")
    assert report.ok, report.render()

"""A slow rank of a real job is named: by the supervisor, and by `fft watch`. Half a minute."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import IO

import pytest
from waiting import wait_until

from fft.trace.audit import audit_dir

SCRIPT = Path(__file__).with_name("fault_script.py")
LIMIT_S = 150.0
SLOW = """
faults:
  - {name: slow, kind: slow, step: 20, group: 1, rank: 0, seconds: 0.2, steps: 40}
"""


@contextmanager
def fft(*arguments: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A command of `fft`, ended at the latest when its time is up or the block is left."""
    command = [sys.executable, "-u", "-m", "fft.cli", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env={**os.environ, **env}, stdout=pipe, stderr=pipe, text=True
    ) as process:
        limit = Timer(LIMIT_S, process.kill)
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
            process.kill()


def lines_until(lines: IO[str] | None, holds: Callable[[str], bool]) -> list[str]:
    """The lines up to the one that is waited for."""
    assert lines is not None
    seen = []
    for line in lines:
        seen.append(line)
        if holds(line):
            return seen
    raise AssertionError("it ended before:\n" + "".join(seen))


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
    arguments += ["--faults", str(plan), "--evict-stragglers", "2", str(SCRIPT)]
    quick = {"FFT_PROGRESS_INTERVAL": "0.3", "FFT_MONITOR": "0"}
    with fft(*arguments, **quick) as job:
        said = lines_until(job.stderr, lambda line: line.startswith("group 1 is started again"))
        assert sum(line.startswith("straggler: rank 1/0 takes") for line in said) == 1
        wait_until(lambda: committed(traces, "g1r0i2") > 3, "it trains again", LIMIT_S)
        job.send_signal(signal.SIGTERM)
        _, rest = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 0, rest
    assert {path.stem for path in traces.glob("g*.jsonl")} == {
        "g0r0i1",
        "g1r0i1",
        "g1r0i2",
        "g2r0i1",
    }
    report = audit_dir(traces)
    assert report.ok, report.render()


def committed(traces: Path, process: str) -> int:
    """Txns that a process has committed so far."""
    found = list(traces.glob(f"{process}.jsonl"))
    return sum(path.read_text().count('"consumed"') for path in found)


@pytest.mark.multiprocess
def test_a_slow_rank_is_named_and_the_others_are_not(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(SLOW)
    arguments = ["run", "--groups", "3", "--no-progress", "--trace-dir", str(tmp_path / "run")]
    arguments += ["--faults", str(plan), "--min-groups", "1", str(SCRIPT)]
    quick = {"FFT_PROGRESS_INTERVAL": "0.3", "FFT_MONITOR": "0"}
    with fft(*arguments, **quick) as job:
        told = lines_until(job.stderr, lambda line: "FFT_TOKEN_FILE=" in line)[-1].split()
        reach = dict(word.split("=", 1) for word in told if word.startswith("FFT_"))
        with fft("watch", "--json", **reach) as watch:
            seen = lines_until(
                watch.stdout, lambda line: '"straggler"' in line and '"slow": false' in line
            )
        said = lines_until(job.stderr, lambda line: line.startswith("no longer a straggler"))
        job.send_signal(signal.SIGTERM)
        _, rest = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 0, rest
    named = [line for line in said if line.startswith("straggler: ")]
    assert [line.split(" takes ")[0] for line in named] == ["straggler: rank 1/0"]
    assert "the median body time over its last" in named[0]
    events = [json.loads(line) for line in seen if '"straggler"' in line]
    assert [(event["rank"], event["slow"]) for event in events] == [("1/0", True), ("1/0", False)]
    assert events[0]["factor"] > 3
    report = audit_dir(tmp_path / "run")
    assert report.ok, report.render()

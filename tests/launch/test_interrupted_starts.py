"""Tests of SIGTERM to `fft run` while it or its ranks start: nothing is lost, and it is
reported."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from forked_run import running
from waiting import wait_until

LIMIT_S = 60.0
LOADING = """
import os, time
print(os.getpid(), flush=True)
time.sleep(600)  # as an import may take; nothing of FFT has taken the signal yet
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    made = tmp_path / "loading.py"
    made.write_text(LOADING)
    return made


@pytest.mark.long
@pytest.mark.multiprocess
def test_before_anything_is_started(tmp_path: Path, script: Path) -> None:
    """The signal comes while the command loads torch for its services, after it has made the folder
    of the run."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fft.cli", "run", "--no-progress", str(script)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until((tmp_path / "runs").exists, "it has begun", LIMIT_S)
        process.send_signal(signal.SIGTERM)
        _, output = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 75, output
    assert "fft: interrupted before anything was started" in output
    assert not list(tmp_path.glob("runs/*/logs/*.log"))


def test_while_the_ranks_load(tmp_path: Path, script: Path) -> None:
    traces = tmp_path / "traces"
    command = ["run", "--groups", "2", "--ranks", "2", "--no-progress", "--no-lighthouse"]
    command += ["--trace-dir", str(traces), str(script)]
    with running(*command, folder=tmp_path) as job:

        def loading() -> list[str]:
            return [pid for log in traces.glob("logs/*.log") if (pid := log.read_text().strip())]

        wait_until(lambda: len(loading()) == 4, "all ranks load", LIMIT_S)
        job.signal(signal.SIGTERM)
        assert job.wait(LIMIT_S) == 75, job.tail()
    for group in "01":
        assert f"fft: group {group} was asked to end while it started" in job.stderr_text
    assert not any(psutil.pid_exists(int(pid)) for pid in loading())

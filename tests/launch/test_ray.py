"""Tests of `fft.launch.ray` on real raylets, one of which is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_kubernetes import SCRIPT

from fft.errors import FftError
from fft.trace.audit import audit_dir

DRIVER = Path(__file__).with_name("ray_driver.py")
LIMIT_S = 560.0

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray"
)


def driven(folder: Path, steps: int, kills: int) -> tuple[dict[str, int], str]:
    """Run a job of two groups; return how it has ended, and the output of the driver."""
    (folder / "train.py").write_text(SCRIPT)
    env = {
        **os.environ,
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "5",
        "RAY_raylet_start_wait_time_s": "150",  # a busy machine
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, str(DRIVER), str(folder), str(folder / "train.py")]
    done = subprocess.run(
        [*command, str(steps), str(kills)],
        env=env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"status')]
    assert found, done.stdout
    return found[0], done.stdout


@pytest.mark.long
@pytest.mark.timeout(600)
def test_group_of_a_killed_raylet_is_placed_on_another(tmp_path: Path) -> None:
    end, output = driven(tmp_path, steps=600, kills=1)
    assert end == {"status": 0, "step": 600}, output
    assert "killed the raylet" in output and "both groups train" in output
    traces = tmp_path / "traces"
    starts = {p.name for p in traces.glob("g*.jsonl")}
    assert starts > {"g0r0i1.jsonl", "g1r0i1.jsonl"}, "another process has taken a group's place"
    logs = [line for p in traces.glob("logs/*") for line in p.read_text().splitlines()]
    bits = {line for line in logs if line.startswith("bits 600 ")}
    assert len(bits) == 1, "both groups have the same weights"
    audit = audit_dir(traces)
    assert audit.ok, audit.render()


def test_process_without_a_cluster_is_told_to_connect() -> None:
    from fft.launch.ray import run

    with pytest.raises(FftError, match=r"ray\.init"):
        run("train.py")

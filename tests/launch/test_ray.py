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
from fft.trace.resumed import audit_job

DRIVER = Path(__file__).with_name("ray_driver.py")
LIMIT_S = 560.0

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray"
)


def driven(folder: Path, steps: int, what: str) -> subprocess.CompletedProcess[str]:
    """Run the driver with a job of two groups to its end."""
    (folder / "train.py").write_text(SCRIPT)
    env = {
        **os.environ,
        "PYTHONPATH": f"{DRIVER.parents[1]}:{os.environ.get('PYTHONPATH', '')}",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "5",
        "RAY_raylet_start_wait_time_s": "150",  # a busy machine
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, str(DRIVER), str(folder), str(folder / "train.py")]
    return subprocess.run(
        [*command, str(steps), what],
        env=env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def audited(traces: Path) -> None:
    audit = audit_dir(traces)
    assert audit.ok, audit.render()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_group_of_a_killed_raylet_is_placed_on_another(tmp_path: Path) -> None:
    done = driven(tmp_path, 600, "kill")
    assert done.returncode == 0, done.stdout
    assert "killed the raylet" in done.stdout and "both groups train" in done.stdout
    assert json.dumps({"status": 0, "step": 600}) in done.stdout
    traces = tmp_path / "traces"
    starts = {path.name for path in traces.glob("g*.jsonl")}
    assert starts > {"g0r0i1.jsonl", "g1r0i1.jsonl"}, "another process has taken a group's place"
    logs = [line for p in traces.glob("logs/*") for line in p.read_text().splitlines()]
    bits = {line for line in logs if line.startswith("bits 600 ")}
    assert len(bits) == 1, "both groups have the same weights"
    audited(traces)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_interrupt_of_the_driver_drains_the_job(tmp_path: Path) -> None:
    done = driven(tmp_path, 5000, "interrupt")
    assert "KeyboardInterrupt" in done.stdout and done.returncode != 0
    assert done.stdout.count("the job has ended: drained before its end") == 2, done.stdout
    audited(tmp_path / "traces")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_job_continues_without_one_server_of_its_bus(tmp_path: Path) -> None:
    done = driven(tmp_path, 400, "server")
    assert done.returncode == 0 and "both groups train" in done.stdout, done.stdout
    assert json.dumps({"status": 0, "step": 400}) in done.stdout
    starts = {path.name for path in (tmp_path / "traces").glob("g*.jsonl")}
    assert starts == {"g0r0i1.jsonl", "g1r0i1.jsonl"}, "no process restarts"
    audited(tmp_path / "traces")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_job_with_a_lost_bus_starts_again_from_its_checkpoint(tmp_path: Path) -> None:
    done = driven(tmp_path, 200, "bus")
    assert done.returncode == 0, done.stdout
    assert "the job starts again from the checkpoint of step" in done.stdout
    assert json.dumps({"status": 0, "step": 200}) in done.stdout
    audit = audit_job(tmp_path / "traces")
    assert audit.resumed.checks and not audit.resumed.violation, audit.render()
    assert len(audit.starts) == 2 and audit.starts[1].ok, audit.render()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_job_ends_if_the_bus_is_lost_again_before_a_checkpoint(tmp_path: Path) -> None:
    done = driven(tmp_path, 5000, "buses")
    assert done.returncode == 1 and "BusUnreachable" in done.stdout, done.stdout
    assert done.stdout.count("the job starts again from the checkpoint of step") == 1


def test_process_without_a_ray_cluster_is_refused_with_the_fix() -> None:
    from fft.launch.ray import run

    with pytest.raises(FftError, match=r"ray\.init"):
        run("train.py")

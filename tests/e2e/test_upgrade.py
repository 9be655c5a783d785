"""FFT resumes the checkpoint of FFT 0.1 that `fft_0_1` holds, and audits its traces."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from fft.trace.audit import audit_dir

FOLDER = Path(__file__).with_name("fft_0_1")
AFTER_TEN_STEPS = "0x1.c52b7b4000000p+0"
"""Sum of the parameters of rank 0 after ten steps of FFT 0.1 without a pause, with torch 2.13."""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    with tarfile.open(FOLDER / "job.tar.gz") as file:
        file.extractall(tmp_path, filter="data")
    return tmp_path


def test_audit_accepts_traces_of_the_previous_version(job: Path) -> None:
    report = audit_dir(job / "traces")
    assert report.ok, report.render()
    assert report.commits == 5


@pytest.mark.multiprocess
def test_job_resumes_from_a_checkpoint_of_the_previous_version(job: Path) -> None:
    """The switch that the script set at step 1, and the bits of the parameters, are there."""
    command = [sys.executable, "-m", "fft.cli", "run", "--groups", "2", "--ranks", "2"]
    command += ["--checkpoint", "checkpoints", "--every", "5", "--resume", "--trace-dir", "new"]
    script = [str(FOLDER / "script.py"), "10"]
    done = subprocess.run([*command, *script], cwd=job, capture_output=True, text=True, timeout=120)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert "settings False sum" in text
    if torch.__version__.startswith("2.13."):
        assert f"sum {AFTER_TEN_STEPS}" in text
    report = audit_dir(job / "new")
    assert report.ok, report.render()
    assert report.commits == 5

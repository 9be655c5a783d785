"""Tests that random numbers belong to the script: no FFT thread draws from the global
generators."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_run import fft

SCRIPT = Path(__file__).with_name("draws_script.py")
LIMIT_S = 100


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("bus", ["tcp", "nats"])
def test_global_generators_draw_the_same_values_as_without_fft(bus: str, tmp_path: Path) -> None:
    command = ["run", "--groups", "2", "--ranks", "1", "--no-progress", "--no-lighthouse"]
    command += ["--bus", bus, "--trace-dir", str(tmp_path / "run"), str(SCRIPT)]
    done = fft(*command, folder=tmp_path, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr

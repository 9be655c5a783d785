"""Tests that interrupted step functions, in Python and in collectives, end once and replay cleanly.

``tests/acceptance/interrupt_soak.py`` runs the same job for longer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fft.trace.audit import audit_dir

WORKER = Path(__file__).with_name("interrupt_worker.py")
STEPS = 12
VAIN = 2
LIMIT_S = 240


def run_job(directory: Path, steps: int, vain: int) -> list[dict[str, Any]]:
    """Return the final state of each of the four ranks."""
    directory.mkdir()
    command = [sys.executable, "-m", "fft.cli", "run", "--groups", "2", "--ranks", "2"]
    command += ["--trace-dir", str(directory / "run"), "--timeout", str(LIMIT_S - 30)]
    command += [str(WORKER), str(steps), str(vain), "0.02", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(path.read_text()) for path in sorted(directory.glob("result-*.json"))]


@pytest.mark.long
@pytest.mark.multiprocess
def test_run_with_interruptions_everywhere_has_the_bits_of_a_calm_run(
    tmp_path: Path,
) -> None:
    calm, torn = run_job(tmp_path / "calm", STEPS, 0), run_job(tmp_path / "torn", STEPS, VAIN)
    assert len(torn) == 4
    assert [rank["digest"] for rank in torn] == [rank["digest"] for rank in calm]
    for rank in torn:
        assert rank["steps"] == STEPS
        # an endless step function cannot end in another way, and none of them is unwound twice
        assert sum(rank["ended"].values()) >= rank["interruptions"] > STEPS
    assert all(rank["ended"].get("Interrupted") for rank in torn)
    report = audit_dir(tmp_path / "torn" / "run")
    assert report.ok, report.render()
    assert report.commits == STEPS
    assert report.bytes_healed == 0
    print(f"\nbodies ended by {[rank['ended'] for rank in torn]}")

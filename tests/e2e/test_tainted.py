"""Tests of a job in which a committed state turns out to be wrong: it returns to one before it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked_run import fft as forked_fft

from fft.trace.audit import audit_dir
from fft.train.checkpoint.contents import read_tensors

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]


def _run(folder: Path, *given: str) -> str:
    """Run the job with a checkpoint of each step and a comparison in each fourth."""
    folder.mkdir()
    kept = ["--checkpoint", str(folder / "kept"), "--keep", "6", "--every", "1"]
    common = ["--groups", "2", "--no-lighthouse", "--no-progress", "--timeout", "120"]
    script = str(Path(__file__).with_name("tainted_script.py"))
    traces = ["--trace-dir", str(folder / "traces")]
    done = forked_fft("run", *common, *traces, *kept, script, *given, folder=folder, within=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _final(folder: Path) -> list[list[float]]:
    """Return the parameters and the optimizer's state after the last step."""
    files = (folder / "kept" / "step-10").glob("*.safetensors")
    found = {name: tensor for path in files for name, tensor in read_tensors(path).items()}
    return [found[name].flatten().tolist() for name in sorted(found) if name.startswith("state.")]


def test_job_returns_to_the_checkpoint_before_a_flipped_parameter(
    tmp_path: Path,
) -> None:
    _run(tmp_path / "quiet")
    output = _run(tmp_path / "flipped", str(tmp_path / "flipped" / "mark"))
    assert "steps 5 to 8 are tainted" in output
    # a checkpoint that is due while the one before is written is left out
    assert re.search(r"the job starts again from the checkpoint of step [1-4]\b", output), output
    assert _final(tmp_path / "flipped") == _final(tmp_path / "quiet")
    first = audit_dir(tmp_path / "flipped" / "traces")
    assert first.diverged and first.tainted == (5, 8)
    assert audit_dir(tmp_path / "flipped" / "traces" / "start2").ok

"""Jobs whose disk has no room for a checkpoint: what they leave there, and what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_run import fft

SCRIPT = Path(__file__).with_name("durable_short_script.py")
LIMIT_S = 120

pytestmark = pytest.mark.multiprocess


def run(root: Path, *script: object) -> str:
    """A job of two groups, to its end. What was said."""
    given = {"groups": 2, "trace-dir": root / "traces", "timeout": LIMIT_S - 20}
    given |= {"checkpoint": root / "checkpoints", "every": 2}
    flags = ["run", "--no-lighthouse", "--no-progress", "--resume"]
    for name, value in given.items():
        flags += [f"--{name}", str(value)]
    done = fft(*flags, str(SCRIPT), *map(str, script), folder=root, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def left(root: Path) -> list[str]:
    """Directories at the place of the checkpoints."""
    return sorted(path.name for path in (root / "checkpoints").glob("step-*"))


def test_attempts_that_have_failed_leave_nothing(tmp_path: Path) -> None:
    """Group 0, which publishes, has no room; group 1 has written all of its files."""
    said = run(tmp_path, 6)
    assert said.count("no checkpoint of step") == 3
    assert left(tmp_path) == []

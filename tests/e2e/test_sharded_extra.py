"""Tests of a sharded `extra`: fetched by a group that was killed, and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked_run import fft

SCRIPT = Path(__file__).with_name("sharded_extra_script.py")
PLAN = "faults:\n  - {name: kill, kind: kill, step: 3, group: 1, phase: backward}\n"
LIMIT_S = 120


def run(root: Path, steps: int, *options: str) -> dict[str, list[object]] | str:
    """Return the final state of each rank of a job of 2 groups x 2 ranks; or its output, if it
    failed."""
    (root / "out").mkdir(parents=True, exist_ok=True)
    flags = ["--no-lighthouse", "--no-progress", "--groups", "2", "--ranks", "2"]
    flags += ["--trace-dir", str(root / f"traces{steps}"), "--timeout", str(LIMIT_S - 20)]
    flags += ["--max-restarts", "2"]
    script = str(SCRIPT), str(steps), str(root / "out")
    done = fft("run", *flags, *options, *script, folder=root, within=LIMIT_S)
    if done.returncode:
        return done.stderr
    return {p.name: json.loads(p.read_text()) for p in sorted((root / "out").glob("final-*"))}


@pytest.mark.long
@pytest.mark.multiprocess
def test_sharded_average_is_restored_after_a_kill_and_on_resuming(
    tmp_path: Path,
) -> None:
    whole = run(tmp_path / "whole", 9)
    (tmp_path / "plan.yaml").write_text(PLAN)
    kept = ["--checkpoint", str(tmp_path / "checkpoints"), "--resume"]
    killed = run(tmp_path / "parts", 6, *kept, "--faults", str(tmp_path / "plan.yaml"))
    assert isinstance(whole, dict) and isinstance(killed, dict), (whole, killed)
    assert run(tmp_path / "parts", 9, *kept) == whole
    assert {number for _, number, _ in whole.values()} == {9}
    output = run(tmp_path / "parts", 12, *kept, "--ranks", "3")
    assert isinstance(output, str) and "extra['ema'] is sharded over the ranks of a group" in output

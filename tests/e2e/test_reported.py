"""Jobs with the causes of public bug reports end with the bits of an undisturbed run, by processes.

Rollbacks of the first and of later steps, the return of both groups, and a resume from a
checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_run import fft

SCRIPT = Path(__file__).with_name("reports_script.py")
FAULTS = """faults:
  - {name: first, kind: exception, step: 0, group: 1, rank: 0, phase: backward}
  - {name: later, kind: exception, step: 4, group: 0, rank: 0, phase: backward}
  - {name: killed, kind: kill, step: 6, group: 1, rank: 0, phase: backward}
  - {name: other, kind: kill, step: 10, group: 0, rank: 0, phase: backward}
"""
DRAIN = """faults:
  - {name: one, kind: drain, step: 7, group: 0}
  - {name: other, kind: drain, step: 7, group: 1}
"""
LIMIT_S = 120


def run(root: Path, case: str, *options: str, plan: str = "", status: int = 0) -> list[str]:
    """Run the case on two groups in `root`, and return the final digest of each group."""
    (root / "out").mkdir(parents=True, exist_ok=True)
    flags = ["--no-progress", "--groups", "2", "--timeout", str(LIMIT_S - 20)]
    flags += ["--trace-dir", str(root / "traces"), *options]
    if plan:
        (root / "plan.yaml").write_text(plan)
        flags += ["--faults", str(root / "plan.yaml")]
    done = fft("run", *flags, str(SCRIPT), case, str(root / "out"), folder=root, within=LIMIT_S)
    assert done.returncode == status, done.stderr
    return [path.read_text() for path in sorted((root / "out").iterdir())]


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "case",
    [
        "extra_state",
        "observers",
        "cache",
        "added_group",
        "added_group_in_step",
        "default_device",
        "lbfgs",
    ],
)
def test_reported_job_ends_with_the_same_bits_under_faults(tmp_path: Path, case: str) -> None:
    whole = run(tmp_path / "whole", case)
    assert whole[0] == whole[1]
    assert run(tmp_path / "faults", case, plan=FAULTS) == whole
    kept = ["--checkpoint", str(tmp_path / "checkpoints"), "--resume"]
    run(tmp_path / "parts", case, *kept, plan=DRAIN, status=75)
    assert run(tmp_path / "parts", case, *kept) == whole

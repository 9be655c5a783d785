"""A job with a constant global batch in which a group is killed and returns.

There are two slices in a step. Two groups add two numbers, and so does one group that computes
both slices, so a job in which no group is killed has the same bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_run import fft
from stage import digests

from fft.trace.audit import audit_dir
from fft.trace.run import Run

SCRIPT = Path(__file__).with_name("global_batch_script.py")
LIMIT_S = 200
PLAN = "faults: [{name: kill, kind: kill, step: 3, group: 1, phase: backward}]\n"


def _run(folder: Path, ranks: int, *given: str, steps: int | None = None) -> Path:
    common = ["--groups", "2", "--ranks", str(ranks), "--timeout", str(LIMIT_S - 20)]
    script = [str(SCRIPT), str(2 * ranks), *([] if steps is None else [str(steps)])]
    traces = folder / "traces"
    done = fft(
        "run", *common, "--trace-dir", str(traces), *given, *script, folder=folder, within=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = audit_dir(traces)
    assert report.ok, report.render()
    return traces


def _digests(traces: Path) -> dict[tuple[int, int], set[str]]:
    """Return the digests of the weights by committed steps and rank."""
    found: dict[tuple[int, int], set[str]] = {}
    for (_, rank, step), taken in digests(traces).items():
        found.setdefault((step, rank), set()).update(taken)
    return found


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_group_changes_no_bits_of_a_constant_global_batch(
    ranks: int, tmp_path: Path
) -> None:
    plan, killed, quiet = tmp_path / "plan.yaml", tmp_path / "killed", tmp_path / "quiet"
    plan.write_text(PLAN)
    killed.mkdir()
    quiet.mkdir()
    traces = _run(killed, ranks, "--faults", str(plan), "--stop-after-plan", "3")
    steps = list(Run(traces).steps())
    assert {step.slices for step in steps} == {2}
    groups = [len(step.groups) for step in steps]
    assert 1 in groups and groups[-1] == 2, "one group computed alone, and the other one returned"
    disturbed = _digests(traces)
    assert all(len(each) == 1 for each in disturbed.values())
    assert _digests(_run(quiet, ranks, steps=len(steps))) == disturbed

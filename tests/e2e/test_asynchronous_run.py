"""Tests of asynchronous groups as processes that are killed and come back; audited."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_run import fft
from stage import aborts, records

from benchmarks.slices import slices
from fft.trace.audit import audit_dir, read_lines
from fft.trace.report import RunReport

SCRIPT = Path(__file__).parents[2] / "examples" / "async_char_lm.py"
LIMIT_S = 200
BOUND = 4
FAULTS = """
faults:
  - {name: apart, kind: kill, step: 4, group: 1, phase: backward}
  - {name: together, kind: kill, step: 8, group: 0, phase: during_allreduce}
"""


@pytest.mark.multiprocess
@pytest.mark.long
def test_killed_groups_return_and_each_contribution_counts_once(
    tmp_path: Path,
) -> None:
    """The kills come in the local phase and in a synchronization; the third group is much
    slower."""
    (tmp_path / "faults.yaml").write_text(FAULTS)
    traces = tmp_path / "run"
    command = ["run", "--groups", "3", "--ranks", "1", "--no-progress", "--no-lighthouse"]
    command += ["--faults", f"{tmp_path / 'faults.yaml'}", "--trace-dir", f"{traces}"]
    done = fft(*command, str(SCRIPT), "--steps", "30", folder=tmp_path, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    report = audit_dir(traces)
    assert report.ok, report.render()
    (judged,) = (finding for finding in report.findings if finding.name == "bounded")
    assert judged.checks
    assert "all 2 requested faults" in str(RunReport(traces).fired())
    assert slices(read_lines(traces)).exact
    before, late, partial, steps = None, set(), 0, 0
    for record in records(traces):
        if record["kind"] == "commit" and before is not None:
            held = {lease[1] for lease in before["leases"]}
            inside = {entry["group"] for entry in before["members"]}
            away = {at[0]["group"] for at in before["standing"]} - inside
            late |= {
                before["step"] + 1 - at[1]
                for at in before["standing"]
                if at[0]["group"] in inside & held
            }
            partial, steps = partial + bool(away), steps + 1
        before = record
    assert steps == 30
    assert partial, "the slow one was waited for in none"
    assert late <= set(range(1, BOUND + 1))
    # No group was in a txn with the group that was killed in its local phase, so only the other
    # kill rolls one back.
    (rolled_back,) = aborts(traces)
    # the other may notice the closed connection first
    assert "0/0#1 died" in rolled_back["cause"] or "CollectiveFailed" in rolled_back["cause"]
    # A group reaches a fault at its first own step from the planned one on.
    by_fault = {
        incident.fault.partition(" (")[0]: incident for incident in RunReport(traces).incidents
    }
    assert "apart" in by_fault
    assert by_fault["together"].attempts_lost == 1
    back = {line["group"] for line in read_lines(traces) if line["inc"] > 1}
    assert {"0", "1"} <= back

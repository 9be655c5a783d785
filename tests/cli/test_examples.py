"""Tests of the examples: real processes, real training, audited afterwards.

The script of the README is started as a user starts it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked_run import fft

from fft.messages.fault_plans import load_plan
from fft.trace.audit import audit_dir, read_lines

ROOT = Path(__file__).parents[2]
EXAMPLES, README = ROOT / "examples", ROOT / "README.md"
LIMIT_S = 150

TRANSIENT = """
faults:
  - {name: raise, kind: exception, step: 2, group: 1, rank: 1, phase: backward}
  - {name: one-sided, kind: one_sided, step: 4, group: 0}
"""


def run(tmp_path: Path, *arguments: str, as_users_do: bool = False) -> Path:
    """Run a job to its successful end and return its trace directory."""
    traces = tmp_path / "run"
    command = ["run", "--trace-dir", str(traces), "--timeout", str(LIMIT_S - 20), *arguments]
    if as_users_do:
        done = subprocess.run(
            [sys.executable, "-m", "fft.cli", *command],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=os.environ,
        )
    else:
        done = fft(*command, folder=tmp_path, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return traces


def test_the_demo_has_the_four_faults_of_its_table() -> None:
    plan = load_plan(EXAMPLES / "hsdp_demo_faults.yaml", groups=2, ranks=2)
    assert [fault.kind for fault in plan.faults] == ["exception", "one_sided", "kill", "drain"]


@pytest.mark.multiprocess
def test_the_script_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(snippet, encoding="utf-8")
    size = ["--groups", "2", "--max-restarts", "0"]
    traces = run(tmp_path, *size, str(script), as_users_do=True)
    found = audit_dir(traces)
    assert found.ok, found.render()
    last = max(line.get("step", 0) for line in read_lines(traces))
    assert f"max_steps={last})" in snippet
    assert not any((traces / "logs").rglob("*-2.log")), "nobody was started twice"


@pytest.mark.long
@pytest.mark.multiprocess
def test_hsdp_trains_through_transient_faults_until_the_plan_is_through(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(TRANSIENT)
    size = ["--groups", "2", "--ranks", "2", "--max-restarts", "0"]
    until = ["--faults", str(plan), "--stop-after-plan", "3", "--min-steps", "10"]
    traces = run(tmp_path, *size, *until, str(EXAMPLES / "hsdp_char_lm.py"))
    found = audit_dir(traces)
    assert found.ok, found.render()
    logs = [log.read_text().splitlines()[-1] for log in sorted((traces / "logs").iterdir())]
    assert len(logs) == 4  # no process was restarted
    one, other, *rest = (
        int(line.rpartition("done at step ")[2]) for line in logs[::2] + logs[1::2]
    )
    assert rest == [one, other], "the ranks of a group leave with one commit"
    # a group that learns of the end after its vote leaves with the next commit
    assert min(one, other) >= 10 and abs(one - other) <= 1


@pytest.mark.multiprocess
@pytest.mark.parametrize("manager", ["fft", "torchft"])
def test_the_plain_loop_runs_with_either_manager(tmp_path: Path, manager: str) -> None:
    script = [str(EXAMPLES / "torchft_loop.py"), "--manager", manager, "--steps", "20"]
    size = ["--groups", "2", "--min-groups", "2", "--max-restarts", "0"]
    traces = run(tmp_path, *size, *script)
    for group in (0, 1):
        assert "step 20: loss" in (traces / "logs" / f"g{group}r0-1.log").read_text()
    if manager == "fft":
        found = audit_dir(traces)
        assert found.ok, found.render()

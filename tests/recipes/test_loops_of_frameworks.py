"""Test of the recipes for Accelerate and Fabric: the scripts of their pages under faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked_run import fft

from fft.launch.exit_status import ExitStatus
from fft.trace.audit import audit_dir, read_lines

PAGES = Path(__file__).parents[2] / "docs" / "guides"
PLAN = """
faults:
  - {name: exception, kind: exception, step: 3, group: 1, rank: 0, phase: backward}
  - {name: one-sided, kind: one_sided, step: 6, group: 0}
"""


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_script_of_the_page_survives_faults(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    page = (PAGES / f"{name}.md").read_text("utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script, plan, traces = tmp_path / "train.py", tmp_path / "plan.yaml", tmp_path / "run"
    script.write_text(snippet, encoding="utf-8")
    plan.write_text(PLAN)
    options = ["--groups", "2", "--faults", str(plan), "--no-progress", "--no-lighthouse"]
    command = ["run", "--trace-dir", str(traces), *options, str(script)]
    done = fft(*command, folder=tmp_path, within=200.0)
    assert done.returncode == ExitStatus.COMPLETE, done.stdout + done.stderr
    found = audit_dir(traces)
    assert found.ok, found.render()
    assert max(line.get("step") or 0 for line in read_lines(traces)) == 100
    lines = [line for log in (traces / "logs").iterdir() for line in log.read_text().splitlines()]
    logged = [int(line.split()[1][:-1]) for line in lines if line.startswith("step ")]
    assert logged == list(range(100)), "one rank writes each committed step once"

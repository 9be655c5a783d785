"""Tests of the recipes of whole scripts: those of the pages under faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
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


KILL = "  - {name: kill, kind: kill, step: 60, group: 1, phase: backward}\n"


@pytest.mark.long
@pytest.mark.multiprocess
def test_script_with_epochs_has_the_same_bits_under_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snippet = re.findall(
        r"```python\n(.*?)```", (PAGES / "epochs.md").read_text("utf-8"), re.DOTALL
    )[0]
    assert "min_replica_size=1" in snippet
    script, plan = tmp_path / "train.py", tmp_path / "plan.yaml"
    # the job waits for the killed group, whose absence would change the batches
    script.write_text(snippet.replace("min_replica_size=1", "min_replica_size=2"), "utf-8")
    plan.write_text(PLAN + KILL)
    found = []
    for name, more in (("calm", []), ("faults", ["--faults", str(plan)])):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        options = ["--groups", "2", "--no-progress", "--no-lighthouse", *more]
        traces = folder / "run"
        command = ["run", "--trace-dir", str(traces), *options, str(script)]
        done = fft(*command, folder=folder, within=200.0)
        assert done.returncode == ExitStatus.COMPLETE, done.stdout + done.stderr
        assert "did not fire" not in done.stderr and audit_dir(traces).ok
        text = "".join(log.read_text() for log in (traces / "logs").iterdir())
        epochs = re.findall(r"^epoch (\d): loss (\S+)$", text, re.MULTILINE)
        assert [number for number, _ in epochs] == ["1", "2", "3", "4"]
        best = torch.load(folder / "best.pt", weights_only=True)
        found.append((epochs, {key: value.tolist() for key, value in best.items()}))
    assert found[0] == found[1]

"""Tests that the guide on writing a spec works as described, up to an audited run."""

from __future__ import annotations

import re
from pathlib import Path

import forked_run
import pytest

from fft.messages.fault_plans import load_plan
from fft.trace.audit import audit_dir, read_lines
from fft.trace.report import RunReport

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "own-paradigm.md"
LIMIT_S = 150


def written(folder: Path) -> None:
    """Write each file that the guide shows."""
    text = GUIDE.read_text(encoding="utf-8")
    saved = re.findall(r"ave this as `([\w.]+)`.*?\n```\w+\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in saved] == ["tensor_parallel.yaml", "train.py", "faults.yaml"]
    for name, content in saved:
        (folder / name).write_text(content, encoding="utf-8")


def fft(folder: Path, *arguments: str) -> str:
    done = forked_run.fft(*arguments, folder=folder, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ends(traces: Path) -> dict[tuple[str, int], tuple[int, str]]:
    """Return the step and digest of each rank's last commit."""
    return {
        (line["group"], line["rank"]): (line["step"], line["event"]["digest"])
        for line in read_lines(traces)
        if (line.get("event") or {}).get("type") == "applied"
    }


@pytest.mark.long
@pytest.mark.multiprocess
def test_tensor_parallel_ranks_train_by_a_spec_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    output = fft(tmp_path, "dev", "spec", "tensor_parallel.yaml")
    assert "holds a shard of it; all ranks of a group take the same samples" in output
    assert "no violation" in fft(
        tmp_path, "dev", "check", "tensor_parallel.yaml", "--bounds", "overrun"
    )
    job = ["run", "--groups", "2", "--ranks", "2", "--no-progress", "--timeout", str(LIMIT_S - 20)]
    fft(tmp_path, *job, "--trace-dir", "calm", "train.py")
    fft(tmp_path, *job, "--faults", "faults.yaml", "--trace-dir", "traces", "train.py")
    faults = load_plan(tmp_path / "faults.yaml").faults
    assert (
        RunReport(tmp_path / "traces").fired() == f"all {len(faults)} requested faults have fired"
    )
    for traces in (tmp_path / "calm", tmp_path / "traces"):
        report = audit_dir(traces)
        assert report.ok, report.render()
    assert len(ends(tmp_path / "calm")) == 4
    assert ends(tmp_path / "calm") == ends(tmp_path / "traces")
    calm, broken = (
        {(line["rank"], line["data"]["slice"]) for line in read_lines(tmp_path / name)
         if line.get("note") == "consumed"}
        for name in ("calm", "traces")
    )  # fmt: skip
    assert calm == broken

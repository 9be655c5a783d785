"""A rank that fails at every attempt: named and evicted by `fft run`, and the others finish."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from stage import notes, records

from fft.audit import audit_dir

WORKER = Path(__file__).with_name("culprit_worker.py")
LIMIT_S = 240
STEPS, BAD_FROM = 12, 5


@pytest.mark.multiprocess
def test_who_fails_every_attempt_is_named_and_left_out(tmp_path: Path) -> None:
    traces = tmp_path / "run"
    command = [sys.executable, "-m", "fft.cli", "run", "--groups", "3", "--no-progress"]
    command += ["--trace-dir", str(traces), "--timeout", str(LIMIT_S - 30)]
    command += [str(WORKER), str(STEPS), str(BAD_FROM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((traces / f"diagnosis-{BAD_FROM}.json").read_text())
    (culprit,) = [c for c in report["culprits"] if c["how"] != "slow"]
    assert (culprit["group"], culprit["rank"], culprit["how"]) == ("1", 0, "rollbacks")
    assert "ValueError: this rank cannot do it" in culprit["evidence"][0]
    assert {check["found"] and True for check in (n["data"] for n in notes(traces, "check"))}
    assert all(rank["checks"]["compute"]["ok"] for rank in report["ranks"])
    assert report["actions"][0].startswith("evicted: group 1 has ended")
    assert f"diagnosis for step {BAD_FROM}" in done.stderr
    assert not (traces / "g1r0i2.jsonl").exists(), "it must not be started again"
    found = records(traces)
    assert max(r["step"] for r in found if r["kind"] == "commit") == STEPS
    last = [r for r in found if r["kind"] == "epoch"][-1]
    assert sorted(group["group"] for group in last["members"]) == ["0", "2"]
    audit = audit_dir(traces)
    assert audit.ok, audit.render()

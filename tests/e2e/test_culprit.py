"""Tests that a rank that fails at every attempt is named and evicted, and the others finish."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from forked_run import fft, running
from stage import notes, records
from typer.testing import CliRunner
from waiting import wait_until

from fft.cli import app
from fft.operate.diagnosis.rounds import traced_rollbacks
from fft.trace.audit import audit_dir

WORKER = Path(__file__).with_name("culprit_worker.py")
LIMIT_S = 240
STEPS, BAD_FROM = 12, 5


def command(traces: Path, *options: str) -> list[str]:
    run = ["run", "--groups", "3", "--no-progress", *options]
    run += ["--trace-dir", str(traces), "--timeout", str(LIMIT_S - 30)]
    return [*run, str(WORKER), str(STEPS), str(BAD_FROM)]


def the_others_finished(traces: Path) -> None:
    """Check that all steps were made without group 1, which was not restarted, and audit the
    job."""
    assert not (traces / "g1r0i2.jsonl").exists(), "it must not be started again"
    found = records(traces)
    assert max(r["step"] for r in found if r["kind"] == "commit") == STEPS
    last = next(r for r in reversed(found) if r["kind"] == "epoch")
    assert sorted(group["group"] for group in last["members"]) == ["0", "2"]
    audit = audit_dir(traces)
    assert audit.ok, audit.render()


@pytest.mark.long
@pytest.mark.multiprocess
def test_rank_that_fails_every_attempt_is_named_and_excluded(tmp_path: Path) -> None:
    traces = tmp_path / "run"
    done = fft(*command(traces), folder=tmp_path, within=LIMIT_S)
    # The job ended without the group at fault
    assert done.returncode == 3, done.stdout + done.stderr
    report = json.loads((traces / f"diagnosis-{BAD_FROM}.json").read_text())
    (culprit,) = [c for c in report["culprits"] if c["how"] != "slow"]
    assert (culprit["group"], culprit["rank"], culprit["how"]) == ("1", 0, "rollbacks")
    assert "ValueError: this rank cannot do it" in culprit["evidence"][0]
    assert all(rank["checks"]["compute"]["ok"] for rank in report["ranks"])
    assert {note["group"] for note in notes(traces, "check")} == {"0", "1", "2"}
    assert report["actions"][0].startswith("evicted: group 1 has ended")
    assert f"diagnosis for step {BAD_FROM}" in done.stderr
    the_others_finished(traces)


@pytest.mark.multiprocess
@pytest.mark.long
def test_operator_diagnoses_and_evicts_the_culprit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is stuck in rollbacks, and the supervisor is configured not to react."""
    traces = tmp_path / "run"
    with running(*command(traces, "--diagnose-after", "0"), folder=tmp_path) as run:
        wait_until(lambda: len(traced_rollbacks(traces)) >= 4, "four rollbacks", LIMIT_S)
        printed = re.search(r"FFT_BUS=(\S+) FFT_TOKEN_FILE=(\S+)\n", run.stderr_text)
        assert printed is not None
        monkeypatch.setenv("FFT_TOKEN_FILE", printed[2])
        asked = ["diagnose", "--bus", printed[1], "--trace-dir", str(traces), "--evict"]
        done = CliRunner().invoke(app, asked)
        assert done.exit_code == 1, done.output
        assert "group 1 rank 0 is at fault (rollbacks" in done.output, done.output
        assert "evicted: group 1 has ended" in done.output
        assert run.wait(LIMIT_S) == 3, run.stderr_text
    assert not list(traces.glob("diagnosis-*.json"))
    the_others_finished(traces)

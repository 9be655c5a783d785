"""Tests of the versions of the trace format; causes of format 3 have no codes."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from forged import rewrite
from traced import TracedJob
from typer.testing import CliRunner

from fft.cli import app
from fft.messages.causes import CauseCode
from fft.trace.audit import audit_dir
from fft.trace.report import RunReport


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Traces of two groups with a fault, a kill, a rejoin and a drain."""
    with tarfile.open(Path(__file__).with_name("format_3.tar.gz")) as file:
        file.extractall(tmp_path, filter="data")
    return tmp_path / "format_3"


def test_audit_replays_old_traces(old: Path) -> None:
    report = audit_dir(old)
    assert report.ok, report.render()
    assert (report.commits, report.epochs) == (8, 5)
    (replayed,) = (finding for finding in report.findings if finding.name == "replay")
    assert replayed.checks == 129


def test_audit_finds_a_changed_cause_in_an_old_trace(old: Path) -> None:
    rewrite(old / "g0r0i1.jsonl", lambda line: [{**line, "cause": "another"}])
    (replayed,) = (finding for finding in audit_dir(old).findings if finding.name == "replay")
    assert "another" in str(replayed.violation)


def test_audit_finds_a_changed_code_in_a_new_trace(tmp_path: Path) -> None:
    job = TracedJob(tmp_path)
    job.step()
    job.fail(next(iter(job.nodes.values())), "boom")
    job.step()
    job.close()
    assert audit_dir(tmp_path).ok
    died = {"code": CauseCode.DIED}
    rewrite(tmp_path / "g0r0i1.jsonl", lambda x: [{**x, **died} if x.get("cause") else x])
    (replayed,) = (finding for finding in audit_dir(tmp_path).findings if finding.name == "replay")
    assert "died" in str(replayed.violation)


def test_report_shows_the_causes_of_old_traces(old: Path) -> None:
    assert [one.noticed for one in RunReport(old).incidents] == [
        "0/0#1: ValueError: boom",
        "0/0#1: 1/0#1 died:  (seen by sim)",
        "a group asked to join",
        "leaves after a commit: group 1",
    ]
    shown = CliRunner().invoke(app, ["report", str(old)])
    assert shown.exit_code == 0 and "ValueError: boom" in shown.output

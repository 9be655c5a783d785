"""Tests that the report does not depend on whether the hosts' clocks agree."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forged import rewrite
from stage import Member, job
from traced import a_record

import fft
from fft.messages.protocol import Decision
from fft.protocol.roles import Role
from fft.trace.audit import audit_dir
from fft.trace.lines import Transition
from fft.trace.read import Clocks, read_lines
from fft.trace.report import RunReport

STEPS = 8
FEW_MS = 60.0
"""Allowance for the transfer of records on a busy machine."""


def _fail_once(member: Member, txn: fft.Transaction) -> None:
    if (member.group, txn.step) == ("1", 4) and not vars(member).get("has_failed"):
        member.has_failed = True  # type: ignore[attr-defined]
        raise RuntimeError("once")


def _jumping(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a clock that is set right when two thirds of the lines are written."""
    late = record["step"] >= 6 if "step" in record else False
    return [{**record, "wall": record["wall"] + (0 if late else 900)}]


def _behind(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**record, "wall": record["wall"] - 900}]


def test_report_does_not_depend_on_the_clock_of_a_host(tmp_path: Path) -> None:
    with job(tmp_path / "right", 2) as one:
        one.run(lambda member: member.train(STEPS, body=_fail_once))
    right = RunReport(tmp_path / "right").incidents
    assert "RuntimeError: once" in right[0].noticed
    assert right[0].rolled_back_ms is not None and right[0].next_commit_ms is not None
    for change in (_behind, _jumping):
        traces = shutil.copytree(tmp_path / "right", tmp_path / change.__name__)
        for path in traces.glob("g1*.jsonl"):
            rewrite(path, change)
        wrong = RunReport(traces).incidents
        assert [(i.fault, i.noticed) for i in right] == [(i.fault, i.noticed) for i in wrong]
        for a, b in zip(right, wrong, strict=True):
            assert b.rolled_back_ms == pytest.approx(a.rolled_back_ms, abs=FEW_MS)
            assert b.next_commit_ms == pytest.approx(a.next_commit_ms, abs=FEW_MS)
        assert audit_dir(traces).ok
        times = [line["wall"] for line in read_lines(traces)]
        assert max(times) - min(times) < 300


@pytest.mark.parametrize("difference_s", [0.0, 900.0])
def test_clock_of_a_process_that_received_most_records_late_stays_right(
    difference_s: float,
) -> None:
    """A process that was stopped gets the records of that time at once, after it goes on."""
    clocks = Clocks()
    for n in range(1, 151):
        at = n * 0.04
        received = max(at + 0.001, 5.0) if 40 < n <= 125 else at + 0.001
        for group, mono in (("0", at), ("1", received)):
            wall = 1e6 + mono + (difference_s if group == "1" else 0.0)
            clocks.take(_line(group, mono, wall, n))
    first = clocks.at(_line("0", 1.0, 1e6 + 1.0))
    assert clocks.at(_line("1", 1.0, 1e6 + 1.0 + difference_s)) == pytest.approx(first, abs=0.01)


def test_clock_stays_right_after_reading_only_an_old_record_at_join() -> None:
    clocks = Clocks()
    for n in (1, 2, 3):
        clocks.take(_line("0", n * 0.1, 1e6 + n * 0.1, n))
    clocks.take(replace(_line("1", 60.0, 1e6 + 60.0, 3), roles=("joining", "joining")))
    assert clocks.at(_line("1", 60.0, 1e6 + 60.0)) == pytest.approx(1e6 + 60.0)


def _line(group: str, mono: float, wall: float, n: int | None = None) -> Transition:
    event = None if n is None else Decision(a_record(n, "commit", n))
    who: dict[str, Any] = {"group": group, "rank": 0, "inc": 1, "mono": mono, "wall": wall}
    roles: tuple[Role, Role] = ("voting", "committing")
    return Transition(kind="transition", to="COMMIT", roles=roles, event=event, **who)

"""Tests of the audit of txns' inputs: missing, duplicate or wrong notes are found, relinked or
not."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from forged import Change, gap_after, in_turn, nth_note, rewrite, saying, without
from jobs import Job

from fft.messages.protocol import ScopeRecord
from fft.protocol.invariants import Finding
from fft.protocol.load import load_spec
from fft.protocol.state import ScopePosition
from fft.prove.simulator.faults import CALM
from fft.prove.simulator.run import run_seed
from fft.trace import audit
from fft.trace.audit import AuditReport, audit_dir, read_lines, trace_files
from fft.trace.flow import Flow, judge_flow
from fft.trace.inputs import Given, Inputs, Runs

SEED = 3
LEARNS, MADE_ANEW = 11, 0
"""Seeds in which groups join as learners, and in which entries are lost and recomputed."""
SPECS = ["hsdp", "diloco", "pipeline_ahead"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Traces of a run without faults, of several groups."""

    @cache
    def made(spec: str) -> Path:
        root = tmp_path_factory.mktemp(spec)
        run_seed(SEED, load_spec(spec), CALM, trace_dir=root)
        return root

    return made


@pytest.fixture(params=SPECS)
def traces(
    request: pytest.FixtureRequest, undisturbed: Callable[[str], Path], tmp_path: Path
) -> Path:
    """A copy of these traces."""
    return shutil.copytree(undisturbed(request.param), tmp_path / "traces")


@pytest.fixture
def hsdp(undisturbed: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(undisturbed("hsdp"), tmp_path / "traces")


@pytest.fixture
def ahead(undisturbed: Callable[[str], Path], tmp_path: Path) -> Path:
    """Traces of stages that step by themselves."""
    return shutil.copytree(undisturbed("pipeline_ahead"), tmp_path / "traces")


def violated(report: AuditReport) -> dict[str, str]:
    found = [*report.findings, *(f for stage in report.stages for f in stage.findings)]
    return {f.name: f.violation for f in found if f.violation}


def everywhere(root: Path, change: Callable[[], Change]) -> None:
    for path in sorted(root.rglob("*.jsonl")):
        rewrite(path, change())


def last_stage(root: Path) -> Path:
    return root / "scopes" / "stage1"


@pytest.mark.parametrize("window", [8, 1024])
@pytest.mark.parametrize("spec", SPECS)
def test_a_run_with_faults_lacks_none(
    spec: str, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds whether or not facts are forgotten during the run."""
    monkeypatch.setattr(audit, "_WINDOW", window)
    run_seed(0, load_spec(spec), trace_dir=tmp_path)
    report = audit_dir(tmp_path)
    assert violated(report) == {}
    checks = {f.name: f.checks for f in report.findings}
    assert checks["inputs"]
    assert ("entries" in checks and checks["entries"] > 0) == (spec == "pipeline_ahead")


def twice(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [record, record]


def gone(record: dict[str, Any]) -> list[dict[str, Any]]:
    return []


def later(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Move the note to the next txn."""
    epoch, txn = record["data"]["token"]
    return saying(token=[epoch, txn + 1])(record)


def headers(**config: Any) -> Change:
    """Replace values in the configuration of the header."""
    return lambda r: [{**r, "config": {**r["config"], **config}} if r["kind"] == "header" else r]


def torchfts() -> Change:
    """Return the trace of a process that runs only torchft's loop."""
    return in_turn(nth_note("loop", 0, saying(runs="torchft")), without("consumed"))


FORGED: dict[str, tuple[Callable[[], Change], str]] = {
    "none at all": (lambda: without("consumed"), "0 notes 'consumed'"),
    "one is missing": (lambda: nth_note("consumed", 1, gone), "0 notes 'consumed'"),
    "one is there twice": (lambda: nth_note("consumed", 1, twice), "2 notes 'consumed'"),
    "another slice": (
        lambda: nth_note("consumed", 1, saying(slice=10_000)),
        "a note 'consumed' of slice 10000",
    ),
    "that it did not count": (
        lambda: nth_note("consumed", 1, saying(slice=None)),
        "a note 'consumed' of slice None",
    ),
    "of the next txn": (lambda: nth_note("consumed", 1, later), "0 notes 'consumed'"),
    "of no txn": (
        lambda: nth_note("consumed", 1, lambda r: [{**r, "data": {"slice": r["data"]["slice"]}}]),
        "the note 'consumed' lacks a field or has a wrong one",
    ),
    "no loop": (lambda: without("loop"), "no note names the loop that ran it"),
    "a loop that begins later": (
        lambda: nth_note("loop", 0, lambda r: saying(**{"from": [1, 3]})(r)),
        "no note names the loop that ran it",
    ),
    "a loop that there is not": (
        lambda: nth_note("loop", 0, saying(runs="mine")),
        "the loop 'mine' has run it",
    ),
    "another loop": (
        lambda: nth_note("loop", 0, saying(runs="torchft")),
        "the loop 'torchft' has run it",
    ),
    "another loop, without its data": (torchfts, "torchft"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", FORGED)
def test_missing_or_unexpected_inputs_are_found(how: str, traces: Path) -> None:
    change, text = FORGED[how]
    rewrite(trace_files(traces)[0], change())
    assert text in violated(audit_dir(traces))["inputs"]


def test_slices_and_items_that_ranks_have_swapped_are_found(hsdp: Path) -> None:
    """The swap is between two groups in one txn, then between two ranks of a group."""
    ranks = [path for path in trace_files(hsdp) if "r0i" in path.name]
    consumed = [_consumed(path)[2] for path in ranks]
    assert (
        consumed[0]["token"] == consumed[1]["token"]
        and consumed[0]["slice"] != consumed[1]["slice"]
    )
    for path, other in zip(ranks, reversed(consumed), strict=True):
        rewrite(path, nth_note("consumed", 2, saying(slice=other["slice"], item=other["item"])))
    assert f"'consumed' of slice {consumed[1]['slice']}" in violated(audit_dir(hsdp))["inputs"]


def test_items_that_the_ranks_of_a_group_have_swapped_are_found(hsdp: Path) -> None:
    group = [path for path in trace_files(hsdp) if path.name.startswith("g0")]
    items = [_consumed(path)[2]["item"] for path in group]
    assert items[1] == items[0] + 1
    for path, item in zip(group, reversed(items), strict=True):
        rewrite(path, nth_note("consumed", 2, saying(item=item)))
    text = f"this rank has item {items[1]} of the data in it, and not {items[0]}"
    assert text in violated(audit_dir(hsdp))["inputs"]


def _consumed(path: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, path.read_text().splitlines())
    return [line["data"] for line in lines if line.get("note") == "consumed"]


def test_a_job_that_draws_no_data_by_fft_owes_no_notes(hsdp: Path) -> None:
    """The notes of a loop over torchft's Manager state that."""
    everywhere(hsdp, torchfts)
    assert violated(audit_dir(hsdp)) == {}


@pytest.mark.parametrize("first", ["transactions", "torchft"])
def test_each_txn_owes_the_inputs_of_its_own_loop(first: str, hsdp: Path) -> None:
    """There are two loops in a row, in either order; then one that is still running at its last
    note."""
    change = _consumed(trace_files(hsdp)[0])[3]["token"]
    runs = ["transactions", "torchft"] if first == "transactions" else ["torchft", "transactions"]

    def forged() -> Change:
        def loops(record: dict[str, Any]) -> list[dict[str, Any]]:
            second = saying(runs=runs[1], **{"from": change})(record)
            return [*saying(runs=runs[0])(record), *second]

        def drawn(record: dict[str, Any]) -> list[dict[str, Any]]:
            if record.get("note") != "consumed":
                return [record]
            is_late = record["data"]["token"] >= change
            return [record] if runs[is_late] == "transactions" else []

        return in_turn(nth_note("loop", 0, loops), drawn)

    everywhere(hsdp, forged)
    report = audit_dir(hsdp)
    assert violated(report) == {}
    assert next(f for f in report.findings if f.name == "inputs").checks
    rewrite(trace_files(hsdp)[0], nth_note("consumed", 0, gone))
    assert "0 notes 'consumed'" in violated(audit_dir(hsdp))["inputs"]


def test_ranks_that_have_run_a_txn_in_unlike_loops_are_found(hsdp: Path) -> None:
    rewrite(trace_files(hsdp)[1], torchfts())
    assert "and on another rank it was " in violated(audit_dir(hsdp))["inputs"]


@pytest.mark.parametrize("name", ["leases", "flow", "spec"])
def test_headers_of_different_jobs_are_found(name: str, hsdp: Path) -> None:
    """The owed notes follow from the headers."""

    def other(record: dict[str, Any]) -> list[dict[str, Any]]:
        if record["kind"] == "header":
            if name == "spec":
                record["spec"]["parameter_groups"]["model"]["samples"] = "per_group"
            else:
                stage = {"scope": "x", "ahead": 0, "n": 0, "groups": []}
                record["config"][name] = {"leases": True, "flow": [stage]}[name]
        return [record]

    rewrite(trace_files(hsdp)[1], other)
    text = "its header has another spec" if name == "spec" else f"its header has {name} "
    assert text in violated(audit_dir(hsdp))["replay"]


def test_a_slice_that_a_rank_claims_which_does_not_count_is_found(tmp_path: Path) -> None:
    """The rank is a learner, in the txn in which it joins."""
    run_seed(LEARNS, load_spec("hsdp"), trace_dir=tmp_path)
    assert violated(audit_dir(tmp_path)) == {}
    path, token, number = _learned(tmp_path)
    claim = {"slice": number, "item": number, "step": 0, "token": token}

    def claims(record: dict[str, Any]) -> list[dict[str, Any]]:
        event = record.get("event") or {}
        if event.get("type") != "applied" or event["token"] != token:
            return [record]
        return [{**record, "kind": "note", "note": "consumed", "data": claim}, record]

    rewrite(path, claims)
    text = f"took no slice here, and the trace has a note 'consumed' of slice {number}"
    assert text in violated(audit_dir(tmp_path))["inputs"]


def _learned(root: Path) -> tuple[Path, list[int], int]:
    """Return a trace, a txn that it has applied without counting, and a slice of that txn."""
    for path in trace_files(root):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        mine = {str(line["data"]["token"]) for line in lines if line.get("note") == "consumed"}
        for line in lines:
            event = line.get("event") or {}
            if event.get("type") == "applied" and str(event["token"]) not in mine:
                for other in trace_files(root):
                    for data in _consumed(other):
                        if data["token"] == event["token"]:
                            return path, data["token"], data["slice"]
    raise AssertionError("nobody has learned in this seed")


OWES_NOTHING: dict[str, tuple[Callable[[], Change], str, str]] = {
    "no notes": (
        lambda: in_turn(without("loop"), without("consumed"), without("entry")),
        "inputs",
        "no note names the loop that ran it, and its job has only the loop 'transactions'",
    ),
    "torchft's loop": (
        lambda: in_turn(
            nth_note("loop", 0, saying(runs="torchft")), without("consumed"), without("entry")
        ),
        "inputs",
        "the loop 'torchft' has run it, and its job has only the loop 'transactions'",
    ),
    "no entries": (lambda: without("entry"), "inputs", "0 notes 'entry'"),
    "no stage": (
        lambda: in_turn(headers(flow=[]), without("entry")),
        "flow_order",
        "its headers name None steps for stage0, whose headers name 2 for it",
    ),
}


@pytest.mark.parametrize("how", OWES_NOTHING)
def test_stage_without_input_records_is_found(how: str, ahead: Path) -> None:
    """The owed records follow from the flow of the job."""
    change, name, text = OWES_NOTHING[how]
    assert violated(audit_dir(ahead)) == {}
    everywhere(last_stage(ahead), change)
    assert text in violated(audit_dir(ahead))[name]


def test_stages_of_which_no_header_knows_a_flow_are_found(ahead: Path) -> None:
    everywhere(ahead, lambda: in_turn(headers(flow=[]), without("entry")))
    text = "the headers of scope stage0 bind it to no other one of the job"
    assert violated(audit_dir(ahead))["flow_order"] == text


def with_positions(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a line as earlier versions wrote it: votes and records name positions of scopes."""
    event = record.get("event") or {}
    for each in (event.get("record"), *event.get("votes", ())):
        if each is not None:
            each["seen"] = [["stage9", 1, 2, 3]]
    if event.get("type") == "scope_record":
        event["takers"] = len(event["groups"])
    return [record]


def test_positions_in_votes_and_records_of_earlier_versions_are_read(ahead: Path) -> None:
    lines = len(read_lines(ahead))
    everywhere(ahead, lambda: with_positions)
    text = "".join(path.read_text() for path in ahead.rglob("*.jsonl"))
    assert text.count('"seen":[["stage9",1,2,3]]') > text.count('"type":"decision"') > 0
    assert '"takers":' in text
    assert (violated(audit_dir(ahead)), len(read_lines(ahead))) == ({}, lines)


@pytest.mark.parametrize(
    ("flow", "cursor", "reached"),
    [
        (ScopePosition("stage0", 0), 3, [False, True, True]),
        (ScopePosition("stage1", 2), 3, [False, True, True]),
        (ScopePosition("stage1", 2), 0, [True, True, True]),
    ],
)
def test_scope_must_have_come_to_the_position_that_a_txn_relied_on(
    flow: ScopePosition, cursor: int, reached: list[bool]
) -> None:
    """The other scope has two groups, and has taken 2, 3 or 4 slices."""
    job = Job(2, spec=load_spec("pipeline_ahead"), flow=(flow,))
    job.settle()
    for node in job.live():
        job.post(node, ScopeRecord(flow.scope, 2, cursor, ("0", "1")))
    job.settle()
    job.step()
    job.step()
    mine, found = Flow("mine", (flow,)), []
    for move in job.record.all():
        mine.move(move)
    for taken in (2, 3, 4):
        other = Flow(flow.scope, (ScopePosition("mine", 2 - flow.ahead),))
        other.take(job.history[0])
        other.take(replace(job.history[1], cursor=taken))
        found.append(judge_flow([mine, other]).violation is None)
    assert found == reached


ODD: dict[str, tuple[Callable[[], Change], str, str]] = {
    "another slice": (
        lambda: nth_note("entry", 2, saying(slice=0)),
        "inputs",
        "a note 'entry' of slice 0",
    ),
    "there twice": (lambda: nth_note("entry", 2, twice), "inputs", "2 notes 'entry'"),
    "of the next txn": (lambda: nth_note("entry", 2, later), "inputs", "0 notes 'entry'"),
    "too old": (lambda: nth_note("entry", 2, saying(version=1)), "entries", "with version 1"),
    "too new": (lambda: nth_note("entry", 2, saying(version=3)), "entries", "with version 3"),
}


@pytest.mark.parametrize("how", ODD)
def test_entry_unlike_the_one_given_by_the_stage_before_is_found(how: str, ahead: Path) -> None:
    change, name, text = ODD[how]
    rewrite(trace_files(last_stage(ahead))[0], change())
    assert text in violated(audit_dir(ahead))[name]


def test_entry_computed_by_no_rank_of_the_group_is_found(tmp_path: Path) -> None:
    """They were lost with a process of the previous stage; others of that stage have computed the
    slice."""
    run_seed(MADE_ANEW, load_spec("pipeline_ahead"), trace_dir=tmp_path)
    assert violated(audit_dir(tmp_path)) == {}
    everywhere(tmp_path, lambda: without("entry_made_anew"))
    assert "has neither computed that slice" in violated(audit_dir(tmp_path))["entries"]


@pytest.mark.one_in(3)
def test_records_missing_after_a_gap_or_the_end_are_no_violation(traces: Path) -> None:
    """The rest may be lost anywhere, in either stage; the existing notes do not matter."""
    for path in (trace_files(traces)[0], sorted(traces.rglob("*.jsonl"))[-1]):
        lines = path.read_bytes().splitlines(keepends=True)
        starts = [n for n, line in enumerate(lines) if n and b'"event":null' not in line]
        for kept in starts[:: max(1, len(starts) // 4)]:
            path.write_bytes(b"".join(lines[:kept]))
            assert violated(audit_dir(traces)).keys() <= {"trace_whole"}, kept
            path.write_bytes(b"".join(lines[:kept]) + gap_after(lines[kept - 1]))
            report = audit_dir(traces)
            assert violated(report) == {}, kept
            assert "INCOMPLETE" in report.render()
        path.write_bytes(b"".join(lines))


def test_the_last_note_of_a_process_that_was_killed_may_be_missing(hsdp: Path) -> None:
    """It was killed between the decision and its note, before the update."""
    path = trace_files(hsdp)[0]
    last = [x for x in read_lines(hsdp) if x.get("note") == "consumed"][-1]["data"]["token"]
    rewrite(
        path, lambda r: [] if r.get("note") == "consumed" and r["data"]["token"] == last else [r]
    )
    lines = path.read_text().splitlines(keepends=True)
    events = [json.loads(line).get("event") or {} for line in lines]
    applied = [e.get("type") == "applied" and e["token"] == last for e in events].index(True)
    path.write_text("".join(lines[:applied]))
    assert "inputs" not in violated(audit_dir(hsdp))


def test_runs_contain_exactly_the_added_pairs() -> None:
    dice = random.Random(7)
    runs, put = Runs(), list[tuple[int, int]]()
    version, number = 0, 0
    for _ in range(150):
        put.append((version, number))
        runs.add(version, number)
        runs.add(version, number)  # as a repeated attempt
        stride = 2 if len(put) % 25 < 20 else dice.choice([1, 2, 3])
        version, number = version + dice.choice([1, 1, 1, 0]), number + stride
    assert list(runs) == put
    every = {(v, n) for v in range(version + 2) for n in range(number + 2)}
    assert {pair for pair in every if pair in runs} == set(put)


@pytest.mark.parametrize(("lineage", "is_told"), [("the epoch's", False), ("", True)])
def test_entry_made_while_forming_an_epoch_is_valid_for_its_state_holder(
    lineage: str, is_told: bool
) -> None:
    node = Job(2, 1).until_running().node("0")
    local = replace(node.local, healed=False)
    assert local.epoch is not None
    local.lineage = lineage and local.epoch.lineage
    inputs = Inputs(Finding("inputs"), Given(), None, "0", "g0r0i1.jsonl")
    inputs._local = local
    inputs.note("line 8", {"note": "entry_made_anew", "data": {"slice": 5, "version": local.step}})
    reported = inputs.finding.violation
    assert (reported is not None) == is_told
    if reported is not None:
        assert "made anew with version 0, by a rank without the state of the job" in reported


def test_audit_finds_a_contribution_from_another_base_than_the_epochs(tmp_path: Path) -> None:
    run_seed(SEED, load_spec("async"), CALM, trace_dir=tmp_path)
    assert audit_dir(tmp_path).ok
    path = next(p for p in sorted(tmp_path.glob("*.jsonl")) if b'"base"' in p.read_bytes())
    rewrite(path, nth_note("consumed", 1, saying(base=77)))
    report = audit_dir(tmp_path)
    (finding,) = (f for f in report.findings if f.violation)
    assert finding.name == "bounded" and "from base 77, and the epoch counts" in finding.violation

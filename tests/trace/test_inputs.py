"""What txns were computed on: notes that are missing, twice or odd are found, chain or no chain."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from forged import Change, nth_note, rewrite, saying, without

from fft.protocol.load import load_spec
from fft.prove.simulator.faults import CALM
from fft.prove.simulator.run import run_seed
from fft.trace import audit
from fft.trace.audit import AuditReport, audit_dir, read_lines, trace_files
from fft.trace.inputs import Runs


@pytest.fixture(scope="module", params=["hsdp", "diloco"])
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of a run without faults."""
    root = tmp_path_factory.mktemp(request.param)
    run_seed(3, load_spec(request.param), CALM, trace_dir=root)
    return root


@pytest.fixture
def traces(undisturbed: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return shutil.copytree(undisturbed, tmp_path / "traces")


def violated(report: AuditReport) -> dict[str, str]:
    return {f.name: f.violation for f in report.findings if f.violation}


@pytest.mark.parametrize("window", [8, 1024])
@pytest.mark.parametrize("spec", ["hsdp", "diloco"])
def test_a_run_with_faults_lacks_none(
    spec: str, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether facts are forgotten on the way or not."""
    monkeypatch.setattr(audit, "_WINDOW", window)
    run_seed(5, load_spec(spec), trace_dir=tmp_path)
    report = audit_dir(tmp_path)
    assert violated(report) == {}
    noted = next(f for f in report.findings if f.name == "inputs")
    assert noted.checks


def twice(record: dict[str, object]) -> list[dict[str, object]]:
    return [record, record]


FORGED: dict[str, tuple[Callable[[], Change], str]] = {
    "none at all": (lambda: without("consumed"), "0 notes 'consumed'"),
    "one is missing": (lambda: nth_note("consumed", 1, lambda record: []), "0 notes 'consumed'"),
    "one is there twice": (lambda: nth_note("consumed", 1, twice), "2 notes 'consumed'"),
    "another slice": (
        lambda: nth_note("consumed", 1, saying(slice=10_000)),
        "a note 'consumed' of slice 10000",
    ),
    "that it did not count": (
        lambda: nth_note("consumed", 1, saying(slice=None)),
        "a note 'consumed' of slice None",
    ),
}


@pytest.mark.parametrize("how", FORGED)
def test_what_is_missing_or_odd_is_found(how: str, traces: Path) -> None:
    change, text = FORGED[how]
    rewrite(trace_files(traces)[0], change())
    assert text in violated(audit_dir(traces))["inputs"]


def test_a_job_that_draws_no_data_by_fft_owes_no_notes(traces: Path) -> None:
    """As a loop over torchft's Manager: its header says so."""
    for path in trace_files(traces):
        rewrite(path, lambda r: [{**r, "notes": []}] if r["kind"] == "header" else [r])
        rewrite(path, without("consumed"))
    report = audit_dir(traces)
    assert violated(report) == {}
    assert "not checked" in next(x for x in report.render().splitlines() if "inputs" in x)


def test_a_header_that_owes_less_than_others_is_found(traces: Path) -> None:
    path = trace_files(traces)[1]
    rewrite(path, lambda r: [{**r, "notes": []}] if r["kind"] == "header" else [r])
    rewrite(path, without("consumed"))
    assert "its header owes the notes []" in violated(audit_dir(traces))["inputs"]


def test_the_last_note_of_a_process_that_was_killed_may_be_missing(traces: Path) -> None:
    """Killed between the decision and its note: the update was not made either."""
    path = trace_files(traces)[0]
    last = [x for x in read_lines(traces) if x.get("note") == "consumed"][-1]["data"]["token"]
    rewrite(
        path, lambda r: [] if r.get("note") == "consumed" and r["data"]["token"] == last else [r]
    )
    lines = path.read_text().splitlines(keepends=True)
    applied = [n for n, x in enumerate(lines) if '"type":"applied"' in x][-1]
    path.write_text("".join(lines[:applied]))
    assert "inputs" not in violated(audit_dir(traces))


def test_runs_have_what_was_put_in_and_nothing_else() -> None:
    dice = random.Random(7)
    runs, put = Runs(), list[tuple[int, int]]()
    version, number = 0, 0
    for _ in range(150):
        put.append((version, number))
        runs.add(version, number)
        runs.add(version, number)  # as an attempt that is repeated
        stride = 2 if len(put) % 25 < 20 else dice.choice([1, 2, 3])
        version, number = version + dice.choice([1, 1, 1, 0]), number + stride
    assert list(runs) == put
    every = {(v, n) for v in range(version + 2) for n in range(number + 2)}
    assert {pair for pair in every if pair in runs} == set(put)

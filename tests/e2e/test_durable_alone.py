"""Tests of durable checkpoints of local groups: resumed twice, with the bits of one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forged import rewrite
from forked_run import fft
from test_durable import LIMIT_S, folders

from fft.checkpoints.files import Checkpoints
from fft.checkpoints.stores import open_store
from fft.trace.audit import trace_files
from fft.trace.resumed import audit_job

SCRIPT = Path(__file__).with_name("durable_alone_script.py")
STEPS = 9

pytestmark = pytest.mark.multiprocess


def run(root: Path, spec: str, steps: int, *cuts: int, every: int = 1000) -> str:
    """Run a start of the job to its end. Return its output."""
    (root / "out").mkdir(parents=True, exist_ok=True)
    given: dict[str, object] = {
        "groups": 2,
        "ranks": 2 if spec == "hsdp_diloco" else 1,
        "trace-dir": root / "traces",
    }
    given |= {
        "timeout": LIMIT_S - 20,
        "checkpoint": root / "checkpoints",
        "every": every,
        "memory": "off",
    }
    flags = ["run", "--no-lighthouse", "--no-progress", "--resume"]
    for name, value in given.items():
        flags += [f"--{name}", str(value)]
    script = (SCRIPT, spec, steps, root / "out", *cuts)
    done = fft(*flags, *map(str, script), folder=root, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def ends(root: Path) -> dict[str, dict[str, Any]]:
    """Return the final state of each rank."""
    found = sorted((root / "out").glob("final-*.json"))
    return {path.name: json.loads(path.read_text()) for path in found}


def _without_unused(header: dict[str, Any]) -> dict[str, Any]:
    assert header["start"]["returned"], "groups held leases at that commit"
    return {**header, "start": {**header["start"], "returned": []}}


@pytest.mark.long
@pytest.mark.parametrize(
    "spec",
    [
        "local_sgd",
        pytest.param("diloco", marks=pytest.mark.long),
        pytest.param("hsdp_diloco", marks=pytest.mark.long),
    ],
)
def test_a_job_that_is_resumed_twice_has_the_bits_of_one_run(spec: str, tmp_path: Path) -> None:
    """The starts follow a normal end, and a power cut between two synchronizations."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, spec, STEPS)
    expected = ends(whole)
    assert len({rank["own"] for rank in expected.values()}) == len(expected)
    run(parts, spec, 3, every=2)
    output = run(parts, spec, STEPS, 7, every=2)
    assert "the job starts again from the checkpoint of step 6" in output
    assert ends(parts) == expected
    assert len(folders(parts)) == 3
    report = audit_job(parts / "traces")
    assert report.ok and report.resumed.checks, report.render()
    for path in trace_files(parts / "traces" / "start3"):  # as if it took a slice again
        rewrite(path, lambda r: [r if r["kind"] != "header" else _without_unused(r)])
    assert "where no earlier start has committed" in audit_job(parts / "traces").render()
    newest, problems = Checkpoints(open_store(str(parts / "checkpoints"))).newest()
    assert newest is not None and newest.step == STEPS and not problems
    place = str(parts / "checkpoints")
    done = fft(
        "checkpoint", "export", place, str(STEPS), str(parts / "dcp"), folder=parts, within=60
    )
    assert done.returncode == 2
    assert "the groups that wrote it take local steps" in done.stderr

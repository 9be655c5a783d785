"""Tests of durable checkpoints of asynchronous groups: all are SIGKILLed, and the job resumes.

The criteria are the audit of all starts, the slices of the data on the resulting lineage, counted
from the register's records, and the state with which each process begins.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forged import rewrite
from forked_run import fft
from stage import notes, records
from test_durable import LIMIT_S, began_at, folders, run_with_kills

from fft.checkpoints.files import Checkpoints, Manifest
from fft.checkpoints.stores import open_store
from fft.trace.audit import trace_files
from fft.trace.resumed import audit_job

SCRIPT = Path(__file__).with_name("durable_async_script.py")
STEPS, CUT_AT = 8, 4

pytestmark = pytest.mark.multiprocess


def arguments(root: Path, steps: int, *plant: str, every: int | str = 2) -> list[str]:
    """Return the arguments of `fft run`; they are the same for each start of a job."""
    (root / "out").mkdir(exist_ok=True)
    given = {"groups": 3, "ranks": 1, "trace-dir": root / "traces", "timeout": LIMIT_S - 20}
    given |= {"checkpoint": root / "checkpoints", "every": every, "keep": 0, "memory": "off"}
    flags = ["run", "--no-lighthouse", "--no-progress", "--resume"]
    for name, value in given.items():
        flags += [f"--{name}", str(value)]
    return [*flags, str(SCRIPT), str(steps), str(root / "out"), *plant]


def manifests(root: Path) -> dict[int, Manifest]:
    """Return the manifests by step."""
    found = Checkpoints(open_store(str(root / "checkpoints"))).found()
    return {e.manifest.step: e.manifest for e in found if e.manifest is not None}


def assert_exactly_once(root: Path) -> None:
    """Check by the records that on the resulting lineage each slice was in one committed
    synchronization, or is not consumed yet."""
    starts, consumed = folders(root), list[int]()
    begins = [*map(began_at, starts[1:]), 10**9]
    last: dict[str, Any] = {}
    for number, folder in enumerate(starts):
        until, before = min(begins[number:]), dict[str, Any]()
        for record in records(folder):
            if record["kind"] == "commit" and record["step"] <= until:
                inside = {entry["group"] for entry in before["members"]}
                consumed += [lease[0] for lease in before["leases"] if lease[1] in inside]
                last = record
            before = record
    held = [lease[0] for lease in last["leases"]] + last["returned"]
    assert sorted(consumed + held) == list(range(last["cursor"]))


def assert_bases(root: Path) -> None:
    """Check that a process that begins with a checkpoint has its shared state as its base."""
    bases = [json.loads(path.read_text()) for path in (root / "out").glob("base-*.json")]
    assert all(base["is_own"] for base in bases)
    for folder in folders(root)[1:]:
        began = began_at(folder)
        assert len({base["digest"] for base in bases if base["step"] == began}) <= 1


@pytest.mark.long
def test_group_behind_at_a_total_loss_resumes_from_the_checkpoint(tmp_path: Path) -> None:
    """No group waits for it during its local phase; the next start consumes its leased slices,
    once."""
    done = fft(*arguments(tmp_path, STEPS), folder=tmp_path, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"the job starts again from the checkpoint of step {CUT_AT}" in done.stderr
    found = manifests(tmp_path)
    assert found[2].groups == ("0", "1", "2") and found[2].writer == "0"
    assert found[CUT_AT].groups == ("1", "2") and found[CUT_AT].writer == "1", "who was there"
    first, second = folders(tmp_path)
    (held,) = (
        lease[0]
        for record in records(first)
        if (record["kind"], record["step"]) == ("commit", CUT_AT)
        for lease in record["leases"]
        if lease[1] == "0"
    )
    assert held in found[CUT_AT].returned
    taken = [n["data"]["slice"] for n in notes(second, "consumed")]
    assert taken.count(held) == 1
    for note in notes(first, "checkpoint"):
        assert note["wall"] - _begun(first, note) < 10, "nobody was waited for"
    assert sorted(found) == [2, CUT_AT, 6, STEPS], "who stands apart is not taken for lost"
    assert_bases(tmp_path)
    assert_exactly_once(tmp_path)
    report = audit_job(tmp_path / "traces")
    assert report.ok and report.resumed.checks, report.render()
    for path in trace_files(second):  # as if another state had been written
        rewrite(path, lambda line: [_other_state(line)])
    assert "begins with digest" in audit_job(tmp_path / "traces").render()


def _other_state(line: dict[str, Any]) -> dict[str, Any]:
    event = line.get("event") or {}
    is_state = event.get("type") == "healed" and line["step"] == CUT_AT
    return {**line, "event": {**event, "digest": "another"}} if is_state else line


def _begun(folder: Path, done: dict[str, Any]) -> float:
    """Return when the same rank began with that checkpoint."""
    (found,) = (
        note["wall"]
        for note in notes(folder, "checkpoint_begun")
        if (note["group"], note["data"]["step"]) == (done["group"], done["data"]["step"])
    )
    return found


@pytest.mark.long
def test_next_group_writes_if_the_writer_dies_in_its_local_phase(tmp_path: Path) -> None:
    """The next group does so with the first synchronization without it, as the next due step is far
    away."""
    plan = tmp_path / "plan.yaml"
    plan.write_text("faults:\n  - {name: kill, kind: kill, step: 7, group: 0, phase: backward}\n")
    flags = arguments(tmp_path, 14, "slow", "2", every=6)
    flags[1:1] = ["--faults", str(plan)]
    done = fft(*flags, folder=tmp_path, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = manifests(tmp_path)
    extra = min(set(found) - {6, 12, 14})
    assert found[6].writer == "0" and 7 < extra < 12
    assert_exactly_once(tmp_path)
    assert audit_job(tmp_path / "traces").ok


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "expected"),
    [("dropped", "where no earlier start has committed"), ("late", "begins with digest")],
)
def test_a_checkpoint_that_is_none_of_the_commit_does_not_pass(
    plant: str, expected: str, tmp_path: Path
) -> None:
    done = fft(*arguments(tmp_path, STEPS, plant), folder=tmp_path, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(folders(tmp_path)) == 2
    report = audit_job(tmp_path / "traces")
    assert not report.ok and expected in report.render(), report.render()


@pytest.mark.long
@pytest.mark.parametrize("every", [2, "0.3s"])
def test_all_ranks_are_killed_at_random_moments(every: int | str, tmp_path: Path) -> None:
    run_with_kills(tmp_path, arguments(tmp_path, 60, "slow", "0", every=every), 6, ranks=3)
    assert any(len(manifest.groups) < 3 for manifest in manifests(tmp_path).values())
    assert_bases(tmp_path)
    assert_exactly_once(tmp_path)
    report = audit_job(tmp_path / "traces")
    assert report.ok and report.resumed.checks, report.render()

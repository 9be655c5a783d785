"""Tests of checkpoints for another number of ranks, and to and from
torch.distributed.checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forged import rewrite
from forked_run import fft
from test_durable import LIMIT_S, SCRIPT
from torch import nn

from fft.checkpoints.files import Checkpoints, sealed
from fft.checkpoints.stores import MANIFEST, open_store
from fft.trace.audit import trace_files
from fft.trace.resumed import audit_job
from fft.train.checkpoint.loading import tree_of, unsharded

pytestmark = pytest.mark.multiprocess
RANKS, STEPS = 3, 8
"""With 3 ranks, 16 rows are in three shards of 6, 6 and 4."""


def run(root: Path, ranks: int, steps: int, place: Path, name: str) -> tuple[int, str]:
    """Run a job of one group; return its exit code, and the output of it and its ranks."""
    (root / name).mkdir(exist_ok=True)
    flags = ["run", "--no-lighthouse", "--no-progress", "--ranks", str(ranks), "--resume"]
    flags += ["--checkpoint", str(place), "--every", "4", "--trace-dir", str(root / "traces")]
    flags += ["--max-restarts", "0"]
    done = fft(*flags, str(SCRIPT), str(steps), str(root / name), folder=root, within=LIMIT_S)
    logs = "".join(p.read_text() for p in sorted((root / "traces").rglob("*.log")))
    return done.returncode, done.stderr + logs


def began_with(root: Path, name: str) -> list[dict[str, Any]]:
    """Return the step and the whole model with which each rank began."""
    return [torch.load(path) for path in sorted((root / name).glob("first-*.pt"))]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints and traces of a job of three ranks that has ended."""
    root = tmp_path_factory.mktemp("written")
    code, output = run(root, RANKS, STEPS, root / "checkpoints", "out")
    assert code == 0, output
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """A copy of these."""
    shutil.copytree(written, tmp_path / "job")
    return tmp_path / "job"


def whole(place: Path, step: int = STEPS) -> dict[str, Any]:
    """Return the state of a checkpoint, assembled from the files of all ranks."""
    found = Checkpoints(open_store(str(place)))
    manifest = found.verify(step)
    ranks = range(manifest.ranks)
    return unsharded([tree_of(found, manifest, manifest.writer, r) for r in ranks])["state"]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_another_number_of_ranks_has_the_same_state_and_the_same_data(
    ranks: int, root: Path
) -> None:
    before = whole(root / "checkpoints")
    code, output = run(root, ranks, STEPS + 3, root / "checkpoints", "again")
    assert code == 0, output
    assert "the same bits as without this are not promised" in output
    found = began_with(root, "again")
    assert len(found) == ranks
    expected = {name.removeprefix("model0."): t for name, t in before["parameters"].items()}
    for each in found:
        assert each["step"] == STEPS and same(each["model"], expected)
    report = audit_job(root / "traces")
    assert report.ok and report.resumed.checks, report.render()
    where = json.loads((root / "traces/start2/g0r0i1.jsonl").open().readline())["start"]["cursor"]
    for path in trace_files(root / "traces" / "start2"):
        rewrite(path, lambda r: [r if r["kind"] != "header" else _elsewhere(r, where + 1)])
    reported = audit_job(root / "traces").render()
    assert f"groups begin at step {STEPS}, cursor {where + 1} and" in reported
    assert f", with {ranks} items in a slice, where no earlier start" in reported
    manifest = Checkpoints(open_store(str(root / "checkpoints"))).verify(STEPS + 3)
    assert manifest.cursor * ranks == STEPS * RANKS + 3 * ranks
    after = whole(root / "checkpoints", STEPS + 3)["optimizers"][0]["state"]
    assert {float(entries["step"]) for entries in after.values()} == {STEPS + 3.0}


def _elsewhere(header: dict[str, Any], cursor: int) -> dict[str, Any]:
    """Return a header with another place in the data."""
    return {**header, "start": {**header["start"], "cursor": cursor}}


@pytest.mark.long
def test_ranks_that_would_begin_within_a_slice_of_the_data_are_refused(root: Path) -> None:
    code, output = run(root, 5, STEPS + 3, root / "checkpoints", "again")
    assert code == 1
    assert "stands at item 24 of the data, which groups that take 5 at a time cannot" in output


@pytest.mark.long
def test_other_rank_count_is_refused_while_slices_are_returned(root: Path) -> None:
    """Its slices belong to groups of that many ranks: others would take other samples for them."""
    store = open_store(str(root / "checkpoints"))
    found = Checkpoints(store)
    manifest = found.manifest(STEPS)
    returned = {"returned": (manifest.cursor - 1,)}
    scopes = {name: scope.model_copy(update=returned) for name, scope in manifest.scopes.items()}
    changed = manifest.model_copy(update={**returned, "scopes": scopes})
    store.write(f"{found.directory(manifest)}/{MANIFEST}", sealed(changed))
    code, output = run(root, 2, STEPS + 3, root / "checkpoints", "again")
    assert code == 1
    assert f"is still to be given out again, in slices of {RANKS} batches for each group" in output


@pytest.mark.long
def test_exported_checkpoint_loads_in_torch_and_imports_again(root: Path) -> None:
    place, target, again = root / "checkpoints", root / "dcp", root / "imported"
    done = fft(
        *("checkpoint", "export", str(place), str(STEPS), str(target)), folder=root, within=60
    )
    assert done.returncode == 0, done.stderr
    layers = (nn.Sequential(nn.Linear(16, 16), nn.Dropout()) for _ in range(2))
    model = nn.Sequential(*layers)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=target, no_dist=True)
    before = whole(place)
    expected = {name.removeprefix("model0."): t for name, t in before["parameters"].items()}
    assert same(state["model"], expected)
    done = fft("checkpoint", "import", str(again), str(target), folder=root, within=60)
    assert done.returncode == 0, done.stderr
    after = whole(again)
    assert same(after["parameters"], before["parameters"])
    for name, entries in before["optimizers"][0]["state"].items():
        assert same(after["optimizers"][0]["state"][name], entries)
    one, other = (Checkpoints(open_store(str(p))).verify(STEPS) for p in (place, again))
    assert (one.lineage, one.cursor, one.ranks) == (other.lineage, other.cursor, other.ranks)
    code, output = run(root, RANKS, STEPS + 2, again, "again")
    assert code == 0, output
    assert all(same(each["model"], expected) for each in began_with(root, "again"))


@pytest.mark.long
def test_a_model_of_torchs_is_where_a_job_begins(tmp_path: Path) -> None:
    torch.manual_seed(77)
    layers = (nn.Sequential(nn.Linear(16, 16), nn.Dropout()) for _ in range(2))
    model = nn.Sequential(*layers)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    place = tmp_path / "checkpoints"
    command = ["checkpoint", "import", str(place), str(tmp_path / "dcp")]
    done = fft(*command, folder=tmp_path, within=60)
    assert done.returncode == 2 and "say by --step where it stands" in done.stderr
    done = fft(*command, "--step", "5", "--cursor", "20", folder=tmp_path, within=60)
    assert done.returncode == 0, done.stderr
    code, output = run(tmp_path, 2, 7, place, "out")
    assert code == 0, output
    assert "only a model was imported" in output
    for each in began_with(tmp_path, "out"):
        assert each["step"] == 5 and same(each["model"], dict(model.named_parameters()))

"""Tests of checkpoints to and from torch.distributed.checkpoint: tied weights, tensor
subclasses."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_composite_state import Momentum, Quantized
from torch import nn
from torchft import ProcessGroupGloo

import fft
from fft.checkpoints.files import Checkpoints, DamagedCheckpoint, sealed
from fft.checkpoints.stores import open_store
from fft.errors import StateMismatch
from fft.train.checkpoint.dcp import export_dcp, import_dcp
from fft.train.checkpoint.loading import tree_of

WIDTH = 4


@pytest.fixture(autouse=True)
def nobody_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FFT_BUS", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


class Tied(nn.Module):
    """A language model whose output layer is its embedding, and a buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1))
        self.head.register_buffer("scale", self.scale)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(words)) * self.scale


def trained(
    folder: Path,
    steps: int,
    seed: int = 0,
    kind: Any = torch.optim.AdamW,
    resume: bool | int = True,
    model: Tied | None = None,
) -> Any:
    """Train a single group to step ``steps``, which is a checkpoint; return the model and the
    digest."""
    torch.manual_seed(seed)
    model = model or Tied()
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        checkpoint=fft.Checkpointing(str(folder), every="1000", resume=resume),
    )
    manager.register(model, kind(model.parameters()))
    manager.sync_gradients(model)
    words = torch.arange(40).reshape(8, 5) % 5
    try:
        for txn in manager.transactions(list(words), max_steps=steps):
            with txn:
                model(txn.batch).square().mean().backward()
        return model, manager.digest()
    finally:
        manager.shutdown()


def checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(open_store(str(folder)))


def test_export_of_a_tied_model_loads_by_dcp_and_is_imported_again(tmp_path: Path) -> None:
    model, digest = trained(tmp_path / "first", 3)
    export_dcp(checkpoints(tmp_path / "first"), 3, tmp_path / "dcp")
    other = Tied()
    state = {"model": other.state_dict()}
    assert "head.weight" in state["model"] and "head.scale" in state["model"]
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(other.embedding.weight, model.embedding.weight)
    assert torch.equal(other.head.weight, model.embedding.weight)
    import_dcp(checkpoints(tmp_path / "again"), tmp_path / "dcp", None, 0)
    resumed, its_digest = trained(tmp_path / "again", 3, seed=1)
    assert its_digest == digest
    assert resumed.head.weight is resumed.embedding.weight


def saved(path: Path, **changes: torch.Tensor) -> Tied:
    torch.manual_seed(7)
    model = Tied()
    state = {**model.state_dict(), **{k.replace("__", "."): v for k, v in changes.items()}}
    dcp.save({"model": state}, checkpoint_id=path, no_dist=True)
    return model


def test_a_tied_model_that_dcp_has_saved_is_imported(tmp_path: Path) -> None:
    model = saved(tmp_path / "dcp")
    import_dcp(checkpoints(tmp_path / "job"), tmp_path / "dcp", 3, 3)
    resumed, _ = trained(tmp_path / "job", 3)
    assert torch.equal(resumed.head.weight, model.head.weight)
    assert resumed.head.weight is resumed.embedding.weight


def test_tied_weights_that_differ_in_the_import_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "dcp", head__weight=torch.ones(5, WIDTH))
    import_dcp(checkpoints(tmp_path / "job"), tmp_path / "dcp", 3, 3)
    with pytest.raises(StateMismatch, match=r"head.weight and .*embedding.weight are tied"):
        trained(tmp_path / "job", 3)


def test_a_subclass_in_optimizer_state_survives_export_and_import(tmp_path: Path) -> None:
    _, digest = trained(tmp_path / "first", 3, kind=Momentum)
    export_dcp(checkpoints(tmp_path / "first"), 3, tmp_path / "dcp")
    import_dcp(checkpoints(tmp_path / "again"), tmp_path / "dcp", None, 0)
    _, its_digest = trained(tmp_path / "again", 3, seed=1, kind=Momentum)
    assert its_digest == digest
    assert Momentum([torch.ones(1)]).of == Quantized.of


@pytest.mark.parametrize("kind", ["json", "safetensors"])
@pytest.mark.parametrize("is_resharded", [False, True])
def test_no_way_of_loading_accepts_a_file_with_another_digest(
    kind: str, is_resharded: bool, tmp_path: Path
) -> None:
    """A file changes after the checkpoint was chosen. With another number of ranks than in the
    checkpoint the state is resharded, which reads it by another way."""
    trained(tmp_path / "job", 3)
    found = checkpoints(tmp_path / "job")
    manifest, (path,) = found.verify(3), (tmp_path / "job" / "step-3").glob(f"g*.{kind}")
    data = bytearray(path.read_bytes())
    at = data.index(b"AdamW") if kind == "json" else len(data) - 1
    data[at] ^= 1  # the file is still readable, and has its size
    path.write_bytes(data)
    assert found.manifest(3) == manifest
    refused = f"{path.name}: its SHA-256 is not"
    with pytest.raises(DamagedCheckpoint, match=refused):
        tree_of(found, manifest, manifest.writer, 0)
    with pytest.raises(DamagedCheckpoint, match=refused):
        export_dcp(found, 3, tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()
    if is_resharded:
        sealed_anew = manifest.model_copy(update={"mesh": "another"})
        (path.parent / "manifest.json").write_bytes(sealed(sealed_anew))
    torch.manual_seed(7)
    model = Tied()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(DamagedCheckpoint, match=refused):
        trained(tmp_path / "job", 4, resume=3, model=model)
    assert all(map(torch.equal, before, model.parameters()))

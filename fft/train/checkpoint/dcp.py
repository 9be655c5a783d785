"""Conversion to and from ``torch.distributed.checkpoint``, in one process.

An export contains full tensors under the names that torch's own functions use. Parameters and
buffers have the names ``model.<name>`` (``model0``, ``model1``, … for several models). Tied tensors
are stored under each of their names, and optimizer state under ``optimizer.state.<name>.<key>``.
Everything else, including the sharding of the tensors, is JSON in the tensor ``fft``, which an
import uses to restore the checkpoint. From other checkpoints an import reads only ``model``.

torch's format contains a pickle (``.metadata``): import only files that you trust.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fft.checkpoints.files import Checkpoints, File, Manifest, Scope, name_of, partial_name
from fft.errors import CheckpointError
from fft.messages.protocol import lineage_of
from fft.train.checkpoint.contents import from_json, packed, to_json, unpacked, write_rank
from fft.train.checkpoint.loading import local_shard, tree_of, unsharded
from fft.train.state.tensor_subclasses import CLASS, is_marked
from fft.util.version import __version__

WRITER = "import"
"""Placeholder for the writing group in the manifest of an imported checkpoint."""
_REST = ("lr_schedulers", "extra", "flags")
"""Parts of the state without parameters and optimizers. Older checkpoints have no flags."""
_KEPT = (
    "step",
    "lineage",
    "batches",
    "cursor",
    "returned",
    "spec",
    "spec_digest",
    "ranks",
    "mesh",
    "items",
)


def export_dcp(checkpoints: Checkpoints, step: int, target: Path) -> int:
    """Write the checkpoint of ``step`` to the new directory ``target``.

    Returns:
        Total size of the tensors in bytes.

    Raises:
        CheckpointError: The target is not empty, or torch's format cannot hold the checkpoint.
        DamagedCheckpoint: The checkpoint does not exist or is damaged.
        OSError: A file cannot be read or written.
    """
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty: name a new directory")
    manifest = checkpoints.verify(step)
    if len(manifest.scopes) > 1:
        raise CheckpointError(
            f"{name_of(step)} has the stages {', '.join(manifest.scopes)}, each at its own "
            "step, and torch's format has one state: resume from it with as many ranks"
        )
    ranks = range(manifest.ranks)
    trees = [tree_of(checkpoints, manifest, manifest.writer, rank) for rank in ranks]
    whole, own = unsharded(trees), trees[0]["own"]
    models: dict[str, Any] = {**whole["state"]["parameters"], **own.get("buffers", {})}
    _check_exportable(models)
    aliases = {alias: name for alias, name in trees[0].get("aliases", {}).items() if name in models}
    models |= {alias: models[name] for alias, name in aliases.items()}
    rest: dict[str, Any] = {
        "manifest": {name: manifest.model_dump(mode="json")[name] for name in _KEPT},
        "parameters": sorted(whole["state"]["parameters"]),
        "aliases": aliases,
        "marked": [
            {name: kept for name, entries in each["state"].items() if (kept := _marked(entries))}
            for each in whole["state"]["optimizers"]
        ],
        "layouts": [tree["layouts"] for tree in trees],
        "optimizers": [
            {name: value for name, value in each.items() if name != "state"}
            for each in whole["state"]["optimizers"]
        ],
        **{name: whole["state"][name] for name in _REST if name in whole["state"]},
        "data": whole["data"],
    }
    data, tensors = packed(rest)
    text = torch.frombuffer(bytearray(to_json(data)), dtype=torch.uint8)
    found = {"fft": text, **{f"fft.{name}": tensor for name, tensor in tensors.items()}}
    found |= {_public(name, models): tensor for name, tensor in models.items()}
    for i, optimizer in enumerate(whole["state"]["optimizers"]):
        several = len(whole["state"]["optimizers"]) > 1
        for name, entries in optimizer["state"].items():
            for key, value in entries.items():
                if is_marked(value):
                    continue
                public = f"optimizer{i if several else ''}.state.{_bare(name, models)}.{key}"
                found[public] = torch.as_tensor(value)
    save(found, storage_writer=FileSystemWriter(target), no_dist=True)
    return sum(tensor.nbytes for tensor in found.values())


def _check_exportable(models: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a tensor that torch's format cannot hold."""
    if dtensors := [name for name in models if not name.startswith("model")]:
        raise CheckpointError(
            f"{dtensors[0]} belongs to no registered model: register the model that contains it"
        )
    if marked := [name for name, value in models.items() if is_marked(value)]:
        raise CheckpointError(
            f"{marked[0]}: expected a plain tensor, got {models[marked[0]][CLASS]}, a subclass "
            "that torch.distributed.checkpoint flattens; save model.state_dict() in your script"
        )


def import_dcp(checkpoints: Checkpoints, source: Path, step: int | None, cursor: int) -> Manifest:
    """Convert ``source`` to a checkpoint of FFT.

    Args:
        checkpoints: The store of the new checkpoint.
        source: A directory in torch's format.
        step: Number of completed steps, for a source that `export_dcp` has not written.
        cursor: Data position of such a source, in slices of a group of one rank.

    Raises:
        CheckpointError: The source cannot be read or imported, or the step already exists.
        OSError: The checkpoint cannot be written.
    """
    tensors = _load(source)
    text = tensors.pop("fft", None)
    if text is not None:
        rest = from_json(bytes(text.tolist()), "fft")
        parts = {n.removeprefix("fft."): t for n, t in tensors.items() if n.startswith("fft.")}
        return _write_again(checkpoints, unpacked(rest, parts), tensors)
    if step is None:
        raise CheckpointError(f"{source} was not written by FFT: say by --step where it stands")
    model = {
        f"model0.{name.removeprefix('model.')}": tensor
        for name, tensor in tensors.items()
        if name.startswith("model.")
    }
    if not model:
        raise CheckpointError(f"{source} has no tensors under `model`, as dcp.save({{'model': …}})")
    tree: dict[str, Any] = {"own": {}, "user": {}, "data": None, "layouts": {}}
    tree["state"] = {"parameters": model, "optimizers": None}
    names = "|".join(sorted(model))
    lineage = lineage_of(f"import|{step}|{names}")
    says = {"step": step, "lineage": lineage, "batches": cursor, "cursor": cursor, "returned": []}
    return _write(checkpoints, [tree], {**says, "spec": "", "spec_digest": "", "ranks": 1})


def _load(source: Path) -> dict[str, torch.Tensor]:
    """Load all tensors of a checkpoint in torch's format. Raises CheckpointError."""
    reader = FileSystemReader(source)
    try:
        listed = reader.read_metadata().state_dict_metadata
    except OSError as error:
        raise CheckpointError(f"{source} is no checkpoint of torch's: {error}") from error
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in listed.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(found, storage_reader=reader, no_dist=True)
    return found


def _write_again(
    checkpoints: Checkpoints, rest: dict[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Manifest:
    """Restore a checkpoint that `export_dcp` exported, split by rank."""
    says, several = rest["manifest"], len(rest["optimizers"]) > 1
    public = {n: t for n, t in tensors.items() if n.startswith("model")}
    models = {(f"model0.{n[6:]}" if n.startswith("model.") else n): t for n, t in public.items()}
    models = {n: t for n, t in models.items() if n not in rest.get("aliases", {})}
    trees = []
    for rank in range(says["ranks"]):
        layouts = rest["layouts"][rank]
        optimizers = [
            {**settings, "state": dict[str, dict[str, torch.Tensor]]()}
            for settings in rest["optimizers"]
        ]
        for i, optimizer in enumerate(optimizers):
            prefix = f"optimizer{i if several else ''}.state."
            for full, value in tensors.items():
                if full.startswith(prefix):
                    bare, _, key = full.removeprefix(prefix).rpartition(".")
                    name = bare if bare in models else f"model0.{bare}"
                    entries = optimizer["state"].setdefault(name, {})
                    entries[key] = local_shard(value, layouts.get(name), models[name].shape)
            for name, entries in rest.get("marked", [{}] * len(optimizers))[i].items():
                optimizer["state"].setdefault(name, {}).update(entries)
        state = {
            "parameters": {
                name: local_shard(models[name], layouts.get(name), models[name].shape)
                for name in rest["parameters"]
            },
            "optimizers": optimizers,
            **{name: rest[name] for name in _REST if name in rest},
        }
        buffers = {
            name: tensor for name, tensor in models.items() if name not in rest["parameters"]
        }
        tree = {"own": {"buffers": buffers}, "user": {}, "data": rest["data"], "layouts": layouts}
        tree["aliases"] = rest.get("aliases", {})
        trees.append({**tree, "state": state})
    return _write(checkpoints, trees, says)


def _write(
    checkpoints: Checkpoints, trees: Sequence[dict[str, Any]], says: dict[str, Any]
) -> Manifest:
    store, step = checkpoints.store, says["step"]
    if any(entry.step == step for entry in checkpoints.found()):
        raise CheckpointError(f"{store.url} has {name_of(step)} already: name another place")
    directory, files = partial_name(step, WRITER), list[File]()
    for rank, tree in enumerate(trees):
        data, tensors = packed(tree)
        apart = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        files += write_rank(store, directory, (WRITER, rank), data, apart)
    at = {name: says[name] for name in Scope.model_fields} | {"returned": tuple(says["returned"])}
    manifest = Manifest(
        **{**says, **at},
        scopes={"job": Scope(**at)},
        writer=WRITER,
        groups=(),
        fft_version=__version__,
        torch_version=torch.__version__,
        attempt=WRITER,
        written_at=time.time(),
        files=tuple(files),
    )
    checkpoints.publish(directory, manifest)
    return manifest


def _marked(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer state entries that torch's format lacks: tensor subclasses."""
    return {key: value for key, value in entries.items() if is_marked(value)}


def _bare(name: str, models: Mapping[str, Any]) -> str:
    """Return the parameter's name without the model prefix if there is only one model."""
    is_only = all(each.startswith("model0.") for each in models)
    return name.removeprefix("model0.") if is_only else name


def _public(name: str, models: Mapping[str, Any]) -> str:
    bare = _bare(name, models)
    return name if bare == name else f"model.{bare}"

"""State as two files: tensors in a safetensors file, the rest as JSON that names them; no pickle.

A value that JSON lacks is encoded as a dict with a single key that begins with ``$``.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fft.durable.manifest import File, file_stem
from fft.durable.stores import Store
from fft.errors import CheckpointError


class UnreadableFile(CheckpointError):
    """A file of a checkpoint does not have the expected contents."""


def packed(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split plain data with tensors in it into a JSON value and the tensors by name.

    Raises CheckpointError.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _packed(tree, "", tensors), tensors


def unpacked(data: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Reverse `packed`. Raises UnreadableFile."""
    try:
        return _unpacked(data, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableFile(f"the JSON does not fit its tensors: {error!r}") from error


def write_rank(
    store: Store,
    directory: str,
    place: tuple[str, int],
    data: Any,
    tensors: Mapping[str, torch.Tensor],
) -> tuple[File, ...]:
    """Write both files of a group's rank and read them back for their digests.

    Args:
        place: Group and rank.
        tensors: Tensors on the CPU that share no memory.

    Raises OSError, CheckpointError.
    """
    stem = file_stem(*place)
    with store.writing(f"{directory}/{stem}.safetensors") as path:
        _write_tensors(path, tensors)
    store.write(f"{directory}/{stem}.json", to_json(data))
    sizes, names = store.files(directory), (f"{stem}.json", f"{stem}.safetensors")
    if lost := [name for name in names if name not in sizes]:
        raise OSError(f"{', '.join(lost)} in {directory} was removed after it had been written")
    return tuple(
        File(name=name, size=sizes[name], sha256=store.digest(f"{directory}/{name}"))
        for name in names
    )


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"safetensors has no type for tensors of {error}") from error


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file. Raises UnreadableFile, OSError."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UnreadableFile(f"{path.name}: no safetensors file: {error}") from error


def to_json(data: Any) -> bytes:
    """Encode as the bytes of a file."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()


def from_json(data: bytes, name: str) -> Any:
    """Decode the bytes of file ``name``. Raises UnreadableFile."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"{name}: no JSON ({error})") from error


def _packed(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = place.lstrip(".") or "value"
        while name in tensors:  # keys of different types may look alike
            name += "'"
        tensors[name] = value
        return {"$tensor": name}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        items = [_packed(item, f"{place}.{i}", tensors) for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs = [(k, _packed(v, f"{place}.{k}", tensors)) for k, v in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$dict": [[_packed(k, f"{place}.key", tensors), v] for k, v in pairs]}
    raise CheckpointError(
        f"{place.lstrip('.')} is a {type(value).__name__}, which a checkpoint cannot hold: it "
        "takes tensors, dicts, lists, tuples, str, bytes, bool, int, float and None"
    )


def _unpacked(data: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(data, list):
        return [_unpacked(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        ((kind, value),) = data.items()
        if kind == "$tensor":
            return tensors[value]
        if kind == "$float":
            return float(value)
        if kind == "$bytes":
            return base64.b64decode(value, validate=True)
        if kind == "$tuple":
            return tuple(_unpacked(item, tensors) for item in value)
        if kind == "$dict":
            return {_unpacked(k, tensors): _unpacked(v, tensors) for k, v in value}
    return {key: _unpacked(value, tensors) for key, value in data.items()}

"""Conversion of a group's state to another number of ranks, on the CPU, tensor by tensor.

Each rank's file has the layout of its tensors in the whole; optimizer state is sharded as its
parameter is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fft.errors import CheckpointError, UnfitCheckpoint
from fft.train.checkpoint.snapshot import Layout, layout_of
from fft.train.local_tensors import local_of
from fft.train.rank_state import RankState
from fft.train.state.tensor_subclasses import CLASS, is_marked

Part = tuple[Layout, torch.Tensor]


def whole_of(parts: Sequence[Part]) -> torch.Tensor:
    """Return the tensor that the parts make up. Raises CheckpointError if they leave gaps."""
    shape = parts[0][0].shape
    whole = torch.empty(shape, dtype=parts[0][1].dtype)
    filled = 0
    for layout, part in {layout.offset: (layout, part) for layout, part in parts}.values():
        whole[_place(layout.offset, part.shape)] = part
        filled += part.numel()
    if filled < whole.numel():
        raise CheckpointError(
            f"the parts of a sharded tensor have {filled} of its {whole.numel()} elements"
        )
    return whole


def _place(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def part_of(
    whole: torch.Tensor, layout: Mapping[str, Any] | None, shape: torch.Size
) -> torch.Tensor:
    """Return a rank's part of a tensor that is sharded as a parameter of ``shape``, by the
    ``layout`` stored in a file."""
    if layout is None or whole.shape != shape or whole.dim() == 0:
        return whole
    return whole[_place(layout["offset"], layout["local"])]


def unsharded(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the whole state from the states of all ranks of a group.

    Raises CheckpointError if they cannot be combined.
    """
    first = trees[0]
    if first["state"] is None or first["state"]["optimizers"] is None:
        if len(trees) == 1 and first["state"] is not None:
            return dict(first)  # a model alone, and whole
        raise CheckpointError("what state_dict= gave is not resharded: use register()")
    if "plan" in first["state"]:
        raise CheckpointError(
            "the groups that wrote it step alone, and each has a state of its own: it is not put "
            "together from shards; resume with as many ranks"
        )
    _refuse_stages(trees)
    layouts = [_layouts(tree) for tree in trees]

    def joined(name: str, values: Sequence[Any]) -> Any:
        local = [each["state"]["parameters"][name] for each in trees]
        known = [each.get(name) for each in layouts]
        marked = [value for value in values if is_marked(value)]
        if marked and known[0] is not None and len(trees) > 1:
            _refuse_marked(name, marked[0])
        is_part = isinstance(values[0], torch.Tensor) and values[0].shape == local[0].shape
        if not is_part or known[0] is None or values[0].dim() == 0:
            return values[0]
        pairs = zip(known, values, strict=True)
        return whole_of([(layout, value) for layout, value in pairs if layout is not None])

    state = dict(first["state"])
    state["parameters"] = {
        name: joined(name, [tree["state"]["parameters"][name] for tree in trees])
        for name in first["state"]["parameters"]
    }
    state["optimizers"] = [
        {
            **optimizer,
            "state": {
                name: {
                    key: joined(
                        name, [t["state"]["optimizers"][i]["state"][name][key] for t in trees]
                    )
                    for key in entries
                }
                for name, entries in optimizer["state"].items()
            },
        }
        for i, optimizer in enumerate(first["state"]["optimizers"])
    ]
    return {**first, "state": state, "layouts": {}}


def resharded(trees: Sequence[Mapping[str, Any]], state: RankState) -> dict[str, Any]:
    """Return this rank's part of the state that the ``trees`` make up. Raises CheckpointError."""
    whole = unsharded(trees)
    if state.step is None:
        raise CheckpointError("what state_dict= gave is not resharded: use register()")
    if (extra := state.step.sharded_extra()) is not None:
        raise UnfitCheckpoint(
            f"extra[{extra!r}] is sharded over the ranks of a group, and such state is not "
            "resharded: resume with as many ranks"
        )
    names = state.step.names()

    def mine(name: str, value: Any) -> Any:
        tensor = names.get(name)
        layout = None if tensor is None else layout_of(tensor)
        if layout is not None and is_marked(value):
            _refuse_marked(name, value)
        if tensor is None or layout is None or not isinstance(value, torch.Tensor):
            return value
        if tuple(value.shape) != layout.shape or value.dim() == 0:
            return value
        return value[_place(layout.offset, local_of(tensor).shape)]

    found = whole["state"]
    parameters = {name: mine(name, value) for name, value in found["parameters"].items()}
    optimizers = [
        {
            **optimizer,
            "state": {
                name: {key: mine(name, value) for key, value in entries.items()}
                for name, entries in optimizer["state"].items()
            },
        }
        for optimizer in found["optimizers"] or ()
    ]
    taken = optimizers if found["optimizers"] is not None else None
    return {**whole, "state": {**found, "parameters": parameters, "optimizers": taken}}


def _refuse_marked(name: str, value: Mapping[str, Any]) -> None:
    kind = f"of class {value[CLASS]}" if CLASS in value else "with a layout of its own"
    raise UnfitCheckpoint(
        f"{name}: a tensor {kind} cannot be resharded; resume with as many ranks per group as the "
        "checkpoint has"
    )


def _layouts(tree: Mapping[str, Any]) -> dict[str, Layout]:
    return {
        name: Layout(tuple(each["shape"]), tuple(each["offset"]))
        for name, each in tree["layouts"].items()
    }


def _refuse_stages(trees: Sequence[Mapping[str, Any]]) -> None:
    names = [set(tree["state"]["parameters"]) for tree in trees]
    if any(each != names[0] for each in names):
        raise CheckpointError(
            "the ranks of the group that wrote it have different parameters, as stages of a "
            "pipeline do: resume with as many ranks"
        )

"""Names of process group ops in messages, and the errors with these names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

_PUBLIC_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_allgather_base": "all_gather_single",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "recv_anysource": "recv from any rank",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}
"""Public names of the methods of a process group."""
_WITH_PEER = {"send": "to", "recv": "from"}


class GroupAborted(RuntimeError):
    """The process group was aborted and not configured since; the message has the cause.

    ``fft_place`` names the pending or refused op and its group; it is empty without an op.
    """

    def __init__(self, cause: str, place: str = "") -> None:
        super().__init__(f"{place}: {cause}" if place else cause)
        self.fft_place = place


class CollectiveFailed(RuntimeError):
    """An op of a process group failed; the message has the op (``fft_place``) and its error."""

    def __init__(self, place: str, error: BaseException | str) -> None:
        super().__init__(f"{place}: {_first_line(error)}")
        self.fft_place = place


def what(op: str, args: tuple[Any, ...]) -> str:
    """Describe a call of a process group method: name, peer and tensors."""
    name = _PUBLIC_NAMES.get(op, op)
    if op in _WITH_PEER and len(args) > 1:
        name += f" {_WITH_PEER[op]} rank {args[1]}"
    return name + _sizes(args)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _sizes(args: tuple[Any, ...]) -> str:
    """Describe the tensors of the first argument that has some, which is the output if any."""
    tensors = next((found for a in args if (found := list(_tensors(a)))), [])
    if not tensors:
        return ""
    size = _bytes(sum(t.nbytes for t in tensors))
    kinds = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
    if len(tensors) == 1:
        return f" of {list(tensors[0].shape)}, {size} ({kinds})"
    return f" of {len(tensors)} tensors, {size} ({kinds})"


def _bytes(count: float) -> str:
    units = ["GB", "MB", "kB", "B"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop()
    return f"{count:.3g} {units[-1]}"


def _first_line(error: BaseException | str) -> str:
    """Return the first line of a gloo error without its source path and general advice."""
    first = (str(error).splitlines() or [""])[0]
    return re.sub(r"^\[/\S+?:\d+\] ", "", first).split(". This is typically")[0]

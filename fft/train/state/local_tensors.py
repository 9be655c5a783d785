"""A rank's local shard of a tensor: its data as plain tensors, and its version.

This module only reads and copies the given tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of ``tensor``, sharing memory, without autograd history."""
    return local_shard(tensor).detach()


def like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor with local shard ``part`` and the placement of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return part
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def is_composite(part: torch.Tensor) -> bool:
    """Whether ``part`` is of a tensor subclass that keeps its data in other tensors."""
    return is_traceable_wrapper_subclass(part) and not isinstance(part, DTensor)


def leaves_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that hold the local shard of ``tensor``, sharing memory."""
    part: Any = local_shard(tensor)
    if is_composite(part):
        for name in part.__tensor_flatten__()[0]:
            yield from leaves_of(getattr(part, name))
    else:
        yield part.detach()


def bits_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Copy the data of the local shard of ``tensor``, for `write_data`."""
    return [leaf.clone() for leaf in leaves_of(tensor)]


def write_data(tensor: torch.Tensor, bits: Sequence[torch.Tensor]) -> None:
    """Write what `bits_of` returned back into ``tensor``. Needs ``torch.no_grad()``.

    A plain tensor that has been resized gets its former shape again.
    """
    if len(bits) == 1 and not isinstance(tensor, DTensor) and tensor.shape != bits[0].shape:
        tensor.data = bits[0].clone()
        return
    for leaf, value in zip(leaves_of(tensor), bits, strict=True):
        leaf.copy_(value)


def version_of(tensor: torch.Tensor) -> int:
    """Return torch's count of in-place edits of the local shard, through any view."""
    part = local_shard(tensor)
    if is_composite(part):
        return part._version + sum(leaf._version for leaf in leaves_of(part))
    return part._version


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two plain tensors of one shape and type are bitwise identical."""
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of ``tensor`` itself, in its own class."""
    # to_local() and detach() of a DTensor go through its dispatcher, 50 times slower
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part.wait() if isinstance(part, AsyncCollectiveTensor) else part

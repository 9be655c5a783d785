"""This rank's part of a tensor, what it holds, and how often it was edited. Reads tensors only."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``tensor``, sharing memory, without autograd history."""
    return _part(tensor).detach()


def like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """What has ``part`` on this rank, and is spread as ``tensor`` is."""
    if not isinstance(tensor, DTensor):
        return part
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def edit_count(tensor: torch.Tensor) -> int:
    """torch's count of edits in place of this rank's part, whichever view they go through."""
    return _part(tensor)._version


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two plain tensors of one shape and type hold the same bits."""
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def _part(tensor: torch.Tensor) -> torch.Tensor:
    # to_local() and detach() of a DTensor go through its dispatcher, 50 times slower
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

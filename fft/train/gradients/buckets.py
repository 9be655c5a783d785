"""Gradient buckets: flat buffers, each for many gradients that are reduced together.

A `Bucket` copies gradients into its buffer, assigns the reduced gradients to the parameters, and
detects later edits. The reducer decides when to reduce. This module accesses the gradients of
parameters, but no process group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.distributed_c10d import Work
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torchft.manager import _ManagedFuture

from fft.train.state.local_tensors import local_of

BUCKET_MB = 25.0
"""Default maximum size of a bucket in MiB, equal to that of DDP (``bucket_cap_mb``)."""
_FIRST_BUCKET_MB = 1.0
"""Maximum size in MiB of the bucket that backward fills first, so that reduction starts early."""
_ALIGNMENT = 16
"""Alignment of each gradient in the buffer, in elements, for vectorized kernels."""


class GradBucket:
    """The argument of a communication hook, with the methods of ``torch.distributed.GradBucket``.

    The object keeps the buffer of its attempt. A hook that is still running after a rollback writes
    there and not into the gradients of the next attempt.
    """

    def __init__(self, bucket: Bucket, last: bool) -> None:
        self._bucket = bucket
        self._flat = bucket.flat()
        self._last = last

    def index(self) -> int:
        """Return the index of the bucket in the order of reduction."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """Return all gradients of the bucket as a flat tensor, to be averaged across the groups."""
        return self._flat[: self._bucket.size]

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the gradients by ``tensor``, which must have the same number of elements."""
        self.buffer().copy_(tensor.reshape(-1))

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients, as views of ``buffer()``, in the order of ``parameters()``."""
        return [_view(self._flat, slot) for slot in self._bucket.slots]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of the bucket."""
        return [slot.parameter for slot in self._bucket.slots]

    def is_last(self) -> bool:
        """Return whether this is the last bucket in the order of reduction."""
        return self._last


CommHook = Callable[[Any, GradBucket], "Future[Any]"]


@dataclass(eq=False)
class Slot:
    """The slice of a bucket for one gradient: ``size`` elements of this rank from ``offset``."""

    name: str
    parameter: nn.Parameter
    offset: int
    size: int
    stride: tuple[int, ...]
    in_place: bool
    """Whether ``parameter.grad`` is a view of the buffer, not a copy."""


@dataclass(eq=False)
class Bucket:
    """Gradients of one dtype on one device that are reduced together, and their buffer."""

    index: int
    dtype: torch.dtype
    device: torch.device
    slots: list[Slot]
    size: int
    buffer: torch.Tensor | None = None
    """``size`` elements for the gradients, then one flag per slot: whether it has a gradient."""
    views: dict[Slot, torch.Tensor] = field(default_factory=dict)
    """The view of the buffer for each slot."""
    own_uses: int = 0
    """Number of tensors of this module that share the memory of the buffer."""
    share: float = 1.0
    """Factor for each gradient when it is copied into the buffer, so that a sum over the groups is
    the average. As in DDP, this saves a pass over the buffer for the division."""
    missing: set[Slot] = field(default_factory=set)
    """Slots whose gradient has not arrived in this backward, or is copied only at its end."""
    touched: bool = False
    again: bool = False
    """A gradient arrived after the bucket was issued, so the bucket must be reduced again."""
    work: Work | Future[Any] | None = None

    def flat(self) -> torch.Tensor:
        """Return the buffer with gradients and flags; allocate it if necessary."""
        if self.buffer is None:
            size = self.size + len(self.slots)
            self.buffer = torch.zeros(size, dtype=self.dtype, device=self.device)
            self.views = {slot: _view(self.buffer, slot) for slot in self.slots}
            self.own_uses = _uses(self.buffer)
        return self.buffer

    def detach_if_shared(self) -> None:
        """Drop the buffer if the user holds a gradient of the last step, which must not change.

        An optimizer may compare gradients with those of the last step, for example.
        """
        if self.buffer is not None and _uses(self.buffer) > self.own_uses:
            self.drop()

    def drop(self) -> None:
        """Drop the buffer; the next use allocates another one."""
        self.buffer = None
        self.views = {}

    def gradients(self) -> torch.Tensor:
        """Return all gradients as a flat tensor."""
        return self.flat()[: self.size]

    def view(self, slot: Slot) -> torch.Tensor:
        """Return the view of the buffer for one gradient, in the layout of its parameter."""
        self.flat()
        return self.views[slot]

    def take(self, slot: Slot) -> None:
        """Copy one gradient into the buffer when it arrives, while it is in the CPU cache."""
        if (grad := slot.parameter.grad) is not None and slot.in_place:
            self._copy_in(slot, grad)

    def gather(self) -> list[bool]:
        """Copy the remaining gradients into the buffer; return for each slot whether it has one."""
        used = []
        with torch.no_grad():
            for slot in self.slots:
                grad = _placed_as(slot.parameter)
                used.append(grad is not None)
                if grad is None:
                    self.view(slot).zero_()
                elif slot in self.missing or not self._is_view(slot, grad):
                    self._copy_in(slot, grad)
        return used

    def _copy_in(self, slot: Slot, grad: torch.Tensor) -> None:
        view = self.view(slot)
        torch.mul(local_of(grad), self.share, out=view)
        if slot.in_place:
            slot.parameter.grad = view

    def wait(self) -> None:
        """Wait for a reduction in progress. Its result is then in the buffer."""
        if isinstance(self.work, Future):
            if isinstance(self.work, _ManagedFuture):  # from `manager.allreduce`
                self.work._managed_work().wait()  # sets the value of the future
            self.gradients().copy_(_tensor_of(self.work.wait()).reshape(-1))
        elif self.work is not None:
            self.work.wait()

    def scatter(self, tail: torch.Tensor, refuse: Callable[[str], object] | None) -> None:
        """Assign each parameter its reduced gradient.

        A parameter that received a gradient in none of the groups keeps ``grad = None``.

        Args:
            tail: One number per slot, nonzero if at least one group had a gradient for it.
            refuse: Called with the name of a parameter that only other groups had a gradient for.
                None: such a parameter is permitted.
        """
        unused = [i for i, slot in enumerate(self.slots) if slot.parameter.grad is None]
        somewhere = tail.tolist() if unused else []
        copies, views = [], []
        with torch.no_grad():
            for i in unused:
                if not somewhere[i]:
                    continue
                slot = self.slots[i]
                if refuse is not None:
                    refuse(slot.name)
                if slot.in_place:
                    slot.parameter.grad = self.view(slot)
                else:
                    slot.parameter.grad = torch.zeros_like(slot.parameter)
            for slot in self.slots:
                grad = slot.parameter.grad
                if grad is not None and not slot.in_place:
                    copies.append(local_of(grad))
                    views.append(self.view(slot))
            if copies:
                torch._foreach_copy_(copies, views)

    def _is_view(self, slot: Slot, grad: torch.Tensor) -> bool:
        if self.buffer is None or not slot.in_place:
            return False
        start = self.buffer.data_ptr() + slot.offset * self.buffer.element_size()
        return grad.data_ptr() == start and grad.stride() == slot.stride


def fill(
    named: list[tuple[str, nn.Parameter]], cap_mb: float, reduce_dtype: torch.dtype | None
) -> list[Bucket]:
    """Assign parameters to buckets by their unsharded size, which is equal on all ranks of a group.

    Args:
        named: The parameters with their names, in the order of reduction.
        cap_mb: Maximum size of a bucket in MiB.
        reduce_dtype: The dtype of all floating-point buckets, or None for that of the parameters.
    """
    buckets: list[Bucket] = []
    used = 0.0
    for name, parameter in named:
        local = local_of(parameter)
        dtype = reduce_dtype if reduce_dtype and local.is_floating_point() else local.dtype
        mib = parameter.numel() * dtype.itemsize / 2**20
        cap = _FIRST_BUCKET_MB if len(buckets) == 1 else cap_mb
        last = buckets[-1] if buckets else None
        kind = (dtype, local.device)
        if last is None or kind != (last.dtype, last.device) or used + mib > min(cap, cap_mb):
            last, used = Bucket(len(buckets), dtype, local.device, [], 0), 0.0
            buckets.append(last)
        last.slots.append(_slot(name, parameter, last))
        last.size += -(-local.numel() // _ALIGNMENT) * _ALIGNMENT
        used += mib
    return buckets


def sparse_parameters(model: nn.Module) -> set[torch.Tensor]:
    """Return the embedding weights with sparse gradients (``sparse=True``), as in DDP."""
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }


def describe(named: list[tuple[str, nn.Parameter]]) -> str:
    """Return names, dtypes and shapes as text."""
    return "|".join(f"{name}:{p.dtype}:{tuple(p.shape)}" for name, p in named)


def _uses(tensor: torch.Tensor) -> int:
    """Return the number of tensors that share the memory of ``tensor``."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return the view of the buffer for one gradient, in the layout of its parameter."""
    return flat.as_strided(local_of(slot.parameter).shape, slot.stride, slot.offset)


def _slot(name: str, parameter: nn.Parameter, bucket: Bucket) -> Slot:
    """Return a slot at the end of ``bucket``, with the strides of the parameter if it is dense."""
    local = local_of(parameter)
    stride = torch.empty_like(local, device="meta").stride()  # equal to those of a dense parameter
    # FSDP2 keeps its gradient tensor and may accumulate into it while the bucket is reduced.
    in_place = not isinstance(parameter, DTensor) and parameter.dtype == bucket.dtype
    return Slot(name, parameter, bucket.size, local.numel(), stride, in_place)


def _placed_as(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a parameter, after giving it the placement of the parameter.

    The gradient of a replicated DTensor may consist of partial sums. Otherwise its ranks would add
    them up in the optimizer step, after the vote.
    """
    grad = parameter.grad
    if not isinstance(grad, DTensor) or not isinstance(parameter, DTensor):
        return grad
    if grad.placements != parameter.placements:
        grad = parameter.grad = grad.redistribute(placements=parameter.placements)
    return grad


def _tensor_of(value: Any) -> torch.Tensor:
    """Return the result of a communication hook: a tensor, or a list of one as from a ``Work``."""
    result = value[0] if isinstance(value, list | tuple) else value
    assert isinstance(result, torch.Tensor)
    return result

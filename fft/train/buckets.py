"""Buckets of gradients: where each lies in one flat buffer, so that many are reduced as one.

A `Bucket` brings the gradients into its buffer, gives them back when they are reduced, and knows
which were edited since. What is reduced when is the reducer's matter. Touches gradients of
parameters, and no process group.
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

from fft.train.local_tensors import edit_count, local_of, same_bits

BUCKET_MB = 25.0
"""As DDP's ``bucket_cap_mb``."""
_FIRST_BUCKET_MB = 1.0
"""Of the parameters that backward reaches first, so that reducing begins early; as DDP's."""
_ALIGNMENT = 16
"""Elements: each gradient begins at a multiple, for vectorised kernels."""


class GradBucket:
    """What a communication hook gets; has the methods of ``torch.distributed.GradBucket``.

    It stays with the buffer of its attempt: a hook that comes late, after a rollback, writes there,
    and not to the gradients of the replay.
    """

    def __init__(self, bucket: Bucket, last: bool) -> None:
        self._bucket = bucket
        self._flat = bucket.flat()
        self._last = last

    def index(self) -> int:
        """Number of the bucket, in the order of reduction."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """All gradients of the bucket, flat: to be averaged across the groups."""
        return self._flat[: self._bucket.size]

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Put ``tensor``, of the same number of elements, in the place of the gradients."""
        self.buffer().copy_(tensor.reshape(-1))

    def gradients(self) -> list[torch.Tensor]:
        """The gradients, as views of ``buffer()``, in the order of ``parameters()``."""
        return [_view(self._flat, slot) for slot in self._bucket.slots]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the bucket."""
        return [slot.parameter for slot in self._bucket.slots]

    def is_last(self) -> bool:
        """Whether no other bucket follows."""
        return self._last


CommHook = Callable[[Any, GradBucket], "Future[Any]"]


@dataclass(eq=False)
class Slot:
    """The place of one gradient in a bucket: ``size`` elements (of this rank) from ``offset``."""

    name: str
    parameter: nn.Parameter
    offset: int
    size: int
    stride: tuple[int, ...]
    in_place: bool
    """Whether the gradient is the buffer's part itself, not a copy of it."""
    copy: tuple[int, int] | None = None
    """Of one that is not: which tensor held the reduced gradient, and its count of edits."""


@dataclass(eq=False)
class Bucket:
    """Gradients of one type on one device that are reduced together, and where they are in it."""

    index: int
    dtype: torch.dtype
    device: torch.device
    slots: list[Slot]
    size: int
    buffer: torch.Tensor | None = None
    """``size`` elements of gradients, and one more for each slot: whether it has a gradient."""
    views: dict[Slot, torch.Tensor] = field(default_factory=dict)
    """The places of the gradients in it."""
    own_uses: int = 0
    """How many tensors of ours share its memory."""
    share: float = 1.0
    """What each gradient is multiplied by on its way into the buffer, so that a sum over the
    groups is their average; as DDP does it, a pass over the buffer less than to divide it."""
    missing: set[Slot] = field(default_factory=set)
    """Slots whose gradient has not come in this backward, or is not to be taken as it comes."""
    touched: bool = False
    again: bool = False
    """A gradient came after the bucket was issued: it has to be reduced once more."""
    work: Work | Future[Any] | None = None
    version: int = -1
    """Of the buffer when it was reduced: in-place edits of the gradients raise it."""

    def flat(self) -> torch.Tensor:
        """Gradients and what says which there are; a fresh buffer if it has none."""
        if self.buffer is None:
            size = self.size + len(self.slots)
            self.buffer = torch.zeros(size, dtype=self.dtype, device=self.device)
            self.views = {slot: _view(self.buffer, slot) for slot in self.slots}
            self.own_uses = _uses(self.buffer)
        return self.buffer

    def leave_to_user(self) -> None:
        """Use another buffer if somebody has kept a gradient of the last step, such as an
        optimizer that looks back on it: it shall not change."""
        if self.buffer is not None and _uses(self.buffer) > self.own_uses:
            self.drop()

    def drop(self) -> None:
        """Use another buffer from now on."""
        self.buffer = None
        self.views = {}

    def gradients(self) -> torch.Tensor:
        """All gradients, flat."""
        return self.flat()[: self.size]

    def view(self, slot: Slot) -> torch.Tensor:
        """The place of one gradient, in the layout of its parameter."""
        self.flat()
        return self.views[slot]

    def take(self, slot: Slot) -> None:
        """Bring one gradient into the buffer as it comes, while it is in the processor's cache."""
        if (grad := slot.parameter.grad) is not None and slot.in_place:
            self._bring(slot, grad)

    def gather(self) -> list[bool]:
        """Bring the gradients that were not taken into the buffer; which slots have one."""
        used = []
        with torch.no_grad():
            for slot in self.slots:
                grad = slot.parameter.grad
                used.append(grad is not None)
                if grad is None:
                    self.view(slot).zero_()
                elif slot in self.missing or not self._is_view(slot, grad):
                    self._bring(slot, grad)
        return used

    def _bring(self, slot: Slot, grad: torch.Tensor) -> None:
        view = self.view(slot)
        torch.mul(local_of(grad), self.share, out=view)
        if slot.in_place:
            slot.parameter.grad = view

    def wait(self) -> None:
        """Until it is reduced, if that was begun; the result is in the buffer then."""
        if isinstance(self.work, Future):
            if isinstance(self.work, _ManagedFuture):  # of `manager.allreduce`: torchft's is filled
                self.work._managed_work().wait()  # in by who waits for the work
            self.gradients().copy_(_tensor_of(self.work.wait()).reshape(-1))
        elif self.work is not None:
            self.work.wait()

    def scatter(self, tail: torch.Tensor) -> None:
        """Give each parameter its reduced gradient; those that no group used keep none.

        ``tail``: a number for each slot, which is not 0 if some group had a gradient of it.
        """
        unused = [i for i, slot in enumerate(self.slots) if slot.parameter.grad is None]
        somewhere = tail.tolist() if unused else []
        copies, views = [], []
        with torch.no_grad():
            for i in unused:
                if not somewhere[i]:
                    continue
                slot = self.slots[i]
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

    def note(self, pristine: dict[Slot, torch.Tensor] | None) -> None:
        """Remember what `is_edited` compares with; ``pristine``, if given, gets copies."""
        self.version = self.flat()._version
        for slot in self.slots:
            grad = slot.parameter.grad
            if not slot.in_place:
                slot.copy = _mark(grad)
            if pristine is not None and grad is not None:
                pristine[slot] = local_of(grad).clone()

    def is_edited(self, pristine: dict[Slot, torch.Tensor] | None) -> bool:
        """Whether a gradient has changed since `note` was called. ``pristine``: as given to it."""
        return any(self._is_edited(slot, pristine) for slot in self.slots)

    def _is_edited(self, slot: Slot, pristine: dict[Slot, torch.Tensor] | None) -> bool:
        grad = slot.parameter.grad
        if pristine is not None:
            before = pristine.get(slot)
            if grad is None or before is None:
                return grad is not before
            return not same_bits(local_of(grad), before)
        if slot.in_place:
            at_home = grad is None or self._is_view(slot, grad)
            return not at_home or (self.buffer is not None and self.buffer._version != self.version)
        return slot.copy != _mark(grad)

    def _is_view(self, slot: Slot, grad: torch.Tensor) -> bool:
        if self.buffer is None or not slot.in_place:
            return False
        start = self.buffer.data_ptr() + slot.offset * self.buffer.element_size()
        return grad.data_ptr() == start and grad.stride() == slot.stride


def fill(
    named: list[tuple[str, nn.Parameter]], cap_mb: float, reduce_dtype: torch.dtype | None
) -> list[Bucket]:
    """Buckets by size of the whole parameters, so that all ranks of a group have as many.

    ``cap_mb``: of a bucket, in MiB; ``reduce_dtype``: of all of floating point; None: their own.
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
    """Weights whose gradients are sparse, as DDP tells them: by their module's own argument."""
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }


def in_words(named: list[tuple[str, nn.Parameter]]) -> str:
    """Names, types and shapes."""
    return "|".join(f"{name}:{p.dtype}:{tuple(p.shape)}" for name, p in named)


def _uses(tensor: torch.Tensor) -> int:
    """How many tensors share its memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The place of the gradient in the buffer, in the layout of its parameter."""
    return flat.as_strided(local_of(slot.parameter).shape, slot.stride, slot.offset)


def _slot(name: str, parameter: nn.Parameter, bucket: Bucket) -> Slot:
    """A place at the end of ``bucket``, in the memory layout of the parameter where it is dense."""
    local = local_of(parameter)
    stride = torch.empty_like(local, device="meta").stride()  # its own, where it is dense
    # FSDP2 holds to the tensor that it made, and may add to it while the bucket is reduced.
    in_place = not isinstance(parameter, DTensor) and parameter.dtype == bucket.dtype
    return Slot(name, parameter, bucket.size, local.numel(), stride, in_place)


def _mark(grad: torch.Tensor | None) -> tuple[int, int] | None:
    """Changes when a gradient is edited in place, or another is put in its place."""
    return None if grad is None else (id(grad), edit_count(grad))


def _tensor_of(value: Any) -> torch.Tensor:
    """The result of a communication hook: a tensor, or a list of one, as torch's own Works give."""
    result = value[0] if isinstance(value, list | tuple) else value
    assert isinstance(result, torch.Tensor)
    return result

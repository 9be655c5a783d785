"""Capture and restore the buffers of modules: the tensor objects and their values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fft.train.local_tensors import bits_of, put_bits


@dataclass
class Buffer:
    """The content of one buffer slot of one module: the tensor object and its value."""

    module: nn.Module
    name: str
    tensor: torch.Tensor | None
    bits: list[torch.Tensor]
    """A copy of the value; empty if the slot has no tensor."""


def capture_buffers(modules: Sequence[nn.Module]) -> Iterator[Buffer]:
    """Yield the present content of each buffer slot of ``modules``."""
    for module in modules:
        for name, tensor in module._buffers.items():
            yield Buffer(module, name, tensor, [] if tensor is None else bits_of(tensor))


def restore_buffers(modules: Iterable[nn.Module], saved: list[Buffer]) -> None:
    """Restore the buffers of ``modules``: the same tensor objects with their captured values.

    Buffers that were registered since the capture are removed, also from modules that had none.
    Otherwise a running statistic that was registered lazily would count the replayed batch twice.
    """
    kept: dict[nn.Module, set[str]] = {module: set() for module in modules}
    for entry in saved:
        kept[entry.module].add(entry.name)
    for module, names in kept.items():
        for name in [n for n in module._buffers if n not in names]:
            del module._buffers[name]
    with torch.no_grad():
        for entry in saved:
            entry.module._buffers[entry.name] = entry.tensor
            if entry.tensor is not None:
                put_bits(entry.tensor, entry.bits)

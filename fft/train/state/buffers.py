"""Buffers of modules: which tensors a step found in them, and with which values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fft.train.local_tensors import bits_of, put_bits


@dataclass
class Buffer:
    """One buffer slot of one module: the object that was in it, and its value."""

    module: nn.Module
    name: str
    tensor: torch.Tensor | None
    bits: list[torch.Tensor]
    """A copy; empty where there is no tensor."""


def capture_buffers(modules: Sequence[nn.Module]) -> Iterator[Buffer]:
    """What is in them now: tensors, and copies of these."""
    for module in modules:
        for name, tensor in module._buffers.items():
            yield Buffer(module, name, tensor, [] if tensor is None else bits_of(tensor))


def restore_buffers(saved: list[Buffer]) -> None:
    """Put the same tensor objects back, with their values; buffers made since go away."""
    kept: dict[nn.Module, set[str]] = {}
    for entry in saved:
        kept.setdefault(entry.module, set()).add(entry.name)
    for module, names in kept.items():
        for name in [n for n in module._buffers if n not in names]:
            del module._buffers[name]
    with torch.no_grad():
        for entry in saved:
            entry.module._buffers[entry.name] = entry.tensor
            if entry.tensor is not None:
                put_bits(entry.tensor, entry.bits)

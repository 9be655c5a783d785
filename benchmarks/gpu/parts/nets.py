"""The model and the data of the trials, and the bits of a state. Needs torch alone."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

from fft.train.state.fingerprint import fingerprint

BATCH = 16


class Net(nn.Module):
    """Layers with batch norm, so that there are buffers, and dropout, so that there is chance."""

    def __init__(self, width: int, layers: int = 3, dropout: float = 0.2) -> None:
        super().__init__()
        made: list[nn.Module] = []
        for _ in range(layers):
            made += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU()]
            made += [nn.Dropout(dropout)] if dropout else []
        self.layers = nn.Sequential(*made, nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def width_of(small: bool) -> int:
    """Of the trials' models."""
    return 32 if small else 1024


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """How far the model is from the mean of its inputs."""
    out: torch.Tensor = model(x)
    return (out - x.mean(1, keepdim=True)).square().mean()


def data(width: int, count: int = 4096) -> torch.utils.data.Dataset[Any]:
    """Inputs, on the host."""
    generator = torch.Generator().manual_seed(11)
    return torch.utils.data.TensorDataset(torch.randn(count, width, generator=generator))


def batch(width: int, device: str, seed: int = 5) -> torch.Tensor:
    """One, on the device, the same everywhere."""
    drawn = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device)


def bits(tensors: Iterable[torch.Tensor]) -> str:
    """Equal for equal bits."""
    return fingerprint([tensor.detach() for tensor in tensors])


def state_bits(model: nn.Module) -> str:
    """Of its parameters and buffers."""
    return bits([*model.parameters(), *model.buffers()])


def keep_busy(device: str, ms: float) -> None:
    """Queue a kernel that does nothing for so long, as measured at the first call. Not on CPU."""
    if device == "cuda":
        torch.cuda._sleep(int(ms * _cycles_per_ms()))


def is_busy(device: str) -> bool:
    """Whether the device has something to do yet that was queued on the current stream."""
    if device != "cuda":
        return False
    try:
        return not torch.cuda.current_stream().query()
    except RuntimeError:  # the device is lost: it does nothing any more
        return False


@cache
def _cycles_per_ms() -> float:
    """Of the clock that a sleeping kernel counts by."""
    cycles = 1_000_000  # 0.5 ms, so that the start of a kernel does not count; doubled if need be
    while True:
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        took_ms = 1e3 * (time.perf_counter() - began)
        if took_ms > 20:
            return cycles / took_ms
        cycles *= 2


def synchronize(device: str) -> None:
    """Wait for the whole device."""
    if device == "cuda":
        torch.cuda.synchronize()

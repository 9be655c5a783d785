"""The model and the data of the tests, and the bits of a state. Needs only torch."""

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
    """Layers with batch norm, for buffers, and dropout, for random numbers."""

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
    """Return the width of the tests' models."""
    return 32 if small else 1024


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the distance of the model's output from the mean of its inputs."""
    out: torch.Tensor = model(x)
    return (out - x.mean(1, keepdim=True)).square().mean()


def data(width: int, count: int = 4096) -> torch.utils.data.Dataset[Any]:
    """Return inputs on the host."""
    generator = torch.Generator().manual_seed(11)
    return torch.utils.data.TensorDataset(torch.randn(count, width, generator=generator))


def batch(width: int, device: str, seed: int = 5) -> torch.Tensor:
    """Return one batch on the device, equal in every process."""
    drawn = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device)


def bits(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest that is equal for equal bits."""
    return fingerprint([tensor.detach() for tensor in tensors])


def state_bits(model: nn.Module) -> str:
    """Return a digest of its parameters and buffers."""
    return bits([*model.parameters(), *model.buffers()])


def keep_busy(device: str, ms: float) -> None:
    """Queue a kernel that idles for ``ms``, as calibrated at the first call.

    Does nothing on CPU.
    """
    if device == "cuda":
        torch.cuda._sleep(int(ms * _cycles_per_ms()))


def is_busy(device: str) -> bool:
    """Whether the device still has work that was queued on the current stream."""
    if device != "cuda":
        return False
    try:
        return not torch.cuda.current_stream().query()
    except RuntimeError:  # a lost device does nothing any more
        return False


@cache
def _cycles_per_ms() -> float:
    """Return the frequency of the clock that an idling kernel counts by."""
    cycles = 1_000_000  # 0.5 ms, so that the start of a kernel is negligible; doubled if necessary
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

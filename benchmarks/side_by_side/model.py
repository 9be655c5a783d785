"""The work, equal for all systems: a small model, its data, and the computing time of a step.

It imports torch, but neither torchft nor FFT.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 64
LAYERS = 4
BATCH = 16
SAMPLES = 4096
LEARNING_RATE = 1e-2


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Random vectors, equal in every process."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index]


class Net(nn.Module):
    """Linear layers; half of a step's ``pace`` (seconds) is spent in forward, half in backward."""

    def __init__(self, pace: float, in_backward: Callable[[], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self._pace, self._in_backward = pace, in_backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _compute(self._pace / 2)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == LAYERS // 2 and x.requires_grad:
                x.register_hook(self._midway)
        return x

    def _midway(self, _grad: torch.Tensor) -> None:
        _compute(self._pace / 2)
        self._in_backward()


def _compute(seconds: float) -> None:
    """Wait as for an accelerator: the step takes time, and the cores are free."""
    if seconds:
        time.sleep(seconds)


def built(pace: float, in_backward: Callable[[], None]) -> Net:
    """Return the model, with equal weights in every process."""
    torch.manual_seed(3)
    return Net(pace, in_backward)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the loss."""
    return F.mse_loss(model(x), x.roll(1, dims=1))


def plain_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer without momentum or decay: a step without a gradient visibly changes
    nothing."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def checksum(model: nn.Module) -> int:
    """Return a checksum of every bit of this rank's parameters."""
    value = 0
    for parameter in model.parameters():
        local = getattr(parameter, "to_local", lambda p=parameter: p)()
        value = zlib.crc32(local.detach().contiguous().numpy().tobytes(), value)
    return value

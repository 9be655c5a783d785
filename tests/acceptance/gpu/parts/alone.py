"""A job of one process in FFT's own loop, whose step functions fail as planned."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torchft
from torch import nn

import fft
from tests.acceptance.gpu.parts import nets

LIMIT = timedelta(seconds=60)


class Planned(RuntimeError):
    """An error that a trial has planned."""


@dataclass
class Job:
    """The argument of a step function; ``prepare`` may change model, optimizer and scaler
    before."""

    device: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    manager: Any = None
    scaler: Any = None
    synced: bool = True
    """Whether gradients are averaged during backward; otherwise the step function does it."""
    fails: set[tuple[int, str]] = field(default_factory=set)
    failed: int = 0
    losses: list[float] = field(default_factory=list)

    def at(self, step: int, place: str) -> None:
        """Fail here once, if that is planned."""
        if (step, place) in self.fails:
            self.fails.remove((step, place))
            self.failed += 1
            raise Planned(f"planned at {place} of step {step}")


def train(
    device: str,
    small: bool,
    steps: int,
    body: Callable[[Job, Any], torch.Tensor],
    prepare: Callable[[Job], None] = lambda job: None,
    fails: Collection[tuple[int, str]] = (),
) -> tuple[str, Job]:
    """Train with ``body(job, txn)``, which returns the loss; return the bits of the final state."""
    torch.manual_seed(0)
    width = nets.width_of(small)
    model = nets.Net(width).to(device)
    job = Job(device, model, torch.optim.AdamW(model.parameters(), lr=1e-3), fails=set(fails))
    prepare(job)
    job.manager = fft.ManagerFFT(
        pg=torchft.ProcessGroupGloo(LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        timeout=LIMIT,
    )
    try:
        job.manager.register(job.model, job.optimizer, scaler=job.scaler)
        if job.synced:
            job.manager.sync_gradients(job.model)
        loader = fft.CursorLoader(nets.data(width), batch_size=nets.BATCH, seed=3)
        for txn in job.manager.transactions(loader, max_steps=steps):
            with txn:
                loss = body(job, txn)
            if txn.committed:
                job.losses.append(float(loss.detach()))
        return nets.state_bits(job.model), job
    finally:
        job.manager.shutdown()


def plain_body(job: Job, txn: Any) -> torch.Tensor:
    """Run forward and backward."""
    loss = nets.loss_of(job.model, txn.batch[0].to(job.device))
    job.at(txn.step, "forward")
    loss.backward()
    job.at(txn.step, "backward")
    return loss

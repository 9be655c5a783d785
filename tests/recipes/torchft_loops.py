"""Loops as users of torchft write them, with FFT's manager in the place of torchft's.

The batch of a step depends only on the commits, so a failed step gets it again.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from corpus import Vectors, perceptron
from recipe_job import Job, bits
from torch import nn
from torchft import DistributedDataParallel, Optimizer
from torchft.local_sgd import DiLoCo, LocalSGD
from waiting import wait_until

import fft

BATCH = 8
SYNC_EVERY = 3
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _batch(number: int) -> Batch:
    """Return vectors, targets and sample numbers of batch ``number``."""
    data = Vectors()
    indices = [(number * BATCH + i) % len(data) for i in range(BATCH)]
    x, y, _ = zip(*(data[i] for i in indices), strict=True)
    return torch.stack(x), torch.stack(y), torch.tensor(indices)


def _mine(manager: fft.ManagerFFT) -> Batch:
    return _batch(manager.batches_committed() + (manager.participating_rank() or 0))


def _functions(**parts: Any) -> dict[str, Any]:
    def load(state: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(state[name])

    def save() -> dict[str, Any]:
        return {name: part.state_dict() for name, part in parts.items()}

    return {"load_state_dict": load, "state_dict": save, "digest": "never"}


def ddp_with_scaler(job: Job) -> None:
    """Train with torchft's DDP and a scaler that is too large at first, so it does not call
    ``step()``."""
    model = perceptron()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    manager = job.manager(**_functions(model=model, optimizer=inner, scaler=scaler))
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    skips = 0
    while manager.current_step() < job.steps:
        optimizer.zero_grad()
        x, y, index = _mine(manager)
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(ddp(x), y.half())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step, scale = manager.current_step(), scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skips += scaler.get_scale() < scale
        if manager.current_step() > step:
            job.committed(index, loss.item())
    job.facts["skips"] = skips
    job.ended(model, inner)


def by_hand(job: Job) -> None:
    """Train without a wrapper; errors in a step are reported."""
    model = perceptron(job.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = job.manager(max_retries=None)
    manager.register(model, optimizer)
    job.own_seed()
    while manager.current_step() < job.steps:
        manager.start_quorum()
        optimizer.zero_grad()
        try:
            x, y, index = _mine(manager)
            loss = F.mse_loss(model(x), y)
            loss.backward()
            works = [manager.allreduce(p.grad) for p in model.parameters()]
            for work in works:
                work.wait()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        except RuntimeError as error:
            manager.report_error(error)
        if manager.should_commit():
            optimizer.step()
            job.committed(index, loss.item())
    job.ended(model, optimizer)


def metrics_after_the_step(job: Job) -> None:
    """Train and average the loss for the log after every step, as most training code does."""
    _metrics(job, killed_at=None)


def killed_in_the_metrics(job: Job) -> None:
    """Run `metrics_after_the_step` while group 1 is killed as the others average the loss of step
    4."""
    _metrics(job, killed_at=4)


def error_after_the_decision(job: Job) -> None:
    """Run `metrics_after_the_step` while group 1 reports an error of step 3 after its commit."""

    def late(manager: fft.ManagerFFT, phase: str) -> None:
        if phase == "after_vote" and job.group == 1 and manager.current_step() == 3:
            wait_until(lambda: manager._parts.job.engine.local.state == "COMMIT", "the decision")
            manager.report_error(RuntimeError("came late"))

    _metrics(job, killed_at=None, at_phase=late)


def _metrics(
    job: Job,
    killed_at: int | None,
    at_phase: Callable[[fft.ManagerFFT, str], None] | None = None,
) -> None:
    model = perceptron()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = job.manager(**_functions(model=model, optimizer=inner))
    if at_phase is not None:
        manager._parts.attempt.inject = partial(at_phase, manager)
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    once = job.folder / "was-killed"
    while manager.current_step() < job.steps:
        optimizer.zero_grad()
        x, y, index = _mine(manager)
        loss = F.mse_loss(ddp(x), y)
        loss.backward()
        step = manager.current_step()
        optimizer.step()
        if job.group == 1 and manager.current_step() == killed_at and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        mean = loss.detach().clone()
        manager.allreduce(mean).wait()
        if manager.current_step() > step:
            job.committed(index, loss.item())
    job.ended(model, inner)


def local_sgd(job: Job) -> None:
    """Let groups train locally and average their weights every third step."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    manager = job.manager(**_functions(model=model, optimizer=optimizer))
    done, synced = 0, []
    with LocalSGD(manager, model, optimizer, sync_every=SYNC_EVERY):
        while manager.current_step() < job.steps:
            x, y, index = _batch(2 * done + job.group)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            step = manager.current_step()
            optimizer.step()
            done += 1
            if done % SYNC_EVERY == 0:
                synced.append(manager.current_step() > step)
            if manager.current_step() > step:
                job.committed(index, loss.item())
    job.facts["synced"] = synced
    job.facts["expected"] = bits(dict(_local_sgd_alone(synced).named_parameters()))
    job.ended(model, optimizer)


def _local_sgd_alone(synced: list[bool]) -> nn.Module:
    """Compute the result of LocalSGD by its definition, with both groups in one process.

    After a failed synchronization, torchft continues with each group's own weights.
    """
    torch.manual_seed(3)
    models = [perceptron()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for i in range(len(synced) * SYNC_EVERY):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x, y, _ = _batch(2 * i + group)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        if i % SYNC_EVERY == SYNC_EVERY - 1 and synced[i // SYNC_EVERY]:
            with torch.no_grad():
                for a, b in zip(*(model.parameters() for model in models), strict=True):
                    a.copy_((a + b) / 2)
                    b.copy_(a)
    return models[0]


def diloco(job: Job) -> None:
    """Train as `local_sgd`, with an outer optimizer over the changes of the inner one."""
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = job.manager(use_async_quorum=False, **_functions(model=model, optimizer=inner))
    local = 0
    with DiLoCo(manager, [model], inner, outer, sync_every=SYNC_EVERY):
        while manager.current_step() < job.steps:
            number = SYNC_EVERY * manager.current_step() + local
            x, y, index = _batch(2 * number + job.group)
            inner.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            step = manager.current_step()
            inner.step()
            local = (local + 1) % SYNC_EVERY
            if manager.current_step() > step:
                job.committed(index, loss.item())
    job.ended(model, [inner, outer])

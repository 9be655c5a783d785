"""Some recipes under torch's own DistributedDataParallel, on the batches that FFT's groups use."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from corpus import GPT, Text
from language import cosine, weight_groups
from recipe_job import Job
from scenes import Branches
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fft


def _wrapped(job: Job, model: nn.Module, **options: Any) -> DistributedDataParallel:
    store = f"file://{job.folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=job.group, world_size=2)
    ddp = DistributedDataParallel(model, **options)
    job.own_seed()
    return ddp


def _batch(job: Job, seed: int, size: int, step: int) -> Any:
    """Return the slice after the cursor of two groups that have committed ``step`` steps."""
    return fft.CursorLoader(Text(), batch_size=size, seed=seed)[2 * step + job.group]


def clipping_accumulation_ema(job: Job) -> None:
    """Train as the recipe of the same name in `language`."""
    model = GPT(job.dropout)
    optimizer = torch.optim.AdamW(weight_groups(model), lr=1e-2, betas=(0.9, 0.95))
    schedule = cosine(optimizer, job.steps)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ddp = _wrapped(job, model)
    for step in range(job.steps):
        x, y, index = _batch(job, 5, 8, step)
        (first, second) = zip(x.chunk(2), y.chunk(2), strict=True)
        with ddp.no_sync():
            (ddp(*first) / 2).backward()
        loss = ddp(*second)
        (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        _step(job, model, optimizer, index, loss.item())
        schedule.step()
        ema.update_parameters(model)
    job.ended(model, optimizer, schedule, ema=ema)
    del ddp, loss  # else it ends the process group last, and torch 2.13 may then wait for itself
    dist.destroy_process_group()


def accumulation_without_no_sync(job: Job) -> None:
    """Train as the recipe of the same name in `language`."""
    model = GPT(job.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    ddp = _wrapped(job, model, bucket_cap_mb=0.01)
    for step in range(job.steps):
        x, y, index = _batch(job, 6, 8, step)
        total = 0.0
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = ddp(a, b) / 4
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        _step(job, model, optimizer, index, total)
    job.ended(model, optimizer)
    del ddp, loss  # else it ends the process group last, and torch 2.13 may then wait for itself
    dist.destroy_process_group()


def tied_shared_unused(job: Job) -> None:
    """Train as the recipe of the same name in `scenes`."""
    model = Branches(job.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ddp = _wrapped(job, model, find_unused_parameters=True)
    odd: list[bool] = []
    for step in range(job.steps):
        x, _, index = _batch(job, 20, 4, step)
        odd.append(bool(index.sum() % 2))
        loss = ddp(x, odd[-1])
        loss.backward()
        _step(job, model, optimizer, index, loss.item())
    job.facts["odd"] = odd
    job.ended(model, optimizer)
    del ddp, loss  # else it ends the process group last, and torch 2.13 may then wait for itself
    dist.destroy_process_group()


def _step(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, index: torch.Tensor, loss: float
) -> None:
    job.reduced(model)
    job.committed(index, loss)
    optimizer.step()
    optimizer.zero_grad()

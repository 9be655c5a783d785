"""Pipelines of ``torch.distributed.pipelining``: two ranks of a group hold the stages of a GPT."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import LETTERS, WINDOW, Block, Text
from recipe_job import Job
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import fft

WIDTH = 32
MICROBATCHES = 4


class Embed(nn.Module):
    """An embedding of letters and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(WINDOW, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wte(x) + self.wpe(torch.arange(x.shape[1]))


class Normed(nn.Module):
    """A batch norm over the channels: a stage with statistics that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(x.flatten(0, 1)).view_as(x)


def parts(job: Job, count: int) -> list[nn.Module]:
    """Return the whole model cut into ``count`` stages; the weights are equal on all ranks."""
    block = [Block(WIDTH, job.dropout) for _ in range(4)]
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS), bias=False))
    layers = [Embed(), *block[:2], Normed(), *block[2:], head]
    cuts = [round(i * len(layers) / count) for i in range(count + 1)]
    return [nn.Sequential(*layers[a:b]) for a, b in pairwise(cuts)]


def loss_of(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), y.flatten())


def clip(modules: nn.ModuleList, limit: float, group: Any) -> float:
    """Clip by the norm over all stages, as torchtitan does."""
    grads = [p.grad for p in modules.parameters() if p.grad is not None]
    total = torch.stack([g.square().sum() for g in grads]).sum()
    dist.all_reduce(total, group=group)
    norm = total.sqrt()
    torch._foreach_mul_(grads, torch.clamp(limit / (norm + 1e-6), max=1.0))
    return float(norm)


def _train(job: Job, kind: Any, stages_each: int) -> None:
    manager = job.sharded_manager(spec="pipeline")
    group = manager.stage_group()
    count = stages_each * group.size()
    cut = parts(job, count)
    mine = {i: cut[i] for i in range(job.rank, count, group.size())}
    device = torch.device("cpu")
    stages = [PipelineStage(m, i, count, device, group=group) for i, m in mine.items()]
    schedule = kind(stages if stages_each > 1 else stages[0], MICROBATCHES, loss_fn=loss_of)
    modules = nn.ModuleList(mine.values())
    optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-2)
    manager.register(list(modules), optimizer)
    manager.register_pipeline(schedule)
    loader = fft.CursorLoader(Text(), batch_size=8, seed=14)
    job.own_seed()
    has_first, has_last = job.rank == 0, job.rank == group.size() - 1
    norms = []
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            x, y, index = txn.batch
            losses: list[torch.Tensor] = []
            schedule.step(
                *([x] if has_first else []), target=y if has_last else None, losses=losses
            )
            job.reduced(modules)
            norm = clip(modules, 1.0, group)
            loss = torch.stack(losses).mean().detach() if has_last else torch.zeros(())
            dist.broadcast(loss, group_src=group.size() - 1, group=group)
        if txn.committed:
            job.committed(index, loss.item())
            norms.append(norm)
    job.facts["clipped"] = sum(norm > 1.0 for norm in norms)
    job.ended(modules, optimizer)


def one_forward_one_backward(job: Job) -> None:
    """Train with one stage per rank."""
    _train(job, Schedule1F1B, 1)


def interleaved(job: Job) -> None:
    """Train with two stages per rank, run by torch's runtime of actions."""
    _train(job, ScheduleInterleaved1F1B, 2)


def zero_bubble(job: Job) -> None:
    """Train like `interleaved`; gradients of the weights come after those of the inputs, without a
    hook."""
    _train(job, ScheduleInterleavedZeroBubble, 2)

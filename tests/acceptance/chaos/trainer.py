"""One rank of a job for fault injection with a realistic loop: a GPT, also in torch's DDP, a
convolutional network, or a pipeline; a GPT by LocalSGD, by DiLoCo, sharded over the ranks of each
group or not, and by asynchronous DiLoCo.

``trainer.py NAME PACE [NAME=SECONDS ...]``: as `worker.py`, with the parts of real loops beside
loss and backward: accumulation, clipping, schedules, EMA, a scaler, augmentation in workers. Groups
of several ranks shard the model by FSDP2, or hold one pipeline stage each. Replicas are compared
every fourth step. If groups train locally, PACE is that of a synchronization.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchft import ProcessGroupGloo

import fft
from benchmarks.whole_step import CONTEXT, GPT, VOCABULARY, Windows
from tests.acceptance.chaos.alone import ALONE
from tests.acceptance.chaos.worker import LIMIT, LONELY_S

CHECK_EVERY = 4
EVERY = 4
"""Inner steps between synchronizations."""
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Pictures(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """A data set of noise around one of ten patterns, flipped and shifted at random as it is
    loaded."""

    def __init__(self) -> None:
        self.patterns = torch.randn(10, 3, 12, 12, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = self.patterns[index % 10] + 0.3 * torch.randn(3, 12, 12)
        if torch.rand(()) < 0.5:
            picture = picture.flip(2)
        return picture.roll(int(torch.randint(-2, 3, ())), 2), index % 10


class Progressions(torch.utils.data.Dataset[torch.Tensor]):
    """Text that can be learned: each sequence advances by its own stride."""

    def __len__(self) -> int:
        return 1_000_000  # more than a run takes

    def __getitem__(self, index: int) -> torch.Tensor:
        first, stride = divmod(int(index) * 7919, 5)
        return (first + (1 + stride) * torch.arange(CONTEXT)) % VOCABULARY


Body = Callable[[Any], torch.Tensor | None]
"""An attempt at a step, given its batch, or in `pipeline_ahead` its txn; may return the loss."""


def shard(manager: fft.ManagerFFT, model: nn.Module) -> nn.Module:
    """Shard the model by FSDP2 if a group has several ranks."""
    return fully_shard(model, mesh=manager.shard_mesh()) if RANKS > 1 else model


def gpt(manager: fft.ManagerFFT) -> tuple[Body, fft.CursorLoader]:
    """Train as nanoGPT: two micro-batches, clipping, AdamW, a cosine schedule; unsharded with an
    EMA."""
    model = shard(manager, GPT(2, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    if RANKS > 1:
        manager.register(model, optimizer, schedule)
    else:
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
        manager.register(model, optimizer, schedule, extra={"ema": ema})
        manager.on_commit(lambda: ema.update_parameters(model))
    manager.sync_gradients(model, bucket_cap_mb=0.2)

    def body(batch: torch.Tensor) -> None:
        first, second = batch.chunk(2)
        with manager.no_sync():
            (model(first) / 2).backward()
        (model(second) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return body, fft.CursorLoader(Windows(), batch_size=4, seed=5)


def cnn(manager: fft.ManagerFFT) -> tuple[Body, fft.CursorLoader]:
    """Train as torchvision: BatchNorm, autocast with a scaler, SGD, pictures from two workers."""
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2)),
        *(nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )
    model = shard(manager, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 500, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=50)
    manager.register(model, optimizer, schedule, scaler=scaler)
    manager.sync_gradients(model)

    def body(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        pictures, kinds = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = model(pictures)
        scaler.scale(F.cross_entropy(scores.float(), kinds)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)

    return body, fft.CursorLoader(Pictures(), batch_size=8, seed=5, num_workers=2)


def ddp(manager: fft.ManagerFFT) -> tuple[Body, fft.CursorLoader]:
    """Train the GPT in torch's DistributedDataParallel, whose averaging FFT takes over."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(),
                                         rank=0, world_size=1)  # fmt: skip
    model = nn.parallel.DistributedDataParallel(GPT(2, 64), bucket_cap_mb=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager.register(model, optimizer)

    def body(batch: torch.Tensor) -> None:
        first, second = batch.chunk(2)
        with model.no_sync():
            (model(first) / 2).backward()
        (model(second) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return body, fft.CursorLoader(Windows(), batch_size=4, seed=5)


class Stage(nn.Module):
    """The part of a GPT that one of ``count`` ranks holds."""

    def __init__(self, whole: GPT, rank: int, count: int) -> None:
        super().__init__()
        each = len(whole.blocks) // count
        self.blocks = whole.blocks[rank * each : (rank + 1) * each]
        self.first = whole.token if rank == 0 else None
        self.place = whole.place if rank == 0 else None
        self.last = nn.Sequential(whole.norm, whole.head) if rank == count - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is not None and self.place is not None:
            x = self.first(x) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return x if self.last is None else self.last(x)


def pipeline(manager: fft.ManagerFFT) -> tuple[Body, fft.CursorLoader]:
    """Train the GPT with one stage per rank, 1F1B, clipped by the norm over all stages."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # half a second

    group, whole = manager.stage_group(), GPT(2, 64)
    rank, count = group.rank(), group.size()
    module = Stage(whole, rank, count)
    stage = PipelineStage(module, rank, count, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 4, loss_fn=_next_tokens)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    manager.register(module, optimizer)
    manager.register_pipeline(schedule, bucket_cap_mb=0.2)

    def body(batch: torch.Tensor) -> None:
        inputs, following = [batch] if rank == 0 else [], batch.roll(-1, 1)
        schedule.step(*inputs, target=following if rank == count - 1 else None)
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        norm = torch.stack([g.square().sum() for g in grads]).sum()
        torch.distributed.all_reduce(norm, group=group)
        torch._foreach_mul_(grads, torch.clamp(1 / norm.sqrt(), max=1.0))

    return body, fft.CursorLoader(Windows(), batch_size=8, seed=5)


def _next_tokens(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), following.flatten())


def pipeline_ahead(manager: fft.ManagerFFT) -> tuple[Body, Any]:
    """Train the GPT's halves as stages with a scope each; the first has its own head."""
    whole = GPT(2, 64)
    rank = int(os.environ["RANK"])
    model = nn.ModuleDict({"stage": Stage(whole, rank, 2), "head": Stage(GPT(2, 64), 1, 2)})
    if rank:
        del model["head"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager.register(model, optimizer)
    manager.sync_gradients(model, bucket_cap_mb=0.2)
    loader = fft.CursorLoader(Progressions(), batch_size=4, seed=5)

    def learn(scores: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        loss = _next_tokens(scores[:, :-1], batch[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss.detach()

    if rank:

        def last(txn: fft.Transaction) -> torch.Tensor:
            vectors, batch = txn.batch
            return learn(model["stage"](vectors), batch)

        return last, fft.StageInput(manager, loader)
    output = fft.StageOutput(manager, lambda batch: (model["stage"](batch), batch))

    def first(txn: fft.Transaction) -> torch.Tensor:
        vectors = model["stage"](txn.batch)
        output.put(txn, (vectors, txn.batch))
        return learn(model["head"](vectors), txn.batch)

    return first, loader


def alone(manager: fft.ManagerFFT, make: Callable[..., Any]) -> tuple[Body, fft.CursorLoader]:
    """Train the GPT locally in each group, on all its ranks; ``make`` synchronizes the groups."""
    model = shard(manager, GPT(2, 64))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager.register(model, inner)
    make(manager, model, inner)

    def body(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss.detach()

    return body, fft.CursorLoader(Progressions(), batch_size=4, seed=5)


def local_sgd(manager: fft.ManagerFFT) -> tuple[Body, fft.CursorLoader]:
    """Average the groups' parameters."""

    def make(manager: fft.ManagerFFT, model: Any, inner: torch.optim.Optimizer) -> fft.LocalSGD:
        return fft.LocalSGD(manager, model, inner, EVERY)

    return alone(manager, make)


def diloco(manager: fft.ManagerFFT) -> tuple[Body, fft.CursorLoader]:
    """Train by streaming DiLoCo: two fragments in turn, each reduced beside one inner step."""

    def make(manager: fft.ManagerFFT, model: Any, inner: torch.optim.Optimizer) -> fft.DiLoCo:
        halves = [
            nn.ModuleList([model.token, model.place, model.blocks[0]]),
            nn.ModuleList([model.blocks[1], model.norm, model.head]),
        ]
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        return fft.DiLoCo(manager, halves, inner, outer, 2 * EVERY, fragment_sync_delay=1)

    return alone(manager, make)


def asynchronous(manager: fft.ManagerFFT) -> tuple[Body, fft.CursorLoader]:
    """Train by asynchronous DiLoCo; the members of a synchronization vary."""

    def make(manager: fft.ManagerFFT, model: Any, inner: torch.optim.Optimizer) -> fft.DiLoCo:
        outer = torch.optim.SGD(model.parameters(), lr=0.7)
        return fft.DiLoCo(manager, [model], inner, outer, EVERY)

    return alone(manager, make)


BODIES = {
    "gpt": gpt,
    "cnn": cnn,
    "ddp": ddp,
    "pipeline": pipeline,
    "pipeline_ahead": pipeline_ahead,
    "local_sgd": local_sgd,
    "diloco": diloco,
    "hsdp_diloco": diloco,
    "async": asynchronous,
}


def main() -> None:
    """Train until the job is drained."""
    name, pace, given = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
    timeouts = {key: float(value) for key, _, value in (word.partition("=") for word in given)}
    group, groups = os.environ["REPLICA_GROUP_ID"], int(os.environ["NUM_REPLICA_GROUPS"])
    torch.set_num_threads(1)
    # on a busy machine a group may start late; asynchronous groups do not wait for others
    joins = {"join_window": 0.2, "join_interval": 0.1} if name == "async" else {"join_window": 30.0}
    shards = RANKS > 1 and name != "pipeline_ahead"
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id=group,
        init_sync=False,
        connect_timeout=timedelta(seconds=10),
        timeouts={**joins, **timeouts},
        config=fft.ManagerConfig(digest="commit", check_replicas=CHECK_EVERY),
        shard_pg=fft.ShardProcessGroupGloo(timeout=LIMIT) if shards else None,
        spec="hsdp" if name in ("gpt", "cnn") else name,
    )
    torch.manual_seed(3)
    body, loader = BODIES[name](manager)
    torch.manual_seed(100 + int(group))
    pace, lonely = pace / (EVERY if name in ALONE else 1), 0
    try:
        for txn in manager.transactions(loader):
            with txn:
                whole = manager.num_participants() == groups
                time.sleep(pace if whole or not lonely else max(pace, LONELY_S))
                loss = body(txn if name == "pipeline_ahead" else txn.batch)
                if loss is not None:
                    txn.log(loss=loss.item())
            if txn.committed:
                lonely = 0 if whole else lonely + 1
    finally:
        manager.shutdown()


if __name__ == "__main__":
    main()

"""Language models, as nanoGPT and torchtitan train them."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext

import torch
from corpus import GPT, LETTERS, WINDOW, Text
from recipe_job import Job
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import fft

WARMUP = 2
SAVE_EVERY = 3


def weight_groups(model: nn.Module) -> list[dict[str, object]]:
    """Matrices decay, vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    def factor(step: int) -> float:
        if step < WARMUP:
            return (step + 1) / WARMUP
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def clipping_accumulation_ema(job: Job) -> None:
    """Two micro-batches a step, gradients clipped by their norm, an average of the weights."""
    model = GPT(job.dropout)
    optimizer = torch.optim.AdamW(weight_groups(model), lr=1e-2, betas=(0.9, 0.95))
    schedule = cosine(optimizer, job.steps)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    manager = job.manager()
    manager.register(model, optimizer, schedule, extra={"ema": ema})
    manager.sync_gradients(model)
    manager.on_commit(lambda: ema.update_parameters(model))
    loader = fft.CursorLoader(Text(), batch_size=8, seed=5)
    job.own_seed()
    norms: list[float] = []
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            x, y, index = txn.batch
            micro = list(zip(x.chunk(2), y.chunk(2), strict=True))
            with manager.no_sync():
                for a, b in micro[:-1]:
                    (model(a, b) / len(micro)).backward()
            loss = model(*micro[-1])
            (loss / len(micro)).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            job.reduced(model)
        if txn.committed:
            job.committed(index, loss.item())
            norms.append(float(norm))
    job.facts["clipped"] = sum(norm > 0.5 for norm in norms)
    job.ended(model, optimizer, schedule, ema=ema)


def accumulation_without_no_sync(job: Job) -> None:
    """Every micro-batch is reduced; the values of the gradients are clipped."""
    model = GPT(job.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    manager = job.manager()
    manager.register(model, optimizer)
    manager.sync_gradients(model, bucket_cap_mb=0.01)
    loader = fft.CursorLoader(Text(), batch_size=8, seed=6)
    job.own_seed()
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            x, y, index = txn.batch
            total = 0.0
            for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
                loss = model(a, b) / 4
                loss.backward()
                total += loss.item()
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            job.reduced(model)
        if txn.committed:
            job.committed(index, total)
    job.ended(model, optimizer)


class Lora(nn.Module):
    """A frozen linear layer and a trained update of rank 4."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def lora(job: Job) -> None:
    """A frozen base with adapters; the head is unfrozen halfway."""
    model = GPT(job.dropout).requires_grad_(False)
    for block in model.h:
        block.c_attn, block.c_proj = Lora(block.c_attn), Lora(block.c_proj)
        block.mlp[0], block.mlp[2] = Lora(block.mlp[0]), Lora(block.mlp[2])
    frozen = model.wte.weight.clone()
    head = model.lm_head.weight
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([*adapters, head], lr=3e-2, weight_decay=0.0)
    manager = job.manager()
    manager.register(model, optimizer)
    manager.sync_gradients(model)
    loader = fft.CursorLoader(Text(), batch_size=8, seed=7)
    job.own_seed()
    for txn in manager.transactions(loader, max_steps=job.steps):
        if txn.step >= job.steps // 2:
            head.requires_grad_()
        with txn:
            x, y, index = txn.batch
            loss = model(x, y)
            loss.backward()
        if txn.committed:
            job.committed(index, loss.item())
    assert torch.equal(frozen, model.wte.weight)
    job.ended(model, optimizer)


def _checkpointed(model: GPT, use_reentrant: bool) -> None:
    for block in model.h:
        forward = block.forward
        block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=use_reentrant)


def _activation_checkpointing(job: Job, use_reentrant: bool) -> None:
    model = GPT(job.dropout)
    _checkpointed(model, use_reentrant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = job.manager()
    manager.register(model, optimizer)
    manager.sync_gradients(model, bucket_cap_mb=0.01)
    loader = fft.CursorLoader(Text(), batch_size=8, seed=8)
    job.own_seed()
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            x, y, index = txn.batch
            loss = model(x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if txn.committed:
            job.committed(index, loss.item())
    job.ended(model, optimizer)


def activation_checkpointing(job: Job) -> None:
    """Blocks are computed again in backward, within it."""
    _activation_checkpointing(job, use_reentrant=False)


def activation_checkpointing_reentrant(job: Job) -> None:
    """Blocks are computed again by a backward inside the backward."""
    _activation_checkpointing(job, use_reentrant=True)


def eval_inside(job: Job) -> None:
    """Validation between steps and inside a body, both with random draws of their own."""
    model = GPT(job.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = job.manager()
    manager.register(model, optimizer)
    manager.sync_gradients(model)
    text = Text()
    loader = fft.CursorLoader(text, batch_size=8, seed=9)
    job.own_seed()

    @torch.no_grad()
    def validate() -> float:
        model.eval()
        drawn = [text[int(i)] for i in torch.randint(len(text), (4,))]
        loss = model(torch.stack([d[0] for d in drawn]), torch.stack([d[1] for d in drawn]))
        model.train()
        return float(loss)

    held_out: list[float] = []
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            x, y, index = txn.batch
            loss = model(x, y)
            loss.backward()
            inside = validate()
        if txn.committed:
            job.committed(index, loss.item())
            held_out.append(inside)
            if txn.step % 2:
                held_out.append(validate())
    job.facts["held_out"] = held_out
    job.ended(model, optimizer)


def checkpoint_and_resume(job: Job) -> None:
    """The first recipe, which saves every third step and begins from what was saved."""
    saved = job.folder / f"checkpoint-{job.group}.pt"
    model = GPT(job.dropout)
    optimizer = torch.optim.AdamW(weight_groups(model), lr=1e-2, betas=(0.9, 0.95))
    schedule = cosine(optimizer, job.steps)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    manager = job.manager()
    manager.register(model, optimizer, schedule, extra={"ema": ema})
    manager.sync_gradients(model)
    manager.on_commit(lambda: ema.update_parameters(model))
    loader = fft.CursorLoader(Text(), batch_size=8, seed=5)
    job.own_seed()
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "ema": ema}
    if saved.exists():
        state = torch.load(saved)
        for name, part in parts.items():
            part.load_state_dict(state[name])  # type: ignore[attr-defined]
        manager.load_state_dict(state["manager"])
        torch.set_rng_state(state["rng"])
    for txn in manager.transactions(loader, max_steps=job.steps if job.is_last else 5):
        with txn:
            x, y, index = txn.batch
            loss = model(x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if txn.committed:
            job.committed(index, loss.item())
            if manager.current_step() % SAVE_EVERY == 0:
                with manager.atomic():
                    state = {name: part.state_dict() for name, part in parts.items()}  # type: ignore[attr-defined]
                    state |= {"manager": manager.state_dict(), "rng": torch.get_rng_state()}
                    torch.save(state, saved.with_suffix(".new"))
                    os.replace(saved.with_suffix(".new"), saved)
    job.ended(model, optimizer, schedule, ema=ema)


def mixed_precision(job: Job) -> None:
    """Autocast to float16 under a scale that is too large for the first steps."""
    model = GPT(job.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = cosine(optimizer, job.steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    manager = job.manager()
    manager.register(model, optimizer, schedule, scaler=scaler)
    manager.sync_gradients(model)
    loader = fft.CursorLoader(Text(), batch_size=8, seed=10)
    job.own_seed()
    scales: list[float] = []  # of all steps, those skipped, too
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            x, y, index = txn.batch
            with torch.autocast("cpu", torch.float16):
                loss = model(x, y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if txn.committed:
            scales.append(scaler.get_scale())
            if manager.current_step() > txn.step:  # else it was skipped
                job.committed(index, loss.item())
    job.facts["scales"] = scales
    job.ended(model, optimizer, schedule, scaler=scaler)


def bfloat16(job: Job) -> None:
    """Autocast to bfloat16, which needs no scale; gradients are reduced in it, too."""
    model = GPT(job.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = job.manager()
    manager.register(model, optimizer)
    manager.sync_gradients(model, reduce_dtype=torch.bfloat16)
    loader = fft.CursorLoader(Text(), batch_size=8, seed=10)
    job.own_seed()
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            x, y, index = txn.batch
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x, y)
            loss.backward()
        if txn.committed:
            job.committed(index, loss.item())
    job.ended(model, optimizer)


def _compiled(job: Job, model: GPT) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = job.manager()
    manager.register(model, optimizer)
    manager.sync_gradients(model)
    loader = fft.CursorLoader(Text(), batch_size=8, seed=11)
    job.own_seed()
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            x, y, index = txn.batch
            loss = model(x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if txn.committed:
            job.committed(index, loss.item())
    job.ended(model, optimizer)
    torch.compiler.reset()


def compiled(job: Job) -> None:
    """The model as a whole, through dynamo and AOTAutograd."""
    model = GPT(job.dropout)
    model.compile(backend="aot_eager")
    _compiled(job, model)


def compiled_by_inductor(job: Job) -> None:
    """Block by block, as torchtitan does, through the whole of ``torch.compile``."""
    model = GPT(job.dropout)
    for block in model.h:
        block.compile()
    _compiled(job, model)


def hugging_face(job: Job) -> None:
    """A model of transformers, made from a configuration, as its examples train."""
    from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

    config = GPT2Config(
        vocab_size=len(LETTERS), n_positions=WINDOW, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=job.dropout, embd_pdrop=job.dropout, attn_pdrop=job.dropout,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, 2 * job.steps)
    manager = job.manager()
    manager.register(model, optimizer, schedule)
    manager.sync_gradients(model)
    loader = fft.CursorLoader(Text(), batch_size=8, seed=12)
    job.own_seed()
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            x, _, index = txn.batch
            loss = model(input_ids=x, labels=x).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if txn.committed:
            job.committed(index, loss.item())
    job.ended(model, optimizer, schedule)


def sharded(model: GPT, manager: fft.ManagerFFT) -> GPT:
    """Over the ranks of the group, block by block."""
    mesh = manager.shard_mesh()
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def hsdp_clipping_accumulation(job: Job) -> None:
    """FSDP2 within the group: two micro-batches, the norm of DTensors, as torchtitan trains, and an
    average of the weights, of which each rank has its shard."""
    manager = job.sharded_manager()
    model = sharded(GPT(job.dropout), manager)
    optimizer = torch.optim.AdamW(weight_groups(model), lr=1e-2)
    schedule = cosine(optimizer, job.steps)
    ema = nn.ParameterList(nn.Parameter(p.detach().clone(), False) for p in model.parameters())

    @torch.no_grad()
    def average() -> None:
        torch._foreach_lerp_(list(ema), list(model.parameters()), 0.1)

    manager.register(model, optimizer, schedule, extra={"ema": ema})
    manager.sync_gradients(model)
    manager.on_commit(average)
    loader = fft.CursorLoader(Text(), batch_size=4, seed=13)
    job.own_seed()
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            x, y, index = txn.batch
            micro = list(zip(x.chunk(2), y.chunk(2), strict=True))
            for i, (a, b) in enumerate(micro):
                is_last = i + 1 == len(micro)
                model.set_requires_gradient_sync(is_last)
                with nullcontext() if is_last else manager.no_sync():
                    loss = model(a, b)
                    (loss / len(micro)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if txn.committed:
            job.committed(index, loss.item())
    job.ended(model, optimizer, schedule, ema=ema)


def hsdp_evaluation(job: Job) -> None:
    """FSDP2 within the group, and a validation between two steps, which gathers the weights."""
    # ranks may fingerprint in unlike steps, as they measure what it costs
    manager = job.sharded_manager(check_replicas=1 << job.rank)
    model = sharded(GPT(job.dropout), manager)
    optimizer = torch.optim.AdamW(weight_groups(model), lr=1e-2)
    manager.register(model, optimizer)
    manager.sync_gradients(model)
    text = Text()
    held_out = [text[i] for i in range(8)]
    loader = fft.CursorLoader(text, batch_size=4, seed=14)
    job.own_seed()

    @torch.no_grad()
    def validate() -> float:
        model.eval()
        x, y = (torch.stack([item[i] for item in held_out]) for i in range(2))
        losses = [float(model(a, b)) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
        model.train()
        return sum(losses) / len(losses)

    losses: list[float] = []
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            x, y, index = txn.batch
            loss = model(x, y)
            loss.backward()
        if txn.committed:
            job.committed(index, loss.item())
            if manager.current_step() % 2:
                losses.append(validate())
    job.facts["held_out"] = losses
    job.ended(model, optimizer)

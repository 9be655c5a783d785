"""Recipes of groups that train locally and synchronize: LocalSGD, DiLoCo, streaming, by weights."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from corpus import GPT, Text, Vectors, perceptron
from islands import Islands
from recipe_job import Job
from slow_link import Link
from torch import nn
from torch.distributed.fsdp import fully_shard

import fft

EVERY = 3
"""Inner steps between two synchronizations."""
Body = Callable[[nn.Module, Any], torch.Tensor]


def _train(
    job: Job,
    manager: fft.ManagerFFT,
    loader: fft.CursorLoader,
    model: nn.Module,
    inner: torch.optim.Optimizer,
    synchronizer: fft.DiLoCo | fft.LocalSGD,
    schedule: Any,
    body: Callable[[Any], torch.Tensor],
    **others: Any,
) -> None:
    job.own_seed()
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            loss = body(txn)
        if txn.committed:
            job.committed(txn.batch[-1], loss.item())
    job.ended(model, inner, schedule, shared=synchronizer, **others)


def local_sgd(job: Job) -> None:
    """Average the parameters, weighted by the groups' numbers of samples, which differ."""
    model = perceptron(job.dropout)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = job.manager(spec="local_sgd")
    manager.register(model, inner)
    synchronizer = fft.LocalSGD(manager, model, inner, EVERY, weighted=True)
    loader = fft.CursorLoader(Vectors(), batch_size=8, seed=30)

    def body(txn: Any) -> torch.Tensor:
        x, y, index = txn.batch
        used = 4 + int(index[0]) % 5
        loss = F.mse_loss(model(x[:used]), y[:used])
        loss.backward()
        txn.weigh(used)
        return loss

    _train(job, manager, loader, model, inner, synchronizer, None, body)


def diloco(job: Job) -> None:
    """Train a GPT with clipping and a schedule, as one fragment."""
    model = GPT(job.dropout)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, job.steps * EVERY)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = job.manager(spec="diloco")
    manager.register(model, inner, schedule)
    synchronizer = fft.DiLoCo(manager, [model], inner, outer, EVERY)
    loader = fft.CursorLoader(Text(), batch_size=4, seed=31, num_workers=1)

    def body(txn: Any) -> torch.Tensor:
        x, y, _ = txn.batch
        loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    _train(job, manager, loader, model, inner, synchronizer, schedule, body)


class _Mean:
    """A mean of the weights, taken at each step."""

    def __init__(self, model: nn.Module) -> None:
        self.average = torch.optim.swa_utils.AveragedModel(
            model, avg_fn=lambda a, b, n: a + (b - a) / 4
        )

    def state_dict(self) -> dict[str, Any]:
        return self.average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state)


def streaming(job: Job) -> None:
    """Train two fragments in turn, reduced beside a step, with mixed precision and averaged
    weights."""
    model = GPT(job.dropout)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    halves = [nn.ModuleList([model.wte, model.wpe, model.h[0]]),
              nn.ModuleList([model.h[1], model.ln_f, model.lm_head])]  # fmt: skip
    outer = [torch.optim.SGD(half.parameters(), lr=0.5, momentum=0.5) for half in halves]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=8)
    mean = _Mean(model)
    manager = job.manager(spec="diloco")
    manager.register(model, inner, scaler=scaler, extra={"mean": mean})
    manager.on_commit(lambda: mean.average.update_parameters(model))
    synchronizer = fft.DiLoCo(
        manager, halves, inner, outer, 2 * EVERY, bucket_cap_mb=0.01,
        fragment_sync_delay=1, fragment_update_alpha=0.25,
    )  # fmt: skip
    loader = fft.CursorLoader(Text(), batch_size=4, seed=32)

    def body(txn: Any) -> torch.Tensor:
        x, y, _ = txn.batch
        with torch.autocast("cpu", torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        return loss

    _train(job, manager, loader, model, inner, synchronizer, None, body, scaler=scaler, mean=mean)


class Trouble:
    """A disturbance of a rank, once, in one inner step; this base class does nothing."""

    is_met = False
    """Whether group 0 waits for it."""

    def __init__(
        self, manager: fft.ManagerFFT, inner: torch.optim.Optimizer, meeting: Path
    ) -> None:
        self.manager, self.inner, self.meeting = manager, inner, meeting

    def meet(self) -> None:
        """Signal group 0, which waits for this, to continue to its fault."""
        self.meeting.write_bytes(b"here")

    @staticmethod
    def mate(manager: fft.ManagerFFT, folder: Path) -> None:
        """Prepare the other rank of the group, before the loop."""

    def at(self, place: str) -> None:
        """Act when the step is at ``place``: ``begin`` or ``end`` of its step function."""


def _until_cut() -> None:
    """Wait until the rollback of the job interrupts this; the bound is for a bug."""
    threading.Event().wait(60)
    raise AssertionError("nobody has interrupted this body")


class HeldInBody(Trouble):
    """It is in its step function when the job rolls back; its mate waits in a collective."""

    is_met = True

    def at(self, place: str) -> None:
        if place == "begin":
            self.meet()
            _until_cut()


class HeldBeforeVote(Trouble):
    """It has computed everything when the job rolls back; its mate has voted."""

    is_met = True

    def at(self, place: str) -> None:
        if place == "end":
            self.meet()
            _until_cut()


class HeldForMate(Trouble):
    """It is in an uninterruptible section until its mate, which has voted, has returned to the job.

    If the mate waited for the decision of this step first, both would wait for ever.
    """

    is_met = True

    @staticmethod
    def mate(manager: fft.ManagerFFT, folder: Path) -> None:
        paradigm: Any = manager._parts.paradigm
        own = paradigm.restore

        def tell() -> None:
            paradigm.restore = own
            own()
            (folder / "restored").write_bytes(b"here")

        paradigm.restore = tell

    def at(self, place: str) -> None:
        if place == "end":
            with self.manager.atomic():
                self.meet()
                (self.meeting.parent / "restored").read_bytes()


class Decided(Trouble):
    """The step is committed, but not applied here, when the job rolls back."""

    is_met = True

    def at(self, place: str) -> None:
        if place == "begin":
            return
        scope: Any = self.manager._parts.state.paradigm.inner  # type: ignore[attr-defined]
        own = scope._next

        def both_have_a_word() -> Any:
            scope._next = own
            scope._engine.wait_command()
            self.meet()
            self.manager._parts.job.engine.wait_command()
            return own()

        scope._next = both_have_a_word


class Torn(Trouble):
    """Its update fails after the COMMIT."""

    def at(self, place: str) -> None:
        def fail(*_: Any) -> None:
            hook.remove()
            raise RuntimeError("the update fails")

        if place == "end":
            hook = self.inner.register_step_pre_hook(fail)


def _islands(
    job: Job,
    trouble: type[Trouble] = Trouble,
    inner_step: int = 1,
    watch: Callable[[int, int], None] = lambda step, inner_step: None,
) -> None:
    """Train with ``trouble`` of rank 1 of group 1 in that inner step after the second txn."""
    manager = job.sharded_manager(spec="hsdp_diloco")
    mesh = manager.shard_mesh()
    model = GPT(job.dropout)
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, job.steps * EVERY)
    halves = [nn.ModuleList([model.wte, model.wpe, model.h[0]]),
              nn.ModuleList([model.h[1], model.ln_f, model.lm_head])]  # fmt: skip
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager.register(model, inner, schedule)
    synchronizer = fft.DiLoCo(manager, halves, inner, outer, 2 * EVERY, fragment_sync_delay=1)
    loader = fft.CursorLoader(Text(), batch_size=4, seed=33)
    last: list[Any] = []
    # not after the step function: the decision of a step may follow a rollback of the job
    manager.on_commit(lambda: job.committed(*last))
    meeting = job.folder / "meeting"
    for pipe in (meeting, job.folder / "restored"):
        with suppress(FileExistsError):
            os.mkfifo(pipe)
    if (job.group, job.rank) == (1, 0):
        trouble.mate(manager, job.folder)
    due = [trouble(manager, inner, meeting)] if (job.group, job.rank) == (1, 1) else []
    waits = trouble.is_met and (job.group, job.rank) == (0, 0)
    job.own_seed()
    for txn in manager.transactions(loader, max_steps=job.steps):
        with txn:
            watch(txn.step, txn.inner_step)
            if waits and (txn.step, txn.inner_step) == (2, inner_step):
                waits = not meeting.read_bytes()
            now = due.pop() if due and (txn.step, txn.inner_step) == (2, inner_step) else None
            if now is not None:
                now.at("begin")
            x, y, index = txn.batch
            loss = model(x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            last[:] = index, loss.item()
            if now is not None:
                now.at("end")
    job.ended(model, inner, schedule, shared=synchronizer)


def hsdp_diloco(job: Job) -> None:
    """Train the GPT of `diloco`, with each group's shards on two ranks, as two fragments."""
    _islands(job)


def held_in_body(job: Job) -> None:
    """Run `hsdp_diloco` with this trouble."""
    _islands(job, HeldInBody)


def held_before_vote(job: Job) -> None:
    """Run `hsdp_diloco` with this trouble."""
    _islands(job, HeldBeforeVote)


def held_for_mate(job: Job) -> None:
    """Run `hsdp_diloco` with this trouble."""
    _islands(job, HeldForMate)


def decided(job: Job) -> None:
    """Run `hsdp_diloco` with this trouble."""
    _islands(job, Decided)


def torn(job: Job) -> None:
    """Run `hsdp_diloco` with this trouble."""
    _islands(job, Torn)


def slow_link(job: Job) -> None:
    """Run `hsdp_diloco` while group 1's links to the job's bus carry nothing during one window."""
    if job.group == 0:
        _islands(job)
        return
    link = Link(job.bus)
    job.bus = link.url

    def hold(step: int, inner_step: int) -> None:
        if (step, inner_step) == (2, 0):
            link.hold()
        if (step, inner_step) == (2, EVERY - 1):
            job.facts["steps_without_bus"] = inner_step
            link.release()

    try:
        _islands(job, watch=hold)
    finally:
        job._ends.append(link.close)  # after the manager


def far_islands(job: Job) -> None:
    """Run `hsdp_diloco` with 20 ms latency and 1 MB/s between the groups."""
    islands = Islands(job, 0.02, 1e6)
    job.facts["carried"] = islands.carried
    job._ends.append(islands.close)  # after the manager
    _islands(job)


def torn_last(job: Job) -> None:
    """Run `hsdp_diloco` with this trouble before a synchronization, in which the mate may already
    be."""
    _islands(job, Torn, EVERY - 1)

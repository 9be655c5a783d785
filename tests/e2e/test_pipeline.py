"""Tests of refused pipelines, which could not be rolled back or would be averaged wrongly.

The recipes (tests/recipes/pipelines.py) test their training and its bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stage import WIDTH, Member, batch_of, job
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
)
from torch.nn.parallel import DistributedDataParallel
from torchft.process_group import ProcessGroupDummy

import fft
from fft.errors import FftError

CPU = torch.device("cpu")


class Stages:
    """Both stages of a pipeline on the one rank of a group."""

    def __init__(self, member: Member, group: Any = None) -> None:
        self.modules: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)]
        with torch.no_grad():  # equal in all groups, whose threads share torch's generator
            for p in (p for module in self.modules for p in module.parameters()):
                p.copy_(torch.linspace(-0.4, 0.5, p.numel()).view_as(p))
        self.group = group or member.manager.stage_group()
        self.manager = member.manager

    def made(self, wrap: Callable[[nn.Module], nn.Module] = lambda m: m) -> list[PipelineStage]:
        return [
            PipelineStage(wrap(m), i, len(self.modules), CPU, group=self.group)
            for i, m in enumerate(self.modules)
        ]

    def register(self, modules: list[nn.Module] | None = None) -> None:
        found = modules or self.modules
        optimizer = torch.optim.SGD([p for m in found for p in m.parameters()], lr=0.1)
        self.manager.register(found, optimizer)


def on_its_thread(tmp_path: Path, work: Callable[[Member], None], **settings: Any) -> None:
    """Run ``work`` in a job of one group of one rank; raise its error."""
    shard = fft.ShardProcessGroupGloo()
    settings = {"spec": "pipeline", "shard_pg": shard, **settings}
    try:
        with job(tmp_path, 1) as made:
            made.run(work, register=False, **settings)
    finally:
        shard.unregister()


def refusal(tmp_path: Path, work: Callable[[Member], None], **settings: Any) -> str:
    with pytest.raises(FftError) as error:
        on_its_thread(tmp_path, work, **settings)
    return str(error.value)


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(y, target)


def test_two_stages_on_one_rank_train_and_a_stale_loss_is_dropped(tmp_path: Path) -> None:
    """The step function raises between two microbatches, when the schedule holds losses of the
    first."""
    ended: dict[bool, list[torch.Tensor]] = {}
    for fails in (False, True):

        def work(member: Member, fails: bool = fails) -> None:
            stages = Stages(member)
            left = [fails]

            def raising_loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                if left[0] and schedule._internal_losses:
                    left[0] = False
                    raise RuntimeError("in the loss of a later microbatch")
                return F.mse_loss(y, target)

            schedule = ScheduleInterleaved1F1B(stages.made(), 4, loss_fn=raising_loss)
            stages.register()
            member.manager.register_pipeline(schedule)
            stages.register()  # a registered pipeline stage stays one
            loader = fft.CursorLoader(range(64), batch_size=8, seed=1)
            for txn in member.manager.transactions(loader, max_steps=4):
                with txn:
                    x = batch_of(txn.batch)
                    schedule.step(x, target=x.mean(1, keepdim=True))
            ended[fails] = [p.detach() for m in stages.modules for p in m.parameters()]
            assert left == [False]

        on_its_thread(tmp_path / str(fails), work)
    assert all(torch.equal(a, b) for a, b in zip(ended[False], ended[True], strict=True))


def test_gradients_are_the_mean_over_microbatches_and_groups(tmp_path: Path) -> None:
    """They equal those of all samples at once, also after one of the groups has left."""
    found: dict[tuple[str, int], tuple[list[Any], list[Any]]] = {}

    def work(member: Member) -> None:
        stages = Stages(member)
        schedule = ScheduleInterleaved1F1B(stages.made(), 4, loss_fn=loss_of)
        stages.register()
        member.manager.register_pipeline(schedule)
        loader = fft.CursorLoader(range(64), batch_size=8, seed=1)
        for txn in member.manager.transactions(loader, max_steps=4):
            if txn.step == 2 and member.group == "1":
                member.manager.drain()
            with txn:
                x = batch_of(txn.batch)
                before = copy.deepcopy(nn.Sequential(*stages.modules))
                schedule.step(x, target=x.mean(1, keepdim=True))
                grads = [p.grad.clone() for m in stages.modules for p in m.parameters()]
            if txn.committed:
                loss_of(before(x), x.mean(1, keepdim=True)).backward()
                alone = [p.grad for p in before.parameters()]
                found[member.group, txn.step] = (grads, alone)

    shards = [fft.ShardProcessGroupGloo() for _ in range(2)]
    try:
        with job(tmp_path, 2) as made:
            for group, shard in zip("01", shards, strict=True):
                made.member(group, register=False, spec="pipeline", shard_pg=shard).start(work)
            for member in made.members:
                member.end()
                assert member.error is None, member.error
    finally:
        for shard in shards:
            shard.unregister()
    assert {step for group, step in found if group == "1"} == {0, 1, 2}
    for step in range(4):
        groups = [found[group, step] for group in "01" if (group, step) in found]
        assert len(groups) == (2 if step < 3 else 1)
        for grads, _ in groups:
            means = [
                torch.stack(g).mean(0) for g in zip(*(alone for _, alone in groups), strict=True)
            ]
            for grad, mean in zip(grads, means, strict=True):
                torch.testing.assert_close(grad, mean)


def test_unregistered_schedule_is_refused_by_name(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        stages = Stages(member)
        schedule = ScheduleInterleaved1F1B(stages.made(), 4, loss_fn=loss_of)
        stages.register()
        for txn in member.manager.transactions(fft.CursorLoader(range(64), 8), max_steps=1):
            with txn:
                schedule.step(batch_of(txn.batch), target=batch_of(txn.batch)[:, :1])

    output = refusal(tmp_path, work)
    assert "ScheduleInterleaved1F1B over manager.stage_group() is not registered" in output


def test_a_frozen_stage_is_named(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        stages = Stages(member)
        stages.register()
        stages.modules[0].requires_grad_(False)
        schedule = ScheduleInterleaved1F1B(stages.made(), 4, loss_fn=loss_of)
        member.manager.register_pipeline(schedule)

    assert "stage 0 has no parameter that is trained" in refusal(tmp_path, work)


def test_spec_without_stages_is_refused_with_the_right_one(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        stages = Stages(member)
        stages.register()
        schedule = ScheduleInterleaved1F1B(stages.made(), 4, loss_fn=loss_of)
        member.manager.register_pipeline(schedule)

    output = refusal(tmp_path, work, spec="hsdp")
    assert "with spec='hsdp'" in output and "use spec='pipeline'" in output


def test_there_is_no_stage_group_without_one_to_abort(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        member.manager.stage_group()

    output = refusal(tmp_path, work, shard_pg=None)
    assert "stage_group() needs shard_pg=fft.ShardProcessGroupGloo" in output


def test_a_schedule_that_cannot_be_cleared_is_named(tmp_path: Path) -> None:
    class Mine(ScheduleInterleaved1F1B):
        """A schedule that may have its own state."""

    def work(member: Member) -> None:
        stages = Stages(member)
        stages.register()
        member.manager.register_pipeline(Mine(stages.made(), 4, loss_fn=loss_of))

    assert "must clear in a" in (output := refusal(tmp_path, work))
    assert "Mine; use one of ScheduleGPipe" in output


@pytest.mark.parametrize("kind", [ScheduleDualPipeV, PipelineScheduleMulti])
def test_untested_schedules_are_refused(kind: type) -> None:
    from fft.train.paradigms.pipeline.schedule import refuse_unfit

    with pytest.raises(FftError, match=f"must clear in a {kind.__name__}"):
        refuse_unfit(object.__new__(kind), None, [])


def test_a_schedule_without_a_loss_is_refused(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        stages = Stages(member)
        stages.register()
        member.manager.register_pipeline(ScheduleInterleaved1F1B(stages.made(), 4))

    assert "made without loss_fn" in refusal(tmp_path, work)


def test_stages_over_another_process_group_are_refused(tmp_path: Path) -> None:
    other = fft.ShardProcessGroupGloo()

    def work(member: Member) -> None:
        stages = Stages(member)
        stages.register()
        made = stages.made()
        made[1].group = other
        member.manager.register_pipeline(ScheduleInterleaved1F1B(made, 4, loss_fn=loss_of))

    output = refusal(tmp_path, work)
    assert "stage 1" in output and "group=manager.stage_group()" in output


def test_a_wrapped_stage_is_refused(tmp_path: Path) -> None:
    def wrap(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, process_group=ProcessGroupDummy(0, 1))

    def work(member: Member) -> None:
        stages = Stages(member)
        stages.register()
        made = stages.made(wrap)
        member.manager.register_pipeline(ScheduleInterleaved1F1B(made, 4, loss_fn=loss_of))

    output = refusal(tmp_path, work)
    assert "stage 0 is wrapped in DistributedDataParallel: pass the plain module" in output


def test_unregistered_stage_is_refused_by_name(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        stages = Stages(member)
        stages.register(stages.modules[:1])
        schedule = ScheduleInterleaved1F1B(stages.made(), 4, loss_fn=loss_of)
        member.manager.register_pipeline(schedule)

    output = refusal(tmp_path, work)
    assert "stage 1 has parameters that are not registered" in output


def test_gradients_averaged_by_a_pipeline_are_not_averaged_twice(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        stages = Stages(member)
        stages.register()
        member.manager.sync_gradients(stages.modules[0])
        schedule = ScheduleInterleaved1F1B(stages.made(), 4, loss_fn=loss_of)
        member.manager.register_pipeline(schedule)

    assert "Linear are already averaged" in refusal(tmp_path, work)


def test_groups_of_several_ranks_need_a_spec_that_supports_them(tmp_path: Path) -> None:
    with job(tmp_path, 1) as made, pytest.raises(FftError) as error:
        made.ranks("0", [{"spec": "ddp"}, {"spec": "ddp"}])
    assert "several ranks in a replica group with spec='ddp'" in str(error.value)

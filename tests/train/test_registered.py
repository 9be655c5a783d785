"""Tests of the refusals of `register`: replaced parameters, and process groups that FFT cannot
abort."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchft import Optimizer, ProcessGroupGloo

from fft.errors import FftError
from fft.train.process_groups import ShardProcessGroupGloo
from fft.train.process_groups.epoch_groups import EpochGroups
from fft.train.session.rank_state import RankState
from fft.train.state.step_state import StepState
from fft.train.state.updates import unwrapped


def linear() -> nn.Linear:
    return nn.Linear(4, 4, bias=False)


def check(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    StepState([model], [optimizer]).refuse_replaced_parameters()


def test_optimizer_made_before_fully_shard_is_refused_with_that_cause(
    shard: ShardProcessGroupGloo,
) -> None:
    model = nn.Sequential(linear(), linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # The optimizer still has the other layer's old parameters
    fully_shard(model[1], mesh=shard.mesh())
    with pytest.raises(
        FftError, match=r"1.weight of the model.*fully_shard\(\) has put new"
    ) as raised:
        check(model, optimizer)
    assert "make the optimizer after it" in str(raised.value)
    check(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_model_that_an_evaluation_has_gathered_is_accepted(shard: ShardProcessGroupGloo) -> None:
    model = nn.Sequential(linear(), linear())
    for layer in (*model, model):
        fully_shard(layer, mesh=shard.mesh(), reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.ones(1, 4))
    with pytest.raises(FftError, match="in no registered optimizer"):
        check(model, optimizer)
    state = RankState.__new__(RankState)
    state.models, state.registered_state = [model], StepState([model], [optimizer])
    state.refuse_unfit()


def test_optimizer_made_before_an_assigning_load_is_refused() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.load_state_dict({"weight": torch.ones(4, 4)}, assign=True)
    with pytest.raises(FftError, match="load_state_dict"):
        check(model, optimizer)


def test_parameters_outside_of_models_and_frozen_ones_are_accepted() -> None:
    model, temperature = nn.Sequential(linear(), linear()), nn.Parameter(torch.ones(4, 4))
    model[1].weight.requires_grad_(False)
    check(model, torch.optim.SGD([model[0].weight, temperature], lr=0.1))
    check(model, torch.optim.SGD([model[0].weight], lr=0.1))


def wrapped_by_accelerate(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    optimizers = pytest.importorskip("accelerate.optimizer", reason="no extra `accelerate`")
    schedulers = pytest.importorskip("accelerate.scheduler")
    made = optimizers.AcceleratedOptimizer.__new__(optimizers.AcceleratedOptimizer)
    made.optimizer = optimizer  # its constructor needs the state of an Accelerator
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    outer = schedulers.AcceleratedScheduler.__new__(schedulers.AcceleratedScheduler)
    outer.scheduler = scheduler
    return [(made, optimizer), (outer, scheduler)]


def wrapped_by_lightning(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    core = pytest.importorskip("lightning.pytorch.core.optimizer", reason="no extra `lightning`")
    fabric = pytest.importorskip("lightning.fabric.wrappers")
    single = pytest.importorskip("lightning.fabric.strategies").SingleDeviceStrategy()
    return [
        (core.LightningOptimizer(optimizer), optimizer),
        (fabric._FabricOptimizer(optimizer, single), optimizer),
        (fabric._FabricModule(model, single), model),
    ]


@pytest.mark.parametrize("wrap", [wrapped_by_accelerate, wrapped_by_lightning])
def test_wrappers_of_other_trainers_are_removed(wrap: Callable[..., list[Any]]) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for outer, inner in wrap(model, optimizer):
        assert unwrapped(outer) is inner
        assert unwrapped(inner) is inner


class Lookahead(torch.optim.SGD):
    """An algorithm that steps an inner optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, lr=0.1)
        self.optimizer = optimizer


def test_algorithm_with_an_inner_optimizer_is_not_unwrapped() -> None:
    outer = Lookahead(torch.optim.SGD(linear().parameters(), lr=0.1))
    assert unwrapped(outer) is outer


@pytest.mark.parametrize("thing", [{"loss": 1.0}, torch.ones(2)])
def test_object_in_extra_without_a_state_is_refused_by_name(thing: Any) -> None:
    """And before anything is replaced that was registered earlier."""
    state = RankState.__new__(RankState)
    state.models = []
    with pytest.raises(FftError, match=rf"extra\['best'\]: .*, got {type(thing).__name__}; keep"):
        state.register([linear()], [], [], {"best": thing}, None, None)
    assert state.models == []


def test_torchfts_optimizer_is_refused() -> None:
    inner = torch.optim.SGD(linear().parameters(), lr=0.1)
    with pytest.raises(FftError, match=r"torchft.Optimizer.*pass the optimizer that it wraps"):
        unwrapped(Optimizer(None, inner))


def groups(shard: ShardProcessGroupGloo | None) -> EpochGroups:
    nobody: Any = None
    made = EpochGroups(
        nobody, nobody, "", ProcessGroupGloo(), None, is_replacement=True, address=""
    )
    if shard is not None:
        vars(made)["shard"] = SimpleNamespace(pg=shard, address=None, waiting=None)
    return made


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_model_on_the_shard_group_of_the_manager_is_accepted(
    shard: ShardProcessGroupGloo,
) -> None:
    model = fully_shard(linear(), mesh=shard.mesh())
    groups(shard).refuse_foreign([model], [])


def test_model_on_another_process_group_is_refused_with_the_fix(
    shard: ShardProcessGroupGloo, world: None
) -> None:
    model = nn.Sequential(fully_shard(linear(), mesh=init_device_mesh("cpu", (4,))))
    for own in (shard, None):
        with pytest.raises(FftError, match=r"module '0'.*of 4 ranks.*manager.shard_mesh\(\)"):
            groups(own).refuse_foreign([model], [])


def on(mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(torch.ones(2), mesh, [Replicate()] * mesh.ndim, run_check=False)


def test_state_tensors_on_another_process_group_are_refused(world: None) -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = linear()
    with pytest.raises(FftError, match="state of an optimizer"):
        groups(None).refuse_foreign([model], [on(mesh)])
    model.register_buffer("table", on(mesh))
    with pytest.raises(FftError, match="table"):
        groups(None).refuse_foreign([model], [])
    batch_norm = nn.Sequential(nn.SyncBatchNorm(4))  # over the default group
    with pytest.raises(FftError, match="SyncBatchNorm"):
        groups(None).refuse_foreign([batch_norm], [])


def test_slice_of_a_foreign_mesh_is_refused_with_the_fix(world: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = fully_shard(linear(), mesh=mesh["shard"])
    with pytest.raises(FftError, match=r"manager.mesh\(names, sizes\)"):
        groups(None).refuse_foreign([model], [])


def test_groups_of_one_rank_are_accepted(world: None) -> None:
    groups(None).refuse_foreign([linear()], [on(init_device_mesh("cpu", (1,)))])

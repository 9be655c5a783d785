"""Switches of modules and of torch that a step function changes are restored by a rollback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from fft.train.gradients.reducer import Reducer
from fft.train.state.step_state import StepState

_AFTER_THE_STEP = {"set_separate_reduce_scatter_group", "set_symm_mem_for_comm"}
"""Setters that need a default process group or CUDA; a test below covers their effects."""


def sharded(mesh: DeviceMesh) -> Any:
    """Two sharded layers, and a root with parameters of its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model[:2]:  # type: ignore[attr-defined]
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def changes(model: Any) -> dict[str, tuple[Any, ...]]:
    """Arguments for each setter of FSDPModule that differ from the defaults."""
    first = model[0]._get_fsdp_state()._fsdp_param_groups[0]
    return {
        "set_is_last_backward": (False,),
        "set_requires_gradient_sync": (False,),
        "set_requires_all_reduce": (False,),
        "set_reshard_after_forward": (False,),
        "set_reshard_after_backward": (False,),
        "set_modules_to_forward_prefetch": ([model[1]],),
        "set_modules_to_backward_prefetch": ([model[0]],),
        "set_custom_all_gather": (type(first._all_gather_comm)(),),
        "set_custom_reduce_scatter": (type(first._reduce_scatter_comm)(),),
        "set_all_reduce_hook": (lambda gradient: None,),
        "set_post_optim_event": (object(),),
        "set_reduce_scatter_divide_factor": (3.0,),
        "set_gradient_divide_factor": (3.0,),
        "set_force_sum_reduction_for_comms": (True,),
        "set_reduce_scatter_unused_params": (True,),
        "set_reduce_scatter_max_input_buffers": (2,),
        "set_unshard_in_backward": (False,),
        "set_allocate_memory_from_process_group_for_comm": (True,),
        "_set_unshard_async_op": (True,),
    }


def settings(model: Any) -> list[dict[str, Any]]:
    """All attributes of FSDP2's objects that are neither tensors nor made by an iteration."""
    found = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            for thing in (state, state._state_ctx, *state._fsdp_param_groups):
                attributes = vars(thing).items()
                found.append({k: v for k, v in attributes if not isinstance(v, torch.Tensor)})
            found += [dict(vars(group.mesh_info)) for group in state._fsdp_param_groups]
    return found


def test_the_table_of_fsdp_setters_is_complete(mesh: DeviceMesh) -> None:
    """A newer torch may add a setter, which `capture_settings` has to cover, too."""
    known = changes(sharded(mesh)).keys() | _AFTER_THE_STEP
    assert {name for name in dir(FSDPModule) if name.startswith("set_")} <= known


@pytest.mark.filterwarnings("ignore:Use `set_gradient_divide_factor`:DeprecationWarning")
@pytest.mark.parametrize("is_root", [True, False])
def test_rollback_restores_the_settings_of_each_fsdp_setter(
    mesh: DeviceMesh, is_root: bool
) -> None:
    model = sharded(mesh)
    state = StepState([model], [])
    model(torch.ones(2, 4))  # lays out what FSDP2 makes lazily
    state.unwind()
    for name, arguments in changes(model).items():
        before = settings(model)
        state.capture()
        getattr(model if is_root else model[1], name)(*arguments)
        assert settings(model) != before, name
        state.restore()
        assert settings(model) == before, name


def test_rollback_of_the_first_step_keeps_the_root_gathered_after_forward(mesh: DeviceMesh) -> None:
    """The first forward decides this for the root; the state before it has no such decision."""
    model = sharded(mesh)
    state = StepState([model], [])
    state.capture()
    model.set_is_last_backward(False)
    model(torch.ones(2, 4))
    state.restore()
    root, first = model._get_fsdp_state(), model[0]._get_fsdp_state()
    assert root._fsdp_param_groups[0].post_forward_mesh_info is None
    assert first._fsdp_param_groups[0].post_forward_mesh_info is not None
    assert first._state_ctx is root._state_ctx
    assert root._state_ctx.is_last_backward


def test_rollback_restores_groups_and_communication_of_fsdp(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    group = model[0]._get_fsdp_state()._fsdp_param_groups[0]
    state = StepState([model], [])
    state.capture()
    group.mesh_info.reduce_scatter_process_group = object()
    group._all_gather_comm = object()
    before = group._reduce_scatter_comm
    group._reduce_scatter_comm = object()
    state.restore()
    assert group.mesh_info.reduce_scatter_process_group is None
    assert type(group._all_gather_comm) is not object
    assert group._reduce_scatter_comm is before


def test_rollback_restores_the_grad_mode() -> None:
    state = StepState([nn.Linear(1, 1)], [])
    state.capture()
    try:
        torch.set_grad_enabled(False)
        state.restore()
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


@pytest.mark.parametrize("before", [True, False])
def test_rollback_restores_whether_a_reducer_accumulates(before: bool) -> None:
    """``model.require_backward_grad_sync = …`` of torch's DDP sets it, without a ``finally``."""
    reducer = Reducer(nn.Linear(2, 2), None, 1.0, None, 0)  # type: ignore[arg-type]
    reducer.quiet(before)
    reducer.begin()
    reducer.quiet(not before)
    reducer.reset()
    assert reducer.quiet(before) is before
    reducer.close()

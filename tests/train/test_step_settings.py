"""Settings of FSDP2 and torch that a step function changes are restored by a rollback."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from fft.train.gradients.reducer import Reducer
from fft.train.gradients.reductions import OpenTxn, Reductions
from fft.train.guard.torch_adapter import fsdp_groups, fsdp_state
from fft.train.guard.watchers import Watchers
from fft.train.state.step_state import StepState


def sharded(mesh: DeviceMesh) -> Any:
    """Two sharded layers, and a root with parameters of its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model[:2]:  # type: ignore[attr-defined]
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def changes(model: Any) -> dict[str, tuple[Any, ...]]:
    """Arguments, other than the defaults, for the setters of FSDPModule that this torch has."""
    first = fsdp_groups(fsdp_state(model[0]))[0]
    known = {
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
        "set_keep_unsharded_storage": (True,),
        "set_manual_backward_finalization": (True,),
        "_set_unshard_async_op": (True,),
    }
    return {name: arguments for name, arguments in known.items() if hasattr(model, name)}


def settings(model: Any) -> list[dict[str, Any]]:
    """All attributes of FSDP2's objects, with tensors by their identity."""
    found = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = fsdp_state(module)
            things = [state, state._state_ctx, state._comm_ctx]
            for group in fsdp_groups(state):
                things += [group, group.mesh_info, *group.fsdp_params]
            for thing in things:
                found.append({name: shown(value) for name, value in vars(thing).items()})
    return found


def objects_of(module: Any) -> dict[str, Any]:
    """The objects in which FSDP2 keeps the settings of a module, by kind."""
    state = fsdp_state(module)
    group = fsdp_groups(state)[0]
    return {
        "state": state,
        "context": state._state_ctx,
        "communication": state._comm_ctx,
        "group": group,
        "parameter": group.fsdp_params[0],
    }


def shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shown(each) for key, each in value.items()}
    if isinstance(value, list | tuple | deque):
        return [shown(each) for each in value]
    return id(value) if isinstance(value, torch.Tensor) else value


VALUES: dict[str, Callable[[], Any]] = {
    "flag": lambda: True,
    "list": lambda: [1, [2]],
    "dict": lambda: {"depth": [1, {"of": {2}}]},
    "tuple": lambda: (1, [2]),
    "queue": lambda: deque([1]),
    "object": lambda: SimpleNamespace(depth=1),
    "tensor": lambda: torch.tensor(2.0),
    "tensors": lambda: [torch.tensor(2.0)],
    "function": lambda: lambda gradient: None,
    "dtype": lambda: torch.bfloat16,
    "stream": lambda: torch.Stream(device="cpu"),
    "event": lambda: torch.Event(device="cpu"),
    "nothing": lambda: None,
}
"""Makers of the values that a made-up setter sets."""


def change_contents(value: Any) -> None:
    """Change the innermost container of a value, if there is one."""
    if isinstance(value, list | tuple | deque):
        if value and isinstance(value[-1], list | dict):
            change_contents(value[-1])
        elif not isinstance(value, tuple):
            value.append(3)
    elif isinstance(value, dict):
        change_contents(next(iter(value.values())))
    elif isinstance(value, set):
        value.add(3)


@pytest.mark.parametrize("of", ["state", "context", "communication", "group", "parameter"])
@pytest.mark.parametrize("initialized", [True, False])
def test_rollback_restores_the_settings_of_an_unknown_setter(
    mesh: DeviceMesh, of: str, initialized: bool
) -> None:
    """A setter of a later release: a new attribute, and a changed one that FFT does not know."""
    model = sharded(mesh)
    state = StepState([model], [])
    if initialized:
        model(torch.ones(2, 4))
        state.unwind()
    state.capture()
    before = settings(model)
    objects_of(model)[of].something = [1]
    state.restore()
    assert settings(model) == before, "a new attribute"

    objects_of(model)[of].something = listed = [1]
    state.capture()
    before = settings(model)
    listed.append(2)
    model(torch.ones(2, 4))
    state.restore()
    assert settings(model) == before, "the contents of an attribute"
    objects_of(model)[of].something = True
    state.restore()
    assert settings(model) == before, "a changed attribute"


@pytest.mark.parametrize("of", ["state", "context", "communication", "group", "parameter"])
@pytest.mark.parametrize("kind", VALUES)
def test_rollback_restores_a_setting_of_any_kind(mesh: DeviceMesh, kind: str, of: str) -> None:
    """Each value is changed in its contents, replaced, deleted, and set where none was."""
    model = sharded(mesh)
    state = StepState([model], [])
    model(torch.ones(2, 4)).sum().backward()
    state.unwind()
    thing = objects_of(model)[of]
    state.capture()
    before = settings(model)
    thing.something = VALUES[kind]()
    model(torch.ones(2, 4)).sum().backward()
    state.restore()
    assert settings(model) == before, "absent before"
    for first in (VALUES[kind](), None):
        thing.something = first
        state.capture()
        before = settings(model)
        for value in (first, VALUES[kind](), None):
            thing.something = value
            change_contents(value)
            model(torch.ones(2, 4)).sum().backward()
            state.restore()
            assert settings(model) == before and thing.something is first
        del thing.something
        state.restore()
        assert settings(model) == before and thing.something is first


def test_rollback_restores_settings_of_a_module_sharded_during_the_job(mesh: DeviceMesh) -> None:
    model = nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=mesh), nn.Linear(4, 4))
    state = StepState([model], [])
    state.capture()
    fully_shard(model[1], mesh=mesh)
    state.capture()
    group = fsdp_groups(fsdp_state(model[1]))[0]
    before = vars(group).copy()
    model[1].set_unshard_in_backward(False)
    state.restore()
    assert group.unshard_in_backward and vars(group) == before


def test_parameters_moved_in_a_step_are_those_of_the_next_forward(mesh: DeviceMesh) -> None:
    """``model.to()`` in a step gives the parameters other memory, which a rollback keeps."""
    model = sharded(mesh)
    state = StepState([model], [])
    state.capture()
    model._apply(torch.clone)
    model(torch.ones(2, 4)).sum().backward()
    state.restore()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        assert not model(torch.ones(2, 4)).any()


def test_event_of_the_optimizer_is_set_again_for_the_replay(mesh: DeviceMesh) -> None:
    """The forward takes the event that ``set_post_optim_event`` has set before the step."""
    model = sharded(mesh)
    state = StepState([model], [])
    event = torch.Event(device="cpu")
    model.set_post_optim_event(event)
    state.capture()
    model(torch.ones(2, 4))
    state.restore()
    assert fsdp_state(model)._state_ctx.post_optim_event is event
    fsdp_state(model)._state_ctx.post_optim_event = None
    state.restore()
    assert fsdp_state(model)._state_ctx.post_optim_event is event


@pytest.mark.filterwarnings("ignore:Use `set_gradient_divide_factor`:DeprecationWarning")
@pytest.mark.parametrize("is_root", [True, False])
def test_rollback_restores_the_settings_of_each_fsdp_setter(
    mesh: DeviceMesh, is_root: bool
) -> None:
    model = sharded(mesh)
    state = StepState([model], [])
    model(torch.ones(2, 4))  # runs FSDP2's lazy initialization
    state.unwind()
    for name, arguments in changes(model).items():
        if name == "set_manual_backward_finalization" and not is_root:
            continue  # a setter of roots
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
    root, first = fsdp_state(model), fsdp_state(model[0])
    assert fsdp_groups(root)[0].post_forward_mesh_info is None
    assert fsdp_groups(first)[0].post_forward_mesh_info is not None
    assert first._state_ctx is root._state_ctx
    assert root._state_ctx.is_last_backward


def test_rollback_restores_groups_and_communication_of_fsdp(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    group = fsdp_groups(fsdp_state(model[0]))[0]
    state = StepState([model], [])
    state.capture()
    mesh_info = dict(vars(group.mesh_info))
    group.mesh_info.reduce_scatter_process_group = object()
    group._all_gather_comm = object()
    before = group._reduce_scatter_comm
    group._reduce_scatter_comm = object()
    state.restore()
    assert vars(group.mesh_info) == mesh_info
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
    side = SimpleNamespace(pg=None, timeout=timedelta(seconds=60), logger=logging)
    manager: Any = SimpleNamespace(_torchft=side, report_error=print)
    reductions = Reductions(OpenTxn(), manager, Watchers(), None, 0)
    reducer = Reducer(nn.Linear(2, 2), reductions)
    reducer.quiet(before)
    reducer.begin()
    reducer.quiet(not before)
    reducer.reset()
    assert reducer.quiet(before) is before
    reducer.close()

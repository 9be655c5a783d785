"""Reset modules under FSDP2 (``fully_shard``) to their state between two steps: sharded and idle.

This module accesses FSDP2's private state of the modules by the attributes of torch 2.13.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

_PLAIN = (bool, int, float, str, type(None))


@cache
def _setting_names() -> frozenset[str]:
    """Return the attributes that the setters of FSDP2 assign in this version of torch."""
    owners = (FSDPModule, FSDPParamGroup)
    setters = [f for owner in owners for n, f in vars(owner).items() if re.match("_?set_", n)]
    steps = (step for setter in setters for step in dis.get_instructions(inspect.unwrap(setter)))
    return frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")


def _settings(thing: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(thing).items() if name in _setting_names()}


def _fsdp_states(models: Sequence[nn.Module]) -> Iterator[Any]:
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                yield module._get_fsdp_state()


def reset_fsdp(models: Sequence[nn.Module]) -> None:
    """Reset FSDP2 from the middle of an iteration, including pending gradients."""
    for state in _fsdp_states(models):
        for group in state._fsdp_param_groups:
            # The op has ended, perhaps failed; the reset below would wait for it and raise.
            if group._all_gather_result is not None:
                group._all_gather_result = group._all_gather_result._replace(all_gather_work=None)
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule) and module._get_fsdp_state()._is_root:
                module.reset_iter_state()
    for state in _fsdp_states(models):
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None:
                    unsharded.grad = None
    reshard(models)


def reshard(models: Sequence[nn.Module]) -> None:
    """Return the modules to their sharded parameters and free the gathered ones. Local."""
    for state in _fsdp_states(models):
        for group in state._fsdp_param_groups:
            if not group.is_sharded:
                group._to_sharded()


def capture_settings(models: Sequence[nn.Module]) -> list[Callable[[], None]]:
    """Return functions that restore everything that the setters of FSDPModule change.

    `reset_fsdp` handles the state of an iteration.
    """
    return [_restoring(state) for state in _fsdp_states(models)]


def _restoring(state: Any) -> Callable[[], None]:
    unit, iteration = _settings(state), _settings(state._state_ctx)
    groups = [
        (group, _settings(group), _settings(group.mesh_info)) for group in state._fsdp_param_groups
    ]

    def restore() -> None:
        vars(state).update(unit)
        vars(state._state_ctx).update(iteration)  # the first forward replaces this object
        for group, settings, mesh_settings in groups:
            vars(group).update(settings)
            vars(group.mesh_info).update(mesh_settings)
            if state._is_root and state._auto_reshard_after_forward:
                group.post_forward_mesh_info = None  # as the first forward has left it

    return restore


def settings_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return the plain values that the setters of an FSDP2 module change; empty for other modules.

    Hooks, meshes and communication objects are not plain. The mesh for resharding after forward is
    left out, because the first forward of a root module removes it, which a joiner has not run.
    """
    return [
        {
            name: value
            for name, value in _settings(thing).items()
            if isinstance(value, _PLAIN) and name != "post_forward_mesh_info"
        }
        for thing in _things(module)
    ]


def load_settings_of(module: nn.Module, settings: Sequence[Mapping[str, Any]] | None) -> None:
    """Load the result of `settings_of`, where the values here are plain, too."""
    pairs = zip(_things(module), settings_of(module), settings or (), strict=False)
    for thing, mine, values in pairs:
        vars(thing).update({name: value for name, value in values.items() if name in mine})


def _things(module: nn.Module) -> list[Any]:
    """Return the objects with the settings of an FSDP2 module."""
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    return [state, state._state_ctx, *state._fsdp_param_groups]

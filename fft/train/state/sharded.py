"""Reset modules under FSDP2 (``fully_shard``) to their state between two steps: sharded and idle.

This module accesses FSDP2's private state of the modules by the attributes of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

_UNIT_SETTINGS = (
    "_auto_reshard_after_forward",
    "_states_to_forward_prefetch",
    "_states_to_backward_prefetch",
)
_ITERATION_SETTINGS = ("is_last_backward", "post_optim_event")
_GROUP_SETTINGS = (
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "post_forward_mesh_info",
    "_all_gather_comm",
    "_reduce_scatter_comm",
    "_all_reduce_hook",
    "_all_reduce_hook_stream",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "reduce_scatter_unused_params",
    "reduce_scatter_max_input_buffers",
    "unshard_in_backward",
    "unshard_async_op",
)


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

    The covered setters are all ``set_*`` methods of torch 2.13; `reset_fsdp` handles the state of
    an iteration.
    """
    return [_restoring(state) for state in _fsdp_states(models)]


def _restoring(state: Any) -> Callable[[], None]:
    unit = {name: getattr(state, name) for name in _UNIT_SETTINGS if hasattr(state, name)}
    iteration = {name: getattr(state._state_ctx, name) for name in _ITERATION_SETTINGS}
    groups = [
        (
            group,
            {name: getattr(group, name) for name in _GROUP_SETTINGS if hasattr(group, name)},
            getattr(group.mesh_info, "reduce_scatter_process_group", None),
        )
        for group in state._fsdp_param_groups
    ]

    def restore() -> None:
        vars(state).update(unit)
        vars(state._state_ctx).update(iteration)  # the first forward replaces this object
        for group, settings, scatter_group in groups:
            vars(group).update(settings)
            if hasattr(group.mesh_info, "reduce_scatter_process_group"):
                group.mesh_info.reduce_scatter_process_group = scatter_group
            if state._is_root and state._auto_reshard_after_forward:
                group.post_forward_mesh_info = None  # as the first forward has left it

    return restore

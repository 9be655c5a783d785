"""Differences between the supported releases of torch; no other file depends on a release.

A rollback resets state of FSDP2 to which torch gives no public access, and the private names have
changed: torch 2.12 introduced several groups of parameters for each module, torch 2.13
``reset_iter_state``, and torch 2.15 accumulated gradients on the gathered parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

try:
    from torch.distributed.distributed_c10d import GroupName as GroupName
except ImportError:  # torch < 2.12 uses str
    GroupName = str  # type: ignore[misc, assignment]

OWN_TENSORS = {"sharded_param", "_sharded_param_data"}
"""Attributes of an FSDP2 parameter that share the memory of the parameter itself."""


def fsdp_state(module: FSDPModule) -> Any:
    """Return the object in which FSDP2 keeps the settings and the progress of a module."""
    return module._get_fsdp_state()


def fsdp_groups(state: Any) -> list[Any]:
    """Return the parameter groups of a result of `fsdp_state`."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in [state._fsdp_param_group] if group is not None]


def reset_iteration(root: FSDPModule) -> None:
    """Reset a root module and the modules below it after a failed forward or backward.

    No operation of FSDP2 may be running. The progress of the iteration and its gradients are
    dropped.
    """
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_iteration(fsdp_state(root))


def _reset_iteration(root: Any) -> None:
    """Do what ``reset_iter_state`` does, for torch < 2.13."""
    root._device_handle.synchronize()  # instead of waiting for each event
    root._comm_ctx.all_gather_state = None
    root._comm_ctx.post_forward_order.clear()
    if hasattr(root._comm_ctx, "reduce_scatter_states"):
        root._comm_ctx.reduce_scatter_states.clear()
    else:
        root._comm_ctx.reduce_scatter_state = None
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        for group in fsdp_groups(state):
            group._all_gather_result = group._all_reduce_state = None
            group._post_reduce_event = group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def drop_gathered_gradients(parameter: Any) -> None:
    """Drop the gradients of a gathered parameter of FSDP2."""
    if "unsharded_accumulated_grad" in vars(parameter):
        parameter.unsharded_accumulated_grad = None
    unsharded: torch.Tensor | None = getattr(parameter, "_unsharded_param", None)
    if unsharded is not None:
        unsharded.grad = None

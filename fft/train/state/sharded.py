"""Modules under FSDP2 (``fully_shard``) between two steps: out of any iteration, sharded.

Touches FSDP2's own state of the modules, by the attributes of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def _fsdp_states(models: Sequence[nn.Module]) -> Iterator[Any]:
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                yield module._get_fsdp_state()


def reset_fsdp(models: Sequence[nn.Module]) -> None:
    """Take FSDP2 out of the middle of an iteration, gradients on their way included."""
    for state in _fsdp_states(models):
        for group in state._fsdp_param_groups:
            # The op is over, perhaps failed; the reset below would wait for it and raise its error.
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
    """Make the modules hold their sharded parameters. Local; frees the gathered ones."""
    for state in _fsdp_states(models):
        for group in state._fsdp_param_groups:
            if not group.is_sharded:
                group._to_sharded()

"""FSDP2 for `FFTTrainer`: the ranks of a group share one model, over FFT's shard process group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    fsdp2_apply_ac,
    fsdp2_prepare_model,
)
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only


def ranks() -> int:
    """Return the number of ranks in a group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def make_alone(args: Any) -> None:
    """Let the Trainer treat this rank as a run with one process.

    ``TrainingArguments`` made the ranks of the group torch's default process group, which FFT
    cannot abort. A default group of one process keeps the Trainer's own collectives local.
    """
    if args.world_size > 1:
        backend = torch.distributed.get_backend()
        torch.distributed.barrier()  # a rank that leaves earlier breaks the rendezvous of others
        torch.distributed.destroy_process_group()
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        args.distributed_state.num_processes, args.distributed_state.process_index = 1, 0


def shard(model: Any, plugin_args: dict[str, Any], accelerator: Any, mesh: Any) -> None:
    """Shard the model over the mesh by Accelerate's rules for FSDP2."""
    plugin, precision = FullyShardedDataParallelPlugin(**plugin_args), accelerator.mixed_precision
    if precision != "no":
        plugin.set_mixed_precision(precision)
    # the attributes of an Accelerator in FSDP mode, which would create a process group of its own
    view = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        mixed_precision=precision,
        is_main_process=accelerator.is_main_process,
        device=accelerator.device,
    )
    if plugin.activation_checkpointing:
        fsdp2_apply_ac(view, model)
    fsdp2_prepare_model(view, model)
    model.register_load_state_dict_pre_hook(_shard_model_state)


def _shard_like(value: Any, parameter: Any) -> Any:
    """Return this rank's part of a whole tensor that has the shape of a sharded parameter."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:
        return value
    mesh, value = parameter.device_mesh, value.to(parameter.device)
    # with None each rank takes its part without communication
    return distribute_tensor(value, mesh, parameter.placements, src_data_rank=None)


def _shard_model_state(model: nn.Module, state: dict[str, Any], *_: Any) -> None:
    for name, parameter in model.state_dict(keep_vars=True).items():
        if name in state:
            state[name] = _shard_like(state[name], parameter)


def shard_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Replace the whole tensors in a state dict of the optimizer by this rank's parts."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, entries in state["state"].items():
        for name, value in entries.items():
            if torch.is_tensor(value):
                entries[name] = _shard_like(value, parameters[number])


@contextlib.contextmanager
def whole_states(*parts: Any, keep: bool) -> Iterator[None]:
    """Let ``state_dict()`` of the parts return whole tensors in the block, if ``keep`` is true.

    All ranks of the group must enter the block, because it gathers the tensors. The ranks with a
    false ``keep`` hold one whole tensor at a time.
    """
    found: dict[int, torch.Tensor | None] = {}

    def gather(shards: Any) -> torch.Tensor | None:
        if id(shards) not in found:  # tied parameters are gathered once, and stay tied
            whole = shards.detach().full_tensor()
            found[id(shards)] = whole.cpu() if keep else None
        return found[id(shards)]

    with contextlib.ExitStack() as undo:
        for part in parts:
            options = {"keep_vars": True} if isinstance(part, nn.Module) else {}
            states = part.state_dict(**options)
            whole = tree_map_only(DTensor, gather, dict(states))
            hook = part.register_state_dict_post_hook(
                lambda _, state, *__, whole=whole: state.update(whole)
            )
            undo.callback(hook.remove)
        yield

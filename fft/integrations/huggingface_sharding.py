"""FSDP2 for `FFTTrainer`: the ranks of a group share one model, over FFT's shard process group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_apply_ac, fsdp2_prepare_model
from torch import distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from fft.integrations.processes import ranks


def make_alone(args: Any) -> None:
    """Let the Trainer treat this rank as a run with one process.

    ``TrainingArguments`` made the ranks of the group torch's default process group, which FFT
    cannot abort. A default group of one process keeps the Trainer's own collectives local.
    """
    if args.world_size > 1:
        backend = distributed.get_backend()
        distributed.barrier()  # a rank that leaves earlier breaks the rendezvous of others
        distributed.destroy_process_group()
        distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
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
    is_whole = isinstance(parameter, DTensor) and not isinstance(value, DTensor)
    if not is_whole or getattr(value, "shape", None) != parameter.shape:
        return value
    mesh, value = parameter.device_mesh, value.to(parameter.device)
    # with None each rank takes its part without communication
    return distribute_tensor(value, mesh, parameter.placements, src_data_rank=None)


def _shard_model_state(model: nn.Module, state: dict[str, Any], *_: Any) -> None:
    own = model.state_dict(keep_vars=True)
    state.update({name: _shard_like(value, own.get(name)) for name, value in state.items()})


def shard_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Replace the whole tensors in a state dict of the optimizer by this rank's parts."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in state["state"].items():
        values.update({k: _shard_like(value, parameters[number]) for k, value in values.items()})


@contextlib.contextmanager
def whole_states(*parts: Any, keep: bool) -> Iterator[None]:
    """Let ``state_dict()`` of sharded parts return whole tensors in the block, if ``keep`` is true.

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
        for part in parts if ranks() > 1 else ():
            is_model = isinstance(part, nn.Module)
            shards = part.state_dict(keep_vars=True) if is_model else part.state_dict()
            whole = tree_map_only(DTensor, gather, dict(shards))
            hook = part.register_state_dict_post_hook(
                lambda _, state, *__, whole=whole: state.update(whole)
            )
            undo.callback(hook.remove)
        yield

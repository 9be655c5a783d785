"""Patches with which torchtitan 0.3 trains on a machine without a GPU; import it before torchtitan.

torchtitan supports accelerators only. This module replaces six parts of it:

- the device module: ``torch.cpu`` instead of ``torch.cuda``, so that meshes and tensors are on CPU;
- the monitor of device memory, which has nothing to report;
- flex attention, which has no backward pass on CPU: torch's scaled dot product attention with the
  same mask;
- the scaling of gradients by FSDP2, in which gloo has no scaled sum: a plain sum;
- the shorter time limit of collectives after the first step, whose barrier names a GPU;
- kernels of expert parallelism, which need triton, if it is not installed.

The trainer, its model, optimizer, dataloader and checkpoints are torchtitan's own. CUDA graphs are
disabled in the configuration (``training.disable_cuda_graphs``).
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask


class _NoKernels(types.ModuleType):
    """A module in which every name is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _NoDeviceMemory:
    """The interface of torchtitan's ``DeviceMemoryMonitor`` for a CPU."""

    device_name = "CPU"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None:
        """Do nothing."""


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask: BlockMask,
    scale: float | None,
    enable_gqa: bool,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute what ``flex_attention`` does, with a mask and no other change of the scores.

    Args:
        q: Queries of shape (batch, heads, length, width).
        k: Keys of the same shape.
        v: Values of the same shape.
        block_mask: The mask.
        scale: Factor of the scores.
        enable_gqa: Whether several heads of queries share one of the keys.
    """
    batch, _, length, _ = q.shape
    mask = create_mask(block_mask.mask_mod, batch, 1, length, length, q.device)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa), None


def _sum_gradients(model: torch.nn.Module) -> None:
    """Do not divide gradients, as torchtitan's ``disable_fsdp_gradient_division``."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


torch._utils._get_available_device_type = lambda: "cpu"
if importlib.util.find_spec("triton") is None:
    kernels = "torchtitan.distributed.minimal_async_ep.kernels"
    sys.modules[kernels] = _NoKernels(kernels)

from torchtitan.components import metrics  # noqa: E402
from torchtitan.distributed import fsdp  # noqa: E402
from torchtitan.distributed import utils as distributed_utils  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402

metrics.build_device_memory_monitor = _NoDeviceMemory
attention.FlexAttention._compiled_flex_attn = _attend
attention._compiled_create_block_mask = create_block_mask
fsdp.disable_fsdp_gradient_division = _sum_gradients
distributed_utils.set_pg_timeouts = lambda *_, **__: None

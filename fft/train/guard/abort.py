"""Ready-made aborts for `ManagerFFT.on_abort`, as ``fft.abort``.

Each function returns an abort: a function without arguments that ends a call of another library, in
which the main thread may be blocked. For example::

    manager.on_abort(fft.abort.process_groups())
    manager.on_abort(fft.abort.transformer_engine())
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, _world
from torchft.process_group import ProcessGroup as TorchftGroup

from fft.errors import ConfigError

Abort = Callable[[], None]


def process_groups(*groups: ProcessGroup) -> Abort:
    """Abort NCCL groups of ``torch.distributed`` that FFT has not made.

    An aborted group cannot be used again: destroy it in `ManagerFFT.finalize`, and make another in
    `ManagerFFT.initialize`.

    Args:
        groups: The groups to abort. Without arguments these are all NCCL groups that exist at the
            time of the abort, except those of FFT.

    Raises:
        ConfigError: torch cannot abort one of ``groups``, such as a group of gloo.
    """
    for group in groups:
        if not _is_abortable(group):
            raise ConfigError(
                f"fft.abort.process_groups(): torch cannot abort the group {group.group_name!r} of "
                f"backend {dist.get_backend(group)!r}, only groups of NCCL. Use a group of FFT, "
                "which FFT aborts itself (fft.ShardProcessGroupGloo, or call.group of "
                "fft.restartable), or give this group a short timeout"
            )

    def abort_process_groups() -> None:
        if found := groups or tuple(filter(_is_abortable, _world.pg_names)):
            # at once, because one communicator's abort may wait for another's
            with ThreadPoolExecutor(len(found), "fft-abort") as pool:
                list(pool.map(ProcessGroup.abort, found))

    return abort_process_groups


def _is_abortable(group: ProcessGroup) -> bool:
    return not isinstance(group, TorchftGroup) and "nccl" in str(dist.get_backend(group))


def transformer_engine() -> Abort:
    """Destroy the user buffers of Transformer Engine, and reset its global state for FP8.

    Raises:
        ConfigError: Transformer Engine is not installed.
    """
    _require("transformer_engine", "Transformer Engine", "transformer_engine[pytorch]")

    def abort_transformer_engine() -> None:
        importlib.import_module("transformer_engine.pytorch.module.base").destroy_ub()
        fp8 = importlib.import_module("transformer_engine.pytorch.fp8")
        fp8.FP8GlobalStateManager.reset()

    return abort_transformer_engine


def nvshmem() -> Abort:
    """Finalize NVSHMEM (nvshmem4py).

    NVSHMEM has no abort, and finalizing waits for all processes. If one of them has died, it does
    not return, and FFT kills this process after the ``limit_s`` of `ManagerFFT.on_abort`.

    Raises:
        ConfigError: nvshmem4py is not installed.
    """
    _require("nvshmem", "NVSHMEM", "nvshmem4py-cu12")

    def abort_nvshmem() -> None:
        importlib.import_module("nvshmem.core").finalize()

    return abort_nvshmem


def _require(module: str, name: str, package: str) -> None:
    """Raise ConfigError unless ``module`` is installed. Does not import it."""
    if find_spec(module) is None:
        raise ConfigError(
            f"fft.abort: {name} is not installed in this environment (no module {module!r}); "
            f"install {package}, or remove this abort"
        )

"""What is asked of NCCL: to make a communicator for one epoch, to connect it, to abort it.

Touches one variable of the environment, which torch reads once (`TorchNccl.make`). Needs torch
only, so that it can be tried where nothing else is installed (``python -m benchmarks.gpu``).
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from fft.util.errors import FftError

_LIMIT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
_WATCHDOG_LIMIT = timedelta(hours=24)
"""After which torch's watchdog ends the process for an op. How long a step may take is for FFT's
windows to say, whose rollback a process survives."""


class Communicator(Protocol):
    """What `TorchNccl.make` returns: a ``torch.distributed.ProcessGroup``, which does the ops."""

    def abort(self) -> None:
        """End all ops, in progress or not, and the connections."""


class NcclLibrary(Protocol):
    """What makes communicators; `TorchNccl`, or what a test has in its place."""

    def make(
        self, store: Store, rank: int, world_size: int, timeout: timedelta, name: str
    ) -> Communicator: ...

    def connect(self, made: Communicator) -> None: ...


class TorchNccl:
    """NCCL through torch's backend."""

    def make(
        self, store: Store, rank: int, world_size: int, timeout: timedelta, name: str
    ) -> dist.ProcessGroup:
        """A communicator that is not connected yet, so that `connect` can be aborted.

        Raises FftError: this torch has no NCCL, or there is no GPU.
        """
        if not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise FftError(
                "ShardProcessGroupNCCL needs a GPU and a torch that was built with NCCL; on CPU "
                "use fft.ShardProcessGroupGloo"
            )
        os.environ.setdefault(_LIMIT, str(max(1, round(timeout.total_seconds()))))
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options.config.blocking = False  # else a call that waits for a peer cannot be aborted
        options._timeout = _WATCHDOG_LIMIT
        options.group_name = name
        backend = nccl(store, rank, world_size, options)
        backend._set_sequence_number_for_group()
        pg = dist.ProcessGroup(store, rank, world_size)
        pg._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        pg._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
        return pg

    def connect(self, made: Communicator) -> None:
        """Meet the other ranks, on the current device."""
        device = torch.device("cuda", torch.cuda.current_device())
        made._get_backend(device).eager_connect_single_device(device)  # type: ignore[attr-defined]

"""The process group that a model is sharded over on GPUs: NCCL's, rebuilt for every epoch.

`TorchNccl` is all that is asked of the library: to make a communicator of one epoch, to connect
it, to abort it. NCCL connects the ranks by a unique id that rank 0 draws and torch's backend puts
into the rendezvous store. That store is the one of the epoch's record, and nobody has met there
before (`AbortableGroup` refuses it else), so no two epochs share an id.

Touches one variable of the environment, which torch reads once (`TorchNccl.make`).
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from fft.train.process_group.shard import ShardGroup
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


class ShardProcessGroupNCCL(ShardGroup):
    """The process group that FSDP2 shards over on GPUs: rebuilt under the model, not replaced.

    Pass it as ``shard_pg=``. One device in a process: set it (``torch.cuda.set_device``) before the
    manager is made. Has not been run on a GPU yet.

    Args:
        timeout: how long connecting may take. Ops have no limit of their own: a rollback ends them.
        library: what makes communicators; None: NCCL.
    """

    backend = "nccl"
    device_type = "cuda"

    def __init__(
        self, timeout: timedelta = timedelta(seconds=60), library: NcclLibrary | None = None
    ) -> None:
        super().__init__(timeout)
        self._library: NcclLibrary = TorchNccl() if library is None else library
        self._lock = threading.Lock()
        self._connecting: Communicator | None = None

    def getBackendName(self) -> str:
        """torchft's name for it."""
        return "torchft-nccl"

    def _create_pg(self, store: Store, rank: int, world_size: int) -> Communicator:
        name = f"{self._group_name or 'fft-shard'}-{self._quorum_id}"
        made = self._library.make(store, rank, world_size, self._timeout, name)
        with self._lock:
            self._connecting = made
        try:
            self._library.connect(made)
        except BaseException:
            self._abort_connecting()
            raise
        with self._lock:
            self._connecting = None
        return made

    def abort(self, errored: bool = True) -> None:
        """End all ops of the group, or its connecting. As torchft's; any thread."""
        self._abort_connecting()
        pg: Any = vars(self).get("_pg")
        self._pg = None
        if pg is not None:
            pg.abort()

    def _abort_connecting(self) -> None:
        with self._lock:
            made, self._connecting = self._connecting, None
        if made is not None:
            made.abort()

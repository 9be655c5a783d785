"""The process group that a model is sharded over on GPUs: NCCL's, rebuilt for every epoch.

NCCL connects the ranks by a unique id that rank 0 draws, and torch's backend puts into the store
of the rendezvous. That store is the one of the epoch's record, and this member has met nobody
there before (`AbortableGroup` refuses it else), so no two epochs share an id.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from fft.train.nccl_library import Communicator, NcclLibrary, TorchNccl
from fft.train.process_group.shard import ShardGroup


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
            is_aborted, self._connecting = self._connecting is None, None
        if is_aborted:
            raise RuntimeError("the group was aborted while it connected")
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

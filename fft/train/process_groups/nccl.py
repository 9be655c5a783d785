"""The NCCL process group that a model is sharded over on GPUs, rebuilt for every epoch.

NCCL connects the ranks by a unique id that rank 0 draws. torch's backend puts it into the store of
the rendezvous, which the epoch's record names. `AbortableGroup` refuses a rendezvous that was used
before, so no two epochs share an id.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Self

from torch.distributed.distributed_c10d import Store

from fft.train.process_groups.nccl_library import (
    Communicator,
    NcclLibrary,
    TorchNccl,
    abort_within,
    connect_all,
)
from fft.train.process_groups.shard import ShardGroup

_ABORT_S = 5.0
"""Time limit of an abort, in seconds, which usually takes milliseconds. If it takes longer, the
device is still busy, and a rollback waits for it (`AbortableGroup.quiesce`)."""
_ABORT_CONNECTING_S = 0.05
"""Time limit for the abort of a connecting group, in seconds; torch may delay it until connecting
has timed out."""


class ShardProcessGroupNCCL(ShardGroup):
    """The process group that FSDP2 shards over on GPUs; it is rebuilt under the model.

    Pass it as ``shard_pg=``. A process uses one device: call ``torch.cuda.set_device`` before the
    manager is constructed.

    Args:
        timeout: Time limit for connecting. Ops have no time limit; a rollback ends them.
        library: Creates communicators; NCCL by default.
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

    def _anew(self) -> Self:
        return type(self)(self._timeout, self._library)

    def getBackendName(self) -> str:
        """Return torchft's name for the backend."""
        return "torchft-nccl"

    def _create_pg(self, store: Store, rank: int, world_size: int) -> Communicator:
        name = f"{self._group_name or 'fft-shard'}-{self._quorum_id}"
        made = self._library.make(store, rank, world_size, self._timeout, name)
        with self._lock:
            self._connecting = made
        try:
            connect_all(self._library, made, store, rank, world_size)
        except BaseException:
            if self._take_connecting(made):
                abort_within(made.abort, _ABORT_S, f"a group that could not connect ({name})")
            raise
        if not self._take_connecting(made):
            raise RuntimeError("the group was aborted while it connected")
        return made

    def abort(self, errored: bool = True) -> None:
        """Abort all ops of the group, or its connection setup. Safe on any thread.

        Returns after about 5 s at most; `AbortableGroup.quiesce` waits for a device that is still
        busy.
        """
        with self._lock:
            connecting, self._connecting = self._connecting, None
        pg: Any = vars(self).get("_pg")
        self._pg = None
        if connecting is not None:  # it holds no tensors of the user, so there is no need to wait
            abort_within(connecting.abort, _ABORT_CONNECTING_S, "a group that is connecting")
        if pg is not None:
            abort_within(pg.abort, _ABORT_S, f"the group of epoch {self._quorum_id}")

    def _take_connecting(self, made: Communicator) -> bool:
        """Return whether ``made`` was still connecting and not aborted, and clear that state.

        A later communicator may be connecting by now; it is not aborted.
        """
        with self._lock:
            is_mine = self._connecting is made
            if is_mine:
                self._connecting = None
        return is_mine

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

from fft.train.nccl_library import (
    Communicator,
    NcclLibrary,
    TorchNccl,
    abort_within,
    meet,
)
from fft.train.process_group.shard import ShardGroup

_ABORT_S = 5.0
"""For an abort: milliseconds as a rule. What it has not ended then, the device is still busy with,
and a rollback waits for that (`AbortableGroup.quiesce`)."""
_ABORT_CONNECTING_S = 0.05
"""For one of a group that is connecting: torch may hold it up until connecting has timed out."""


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
            meet(self._library, made, store, rank, world_size)
        except BaseException:
            if self._take_connecting(made):
                abort_within(made.abort, _ABORT_S, f"a group that could not connect ({name})")
            raise
        if not self._take_connecting(made):
            raise RuntimeError("the group was aborted while it connected")
        return made

    def abort(self, errored: bool = True) -> None:
        """End all ops of the group, or its connecting. As torchft's; any thread.

        Returns after 5 s at most: `AbortableGroup.quiesce` tells whether the device is still busy.
        """
        with self._lock:
            connecting, self._connecting = self._connecting, None
        pg: Any = vars(self).get("_pg")
        self._pg = None
        if connecting is not None:  # nothing of the user's is in it, so nobody need wait
            abort_within(connecting.abort, _ABORT_CONNECTING_S, "a group that is connecting")
        if pg is not None:
            abort_within(pg.abort, _ABORT_S, f"the group of epoch {self._quorum_id}")

    def _take_connecting(self, made: Communicator) -> bool:
        """Whether ``made`` was still connecting, for all that is known here, and nobody aborts it.

        A later one may be connecting by now: it is not touched.
        """
        with self._lock:
            is_mine = self._connecting is made
            if is_mine:
                self._connecting = None
        return is_mine

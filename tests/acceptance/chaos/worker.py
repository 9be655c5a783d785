"""One rank of a job for fault injection: a small model, sharded if its group has several ranks.

``worker.py PACE [NAME=SECONDS ...]``: each step takes PACE seconds longer than its computation; the
other arguments are timeouts of the manager. It trains until it is drained; `fft run` starts it.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchft import ProcessGroupGloo

import fft

WIDTH = 32
LIMIT = timedelta(seconds=60)
LONELY_S = 0.2
"""Minimum seconds of a step of a job that is not whole, from its second on: this leaves the cores
to the group that starts, and keeps the traces short."""


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Random vectors, equal in every process."""

    def __init__(self) -> None:
        self.x = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index]


def built(manager: fft.ManagerFFT, sharded: bool) -> nn.Module:
    """Return the model; its dropout draws random numbers, which a replay must reproduce."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()) for _ in range(3)))
    if sharded:
        for layer in model:
            fully_shard(layer, mesh=manager.shard_mesh())
        fully_shard(model, mesh=manager.shard_mesh())
    return model


def main() -> None:
    """Train."""
    pace, given = float(sys.argv[1]), (word.partition("=") for word in sys.argv[2:])
    timeouts = {name: float(value) for name, _, value in given}
    connect = timeouts.pop("connect_timeout", 10.0)
    group, groups = os.environ["REPLICA_GROUP_ID"], int(os.environ["NUM_REPLICA_GROUPS"])
    rank, sharded = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) > 1
    torch.set_num_threads(1)
    shard_pg = fft.ShardProcessGroupGloo(timeout=LIMIT) if sharded else None
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        shard_pg=shard_pg,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id=group,
        init_sync=False,
        connect_timeout=timedelta(seconds=connect),
        timeouts={"join_window": 30.0, **timeouts},  # on a busy machine a group may start late
        # two ranks may get a NaN at one step, one after the other, and each reaches all ranks
        config=fft.ManagerConfig(digest="commit", max_body_failures=5),
    )
    model = built(manager, sharded)
    manager.register(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    manager.sync_gradients(model)
    torch.manual_seed(100 + 10 * int(group) + rank)
    lonely = 0
    try:
        for txn in manager.transactions(fft.CursorLoader(Samples(), batch_size=4, seed=5)):
            with txn:
                whole = manager.num_participants() == groups
                time.sleep(pace if whole or not lonely else max(pace, LONELY_S))
                F.mse_loss(model(txn.batch), txn.batch).backward()  # type: ignore[no-untyped-call]
            if txn.committed:
                lonely = 0 if whole else lonely + 1
    finally:
        manager.shutdown()
        if shard_pg is not None:
            shard_pg.unregister()


if __name__ == "__main__":
    main()

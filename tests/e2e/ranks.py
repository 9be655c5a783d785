"""Common parts of the end-to-end tests' small jobs: data, and an FSDP2 rank to train.

The scripts in this directory import it; `fft run` starts each in its own process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchft import ProcessGroupGloo
from waiting import wait_until

import fft
from fft.train.checkpoint.writer import NAME

LIMIT = timedelta(seconds=60)
"""Timeout of every process group."""
WIDTH = 16


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Random vectors, equal in every process."""

    def __init__(self) -> None:
        self.x = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index]


class Rank(NamedTuple):
    """One rank of a group of FSDP2 ranks, ready to train ``model``."""

    group: str
    number: int
    manager: fft.ManagerFFT
    shard_pg: fft.ShardProcessGroupGloo
    model: nn.Module

    def train(self) -> None:
        """Train until the job is drained, and leave it."""
        loader = fft.CursorLoader(Samples(), batch_size=8, seed=5)
        try:
            for txn in self.manager.transactions(loader):
                with txn:
                    F.mse_loss(self.model(txn.batch), txn.batch).backward()
        finally:
            self.shutdown()

    def shutdown(self) -> None:
        """Leave the job."""
        self.manager.shutdown()
        self.shard_pg.unregister()


def written() -> None:
    """Wait until each due checkpoint has been tried."""

    def at_work() -> bool:
        return any(thread.name == NAME for thread in threading.enumerate())

    wait_until(lambda: not at_work(), "checkpoints are written", LIMIT.total_seconds())


def with_dropout() -> nn.Module:
    """Return a layer whose result depends on the random generators."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout())


def sharded_rank(
    min_groups: int,
    timeouts: dict[str, float],
    layer: Callable[[], nn.Module] = with_dropout,
    **settings: Any,
) -> Rank:
    """Return the rank that the environment names, with a model of two layers."""
    group, number = os.environ["REPLICA_GROUP_ID"], int(os.environ["RANK"])
    torch.set_num_threads(1)
    shard_pg = fft.ShardProcessGroupGloo(timeout=LIMIT)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        shard_pg=shard_pg,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=min_groups,
        replica_id=group,
        init_sync=False,
        timeouts={"join_window": 30.0, **timeouts},  # on a busy machine a group may start late
        config=fft.ManagerConfig(**{"digest": "commit", **settings}),
    )
    torch.manual_seed(3)
    model = nn.Sequential(layer(), layer())
    for each in model:
        fully_shard(each, mesh=manager.shard_mesh())
    fully_shard(model, mesh=manager.shard_mesh())
    manager.register(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    manager.sync_gradients(model)
    torch.manual_seed(100 + 10 * int(group) + number)
    return Rank(group, number, manager, shard_pg, model)

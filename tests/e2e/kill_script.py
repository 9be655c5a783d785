"""A small FSDP2 job for test_kill.py; `fft run` starts it. Trains until the job is drained."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchft import ProcessGroupGloo

import fft

WIDTH = 32
LIMIT = timedelta(seconds=60)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Random vectors, equal in every process."""

    def __init__(self) -> None:
        self.x = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index]


def main() -> None:
    """Train; every commit is traced with a digest of the weights."""
    group, rank = os.environ["REPLICA_GROUP_ID"], int(os.environ["RANK"])
    shard_pg = fft.ShardProcessGroupGloo(timeout=LIMIT)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        shard_pg=shard_pg,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id=group,
        init_sync=False,
        timeouts={"join_window": 30.0},  # on a busy machine a group may start late
        digest="commit",
    )
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.2)) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    for layer in layers:
        fully_shard(layer, mesh=manager.shard_mesh())
    fully_shard(model, mesh=manager.shard_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager.register(model, optimizer)
    manager.sync_gradients(model)
    torch.manual_seed(100 + 10 * int(group) + rank)
    try:
        for txn in manager.transactions(fft.CursorLoader(Samples(), batch_size=8, seed=5)):
            with txn:
                x = txn.batch
                F.mse_loss(model(x), x.mean(1, keepdim=True)).backward()
    finally:
        manager.shutdown()


if __name__ == "__main__":
    main()

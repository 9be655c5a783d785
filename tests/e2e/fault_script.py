"""A small job for test_injected.py. It trains until it is drained.

The arguments are NAME=SECONDS for further timeouts; steps=N, after which it ends by itself; least=N
groups; report=SECONDS between two progress reports.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
from ranks import LIMIT, WIDTH, Samples
from torch import nn
from torchft import ProcessGroupGloo

import fft


def main() -> None:
    """Train; every commit is traced with a digest of the weights."""
    more = {name: float(value) for name, _, value in (a.partition("=") for a in sys.argv[1:])}
    steps, least = int(more.pop("steps", 0)) or None, int(more.pop("least", 1))
    config = fft.ManagerConfig(digest="commit", progress_interval=more.pop("report", 1.0))
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        shard_pg=fft.ShardProcessGroupGloo() if os.environ["WORLD_SIZE"] != "1" else None,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=least,
        replica_id=os.environ["REPLICA_GROUP_ID"],
        init_sync=False,
        # on a busy machine a group may start late; a lost bus must not cost the test 30 s
        timeouts={"join_window": 30.0, "bus_limit": 10.0, **more},
        connect_timeout=timedelta(seconds=3),
        config=config,
    )
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)], nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager.register(model, optimizer)
    manager.sync_gradients(model)
    try:
        loader = fft.CursorLoader(Samples(), batch_size=4, seed=5)
        for txn in manager.transactions(loader, steps):
            with txn:
                x = txn.batch
                loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
                loss.backward()
                txn.log(loss=loss.item())
    finally:
        manager.shutdown()


if __name__ == "__main__":
    main()

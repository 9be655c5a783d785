"""An FSDP2 job with a sharded average of its model as `extra`, for test_sharded_extra.py.

``sharded_extra_script.py STEPS OUT`` leaves the final state of each rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from ranks import LIMIT, WIDTH, Samples
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torchft import ProcessGroupGloo

import fft


def main() -> None:
    """Train to the end."""
    steps, out = int(sys.argv[1]), Path(sys.argv[2])
    group, number = os.environ["REPLICA_GROUP_ID"], int(os.environ["RANK"])
    torch.set_num_threads(1)
    shard_pg = fft.ShardProcessGroupGloo(timeout=LIMIT)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        shard_pg=shard_pg,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        replica_id=group,
        init_sync=False,
        timeouts={"join_window": 30.0, "quorum": 60.0},
    )
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9))
    for each in (model, average.module):
        fully_shard(each, mesh=manager.shard_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager.register(model, optimizer, extra={"ema": average})
    manager.sync_gradients(model)
    manager.on_commit(lambda: average.update_parameters(model))
    try:
        for txn in manager.transactions(fft.CursorLoader(Samples(), 8, seed=5), max_steps=steps):
            with txn:
                F.mse_loss(model(txn.batch), txn.batch).backward()
        parts = average.module.state_dict()
        assert all(isinstance(part, DTensor) for part in parts.values())
        hasher = hashlib.sha256()
        for part in parts.values():
            hasher.update(part.to_local().contiguous().numpy().data)
        found = [hasher.hexdigest(), int(average.n_averaged), manager.digest()]
        (out / f"final-{group}-{number}.json").write_text(json.dumps(found))
    finally:
        manager.shutdown()
        shard_pg.unregister()


if __name__ == "__main__":
    main()

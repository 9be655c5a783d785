"""Train a small FSDP2 model until the group is drained, under torchrun."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchft import ProcessGroupGloo

import fft


def main() -> None:
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        shard_pg=fft.ShardProcessGroupGloo(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        init_sync=False,
        timeouts={"join_window": 30.0},
        config=fft.ManagerConfig(digest="commit"),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    fully_shard(model, mesh=manager.shard_mesh())
    manager.register(model, torch.optim.AdamW(model.parameters()))
    manager.sync_gradients(model)
    inputs = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    for txn in manager.transactions(fft.CursorLoader(data, batch_size=4)):
        with txn:
            x, y = txn.batch
            nn.functional.mse_loss(model(x), y).backward()
    print(f"left at step {manager.current_step()}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()

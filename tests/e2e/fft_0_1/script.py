"""The job whose checkpoint and traces this folder holds, as FFT 0.1 (commit 23b5a6d4) wrote them.

    fft run --groups 2 --ranks 2 --checkpoint checkpoints --every 5 --trace-dir traces script.py 5

FSDP2 shards a model over the two ranks of each group. One of its settings and a switch have changed
after the model was built, so both are in the checkpoint.
"""

import sys
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import fft

manager = fft.ManagerFFT(
    shard_pg=fft.ShardProcessGroupGloo(),
    min_replica_size=1,
    init_sync=False,
    config=fft.ManagerConfig(digest="commit"),
)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
fully_shard(model[0], mesh=manager.shard_mesh())
fully_shard(model, mesh=manager.shard_mesh())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
manager.register(model, optimizer)
manager.sync_gradients(model)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
for txn in manager.transactions(
    fft.CursorLoader(dataset, batch_size=2), max_steps=int(sys.argv[1])
):
    if manager.current_step() == 1:
        model[0].set_reshard_after_backward(False)
    with txn:
        x, y = txn.batch
        torch.nn.functional.mse_loss(model(x), y).backward()
with torch.no_grad():
    shards: list[Any] = [*model.parameters()]
    bits = float(sum(shard.to_local().double().sum().item() for shard in shards)).hex()
print("settings", model[0]._get_fsdp_state()._fsdp_param_group.reshard_after_backward, "sum", bits)
manager.shutdown()

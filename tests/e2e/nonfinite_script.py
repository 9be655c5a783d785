"""A job whose group 1 computes a NaN at step 5, for test_step_results.py: ``… POLICY [always]``."""

from __future__ import annotations

import os
import sys

import torch
import torchft

import fft

torch.set_num_threads(1)
config = fft.ManagerConfig(on_nonfinite=sys.argv[1])  # type: ignore[arg-type]
manager = fft.ManagerFFT(
    pg=torchft.ProcessGroupGloo(),
    load_state_dict=None,
    state_dict=None,
    min_replica_size=2,
    config=config,
)
torch.manual_seed(0)
x = torch.randn(512, 8)
model = torch.nn.Linear(8, 1)
manager.register(model, torch.optim.AdamW(model.parameters()))
manager.sync_gradients(model)
is_spoiled = os.environ["REPLICA_GROUP_ID"] == "1"
for txn in manager.transactions(fft.CursorLoader(x, batch_size=8), max_steps=8):
    with txn:
        loss = model(txn.batch).square().mean()
        if is_spoiled and txn.step == 5:
            loss = loss * float("nan")
            is_spoiled = sys.argv[-1] == "always"
        loss.backward()
        txn.log(loss=loss.item())

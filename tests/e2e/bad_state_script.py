"""A job whose state is bad from step 8 on: ``bad_state_script.py OUT``, for test_near_state.py.

A process that begins with such a state computes a NaN at step 13. Each process notes where it
began.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torchft
from waiting import wait_until

import fft

torch.set_num_threads(1)
manager = fft.ManagerFFT(
    pg=torchft.ProcessGroupGloo(),
    load_state_dict=None,
    state_dict=None,
    min_replica_size=2,
    config=fft.ManagerConfig(on_nonfinite="stop"),
)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
manager.register(model, torch.optim.AdamW(model.parameters()))
manager.sync_gradients(model)
began: int | None = None
for txn in manager.transactions(fft.CursorLoader(torch.randn(512, 8), batch_size=8), max_steps=24):
    if began is None:
        began = txn.step
        Path(sys.argv[1], f"began-{os.getpid()}").write_text(str(began))
    with txn:
        if txn.step == 10:  # the test kills the job in step 11
            place = Path(os.environ["FFT_CHECKPOINT"], "step-5", "manifest.json")
            wait_until(place.exists, "the checkpoint of step 5 is there")
        loss = model(txn.batch).square().mean()
        if began >= 8 and txn.step == 13:
            loss = loss * float("nan")
        loss.backward()
manager.shutdown()

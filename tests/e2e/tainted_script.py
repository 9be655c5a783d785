"""A job whose group 1 flips a bit of a parameter after step 5, once: ``… [MARK]``.

The file ``MARK`` shows that it has happened; without the argument no bit is flipped.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torchft

import fft

torch.set_num_threads(1)
manager = fft.ManagerFFT(
    pg=torchft.ProcessGroupGloo(),
    load_state_dict=None,
    state_dict=None,
    min_replica_size=2,
    config=fft.ManagerConfig(check_replicas=4),
)
torch.manual_seed(0)
x = torch.randn(512, 8)
model = torch.nn.Linear(8, 1)
manager.register(model, torch.optim.AdamW(model.parameters()))
manager.sync_gradients(model)


def flip() -> None:
    """Flip a bit, unseen by torch's version counters."""
    mark = Path(sys.argv[1])
    if manager.current_step() == 5 and not mark.exists():
        mark.touch()
        model.weight.data.view(torch.int32)[0, 0] ^= 1 << 12


if len(sys.argv) > 1 and os.environ["REPLICA_GROUP_ID"] == "1":
    manager.on_commit(flip)
for txn in manager.transactions(fft.CursorLoader(x, batch_size=8), max_steps=10):
    with txn:
        model(txn.batch).square().mean().backward()

"""One rank of a small job in which group 1 fails at every attempt from some step on.

``culprit_worker.py STEPS BAD_FROM``; `fft run` starts it.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
from ranks import WIDTH, Samples
from torch import nn
from torchft import ProcessGroupGloo

import fft


def main() -> None:
    """Train."""
    steps, bad_from = int(sys.argv[1]), int(sys.argv[2])
    group = os.environ["REPLICA_GROUP_ID"]
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id=group,
        init_sync=False,
        timeouts={"join_window": 60.0},  # on a busy machine a group may start late
        config=fft.ManagerConfig(digest="commit", max_body_failures=1000),
        # never gives up by itself
    )
    torch.manual_seed(3)
    model = nn.Linear(WIDTH, 1)
    manager.register(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    manager.sync_gradients(model)
    try:
        loader = fft.CursorLoader(Samples(), batch_size=4, seed=5)
        for txn in manager.transactions(loader, max_steps=steps):
            with txn:
                if group == "1" and txn.step >= bad_from:
                    raise ValueError("this rank cannot do it")
                model(txn.batch).square().mean().backward()
    finally:
        manager.shutdown()


if __name__ == "__main__":
    main()

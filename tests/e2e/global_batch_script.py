"""A job with a constant global batch for test_global_batch_killed.py: ``… SLICES [MAX_STEPS]``."""

from __future__ import annotations

import sys
from functools import partial

import torch.nn.functional as F
from ranks import WIDTH, Samples, sharded_rank
from torch import nn

import fft

BATCH = 4

if __name__ == "__main__":
    rank = sharded_rank(1, {}, partial(nn.Linear, WIDTH, WIDTH))
    batches, max_steps, *_ = [*map(int, sys.argv[1:]), None]
    step = BATCH * batches
    loader = fft.CursorLoader(Samples(), batch_size=BATCH, seed=5, global_batch=step)
    try:
        for txn in rank.manager.transactions(loader, max_steps):
            with txn:
                for batch in txn.batches:
                    F.mse_loss(rank.model(batch), batch).backward()
    finally:
        rank.shutdown()

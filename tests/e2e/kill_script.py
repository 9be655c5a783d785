"""A small FSDP2 job for test_kill.py; `fft run` starts it. Trains until the job is drained."""

from __future__ import annotations

import torch.nn.functional as F
from ranks import Samples, sharded_rank

import fft


def main() -> None:
    """Train; every commit is traced with a digest of the weights."""
    rank = sharded_rank(1, {})
    try:
        for txn in rank.manager.transactions(fft.CursorLoader(Samples(), batch_size=8, seed=5)):
            with txn:
                F.mse_loss(rank.model(txn.batch), txn.batch).backward()
    finally:
        rank.shutdown()


if __name__ == "__main__":
    main()

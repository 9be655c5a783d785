"""The job of kill_script.py, where the ranks of group 1 begin torch's own process group late.

``late_group_script.py STEP``: they begin it in the step function after STEP steps. From then on the
replacement of a lost rank could not join it. Group 0 has none: a rollback cannot free a rank that
waits in such a group for a live mate.
"""

from __future__ import annotations

import math
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Samples, sharded_rank

import fft


def main() -> None:
    """Train; from that step on the ranks of group 1 add numbers in torch's own group."""
    rank = sharded_rank(1, {})
    since = int(sys.argv[1]) if os.environ["FFT_GROUP"] == "1" else math.inf
    try:
        for txn in rank.manager.transactions(fft.CursorLoader(Samples(), batch_size=8, seed=5)):
            with txn:
                is_late = rank.manager.current_step() >= since
                if is_late and not dist.is_initialized():
                    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
                if is_late:
                    seen = torch.ones(1)
                    dist.all_reduce(seen)
                    assert int(seen) == int(os.environ["WORLD_SIZE"])
                F.mse_loss(rank.model(txn.batch), txn.batch).backward()
    finally:
        rank.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()

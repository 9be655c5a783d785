"""A rank of FSDP2 whose blocks inductor compiles, for test_compiled_once.py.

``compiled_script.py OUT``: after each commit every process writes into the folder OUT what it has
compiled by then, and what it has found compiled.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from ranks import LIMIT, WIDTH, Samples
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torchft import ProcessGroupGloo

import fft


class Block(nn.Module):
    """Of which inductor compiles what is computed; FSDP2 gathers the weights before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))
        self.run = torch.compile(compute)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x, self.inner, self.outer)


def compute(x: torch.Tensor, inner: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """Of one block."""
    return x + F.gelu(x @ inner) @ outer


def main() -> None:
    """Train until the job is drained."""
    out = Path(sys.argv[1])
    group, rank = os.environ["REPLICA_GROUP_ID"], os.environ["RANK"]
    torch.set_num_threads(1)
    shard_pg = fft.ShardProcessGroupGloo(timeout=LIMIT)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        shard_pg=shard_pg,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        init_sync=False,
        timeouts={"join_window": 60.0, "ready_window": 200.0},
        digest="commit",
    )
    torch.manual_seed(3)
    model = nn.Sequential(Block(), Block())
    for block in model:
        fully_shard(block, mesh=manager.shard_mesh())
    fully_shard(model, mesh=manager.shard_mesh())
    manager.register(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    manager.sync_gradients(model)

    def note() -> None:
        found = {
            "step": manager.current_step(),
            "graphs": counters["stats"]["unique_graphs"],
            "hits": counters["inductor"]["fxgraph_cache_hit"],
            "misses": counters["inductor"]["fxgraph_cache_miss"],
            "cache": os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
        }
        with (out / f"g{group}r{rank}-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")

    manager.on_commit(note)
    try:
        for txn in manager.transactions(fft.CursorLoader(Samples(), batch_size=8, seed=5)):
            with txn:
                F.mse_loss(model(txn.batch), txn.batch).backward()
    finally:
        manager.shutdown()
        shard_pg.unregister()


if __name__ == "__main__":
    main()

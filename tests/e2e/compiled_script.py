"""A rank of FSDP2 whose blocks inductor compiles, for test_compiled_once.py.

``compiled_script.py OUT``: after each commit every process writes its numbers of compilations and
of cache hits so far into the folder OUT.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from ranks import WIDTH, sharded_rank
from torch import nn
from torch._dynamo.utils import counters


class Block(nn.Module):
    """A block whose computation inductor compiles; FSDP2 gathers the weights before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))
        self.run = torch.compile(compute)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x, self.inner, self.outer)


def compute(x: torch.Tensor, inner: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """Compute one block."""
    return x + F.gelu(x @ inner) @ outer


def main() -> None:
    """Train until the job is drained."""
    out = Path(sys.argv[1])
    rank = sharded_rank(1, {"join_window": 60.0, "ready_window": 200.0}, Block)

    def note() -> None:
        found = {
            "step": rank.manager.current_step(),
            "graphs": counters["stats"]["unique_graphs"],
            "hits": counters["inductor"]["fxgraph_cache_hit"],
            "misses": counters["inductor"]["fxgraph_cache_miss"],
            "cache": os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
        }
        with (out / f"g{rank.group}r{rank.number}-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")

    rank.manager.on_commit(note)
    rank.train()


if __name__ == "__main__":
    main()

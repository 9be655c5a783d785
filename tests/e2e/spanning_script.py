"""A small FSDP2 job for test_spanning.py; each rank writes its process and its steps to files.

The arguments are the folder of these files and the number of steps, or 0. Without that the job ends
after the step in which the file ``end`` is there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed.fsdp  # noqa: F401 - the fork server loads what comes first
import torchft  # noqa: F401
from ranks import WIDTH, Samples, sharded_rank
from torch import nn

import fft


def main() -> None:
    """Train, and show where this rank is."""
    folder, most = Path(sys.argv[1]), int(sys.argv[2]) or None
    rank = sharded_rank(1, {"bus_limit": 60.0}, lambda: nn.Linear(WIDTH, WIDTH))
    place = f"{rank.group}-{rank.number}"
    write(folder / f"pid-{place}", str(os.getpid()))
    variables = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    write(folder / f"env-{place}", json.dumps({name: os.environ[name] for name in variables}))
    loader = fft.CursorLoader(Samples(), batch_size=4, seed=5)
    for txn in rank.manager.transactions(loader, most):
        with txn:
            x = txn.batch
            loss = (rank.model(x) - x.mean(1, keepdim=True)).square().mean()
            loss.backward()
            if (folder / "end").exists():
                rank.manager.drain()
        if txn.committed:
            write(folder / f"step-{place}", str(rank.manager.current_step()))
    rank.shutdown()


def write(file: Path, text: str) -> None:
    """Replace the content of a file at once."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


if __name__ == "__main__":
    main()

"""One rank of the phase matrix: it trains once for every case, and writes its final state.

test_phases.py runs it as ``phase_worker.py config.json group rank``. A case is a fault plan (or
none); every case is a separate job on the bus, with a fresh model from the same seed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchft import ProcessGroupGloo

import fft
from fft.train.state.step_state import StepState

WIDTH = 16


class Net(nn.Module):
    """A small model with everything that a rollback must restore: dropout, buffers, several
    layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.3)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """A data set of samples with their index."""

    def __init__(self) -> None:
        self.x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.x[index], index


def train(case: dict[str, Any], group: str, rank: int, steps: int) -> dict[str, Any]:
    """Train one job under the case's plan."""
    os.environ.pop("FFT_FAULTS", None)
    if case["plan"]:
        os.environ["FFT_FAULTS"] = case["plan"]
    shard_pg = fft.ShardProcessGroupGloo(timeout=timedelta(seconds=60))
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        shard_pg=shard_pg,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        replica_id=group,
        store_addr="127.0.0.1",
        store_port=case["stores"][group],
        init_sync=False,
        bus=case["bus"],
        trace_dir=case["traces"],
        config=fft.ManagerConfig(digest="commit"),
    )
    torch.manual_seed(3)
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=manager.shard_mesh())
    fully_shard(model, mesh=manager.shard_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    manager.register(model, optimizer, schedule)
    manager.sync_gradients(model)
    loader = fft.CursorLoader(Samples(), batch_size=4, seed=5)
    torch.manual_seed(100 + 10 * int(group) + rank)
    consumed, times = [], []
    for txn in manager.transactions(loader, max_steps=steps):
        with txn:
            x, index = txn.batch
            loss = F.mse_loss(model(x), x.mean(1, keepdim=True))
            loss.backward()
        if txn.committed:
            consumed.append(index.tolist())
            times.append(time.monotonic())
    state = StepState([model], [optimizer], [schedule])
    exported: Any = state.export()
    result = {
        "digest": state.digest(),
        "parameters": _bits(exported["parameters"]),
        "optimizers": _bits(exported["optimizers"]),
        "buffers": _bits(exported["buffers"]),
        "schedule": json.dumps(exported["lr_schedulers"], default=str, sort_keys=True),
        "rng": _bits(torch.get_rng_state()),
        "consumed": consumed,
        "steps": manager.current_step(),
        "times": times,
    }
    manager.shutdown()
    shard_pg.unregister()
    return result


def _bits(value: Any) -> str:
    """Return every bit of plain data as text."""
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().view(-1).view(torch.uint8)
        return f"{value.dtype}{tuple(value.shape)}{raw.tolist()}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_bits(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_bits, value)) + "]"
    return repr(value)


def main() -> None:
    """Run every case of the config in turn."""
    config = json.loads(Path(sys.argv[1]).read_text())
    group, rank = sys.argv[2], int(sys.argv[3])
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", REPLICA_GROUP_ID=group)
    torch.set_num_threads(1)
    for case in config["cases"]:
        result = train(case, group, rank, config["steps"])
        out = Path(case["traces"]) / f"result-{group}-{rank}.json"
        out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()

"""One of the processes that train the tests' model under torch's DDP, or under torchft.

At its end it writes ``end-<rank>.json`` with the times of its steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.acceptance.gpu.parts import nets

LIMIT = timedelta(seconds=60)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=["ddp", "torchft"], required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--size", type=int, required=True, help="number of processes")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    width = nets.width_of(args.small)
    model = nets.Net(width, dropout=0.0).to(args.device)
    train = _ddp if args.system == "ddp" else _torchft
    loader = torch.utils.data.DataLoader(nets.data(width), nets.BATCH, shuffle=True)
    took: list[float] = []
    train(args, model, loader, took)
    (args.out / f"end-{args.rank}.json").write_text(json.dumps({"ms": took}))


def _loop(
    args: argparse.Namespace,
    model: nn.Module,
    loader: Any,
    optimizer: Any,
    took: list[float],
    count: Callable[[], int] | None = None,
) -> None:
    """Train until ``count()``, or the number of steps made here, reaches the requested number."""
    began = time.perf_counter()  # so that loading the batch counts, as in FFT's job
    for (x,) in loader:
        optimizer.zero_grad()
        nets.loss_of(model, x.to(args.device)).backward()
        optimizer.step()
        nets.synchronize(args.device)
        ended = time.perf_counter()
        took.append(1e3 * (ended - began))
        began = ended
        if (len(took) if count is None else count()) >= args.steps:
            return


def _ddp(args: argparse.Namespace, model: nn.Module, loader: Any, took: list[float]) -> None:
    store = dist.TCPStore("localhost", args.port, wait_for_workers=False, timeout=LIMIT)
    dist.init_process_group(
        "gloo", store=store, rank=args.rank, world_size=args.size, timeout=LIMIT
    )
    wrapped = DistributedDataParallel(model)
    _loop(args, wrapped, loader, torch.optim.AdamW(model.parameters(), lr=1e-3), took)
    dist.destroy_process_group()


def _torchft(args: argparse.Namespace, model: nn.Module, loader: Any, took: list[float]) -> None:
    import torchft

    own = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(LIMIT),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=args.size,
        replica_id=f"rival_{args.rank}",
        store_addr="localhost",
        store_port=own.port,
        rank=0,
        world_size=1,
        init_sync=False,
    )
    try:
        wrapped = torchft.DistributedDataParallel(manager, model)
        optimizer = torchft.Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))
        # both leave after the same step, as a remaining one would wait for the other's quorum
        _loop(args, wrapped, loader, optimizer, took, manager.current_step)
    finally:
        manager.shutdown(wait=False)


if __name__ == "__main__":
    main()

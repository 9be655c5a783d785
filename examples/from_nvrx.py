"""One training script under NVIDIA's in-process restart and under FFT, with a fault on request.

``--under nvrx`` and ``--under fft`` call the same function again after a fault; it loads a
checkpoint and continues. The gradient is the same sum for any number of ranks, so the final weights
have the bits of an undisturbed run. DIR must be a new folder, which all ranks share:

    fft run --groups 3 examples/from_nvrx.py DIR --under fft --fault kill
    for RANK in 0 1 2; do env RANK=$RANK WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
        python examples/from_nvrx.py DIR --under nvrx --fault kill & done; wait
"""

import argparse
import hashlib
import os
import signal
import statistics
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

PARTS, BATCH = 12, 8  # parts of a step, which the ranks share, and the samples of a part
EVERY = 10  # steps between two checkpoints
NVRX = {  # seconds; the defaults are for large clusters
    "monitor_thread_interval": 0.02, "monitor_process_interval": 0.05, "heartbeat_interval": 0.1,
    "progress_watchdog_interval": 0.05, "heartbeat_timeout": 1.0, "last_call_wait": 0.05,
    "soft_timeout": 1.0, "hard_timeout": 2.0, "termination_grace_time": 0.1,
}  # fmt: skip
FINISHED: dict[int, float] = {}  # when each step was finished, the last time


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def fault(args: argparse.Namespace, step: int) -> None:
    """Raise in, or kill, process 2 at one step, once."""
    mark, me = args.folder / "fault", os.environ.get("REPLICA_GROUP_ID") or os.environ["RANK"]
    if args.fault == "none" or (me, step) != ("2", args.at) or mark.exists():
        return
    mark.touch()
    if args.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(f"planted in step {step}")


def backward(model: nn.Module, step: int, rank: int, group: dist.ProcessGroup, size: int) -> float:
    """Set the mean gradients of all parts, and return their mean loss."""
    share = PARTS // size
    rows = []
    for part in range(rank * share, (rank + 1) * share):
        draw = torch.Generator().manual_seed(step * PARTS + part)
        x = torch.randn(BATCH, 16, generator=draw)
        loss = nn.functional.mse_loss(model(x), x.square().mean(dim=1, keepdim=True))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([loss.detach().view(1), *(g.flatten() for g in gradients)]))
    found = [torch.empty(share, rows[0].numel()) for _ in range(size)]
    dist.all_gather(found, torch.stack(rows), group=group)
    loss, *values = (
        torch.cat(found).mean(dim=0).split([1, *(p.numel() for p in model.parameters())])
    )
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.grad = value.view_as(parameter)
    return loss.item()


def train(
    call: Any, rank: int, size: int, group: dist.ProcessGroup, args: argparse.Namespace
) -> str:
    """Train from the newest checkpoint; ``call`` is NVIDIA's or FFT's."""
    model, optimizer = build()
    path, first, loss = args.folder / "checkpoint.pt", 0, 0.0
    if path.exists():
        first, loss, weights, moments = torch.load(path)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    print(f"call {call.iteration}: rank {rank} of {size}, from step {first}", flush=True)
    for step in range(first, args.steps):
        call.ping()
        time.sleep(args.pause)
        fault(args, step)
        loss = backward(model, step, rank, group, size)
        optimizer.step()
        FINISHED[step] = time.monotonic()
        if (step + 1) % EVERY == 0 and rank == 0:
            with call.atomic():
                state = [step + 1, loss, model.state_dict(), optimizer.state_dict()]
                torch.save(state, path.with_suffix(".new"))
                path.with_suffix(".new").rename(path)
    bits = hashlib.sha256(nn.utils.parameters_to_vector(model.parameters()).detach().numpy())
    steps = [after - before for before, after in pairwise(FINISHED[k] for k in sorted(FINISHED))]
    lost = max(steps) - statistics.median(steps) if steps else 0.0
    return f"done: loss {loss:.6f}, weights {bits.hexdigest()[:16]}, lost {lost:.2f} s"


def under_nvrx(args: argparse.Namespace) -> str:
    import nvidia_resiliency_ext.inprocess as inprocess

    build()  # the first optimizer imports for longer than soft_timeout
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_master, ranks = os.environ["RANK"] == "0", int(os.environ["WORLD_SIZE"])
    # the function's own store, because the group of each call needs new keys
    store = dist.TCPStore(host, port + 1, ranks, is_master, multi_tenant=True)
    limits = {name: timedelta(seconds=seconds) for name, seconds in NVRX.items()}

    @inprocess.Wrapper(store_kwargs={"port": port + 2}, **limits)
    def run(call: inprocess.CallWrapper = None) -> str:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        keys = dist.PrefixStore(str(call.iteration), store)
        limit = timedelta(seconds=1)  # only this frees a rank that waits for a lost one in gloo
        dist.init_process_group("gloo", store=keys, rank=rank, world_size=size, timeout=limit)
        return train(call, rank, size, dist.group.WORLD, args)

    return run()


def under_fft(args: argparse.Namespace) -> str:
    import fft
    from fft.train.api.restartable import Call

    @fft.restartable()
    def run(call: Call) -> str:
        return train(call, call.rank, call.world_size, call.group, args)

    return run()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path, metavar="DIR")
    options.add_argument("--under", choices=["nvrx", "fft"], required=True)
    options.add_argument("--fault", choices=["none", "exception", "kill"], default="none")
    options.add_argument("--at", type=int, default=25, help="step of the fault")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--pause", type=float, default=0.02, help="seconds of a step's computing")
    args = options.parse_args()
    args.folder.mkdir(exist_ok=True)
    print(under_nvrx(args) if args.under == "nvrx" else under_fft(args), flush=True)


if __name__ == "__main__":
    main()

"""One rank of a job that torchrun restarts from a checkpoint: the baseline of `benchmarks.goodput`.

The work and the events are those of `side_by_side.worker`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.side_by_side.events import Pen
from benchmarks.side_by_side.model import (
    BATCH,
    SAMPLES,
    Samples,
    built,
    checksum,
    loss_of,
    plain_optimizer,
)
from benchmarks.side_by_side.victim import Victim

CHECKPOINT_STEPS = 25


def main() -> None:
    """Train until the process is ended, from the newest checkpoint."""
    torch.set_num_threads(1)
    env = os.environ
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    store: dist.Store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]))
    # with init_process_group("gloo") alone, processes that torchrun has restarted never connect
    store = dist.PrefixStore(f"attempt-{env['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    pen = Pen(Path(os.environ["BENCH_DIR"]), rank, 0)
    pen.say("start")
    victim = Victim(json.loads(os.environ["BENCH_PLAN"]), pen, rank, 0)
    net = built(victim.pace, lambda: victim.at("backward"))
    optimizer, samples, step = plain_optimizer(net), Samples(), 0
    path = Path(os.environ["BENCH_DIR"], "checkpoint.pt")
    if path.exists():
        saved = torch.load(path)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while True:
        draw = torch.Generator().manual_seed(step * size + rank)
        x = samples.x[torch.randint(SAMPLES, (BATCH,), generator=draw)]
        optimizer.zero_grad()
        before = checksum(net)
        loss_of(net, x).backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
        step += 1
        pen.say(
            "commit", step=step, before=before, after=checksum(net), n=size, q=0, **{"in": True}
        )
        if rank == 0 and step % CHECKPOINT_STEPS == 0:
            whole = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(whole, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)


if __name__ == "__main__":
    main()

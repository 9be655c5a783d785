"""A small FSDP2 job for test_evaluating.py, which evaluates between two transactions.

`fft run` starts it. Its first argument selects the event during the evaluation of group 0:
``nothing``; ``fault``: a step function of group 1 raises; ``kill``: a rank of group 1 is killed in
one; ``stop``: a step function of group 1 raises, and one of the two ranks that evaluate stops, too;
``last``: no event, and all groups evaluate after the last step, too. The second argument is a
folder, where each rank leaves its results.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from ranks import Samples, sharded_rank
from torch import nn
from torch.distributed.tensor import DTensor
from waiting import wait_until

import fft

STEPS, AT = 6, 3


def held(model: nn.Module) -> str:
    """Return what the modules hold of their parameters."""
    shards = [isinstance(parameter, DTensor) for parameter in model.parameters()]
    return "sharded" if all(shards) else "gathered"


def main(kind: str, folder: Path) -> None:
    rank = sharded_rank(2, {})
    samples, job = Samples(), rank.manager._parts.job
    if kind == "last":  # as FSDP2 itself does with parameters that are in no module below its root
        rank.model[0].set_reshard_after_forward(False)
    tries, found = 0, ""
    loader = fft.CursorLoader(samples, batch_size=8, seed=5)
    for txn in rank.manager.transactions(loader, max_steps=STEPS):
        with txn:
            if kind != "nothing" and rank.group == "1" and txn.step == AT:
                tries += 1
                if kind == "kill" and job.peer.inc == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if kind != "kill" and tries == 1:
                    raise ValueError("once")
            F.mse_loss(rank.model(txn.batch), txn.batch).backward()
        if kind == "last" and rank.manager.current_step() == STEPS:
            with torch.no_grad():
                rank.model(samples.x[:8])
            found = f"{held(rank.model)} "
        if not txn.committed or rank.manager.current_step() != AT or rank.group == "1":
            continue
        if kind != "nothing" and job.peer.inc == 1:
            wait_until(lambda: job.local.role == "rolling_back", "a rollback of the next step")
        if kind == "stop" and job.peer.inc == 1 and rank.number == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with torch.no_grad():
            found = f"{float(rank.model(samples.x[:8]).square().mean())} "
    if kind == "last":
        found += f"{held(rank.model)} "
    (folder / f"{rank.group}.{rank.number}").write_text(found + rank.manager.digest())
    rank.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

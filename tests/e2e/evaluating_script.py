"""A small FSDP2 job for test_evaluating.py, which evaluates between two transactions.

``fft run`` starts it. Its first argument says what happens during the evaluation of group 0:
``nothing``; ``fault``: a body of group 1 raises; ``kill``: a rank of group 1 is killed in one;
``stop``: a body of group 1 raises, and one of the two ranks that evaluate stops, too. The second is
a folder, where each rank leaves what it has found.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from ranks import Samples, sharded_rank
from waiting import wait_until

import fft

STEPS, AT = 6, 3


def main(kind: str, folder: Path) -> None:
    rank = sharded_rank(2, {})
    samples, job = Samples(), rank.manager._parts.job
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
        if not txn.committed or rank.manager.current_step() != AT or rank.group == "1":
            continue
        if kind != "nothing" and job.peer.inc == 1:
            wait_until(lambda: job.local.role == "rolling_back", "a rollback of the next step")
        if kind == "stop" and job.peer.inc == 1 and rank.number == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with torch.no_grad():
            found = f"{float(rank.model(samples.x[:8]).square().mean())} "
    (folder / f"{rank.group}.{rank.number}").write_text(found + rank.manager.digest())
    rank.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""A small FSDP2 job for test_durable.py; `fft run` starts it. Leaves a digest of its last state.

``durable_script.py STEPS OUT [PAUSE_S [STAGE]]``: PAUSE_S is what a body takes longer. Each rank
that comes to STAGE of a checkpoint for the first time in this job ends as by a power cut.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from ranks import Samples, sharded_rank

import fft
from fft.train.checkpoint.writer import RankWriter


def cut_at(stage: str, marks: Path) -> None:
    """Have this process, and all others of the job, SIGKILLed when a checkpoint comes there."""
    before = RankWriter._at

    def at(self: RankWriter, came: str) -> None:
        before(self, came)
        if came != stage:
            return
        try:
            (marks / f"cut-{stage}").touch(exist_ok=False)
        except FileExistsError:
            return
        for mark in marks.glob("pid-*"):
            if (pid := int(mark.name.removeprefix("pid-"))) != os.getpid():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        os.kill(os.getpid(), signal.SIGKILL)

    RankWriter._at = at  # type: ignore[method-assign]


def main() -> None:
    """Train to the end; every commit is traced with a digest of the weights."""
    steps, out = int(sys.argv[1]), Path(sys.argv[2])
    pause = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    (out / f"pid-{os.getpid()}").touch()
    if len(sys.argv) > 4:
        cut_at(sys.argv[4], out)
    rank = sharded_rank(2, {"quorum": 60.0})
    try:
        loader = fft.CursorLoader(Samples(), batch_size=8, seed=5)
        for txn in rank.manager.transactions(loader, max_steps=steps):
            with txn:
                F.mse_loss(rank.model(txn.batch), txn.batch).backward()
                time.sleep(pause)  # what a larger model computes
        digest = [rank.manager.digest(), rank.manager.current_step()]
        own = [int(x) for x in torch.get_rng_state().sum().reshape(1)]
        path = out / f"final-{rank.group}-{rank.number}.json"
        path.write_text(json.dumps([*digest, *own]))
    finally:
        rank.shutdown()


if __name__ == "__main__":
    main()

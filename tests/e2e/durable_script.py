"""A small FSDP2 job for test_durable.py; `fft run` starts it. It leaves a digest of its last state.

``durable_script.py STEPS OUT [PAUSE_S [STAGE STEP]]``: PAUSE_S is the additional time of a step
function; if it is 0, the first step function of each process leaves the whole model, too. When a
checkpoint from STEP on reaches STAGE, all ranks end once, as in a power cut. With ``stall`` as
STAGE group 0 never finishes the checkpoint of STEP, and the job continues with one group.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from ranks import Rank, Samples, sharded_rank

import fft
from fft.checkpoints.files import step_of
from fft.checkpoints.stores import LocalStore
from fft.train.checkpoint.writer import RankWriter


def cut_at(stage: str, step: int, marks: Path) -> None:
    """SIGKILL all processes of the job together once, when a checkpoint from ``step`` on reaches
    ``stage``."""
    begin, rename = RankWriter._at, LocalStore.rename

    def at(self: RankWriter, came: str) -> None:
        begin(self, came)
        if came == stage and self._attempt.named.step >= step:
            cut(stage, marks)

    def renaming(self: LocalStore, old: str, new: str) -> None:
        due = (step_of(new) or 0) >= step
        if due and stage == "renaming":
            cut(stage, marks)
        rename(self, old, new)
        if due and stage == "renamed":
            cut(stage, marks)

    RankWriter._at = at  # type: ignore[method-assign]
    LocalStore.rename = renaming  # type: ignore[method-assign]


def stall(group: str, step: int) -> None:
    """Make the ranks of a group never finish the checkpoint of ``step``."""
    begin = RankWriter._at

    def at(self: RankWriter, came: str) -> None:
        begin(self, came)
        if came == "writing" and self._attempt.named.step == step and self._group == group:
            threading.Event().wait()

    RankWriter._at = at  # type: ignore[method-assign]


def cut(stage: str, marks: Path) -> None:
    """End this process and all others of the job, the first time.

    They are stopped first, so that none can notice the end of another.
    """
    try:
        (marks / f"cut-{stage}").touch(exist_ok=False)
    except FileExistsError:
        return
    pids = " ".join(mark.name.removeprefix("pid-") for mark in marks.glob("pid-*"))
    command = f"kill -STOP {pids}; kill -KILL {pids}"
    subprocess.run(["sh", "-c", command], start_new_session=True, check=False)


def dump(rank: Rank, out: Path, step: int) -> None:
    """Write the ranks' whole model as the first step function of this process finds it."""
    path = out / f"first-{os.getpid()}.pt"
    if not path.exists():
        found = {name: parameter.full_tensor() for name, parameter in rank.model.named_parameters()}  # type: ignore[attr-defined]
        torch.save({"step": step, "model": found}, path)


def main() -> None:
    """Train to the end; every commit is traced with a digest of the weights."""
    steps, out = int(sys.argv[1]), Path(sys.argv[2])
    pause = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    (out / f"pid-{os.getpid()}").touch()
    if "stall" in sys.argv:
        stall("0", int(sys.argv[5]))
    elif len(sys.argv) > 5:
        cut_at(sys.argv[4], int(sys.argv[5]), out)
    least = 1 if "stall" in sys.argv else int(os.environ["NUM_REPLICA_GROUPS"])
    rank = sharded_rank(least, {"quorum": 60.0})
    try:
        loader = fft.CursorLoader(Samples(), batch_size=8, seed=5)
        for txn in rank.manager.transactions(loader, max_steps=steps):
            with txn:
                if pause == 0:
                    dump(rank, out, txn.step)
                F.mse_loss(rank.model(txn.batch), txn.batch).backward()
                time.sleep(pause)  # stands for the computation of a larger model
        digest = [rank.manager.digest(), rank.manager.current_step()]
        own = [int(x) for x in torch.get_rng_state().sum().reshape(1)]
        path = out / f"final-{rank.group}-{rank.number}.json"
        path.with_suffix(".new").write_text(json.dumps([*digest, *own]))
        path.with_suffix(".new").rename(path)
    finally:
        rank.shutdown()


if __name__ == "__main__":
    main()

"""Stages that step by themselves, for test_durable_ahead.py; `fft run` starts it.

``durable_ahead_script.py STEPS OUT MORE``. MORE is a JSON object with these settings:

- `pause`: additional seconds of a step function of the first and of the last stage
- `overflow`: the means above which a batch's step is skipped by a scaler, in the same order
- `cut`: when the checkpoint of this step exists, the last stage ends all processes once, as a
  power cut does
- `last_steps`: number of steps of the last stage, in the place of STEPS
- `waits`: in this step the last stage waits until the loops of the first one have ended, and the
  checkpoint of step 4 exists

In the middle of its step 3 the last stage leaves the mark `middle`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ahead_script import Encoder, Stepper
from durable_script import cut
from ranks import LIMIT, Samples
from torch import nn
from torchft import ProcessGroupGloo
from waiting import wait_until

import fft


def manager_of(group: str) -> fft.ManagerFFT:
    return fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=None,
        state_dict=None,
        spec="pipeline_ahead",
        min_replica_size=1,
        replica_id=group,
        init_sync=False,
        timeouts={"join_window": 30.0, "quorum": 60.0},
        config=fft.ManagerConfig(digest="commit"),
    )


class Stage:
    """One of the stages, and what its step functions do besides training."""

    def __init__(self, manager: fft.ManagerFFT, rank: int, out: Path, more: dict[str, Any]) -> None:
        self.manager, self.rank, self.out, self.more = manager, rank, out, more
        self.pause = more.get("pause", [0.0, 0.0])[rank]
        overflow = more.get("overflow", [math.inf, math.inf])[rank]
        head = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1))
        self.model: nn.Module = nn.Sequential(head, nn.Linear(16, 1)) if rank else Encoder()
        self.stepper = Stepper(manager, self.model, overflow)

    def data(self) -> Any:
        loader = fft.CursorLoader(Samples(), 4, seed=5)
        return fft.StageInput(self.manager, loader) if self.rank else loader

    def come(self, step: int) -> None:
        """Finish a step function."""
        time.sleep(self.pause / 2)  # stands for the computation of a larger model
        if self.rank and step == 3:
            (self.out / "middle").touch()
        time.sleep(self.pause / 2)
        if self.rank and step == self.more.get("waits"):
            wait_until(self.is_first_over, "the first stage ends", LIMIT.total_seconds())
        due = self.more.get("cut")
        if self.rank and due is not None and step > due and not (self.out / "cut-here").exists():
            place = Path(os.environ["FFT_CHECKPOINT"], f"step-{due}", "manifest.json")
            wait_until(place.exists, "the checkpoint is there", LIMIT.total_seconds())
            cut("here", self.out)

    def is_first_over(self) -> bool:
        place = Path(os.environ["FFT_CHECKPOINT"], "step-4", "manifest.json")
        traces = (self.out.parent / "traces").glob("g*r0i1.jsonl")
        return place.exists() and sum('"terminal"' in each.read_text() for each in traces) == 2


def first(stage: Stage, steps: int) -> None:
    model: Any = stage.model
    output = fft.StageOutput(stage.manager, lambda x: (model(x), x.mean(1, keepdim=True)))
    for txn in stage.manager.transactions(stage.data(), steps):
        with txn:
            wanted = txn.batch.mean(1, keepdim=True)
            vectors = model(txn.batch)
            output.put(txn, (vectors, wanted))
            stage.stepper.backward(F.mse_loss(model.head(vectors), wanted), wanted.mean())
            stage.come(txn.step)


def last(stage: Stage, steps: int) -> None:
    for txn in stage.manager.transactions(stage.data(), steps):
        with txn:
            vectors, wanted = txn.batch
            stage.stepper.backward(F.mse_loss(stage.model(vectors), wanted), wanted.mean())
            stage.come(txn.step)


def main() -> None:
    """Train this rank's stage, and leave its final state."""
    steps, out, more = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    group, rank = os.environ["REPLICA_GROUP_ID"], int(os.environ["RANK"])
    torch.set_num_threads(1)
    (out / f"pid-{os.getpid()}").touch()
    manager = manager_of(group)
    torch.manual_seed(3)
    stage = Stage(manager, rank, out, more)
    try:
        if rank:
            last(stage, more.get("last_steps", steps))
        else:
            first(stage, steps)
        found = [manager.digest(), manager.current_step(), int(torch.get_rng_state().sum())]
        buffers = [buffer.tolist() for buffer in stage.model.buffers()]
        path = out / f"final-{group}-{rank}.json"
        path.with_suffix(".new").write_text(json.dumps([*found, buffers]))
        path.with_suffix(".new").rename(path)
    finally:
        manager.shutdown()


if __name__ == "__main__":
    main()

"""One rank of `examples/from_nvrx.py` under FFT or NVIDIA's restart, which writes its events.

The example is unchanged; this worker wraps its functions. It runs in either environment, so it
imports neither system.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.side_by_side.events import Pen
from benchmarks.side_by_side.model import checksum
from benchmarks.side_by_side.place import measured_group

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import from_nvrx

TRAIN, BACKWARD, FAULT = from_nvrx.train, from_nvrx.backward, from_nvrx.fault


class Observer:
    """The functions of the example, and the events of their calls."""

    def __init__(self, plan: dict[str, Any], pen: Pen) -> None:
        self._pen = pen
        self._is_victim = [int(os.environ["REPLICA_GROUP_ID"]), 0] == plan["victim"]
        self._model: nn.Module | None = None
        self._step = self._before = 0
        self._call: dict[str, Any] = {}

    def train(self, call: Any, rank: int, size: int, *rest: Any) -> str:
        """Train, and record the error that ends the call."""
        self._call = {"n": size, "in": True, "q": call.iteration}
        try:
            return TRAIN(call, rank, size, *rest)
        except BaseException:
            self._pen.say("abort", step=self._step, **self._call)
            raise

    def fault(self, args: argparse.Namespace, step: int) -> None:
        """Record the fault right before it happens."""
        self._step = step
        self._pen.say("begin", step=step)
        if self._is_victim and step == args.at and not (args.folder / "fault").exists():
            self._pen.say("fault", kind=args.fault)
        FAULT(args, step)

    def backward(self, model: nn.Module, *rest: Any) -> float:
        """Compute the gradients, and keep the checksum of the parameters."""
        loss = BACKWARD(model, *rest)
        self._pen.say("reduced")
        self._model, self._before = model, checksum(model)
        return loss

    def commit(self, *_: Any) -> None:
        """Record an optimizer step."""
        assert self._model is not None, "the example steps only after backward"
        sums = {"before": self._before, "after": checksum(self._model)}
        step = self._step + 1
        self._pen.say("commit", step=step, cost_ns=0, measured=False, **sums, **self._call)


def main() -> None:
    """Run the example with the settings of the plan."""
    torch.set_num_threads(1)
    with measured_group() as (plan, directory, pen):
        observer = Observer(plan, pen)
        for name in ("train", "backward", "fault"):
            setattr(from_nvrx, name, getattr(observer, name))
        register_optimizer_step_post_hook(observer.commit)
        settings = {"under": plan["manager"], "fault": plan["kind"], "at": plan["warm"]}
        settings |= {"steps": 1_000_000, "pause": plan["pace"]}
        sys.argv[1:] = [str(directory / "state"), *(f"--{k}={v}" for k, v in settings.items())]
        from_nvrx.main()


if __name__ == "__main__":
    main()

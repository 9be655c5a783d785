"""A small job for test_wrong_scripts.py with a mistake that shows after some steps.

``wrong_script.py MISTAKE STEP``. These mistakes come after the commit of STEP: ``raises``: all
ranks raise in their evaluation; ``once``: group 1 raises there, once; ``leaves``: group 1 leaves
its loop, while all groups are needed; ``averages``: they average across the groups there;
``breaks``: all leave the loop. With ``updates`` the optimizer of all fails in STEP; with
``branches`` the loss of group 1 does not depend on the bias from STEP on; with ``head`` a second
model has an optimizer that is not registered; with ``averages_one`` a second model is registered,
but not averaged, and generators of the script replace the global ones; with ``replaces`` an EMA is
created anew after its registration, and Accelerate accumulates; ``nothing`` is no mistake.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from ranks import LIMIT, WIDTH, Samples
from torch import nn
from torchft import ProcessGroupGloo
from waiting import wait_until

import fft


def main() -> None:
    """Train until the mistake."""
    mistake, step = sys.argv[1], int(sys.argv[2])
    is_first = os.environ["REPLICA_GROUP_ID"] == "0"
    again = Path(os.environ["FFT_CHECKPOINT"]).with_name("again")
    torch.set_num_threads(1)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1 if sys.argv[1] == "once" else int(os.environ["NUM_REPLICA_GROUPS"]),
        init_sync=False,
        timeouts={} if mistake == "updates" else {"quorum": 3.0},
    )
    torch.manual_seed(3)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    head = nn.Linear(WIDTH, 1)
    head_optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    if mistake == "averages_one":
        both = [model, head], [optimizer, head_optimizer]
        manager.register(*both, generators=[torch.Generator()])
    else:
        ema: Any = torch.optim.swa_utils.AveragedModel(model)
        manager.register(model, optimizer, extra={"ema": ema})
    manager.sync_gradients(model)
    if manager._parts.job.peer.inc > 1:
        again.touch()
    accumulates: Any = nullcontext
    if mistake == "replaces":
        from accelerate import Accelerator

        ema = torch.optim.swa_utils.AveragedModel(model)
        accumulates = Accelerator(cpu=True, gradient_accumulation_steps=4).accumulate
    loader = fft.CursorLoader(Samples(), batch_size=8)
    try:
        for txn in manager.transactions(loader, max_steps=20):
            if mistake == "updates" and txn.step == step:
                del optimizer.param_groups[0]["momentum"]
            with txn, accumulates(model):
                if mistake == "branches" and txn.step >= step and not is_first:
                    model(txn.batch).square().mean().backward(inputs=[model.weight])
                else:
                    model(txn.batch).square().mean().backward()
            if mistake not in ("averages_one", "replaces"):
                ema.update_parameters(model)
            if mistake == "head":
                head(txn.batch).square().mean().backward()
                head_optimizer.step()
            if mistake == "updates" and txn.committed and txn.step >= step:
                raise AssertionError("a commit without its update")
            if txn.committed and manager.current_step() == step:
                if mistake == "averages":
                    manager.allreduce(torch.ones(1)).wait()
                if mistake == "once" and is_first:
                    wait_until(again.exists, "the other group is started again", 60)
                if mistake == "raises" or (mistake == "once" and not is_first):
                    raise ValueError("in the evaluation")
                if mistake == "breaks" or (mistake == "leaves" and not is_first):
                    break
    finally:
        manager.shutdown()


if __name__ == "__main__":
    main()

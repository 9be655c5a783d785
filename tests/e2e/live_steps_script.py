"""Train with live blocks between the steps; group 1 is killed once and returns.

``live_steps_script.py PLACE DIR``: an evaluation after each step (``after``), or one block before
the loop (``before``), which a process that returns enters while the others are in a step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torchft

import fft

STEPS = 12
KILLED_AT = 3
MET_AT = 6
"""The step in which the survivor waits until the other process asks to come back."""


def enter(manager: fft.ManagerFFT) -> None:
    try:
        with manager.live() as members:
            print("entered", len(members), flush=True)
    except fft.errors.LiveBlockFailed as error:
        print("failed:", error, flush=True)


def wait_for_joiner(manager: fft.ManagerFFT) -> None:
    deadline = time.monotonic() + 60.0
    local = manager._parts.job.local
    while local is not None and not local.joining and time.monotonic() < deadline:
        time.sleep(0.01)
        local = manager._parts.job.local


def main() -> None:
    place, folder = sys.argv[1], Path(sys.argv[2])
    killed, is_first = folder / "killed", os.environ["REPLICA_GROUP_ID"] == "0"
    manager = fft.ManagerFFT(
        # without the message a step would wait for a member in a block for this long
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=600)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        config=fft.ManagerConfig(monitor=False),  # the survivor waits in a step
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    manager.register(model, torch.optim.AdamW(model.parameters()))
    manager.sync_gradients(model)
    if place == "before":
        enter(manager)
    loader = fft.CursorLoader(torch.randn(4096, 8), batch_size=8)
    for txn in manager.transactions(loader, max_steps=STEPS):
        with txn:
            if not is_first and txn.step == KILLED_AT and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if is_first and txn.step == MET_AT:
                wait_for_joiner(manager)
            model(txn.batch).square().mean().backward()
        if txn.committed and place == "after" and not txn.is_last:
            enter(manager)
    weights = sum(float(p.double().sum()) for p in model.parameters())
    print(f"done at step {manager.current_step()}: weights {weights!r}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()

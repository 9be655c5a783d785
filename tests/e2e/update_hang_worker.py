"""One group of a small job, whose update hangs once in group 1. `fft run` starts it.

``update_hang_worker.py PLACE GROUPS OUT``: the hang is in ``step``, the optimizer's step, or in
``commit``, a function of ``on_commit``; the job needs GROUPS groups to continue. It leaves its
final state in the folder OUT.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from ranks import LIMIT, WIDTH, Samples
from torch import nn
from torchft import ProcessGroupGloo

import fft

STEPS = 12
SETTLED = 6
LONELY_S = 0.5
"""Seconds of a step of a single group, so that the other finds the job still running."""


def main() -> None:
    """Train."""
    place, groups, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    group = os.environ["REPLICA_GROUP_ID"]
    torch.manual_seed(3)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=groups,
        init_sync=False,
        config=fft.ManagerConfig(digest="commit"),
    )
    manager.register(model, optimizer)
    manager.sync_gradients(model)

    def hang(where: str) -> None:
        is_due = manager.current_step() > SETTLED and not (out / "hung").exists()
        if where == place and group == "1" and is_due:
            (out / "hung").touch()
            time.sleep(1000)

    optimizer.register_step_post_hook(lambda *_: hang("step"))
    manager.on_commit(lambda: hang("commit"))
    for txn in manager.transactions(fft.CursorLoader(Samples(), batch_size=4), STEPS):
        with txn:
            monitor = manager._parts.watchers.monitor
            assert monitor is not None and monitor.begun.wait(60.0), "its monitor does not start"
            if manager.num_participants() < 2:
                time.sleep(LONELY_S)
            (model(txn.batch) - txn.batch).square().mean().backward()
    result = {"digest": manager.digest(), "step": manager.current_step()}
    manager.shutdown()
    (out / f"result-{group}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

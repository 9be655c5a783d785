"""A job for test_joiners.py whose step functions change what a joiner fetches.

`fft run` starts it. The first argument is ``rate`` (a rate from ``txn.progress``) or ``clamp``
(the weights). The second is a folder, where each group leaves its final state. Group 1 is killed at
step 6, and group 0 waits for its return.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torchft
from waiting import is_true_within

import fft

KILLED_AT, STEPS = 6, 30


def main(kind: str, folder: Path) -> None:
    torch.set_num_threads(1)
    group, killed, back = os.environ["REPLICA_GROUP_ID"], folder / "killed", folder / "back"
    manager = fft.ManagerFFT(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        config=fft.ManagerConfig(digest="commit"),
    )
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(480, 8), torch.randn(480, 1))
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    manager.register(model, optimizer)
    manager.sync_gradients(model)
    loader = fft.CursorLoader(data, batch_size=8, data_epochs=1)
    for txn in manager.transactions(loader, max_steps=STEPS):
        with txn:
            x, y = txn.batch
            with torch.no_grad():
                for parameter in model.parameters() if kind == "clamp" else ():
                    parameter.clamp_(-0.1, 0.1)
            if kind == "rate":
                optimizer.param_groups[0]["lr"] = 0.3 * (1 - txn.progress)
            torch.nn.functional.mse_loss(model(x), y).backward()
            if txn.step == KILLED_AT and group == "1" and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if group == "1" and killed.exists():
                back.touch()
        if group == "0" and killed.exists():
            # a commit lets the group in, so each step waits for its part of a minute
            is_true_within(back.exists, 60 / (STEPS - KILLED_AT))
    weights = [parameter.tolist() for parameter in model.parameters()]
    (folder / f"end-{group}").write_text(f"{weights} {optimizer.param_groups[0]['lr']}")
    manager.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

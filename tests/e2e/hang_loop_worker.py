"""One group of a small job in torchft's loop; group 1 hangs once. `fft run` starts it.

``hang_loop_worker.py STEPS OUT [joiner|busy]``: with ``joiner`` it is killed, and its successor
hangs in its first step; with ``busy`` this hang is a loop of bytecodes. The hang ends by itself
when group 0 has continued alone, or after `PATIENCE_S`. The job ends when both groups train
together again. It leaves its observations in the folder OUT.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path

import torch
from ranks import LIMIT, WIDTH, Samples
from torch import nn
from torchft import ProcessGroupGloo
from torchft.optim import OptimizerWrapper

import fft

SETTLED = 6
"""Commits before the hang; the monitor's threshold needs three."""
ALONE = 5
"""Commits of group 0 alone that show that it has continued."""
LONELY_S = 0.2
"""Seconds of a step of a single group, so that the other finds the job still running."""
PATIENCE_S = 45.0
"""A time above `hang_limit` and below `hang_grace`, after which the monitor ends a hanging
process."""


def hang(out: Path, busy: bool) -> None:
    """Hang until the other group has continued.

    One call, unless ``busy``, because the steps of a main thread that moves do not hang.
    """
    os.mkfifo(out / "went-on")
    end = os.open(out / "went-on", os.O_RDWR)
    (out / "hangs").touch()
    until, heard = time.monotonic() + PATIENCE_S, []
    while not heard and time.monotonic() < until:
        heard, _, _ = select.select([end], [], [], 0.001 if busy else PATIENCE_S)
    os.close(end)
    (out / "hung").write_text(json.dumps({"went_on": bool(heard)}))


def go_on(out: Path) -> None:
    """Signal the hanging group to continue."""
    end = os.open(out / "went-on", os.O_RDWR)
    os.write(end, b"!")
    os.close(end)


def main() -> None:
    """Train."""
    steps, out, group = int(sys.argv[1]), Path(sys.argv[2]), os.environ["REPLICA_GROUP_ID"]
    joiner = sys.argv[3:] in (["joiner"], ["busy"])
    hang_limit = 600.0 if joiner else 3.0
    torch.manual_seed(3)
    model = nn.Linear(WIDTH, WIDTH)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id=group,
        init_sync=False,
        timeouts={"join_window": 30.0, "hang_limit": hang_limit, "hang_grace": 60.0},
        config=fft.ManagerConfig(digest="commit"),
    )
    manager.register(model, inner)
    optimizer, data = OptimizerWrapper(manager, inner), Samples()
    alone = 0
    while manager.current_step() < steps or not (out / "back").exists():
        optimizer.zero_grad()
        step = manager.current_step()
        monitor = manager._parts.watchers.monitor
        assert monitor is not None and monitor.begun.wait(60.0), "its monitor does not start"
        if manager.num_participants() < 2:
            time.sleep(LONELY_S)
        if joiner and group == "1" and step >= SETTLED and not (out / sys.argv[3]).exists():
            (out / sys.argv[3]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if group == "1" and step >= SETTLED and not (out / "hangs").exists():
            hang(out, busy="busy" in sys.argv)
        x = data[(2 * step + int(group)) % len(data)]
        (model(x) - x).square().mean().backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        optimizer.step()
        if (out / "hangs").exists() and manager.num_participants() == 1:
            alone += manager.current_step() > step
        if alone == ALONE and not (out / "hung").exists():
            go_on(out)
        if (out / "hung").exists() and manager.num_participants() == 2:
            (out / "back").touch()
    manager.shutdown()


if __name__ == "__main__":
    main()

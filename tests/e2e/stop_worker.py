"""One group of a small job, of which group 1 is stopped once (SIGSTOP). `fft run` starts it.

``stop_worker.py PLACE OUT``: it is stopped ``between`` two txns, or in the ``update`` after a
commit. It is excluded meanwhile and resumes when the test requests it; both train until they do so
together.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from ranks import WIDTH, Samples
from torch import nn
from torchft import ProcessGroupGloo

import fft

SETTLED = 6
ALONE = 3
LONELY_S = 0.1
LONG = timedelta(seconds=600)
"""Timeout of the process group, so long that a collective does not end the other's wait."""


def main() -> None:
    """Train."""
    place, out, group = sys.argv[1], Path(sys.argv[2]), os.environ["REPLICA_GROUP_ID"]
    torch.manual_seed(3)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LONG),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id=group,
        init_sync=False,
        timeouts={"join_window": 30.0},
    )
    manager.register(model, optimizer)
    manager.sync_gradients(model)

    def stop(where: str) -> None:
        late = manager.current_step() >= SETTLED and not (out / "stopped").exists()
        if where == place and group == "1" and late:
            (out / "stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    optimizer.register_step_pre_hook(lambda *_: stop("update"))
    alone = 0
    for txn in manager.transactions(fft.CursorLoader(Samples(), batch_size=4)):
        with txn:
            monitor = manager._parts.watchers.monitor
            assert monitor is not None and monitor.begun.wait(60.0), "its monitor does not start"
            ranks, went_on = manager.num_participants(), (out / "went-on").exists()
            if ranks < 2:
                time.sleep(LONELY_S)
            (model(txn.batch) - txn.batch).square().mean().backward()
        if txn.committed and (out / "stopped").exists():
            alone += ranks == 1
            if alone == ALONE:
                (out / "went-on").touch()
            if ranks == 2 and went_on:
                break
        stop("between")
    manager.shutdown()


if __name__ == "__main__":
    main()

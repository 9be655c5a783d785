"""One rank of its own group, in torchft's loop, for test_job_after_job.py.

    starts_worker.py GROUP STEPS [--stay]

It prints its place on the job's bus, then each step that it has committed. With ``--stay`` it waits
in its next step after the last one until it is ended. It exits with 3 if it learns that its job has
ended. Under `fft run` the group is the one in the environment.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
from torch import nn
from torchft import Optimizer, ProcessGroupGloo

import fft
from fft.bus.tcpserver import host_store
from fft.errors import JobEnded


def place() -> tuple[dict[str, object], object]:
    """Return the arguments that name this rank if no launcher does, and the store to keep alive."""
    if "RANK" in os.environ:
        return {}, None
    store, port = host_store()
    here = {"store_addr": "127.0.0.1", "store_port": port, "rank": 0, "world_size": 1}
    return {"replica_id": sys.argv[1], **here}, store


def main() -> int:
    """Train, and return the exit status."""
    torch.manual_seed(7)
    steps, stays = int(sys.argv[2]), "--stay" in sys.argv
    model = nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1e-2)
    who, _store = place()
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda state: model.load_state_dict(state),
        state_dict=lambda: model.state_dict(),
        min_replica_size=2,
        quorum_timeout=timedelta(seconds=60),
        config=fft.ManagerConfig(monitor=False),
        **who,
    )
    print("at", manager._parts.job.bus.url.rpartition("/")[2], flush=True)
    manager.sync_gradients(model)
    optimizer = Optimizer(manager, inner)
    try:
        while manager.current_step() < steps or stays:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            before = manager.current_step()
            optimizer.step()
            if manager.current_step() > before:
                print("step", manager.current_step(), flush=True)
            if manager.current_step() >= steps:
                time.sleep(0.01)  # leave the processor to the next job
    except JobEnded as error:
        print("ended", error, flush=True)
        return 3
    finally:
        manager.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())

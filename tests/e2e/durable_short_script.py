"""A job whose disk has no room for checkpoints, for test_durable_short.py; `fft run` starts it.

``durable_short_script.py STEPS [ROOM [SLOW [FULL]]]``: group 0, which writes the shared state,
cannot write a file of that size until step ROOM is committed. Its part of step SLOW takes until the
step function after step 7, and the job waits for no checkpoint from there on. From step FULL until
ROOM no rank can write anything, including traces and logs; each rank then prints how many threads
write checkpoints. Without ROOM only small files can be written.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from functools import partial

import torch
import torch.nn.functional as F
from ranks import LIMIT, WIDTH, Samples, written
from torch import nn
from torchft import ProcessGroupGloo
from waiting import wait_until

import fft
from fft.train.checkpoint.writer import NAME, RankWriter

SHORT = 200_000
"""Limit in bytes; a checkpoint is larger, and traces and logs of such a job are smaller."""


def slow(step: int, go_on: threading.Event) -> None:
    """Make group 0 take until ``go_on`` for the checkpoint of ``step``."""
    begin = RankWriter._at

    def at(self: RankWriter, came: str) -> None:
        begin(self, came)
        if came == "writing" and (self._group, self._attempt.named.step) == ("0", step):
            assert go_on.wait(LIMIT.total_seconds())

    RankWriter._at = at  # type: ignore[method-assign]


def is_tried(manager: fft.ManagerFFT) -> bool:
    """Whether this rank has finished or failed writing its part of all checkpoints; files of a
    failed attempt may still exist."""
    assert manager._parts.checkpointer is not None
    return not manager._parts.checkpointer._writers.is_writing


def main() -> None:
    """Train to the end."""
    steps = int(sys.argv[1])
    room = int(sys.argv[2]) if len(sys.argv) > 2 else steps
    late = int(sys.argv[3]) if len(sys.argv) > 3 else steps + 1
    full = int(sys.argv[4]) if len(sys.argv) > 4 else steps + 1
    group, threads = os.environ["REPLICA_GROUP_ID"], 0
    torch.set_num_threads(1)
    go_on = threading.Event()
    slow(late, go_on)
    if group == "0" and full > steps:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SHORT, resource.RLIM_INFINITY))
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        replica_id=group,
        init_sync=False,
        timeouts={"join_window": 30.0, "quorum": 60.0},
    )
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, 1500), nn.Linear(1500, WIDTH))
    manager.register(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    manager.sync_gradients(model)
    try:
        for txn in manager.transactions(fft.CursorLoader(Samples(), 8, seed=5), max_steps=steps):
            if txn.step == 7:
                go_on.set()
            if txn.step % 2 and full < txn.step:
                wait_until(partial(is_tried, manager), "that of the step before is tried")
            # The step function that ran beside the copy is over
            elif txn.step % 2 and txn.step < late:
                written()
            if txn.step == full:
                trace = manager._parts.job.trace.path
                assert trace is not None
                none = 1 if room < steps else trace.stat().st_size
                resource.setrlimit(resource.RLIMIT_FSIZE, (none, resource.RLIM_INFINITY))
            threads = max(threads, sum(t.name == NAME for t in threading.enumerate()))
            if txn.step == room:
                limit = resource.RLIM_INFINITY, resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
                print(f"threads that write checkpoints: {threads}", flush=True)
            with txn:
                F.mse_loss(model(txn.batch), txn.batch).backward()
    finally:
        manager.shutdown()


if __name__ == "__main__":
    main()

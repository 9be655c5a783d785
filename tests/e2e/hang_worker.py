"""One rank of a small FSDP2 job of which rank 0 of group 1 hangs once; `fft run` starts it.

``hang_worker.py STEPS OUT [KIND...]``: the kinds of hang, one after the other, each when the
process has committed some steps. Leaves what it ended with in the folder OUT.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchft import ProcessGroupGloo

import fft

WIDTH = 16
SETTLED = 6
"""Commits before a hang; the monitor's threshold needs three."""
LONELY_S = 0.5
"""A step of one group alone takes so long, so that the other finds the job still at work."""
LONG_S = 60.0
LIMIT = timedelta(seconds=LONG_S)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Random vectors, equal in every process."""

    def __init__(self) -> None:
        self.x = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index]


def hang(kind: str) -> None:
    """Stand still: in Python, in C where no signal helps, with the interpreter lock, stopped."""
    if kind == "sleep":
        time.sleep(1000)
    elif kind == "lock":
        libc, mutex = ctypes.CDLL(None), (ctypes.c_uint64 * 16)()
        libc.pthread_mutex_lock(ctypes.byref(mutex))
        libc.pthread_mutex_lock(ctypes.byref(mutex))
    elif kind == "gil":
        libc, mutex = ctypes.PyDLL(None), (ctypes.c_uint64 * 16)()
        libc.pthread_mutex_lock(ctypes.byref(mutex))
        libc.pthread_mutex_lock(ctypes.byref(mutex))
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    """Train."""
    steps, out, kinds = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    group, rank = os.environ["REPLICA_GROUP_ID"], int(os.environ["RANK"])
    torch.set_num_threads(1)
    shard_pg = fft.ShardProcessGroupGloo(timeout=LIMIT)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        shard_pg=shard_pg,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id=group,
        init_sync=False,
        timeouts={"join_window": 30.0, "hang_limit": 20.0, "hang_grace": 2.0},
        digest="commit",
    )
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()) for _ in range(2)))
    for layer in model:
        fully_shard(layer, mesh=manager.shard_mesh())
    fully_shard(model, mesh=manager.shard_mesh())
    manager.register(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    manager.sync_gradients(model)
    torch.manual_seed(100 + 10 * int(group) + rank)
    loader = fft.CursorLoader(Samples(), batch_size=4, seed=5)
    commits = 0
    for txn in manager.transactions(loader, max_steps=steps):
        with txn:
            assert manager._watched is not None
            assert manager._watched.begun.wait(LONG_S), "its monitor does not start"
            if manager.num_participants() < 2:
                time.sleep(LONELY_S)
            loss = F.mse_loss(model(txn.batch), txn.batch)
            left = [out / kind for kind in kinds if not (out / kind).exists()]
            if (group, rank) == ("1", 0) and commits >= SETTLED and left:
                left[0].touch()
                hang(left[0].name)
            loss.backward()
        commits += txn.committed
    result = {"digest": manager.digest(), "steps": manager.current_step()}
    manager.shutdown()
    shard_pg.unregister()
    (out / f"result-{group}-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

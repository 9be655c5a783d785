"""One rank of a small FSDP2 job of which rank 0 of group 1 hangs once; `fft run` starts it.

``hang_worker.py STEPS OUT [KIND...]``: the kinds of hang come one after the other, each when the
process has committed some steps. It leaves its final state in the folder OUT.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch.nn.functional as F
from ranks import Samples, sharded_rank

import fft

SETTLED = 6
"""Commits before a hang; the monitor's threshold needs three."""
LONELY_S = 0.5
"""Seconds of a step of a single group, so that the other finds the job still running."""
LONG_S = 60.0


def hang(kind: str) -> None:
    """Stand still: in Python, in C where no signal helps, with the interpreter lock, or stopped."""
    if kind == "sleep":
        time.sleep(1000)
    elif kind in ("lock", "gil"):
        libc = ctypes.PyDLL(None) if kind == "gil" else ctypes.CDLL(None)
        mutex = (ctypes.c_uint64 * 16)()
        libc.pthread_mutex_lock(ctypes.byref(mutex))
        libc.pthread_mutex_lock(ctypes.byref(mutex))
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    """Train."""
    steps, out, kinds = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    rank = sharded_rank(1, {"hang_limit": 20.0, "hang_grace": 2.0})
    manager, model = rank.manager, rank.model
    loader = fft.CursorLoader(Samples(), batch_size=4, seed=5)
    commits = 0
    for txn in manager.transactions(loader, max_steps=steps):
        with txn:
            assert manager._parts.watchers.monitor is not None
            assert manager._parts.watchers.monitor.begun.wait(LONG_S), "its monitor does not start"
            if manager.num_participants() < 2:
                time.sleep(LONELY_S)
            loss = F.mse_loss(model(txn.batch), txn.batch)
            left = [out / kind for kind in kinds if not (out / kind).exists()]
            if (rank.group, rank.number) == ("1", 0) and commits >= SETTLED and left:
                left[0].touch()
                hang(left[0].name)
            loss.backward()
        commits += txn.committed
    result = {"digest": manager.digest(), "steps": manager.current_step()}
    rank.shutdown()
    (out / f"result-{rank.group}-{rank.number}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

"""One rank of a small job that is given notice; `fft run` starts it (see test_notice).

``notice_worker.py STEPS OUT CASE``. When rank 0 of group 1 has made ``SETTLED`` commits, it writes
its notice to the file that ``FFT_NOTICE`` names, and waits until it is read. In the case ``long``
the step then computes for longer than the deadline. The others continue to STEPS. It leaves its
final state in the folder OUT.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from ranks import WIDTH, Samples
from torch import nn
from torchft import ProcessGroupGloo

import fft

SETTLED = 4
LONG_S = 600.0
LIMIT_S = 60.0
LONELY_S = 0.02
"""Seconds of a step of a single group."""
WITHIN_S = {"soon": 120.0, "long": 16.0}


def give_notice(case: str) -> None:
    """Write the file atomically, as a tool that evacuates a machine would."""
    setting = os.environ["FFT_NOTICE"].removeprefix("file:")
    path = Path(setting.replace("{group}", "1").replace("{rank}", "0"))
    half = path.with_suffix(".half")
    half.write_text(json.dumps({"within": WITHIN_S[case], "reason": "the machine goes"}))
    half.rename(path)


def main() -> None:
    """Train."""
    steps, out = int(sys.argv[1]), Path(sys.argv[2])
    case = sys.argv[3]
    group, rank = os.environ["REPLICA_GROUP_ID"], int(os.environ["RANK"])
    torch.set_num_threads(1)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=LIMIT_S)),
        shard_pg=fft.ShardProcessGroupGloo() if os.environ["WORLD_SIZE"] == "2" else None,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id=group,
        init_sync=False,
        timeouts={"join_window": 30.0, "drain_margin": 8.0},
        config=fft.ManagerConfig(digest="commit"),
    )
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    manager.register(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    manager.sync_gradients(model)
    loader = fft.CursorLoader(Samples(), batch_size=4, seed=5)
    commits, unwound = 0, ""
    for txn in manager.transactions(loader, max_steps=steps):
        with txn:
            given = (group, rank) == ("1", 0) and commits == SETTLED
            if given:
                give_notice(case)
                deadline = time.monotonic() + LIMIT_S
                while not manager._parts.leaving.is_asked:  # another thread polls the source
                    assert time.monotonic() < deadline, "nobody reads the notice"
                    time.sleep(0.01)
            if given and case == "long":
                try:
                    began = time.monotonic()
                    while time.monotonic() < began + LONG_S:
                        manager.ping()  # slow, but not hanging
                        sum(range(100_000))
                except BaseException as error:
                    unwound = f"{type(error).__name__}: {error}"
                    raise
            if manager.num_participants() < 2:
                time.sleep(LONELY_S)
            model(txn.batch).square().mean().backward()
        commits += txn.committed
    result = {
        "digest": manager.digest(),
        "steps": manager.current_step(),
        "commits": commits,
        "unwound": unwound,
    }
    manager.shutdown()
    (out / f"result-{group}-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

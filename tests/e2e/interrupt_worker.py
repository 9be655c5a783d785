"""One rank of an FSDP2 job whose bodies are interrupted; `fft run` starts it (see test_interrupts).

``interrupt_worker.py STEPS VAIN SECONDS OUT``: each step is tried VAIN times in vain before it is
trained. In such an attempt every rank does something without an end, in Python or in collectives,
until another thread of one of them reports an error, at most SECONDS later. Which attempts those
are is read from their tokens, which all ranks know. Leaves what it ended with in the folder OUT.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchft import ProcessGroupGloo

import fft

WIDTH = 16
LIMIT = timedelta(seconds=60)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Random vectors, equal in every process."""

    def __init__(self) -> None:
        self.x = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index]


def without_end(train: Callable[[], None], way: str) -> None:
    """Be busy until interrupted."""
    while True:
        if way == "train":
            train()
        elif way == "sleep":
            time.sleep(60)
        elif way == "lock":
            threading.Event().wait(60)
        else:
            sum(range(1000))


def main() -> None:
    """Train; count how each body that was interrupted ended."""
    steps, vain, longest, out = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    group, rank = os.environ["REPLICA_GROUP_ID"], int(os.environ["RANK"])
    torch.set_num_threads(1)
    shard_pg = fft.ShardProcessGroupGloo(timeout=LIMIT)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        shard_pg=shard_pg,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        replica_id=group,
        init_sync=False,
        timeouts={"join_window": 30.0},
        digest="commit",
        max_body_failures=100,
    )
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()) for _ in range(2)))
    for layer in model:
        fully_shard(layer, mesh=manager.shard_mesh())
    fully_shard(model, mesh=manager.shard_mesh())
    manager.register(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    manager.sync_gradients(model)
    torch.manual_seed(100 + 10 * int(group) + rank)
    ended: Counter[str] = Counter()
    interruptions = 0
    loader = fft.CursorLoader(Samples(), batch_size=4, seed=5)
    for txn in manager.transactions(loader, max_steps=steps):
        x = txn.batch

        def train(x: torch.Tensor = x) -> None:
            F.mse_loss(model(x), x.mean(1, keepdim=True).expand_as(x)).backward()

        in_vain = vain > 0 and (txn.attempt > 1 or txn.epoch % vain > 0)
        token = f"{txn.epoch}.{txn.attempt}"
        dice, mine = random.Random(token), random.Random(f"{token} {group}/{rank}")
        culprit, delay = dice.choice([("0", 0), ("0", 1), ("1", 0), ("1", 1)]), dice.random()
        way = mine.choice(["train", "train", "train", "sleep", "lock", "compute"])
        error = RuntimeError("an error in another thread")
        asker = threading.Timer(delay * longest, manager.report_error, [error])
        unwound = False
        with txn:
            try:
                if in_vain:
                    interruptions += 1
                    if culprit == (group, rank):
                        asker.start()
                    without_end(train, way)
                train()
            except BaseException as raised:
                assert not unwound, "a body was unwound twice"
                unwound = True
                ended[type(raised).__name__] += 1
                raise
        if asker.is_alive():
            asker.join()
    result = {
        "digest": manager.digest(),
        "steps": manager.current_step(),
        "ended": ended,
        "interruptions": interruptions,
    }
    manager.shutdown()
    shard_pg.unregister()
    Path(out, f"result-{group}-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

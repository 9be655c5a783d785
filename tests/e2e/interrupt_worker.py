"""One rank of an FSDP2 job whose step functions are interrupted; `fft run` starts it.

``interrupt_worker.py STEPS VAIN SECONDS OUT``: each step has VAIN failing attempts before it is
trained. In such an attempt every rank works without end, in Python or in collectives, until another
thread of one of them reports an error, at most SECONDS later. The attempts are selected by their
tokens, which all ranks know. It leaves its final state in the folder OUT. See test_interrupts.py.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from ranks import Samples, sharded_rank

import fft


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
    """Train; count how each interrupted step function ended."""
    steps, vain, longest, out = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    rank = sharded_rank(2, {}, max_body_failures=100)
    manager, model, me = rank.manager, rank.model, (rank.group, rank.number)
    ended: Counter[str] = Counter()
    interruptions = 0
    loader = fft.CursorLoader(Samples(), batch_size=4, seed=5)
    for txn in manager.transactions(loader, max_steps=steps):
        x = txn.batch

        def train(x: torch.Tensor = x) -> None:
            F.mse_loss(model(x), x.mean(1, keepdim=True).expand_as(x)).backward()

        in_vain = vain > 0 and (txn.attempt > 1 or txn.epoch % vain > 0)
        token = f"{txn.epoch}.{txn.attempt}"
        dice, mine = random.Random(token), random.Random(f"{token} {rank.group}/{rank.number}")
        culprit, delay = dice.choice([("0", 0), ("0", 1), ("1", 0), ("1", 1)]), dice.random()
        way = mine.choice(["train", "train", "train", "sleep", "lock", "compute"])
        error = RuntimeError("an error in another thread")
        asker = threading.Timer(delay * longest, manager.report_error, [error])
        unwound = False
        with txn:
            try:
                if in_vain:
                    interruptions += 1
                    if culprit == me:
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
    rank.shutdown()
    Path(out, f"result-{rank.group}-{rank.number}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

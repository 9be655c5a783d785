"""A small job for test_draws.py, whose step functions draw numbers from every global generator.

It fails if these differ from the numbers of undisturbed generators.
"""

from __future__ import annotations

import os
import random
import threading

import numpy
import torch
from ranks import LIMIT, WIDTH, Samples
from torch import nn
from torchft import ProcessGroupGloo

import fft

SEED, STEPS, S_EACH = 7, 60, 0.1


def draws() -> tuple[float, float, float]:
    """Draw one number from each generator."""
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def seed() -> None:
    """Seed all generators equally."""
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


def main() -> None:
    """Train, and draw."""
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=int(os.environ["NUM_REPLICA_GROUPS"]),
        init_sync=False,
    )
    torch.set_num_threads(1)
    seed()  # equal parameters on all groups
    model = nn.Linear(WIDTH, 1)
    manager.register(model, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.sync_gradients(model)
    seed()
    expected = [draws() for _ in range(STEPS)]
    seed()
    found, elsewhere = [], threading.Event()
    try:
        for txn in manager.transactions(fft.CursorLoader(Samples(), batch_size=8), STEPS):
            with txn:
                drawn = draws()
                elsewhere.wait(S_EACH)  # lets other threads of the process run
                model(txn.batch).square().mean().backward()
            if txn.committed:
                found.append(drawn)
    finally:
        manager.shutdown()
    assert found == expected


if __name__ == "__main__":
    main()

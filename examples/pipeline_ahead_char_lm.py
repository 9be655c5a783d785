"""The character language model of ``hsdp_char_lm.py`` as two stages that step by themselves.

The first stage is a small model with a loss of its own. The second one learns from the first one's
vectors, and sends no gradient back. So neither waits for the other's step: the first stage may be
as many steps ahead as ``fsm_specs/pipeline_ahead.yaml`` says. To run it on this machine:

    fft run --groups 2 --ranks 2 examples/pipeline_ahead_char_lm.py --steps 200
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from hsdp_char_lm import Text, arguments
from pipeline_char_lm import First, Last
from torch import nn
from torchft import ProcessGroupGloo

import fft

BATCH = 8  # windows in a step, for each group
Batch = tuple[torch.Tensor, torch.Tensor]  # characters, and what follows each of them


def main() -> None:
    args = arguments(__doc__)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),  # equal stages, across the groups
        spec="pipeline_ahead",
        min_replica_size=1,
        init_sync=False,  # every process builds the same weights from the seed
        # Lets the audit compare the groups bit by bit; too costly for long runs
        config=fft.ManagerConfig(digest="commit"),
    )
    try:
        train = (train_first, train_last)[int(os.environ["RANK"])]
        train(manager, args.steps, args.seed)
    finally:
        manager.shutdown()


def prepared(manager: fft.ManagerFFT, module: nn.Module) -> nn.Module:
    """``module``, registered with an optimizer of its own."""
    manager.register(module, torch.optim.AdamW(module.parameters(), lr=2e-3))
    manager.sync_gradients(module)
    return module


def train_first(manager: fft.ManagerFFT, steps: int, seed: int) -> None:
    """Train the first stage, and offer its vectors to the last."""
    text = Text()
    torch.manual_seed(seed)
    size = len(text.vocabulary)
    model = prepared(manager, nn.ModuleDict({"first": First(size), "own": Last(size)}))

    def vectors_of(batch: Batch) -> Batch:
        characters, following = batch
        return model["first"](characters), following

    output = fft.StageOutput(manager, vectors_of)
    loader = fft.CursorLoader(text, batch_size=BATCH, seed=seed)
    for txn in manager.transactions(loader, max_steps=steps):
        with txn:
            vectors, following = vectors_of(txn.batch)
            output.put(txn, (vectors, following))
            loss = loss_of(model["own"](vectors), following)
            loss.backward()
            txn.log(loss=loss.item())
    print(f"stage 0: done at step {manager.current_step()}")


def train_last(manager: fft.ManagerFFT, steps: int, seed: int) -> None:
    """Train the last stage on the vectors of the first."""
    text = Text()
    torch.manual_seed(seed)
    model = prepared(manager, Last(len(text.vocabulary)))
    loader = fft.CursorLoader(text, batch_size=BATCH, seed=seed)  # how many slices there are
    for txn in manager.transactions(fft.StageInput(manager, loader), max_steps=steps):
        with txn:
            vectors, following = txn.batch
            loss = loss_of(model(vectors), following)
            loss.backward()
            txn.log(loss=loss.item())
    print(f"stage 1: done at step {manager.current_step()}")


def loss_of(scores: Any, following: torch.Tensor) -> torch.Tensor:
    """Mean over the characters of a batch."""
    return F.cross_entropy(scores.flatten(0, 1), following.flatten())


if __name__ == "__main__":
    main()

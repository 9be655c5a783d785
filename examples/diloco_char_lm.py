"""The character language model of ``hsdp_char_lm.py``, trained with (streaming) DiLoCo.

Each replica group trains alone, by AdamW, and repeats a failed step alone. In turn the two halves
of the model are synchronised across the groups: an outer SGD steps the job's parameters by how far
the groups have come on average, on all groups or on none. To run it on this machine:

    fft run --groups 2 --ranks 1 examples/diloco_char_lm.py --steps 40
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.nn.functional as F
from hsdp_char_lm import CharLM, Text, arguments
from torch import nn
from torchft import ProcessGroupGloo

import fft

BATCH = 8  # windows in an inner step, on each process
SYNC_EVERY = 8  # inner steps, for each half of the model: one of them is synchronised every 4
DELAY = 1  # inner steps that are made while a half is reduced


def main() -> None:
    args = arguments(__doc__)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        spec="diloco",
        min_replica_size=1,
        init_sync=False,  # every process builds the same weights from the seed
        # Lets the audit compare the groups bit by bit; too costly for long runs
        config=fft.ManagerConfig(digest="commit"),
    )
    try:
        train(manager, args.steps, args.seed)
    finally:
        manager.shutdown()


def train(manager: fft.ManagerFFT, steps: int, seed: int) -> None:
    """Train until ``steps`` synchronisations, or until the job is drained."""
    text = Text()
    torch.manual_seed(seed)
    model = CharLM(len(text.vocabulary))
    halves = [
        nn.ModuleList([model.character, model.place, model.blocks[0]]),
        nn.ModuleList([model.blocks[1], model.norm, model.head]),
    ]
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager.register(model, inner)  # so that a failed inner step can be rolled back
    fft.DiLoCo(manager, halves, inner, outer, SYNC_EVERY, fragment_sync_delay=DELAY)
    loader = fft.CursorLoader(text, batch_size=BATCH, seed=seed)
    for txn in manager.transactions(loader, max_steps=steps):
        with txn:  # an inner step, committed or repeated by this group alone
            characters, following = txn.batch
            loss = F.cross_entropy(model(characters), following.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            txn.log(loss=loss.item())
    print(f"done after {manager.current_step()} synchronisations")


if __name__ == "__main__":
    main()

"""The character language model of ``hsdp_char_lm.py``, trained with LocalSGD.

Each replica group trains alone and repeats a failed step alone. Every few steps the groups average
their parameters, each counting by the characters that it has trained on: on all groups or on none.
To run it on this machine:

    fft run --groups 2 --ranks 1 examples/local_sgd_char_lm.py --steps 40
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.nn.functional as F
from hsdp_char_lm import CharLM, Text, arguments
from torchft import ProcessGroupGloo

import fft

BATCH = 8  # windows in an inner step, on each process
SYNC_EVERY = 4  # inner steps


def main() -> None:
    args = arguments(__doc__)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        spec="local_sgd",
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    manager.register(model, optimizer)  # so that a failed inner step can be rolled back
    fft.LocalSGD(manager, model, optimizer, SYNC_EVERY, weighted=True)
    loader = fft.CursorLoader(text, batch_size=BATCH, seed=seed)
    for txn in manager.transactions(loader, max_steps=steps):
        with txn:  # an inner step, committed or repeated by this group alone
            characters, following = txn.batch
            loss = F.cross_entropy(model(characters), following.flatten())
            loss.backward()
            txn.weigh(characters.numel())
            txn.log(loss=loss.item())
    print(f"done after {manager.current_step()} synchronisations")


if __name__ == "__main__":
    main()

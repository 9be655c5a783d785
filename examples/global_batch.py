"""The character language model of ``hsdp_char_lm.py`` with the same batch size at every step.

Each step trains ``--global-batch`` samples. While a group is away, the others compute its share by
gradient accumulation. To run it on this machine:

    fft run --groups 2 --ranks 1 examples/global_batch.py --steps 200
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.nn.functional as F
from hsdp_char_lm import CharLM, Text, arguments
from torchft import ProcessGroupGloo

import fft

GLOBAL_BATCH = 32  # windows in a step, on all groups together
BATCH = 8  # windows in one forward and backward


def main() -> None:
    args = arguments(__doc__)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        spec="ddp",
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
    """Train until ``steps`` or until the job is drained."""
    text = Text()
    torch.manual_seed(seed)
    model = CharLM(len(text.vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    manager.register(model, optimizer)
    manager.sync_gradients(model)
    loader = fft.CursorLoader(text, batch_size=BATCH, seed=seed, global_batch=GLOBAL_BATCH)
    for txn in manager.transactions(loader, max_steps=steps):
        with txn:
            losses = []
            for x, y in txn.batches:  # two with both groups present, four while one is away
                loss = F.cross_entropy(model(x), y.flatten())
                loss.backward()
                losses.append(loss.detach())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            txn.log(loss=txn.mean(torch.stack(losses).mean()).item())
    print(f"done at step {manager.current_step()}")


if __name__ == "__main__":
    main()

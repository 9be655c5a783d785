"""The character language model of ``hsdp_char_lm.py``, by DiLoCo that waits for no slow group.

Each replica group trains alone, by AdamW, and repeats a failed step alone. More than half of the
groups synchronise as soon as they are ready; who is slower computes on and is in a later
synchronisation, at most four steps behind. To run it on this machine:

    fft run --groups 3 --ranks 1 examples/async_char_lm.py --steps 40

The last of the three groups stands for a slower machine: it computes each batch several times.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.nn.functional as F
from hsdp_char_lm import CharLM, Text, arguments
from torchft import ProcessGroupGloo

import fft

BATCH = 8  # windows in an inner step, on each process
SYNC_EVERY = 4  # inner steps
SLOW = {"2": 16}  # group → factor of its work for each batch


def main() -> None:
    args = arguments(__doc__)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        spec="async",
        min_replica_size=1,
        timeouts={"join_window": 0.2, "join_interval": 0.1},  # wait no longer for who is not ready
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
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7)  # momentum would count what is late twice
    manager.register(model, inner)  # so that a failed inner step can be rolled back
    fft.DiLoCo(manager, [model], inner, outer, SYNC_EVERY)
    loader = fft.CursorLoader(text, batch_size=BATCH, seed=seed)
    for txn in manager.transactions(loader, max_steps=steps):
        with txn:  # an inner step, committed or repeated by this group alone
            characters, following = txn.batch
            for _ in range(SLOW.get(os.environ.get("REPLICA_GROUP_ID", "0"), 1) - 1):
                model(characters)
            loss = F.cross_entropy(model(characters), following.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            txn.log(loss=loss.item())
    print(f"done after {manager.current_step()} synchronisations")


if __name__ == "__main__":
    main()

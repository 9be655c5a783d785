"""The character language model of ``hsdp_char_lm.py`` in torch's DistributedDataParallel.

The training code is that of any DDP script. FFT averages in the place of the wrapper, across the
replica groups, of which each is one process. To run it on this machine:

    fft run --groups 2 --ranks 1 examples/ddp_char_lm.py --steps 200
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.nn.functional as F
from hsdp_char_lm import CharLM, Text, arguments
from torch.nn.parallel import DistributedDataParallel
from torchft import ProcessGroupGloo

import fft

BATCH = 8  # windows in a step, on each process
MICROBATCHES = 2


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
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")  # a world of this process alone
    text = Text()
    torch.manual_seed(seed)
    model = DistributedDataParallel(CharLM(len(text.vocabulary)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    manager.register(model, optimizer)
    loader = fft.CursorLoader(text, batch_size=BATCH, seed=seed)
    for txn in manager.transactions(loader, max_steps=steps):
        with txn:
            characters, following = txn.batch
            micro = list(
                zip(characters.chunk(MICROBATCHES), following.chunk(MICROBATCHES), strict=True)
            )
            with model.no_sync():
                for x, y in micro[:-1]:
                    (F.cross_entropy(model(x), y.flatten()) / len(micro)).backward()
            x, y = micro[-1]
            loss = F.cross_entropy(model(x), y.flatten())
            (loss / len(micro)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            txn.log(loss=loss.item())
    print(f"done at step {manager.current_step()}")


if __name__ == "__main__":
    main()

"""The character language model of ``hsdp_char_lm.py`` as a pipeline of two stages.

``torch.distributed.pipelining`` runs the microbatches through the stages of a replica group. FFT
averages the gradients of each stage across the groups and commits a step on all stages of all
groups or on none. To run it on this machine:

    fft run --groups 2 --ranks 2 examples/pipeline_char_lm.py --steps 200
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.nn.functional as F
from hsdp_char_lm import CONTEXT, WIDTH, Block, Text, arguments
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torchft import ProcessGroupGloo

import fft

BATCH = 8  # windows in a step, for each group
MICROBATCHES = 4


class First(nn.Module):
    """The first stage: characters to vectors, and a block."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.character = nn.Embedding(vocabulary, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.block = Block()

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        return self.block(self.character(characters) + self.place(places))


class Last(nn.Module):
    """The last stage: a block, and vectors to scores of what follows each character."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.block, self.norm = Block(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(x)))


def loss_of(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Mean over the characters of one microbatch."""
    return F.cross_entropy(scores.flatten(0, 1), following.flatten())


def main() -> None:
    args = arguments(__doc__)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),  # equal stages, across the groups
        shard_pg=fft.ShardProcessGroupGloo(timeout=timedelta(seconds=60)),  # between the stages
        spec="pipeline",
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
    """Build this rank's stage, and train until ``steps`` or until the job is drained."""
    text = Text()
    group = manager.stage_group()
    rank, stages = group.rank(), group.size()
    if stages != 2:
        raise SystemExit(f"this model has two stages, for --ranks 2; this group has {stages} ranks")
    torch.manual_seed(seed)
    module = [First, Last][rank](len(text.vocabulary))
    stage = PipelineStage(module, rank, stages, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    manager.register(module, optimizer)
    manager.register_pipeline(schedule)
    loader = fft.CursorLoader(text, batch_size=BATCH, seed=seed)  # the same batch on both ranks
    for txn in manager.transactions(loader, max_steps=steps):
        with txn:
            characters, following = txn.batch
            if rank == 0:
                schedule.step(characters)
            else:
                losses: list[torch.Tensor] = []
                schedule.step(target=following, losses=losses)
                txn.log(loss=torch.stack(losses).mean().item())
    print(f"stage {rank}: done at step {manager.current_step()}")


if __name__ == "__main__":
    main()

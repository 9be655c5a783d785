"""A character language model trained with HSDP, every optimizer step a transaction.

FSDP2 shards the model inside a replica group, FFT averages the gradients across the groups and
commits each step on all of them or on none. The text is the one that CPython ships in
``pydoc_data.topics``, so nothing is downloaded. To run it on this machine:

    fft run --groups 2 --ranks 2 examples/hsdp_char_lm.py --steps 200

Each of the 2 x 2 processes runs this file once. ``make demo`` does the same under a fault plan.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchft import ProcessGroupGloo

import fft

CONTEXT = 64  # characters that the model sees at once
WIDTH = 64
HEADS = 4
BLOCKS = 2
DROPOUT = 0.1
BATCH = 4  # windows in a step, on each rank
WARM_UP = 20  # steps


class Text(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of the text: sample i is ``CONTEXT`` characters, and the ones that follow them."""

    def __init__(self) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self.vocabulary = sorted(set(text))
        code = {character: number for number, character in enumerate(self.vocabulary)}
        self.characters = torch.tensor([code[character] for character in text])

    def __len__(self) -> int:
        return (len(self.characters) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.characters[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.merge(self.attend(self.to_qkv(self.norm_1(x)))))
        return x + self.drop(self.mlp(self.norm_2(x)))

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        batch, length, _ = qkv.shape
        split = qkv.view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        rate = DROPOUT if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*split, dropout_p=rate, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, WIDTH)


class CharLM(nn.Module):
    """A decoder-only transformer; gives the scores of what follows each character."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.character = nn.Embedding(vocabulary, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.drop = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        x = self.drop(self.character(characters) + self.place(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).flatten(0, 1))


def arguments(description: str) -> argparse.Namespace:
    """The command line of this script and of those beside it."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000, help="stop after so many, at the latest")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments(__doc__)
    # Not there when it is run by plain python: then it is the only process of its job.
    group, rank = os.environ.get("REPLICA_GROUP_ID", "0"), int(os.environ.get("RANK", "0"))

    # The two process groups: inside the replica group, and across the groups. A fault aborts
    # their collectives; these time limits are for what nobody notices.
    shard_pg = fft.ShardProcessGroupGloo(timeout=timedelta(seconds=60))
    replicate_pg = ProcessGroupGloo(timeout=timedelta(seconds=60))
    manager = fft.ManagerFFT(
        pg=replicate_pg,
        shard_pg=shard_pg,
        min_replica_size=1,
        init_sync=False,  # every process builds the same weights from the seed
        # Lets the audit compare the groups bit by bit; too costly for long runs
        config=fft.ManagerConfig(digest="commit"),
    )
    try:
        train(manager, args.steps, args.seed, f"group {group} rank {rank}")
    finally:
        manager.shutdown()


def train(manager: fft.ManagerFFT, steps: int, seed: int, who: str) -> None:
    """Build the model, shard it, and train until ``steps`` or until the job is drained."""
    text = Text()
    torch.manual_seed(seed)
    model = CharLM(len(text.vocabulary))
    mesh = manager.shard_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP)
    )
    manager.register(model, optimizer, lr_scheduler=schedule)
    manager.sync_gradients(model)  # across the groups, at the end of each backward pass
    loader = fft.CursorLoader(text, batch_size=BATCH, seed=seed)

    # from here on each rank draws its own dropout masks
    torch.manual_seed(seed * 1009 + hash_of(who))
    for txn in manager.transactions(loader, max_steps=steps):
        with txn:  # left with a commit on all ranks, or with a rollback; then the same batch again
            characters, following = txn.batch
            loss = F.cross_entropy(model(characters), following.flatten())
            loss.backward()
            txn.log(loss=loss.item())
    print(f"{who}: done at step {manager.current_step()}")


def hash_of(text: str) -> int:
    """A number from a text, the same in every process (``hash`` is not)."""
    return int.from_bytes(text.encode(), "big") % 65521


if __name__ == "__main__":
    main()

"""Train a character model with FSDP2 and tensor parallelism on one mesh of each replica group.

    fft run --groups 2 --ranks 4 examples/fsdp_tp.py --steps 100

The ranks of a group form a mesh of 2 x 2. Along ``tp`` they share a batch and split each layer;
along ``fsdp`` they have batches of their own and shard the parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hsdp_char_lm import BATCH, Text, arguments
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchft import ProcessGroupGloo

import fft

WIDTH = 32


class Block(nn.Module):
    """A residual block whose two layers are split over the ranks along ``tp``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class CharModel(nn.Module):
    """Predicts the next character from the last one."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.character(characters)
        for block in self.blocks:
            x = block(x)
        return self.head(x).flatten(0, 1)


def main() -> None:
    args = arguments(__doc__)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(),
        shard_pg=fft.ShardProcessGroupGloo(),
        min_replica_size=1,
        init_sync=False,  # every process builds the same weights from the seed
        config=fft.ManagerConfig(digest="commit"),  # for the audit; too costly for long runs
    )
    try:
        text = Text()
        torch.manual_seed(args.seed)
        model = CharModel(len(text.vocabulary))
        mesh = manager.mesh(("fsdp", "tp"), (2, 2))
        for block in model.blocks:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
            fully_shard(block, mesh=mesh["fsdp"])
        fully_shard(model, mesh=mesh["fsdp"])
        manager.register(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
        manager.sync_gradients(model)  # across the groups
        loader = fft.CursorLoader(text, batch_size=BATCH, seed=args.seed)
        for txn in manager.transactions(loader, max_steps=args.steps):
            with txn:
                characters, following = txn.batch
                loss = F.cross_entropy(model(characters), following.flatten())
                loss.backward()
                txn.log(loss=loss.item())
    finally:
        manager.shutdown()


if __name__ == "__main__":
    main()

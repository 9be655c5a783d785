"""The character language model of ``hsdp_char_lm.py``, trained with DiLoCo between sharded groups.

FSDP2 shards the model inside a replica group, whose ranks commit or repeat each step together and
alone. Every so many steps the groups average how far they have come, and an outer SGD steps the
job's parameters by that, on all groups or on none. To run it on this machine:

    fft run --groups 2 --ranks 2 examples/hsdp_diloco_char_lm.py --steps 40
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.nn.functional as F
from hsdp_char_lm import CharLM, Text, arguments, hash_of
from torch.distributed.fsdp import fully_shard
from torchft import ProcessGroupGloo

import fft

BATCH = 4  # windows in an inner step, on each rank
SYNC_EVERY = 4  # inner steps


def main() -> None:
    args = arguments(__doc__)
    group, rank = os.environ.get("REPLICA_GROUP_ID", "0"), int(os.environ.get("RANK", "0"))
    limit = timedelta(seconds=60)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=limit),  # across the groups
        shard_pg=fft.ShardProcessGroupGloo(timeout=limit),  # inside of this one
        spec="hsdp_diloco",
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
    """Train until ``steps`` synchronisations, or until the job is drained."""
    text = Text()
    torch.manual_seed(seed)
    model = CharLM(len(text.vocabulary))
    mesh = manager.shard_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager.register(model, inner)  # so that a failed inner step can be rolled back
    fft.DiLoCo(manager, [model], inner, outer, SYNC_EVERY)
    loader = fft.CursorLoader(text, batch_size=BATCH, seed=seed)

    # from here on each rank draws its own dropout masks
    torch.manual_seed(seed * 1009 + hash_of(who))
    for txn in manager.transactions(loader, max_steps=steps):
        with txn:  # an inner step, committed or repeated by the ranks of this group
            characters, following = txn.batch
            loss = F.cross_entropy(model(characters), following.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            txn.log(loss=loss.item())
    print(f"{who}: done after {manager.current_step()} synchronisations")


if __name__ == "__main__":
    main()

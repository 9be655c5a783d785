"""Trains torchtitan's debug model and writes a digest of this rank's state to a folder.

Arguments: the folder, and arguments of torchtitan. The trainer is that of the example.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import torchtitan_debug  # noqa: F401
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger


def main() -> None:
    folder, arguments = Path(sys.argv[1]), sys.argv[2:]
    init_logger()
    config = ConfigManager().parse_args(
        ["--module", "torchtitan_debug", "--config", "debugmodel", *arguments]
    )
    trainer = config.build()
    trainer.train()
    hasher = hashlib.sha256()
    for model in trainer.model_parts:
        for value in model.state_dict().values():
            local = value.to_local() if isinstance(value, DTensor) else value
            hasher.update(local.detach().contiguous().view(torch.uint8).numpy().data)
    group, rank = os.environ.get("REPLICA_GROUP_ID"), int(os.environ["RANK"])
    # torchtitan's own processes 2 and 3 are the second replica
    number = rank if group is None else 2 * int(group) + rank
    (folder / f"{number}").write_text(f"step {trainer.step}: {hasher.hexdigest()[:16]}")
    trainer.close()


if __name__ == "__main__":
    main()

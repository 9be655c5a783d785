"""An FSDP2 job with data from workers, for test_loading_job.py; `fft run` starts it.

``loading_script.py OUT``: leaves a file named after the process ids of its workers in OUT. Trains
until the job is drained.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ranks import Samples, sharded_rank

import fft


class Augmented(Samples):
    """A data set of samples with noise."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index] + 0.1 * torch.randn(self.x.shape[1])


class Noted(fft.CursorLoader):
    """A loader that records its workers."""

    def open(self) -> None:
        started = self._iterator is None
        super().open()
        if started:
            pids: Any = [str(worker.pid) for worker in self._iterator._workers]
            (Path(sys.argv[1]) / "-".join(pids)).touch()


def main() -> None:
    """Train; every commit is traced with a digest of the weights."""
    rank = sharded_rank(1, {})
    loader = Noted(Augmented(), batch_size=8, seed=5, num_workers=2)
    try:
        for txn in rank.manager.transactions(loader):
            with txn:
                F.mse_loss(rank.model(txn.batch.mul_(2)), txn.batch).backward()
    finally:
        rank.shutdown()


if __name__ == "__main__":
    main()

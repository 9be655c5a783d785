"""Trains a model with batch norm on data that vary with the epoch, for test_lightning.py.

``lightning_epochs_script.py ddp|fft``: with Lightning's own DDP under torchrun, or on FFT. A hook
tells the dataset the epoch, and data workers read it. The job commits only with both groups. Each
process prints a digest of its final state, and what it has seen and evaluated in each epoch.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fft.integrations.lightning import FFTStrategy

VALIDATION = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))


class ByEpoch(Dataset[torch.Tensor]):
    epoch = 0  # Lightning starts the workers of the first epoch before its hooks

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(index)) + self.epoch


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.data = ByEpoch()
        self.evaluated: list[float] = []

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4, shuffle=True, num_workers=1)

    def val_dataloader(self) -> Any:
        return DataLoader(VALIDATION, batch_size=16)

    def on_train_epoch_start(self) -> None:
        self.data.epoch = self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.layers(batch) - batch.square().mean(1, keepdim=True)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.layers(batch).square().mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.evaluated.append(self.layers(VALIDATION).square().mean().item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(kind: str) -> None:
    lightning.seed_everything(1)
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1 if kind == "fft" else 2,
        strategy=FFTStrategy(min_replica_size=2) if kind == "fft" else kind,
        max_epochs=4,
        num_sanity_val_steps=0,
        callbacks=[EarlyStopping("loss", patience=4)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    state = b"".join(value.numpy().tobytes() for value in model.layers.state_dict().values())
    digest = hashlib.blake2b(state, digest_size=8).hexdigest()
    print(f"done at step {trainer.global_step}: state {digest}, last {model.evaluated[-1]}")


if __name__ == "__main__":
    main(sys.argv[1])

"""Train a model that FSDP2 shards over the ranks of each group. Argument: a folder for files."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from fft.integrations.lightning import FFTStrategy


class Sharded(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def configure_model(self) -> None:
        for module in (self.first, self.last, self):
            fully_shard(module, mesh=self.device_mesh)

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.last(torch.relu(self.first(x))), y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss_of(batch)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def main() -> None:
    folder = sys.argv[1]
    lightning.seed_everything(1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=FFTStrategy(),
        max_epochs=2,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[ModelCheckpoint(dirpath=folder, save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = Sharded()
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, 64))
    shards = b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters())
    digest = hashlib.blake2b(shards, digest_size=8).hexdigest()
    print(f"done at step {trainer.global_step}: weights {digest}")


if __name__ == "__main__":
    main()

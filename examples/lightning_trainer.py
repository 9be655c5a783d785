"""An ordinary Lightning script whose optimizer steps are transactions across replica groups.

It differs from the same script for one process in two lines: the import of ``FFTStrategy`` and
``strategy=`` of the Trainer. To run it on this machine:

    fft run --groups 2 examples/lightning_trainer.py --steps 200

With ``--strategy ddp`` and torchrun, the same script trains with Lightning's own DDP.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fft.integrations.lightning import FFTStrategy


class Regression(lightning.LightningModule):
    """Learns a fixed random map, with a schedule, clipping, logs and a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.layers(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def samples(count: int, seed: int) -> TensorDataset:
    """Return ``count`` inputs with the outputs of a map that is the same for every seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    return TensorDataset(x, x.square().sum(1, keepdim=True).sin())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="optimizer steps of the job")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--strategy", choices=["fft", "ddp"], default="fft")
    parser.add_argument("--dir", default="runs/lightning", help="for logs and checkpoints")
    args = parser.parse_args()
    lightning.seed_everything(1)
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1 if args.strategy == "fft" else 2,
        strategy=FFTStrategy() if args.strategy == "fft" else args.strategy,
        max_steps=args.steps,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger(args.dir),
        callbacks=[ModelCheckpoint(monitor="val_loss", save_last=True)],
        default_root_dir=args.dir,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        model,
        DataLoader(samples(1024, 0), batch_size=8, shuffle=True),
        DataLoader(samples(256, 1), batch_size=64),
    )
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    digest = hashlib.blake2b(bits, digest_size=8).hexdigest()
    print(f"done at step {trainer.global_step}: weights {digest}")


if __name__ == "__main__":
    main()

"""Train with EarlyStopping or from a checkpoint of Lightning's own.

Run as a script: ``lightning_stop_script.py EPOCHS|stop DIR [CHECKPOINT]``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from fft.integrations.lightning import FFTStrategy

EXAMPLES = Path(__file__).parents[2] / "examples"


def main() -> None:
    sys.path.append(str(EXAMPLES))
    from lightning_trainer import Regression, samples

    how, folder, *checkpoint = sys.argv[1:]
    lightning.seed_everything(1)
    model = Regression()
    callbacks: list[Any] = [ModelCheckpoint(dirpath=folder, save_last=True)]
    if how == "stop":  # in the second epoch, whose loss is not so much better
        callbacks.append(EarlyStopping("val_loss", patience=1, min_delta=10.0))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=FFTStrategy(),
        max_epochs=50 if how == "stop" else int(how),
        logger=False,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train = DataLoader(samples(256, 0), batch_size=8, shuffle=True)
    val = DataLoader(samples(64, 1), batch_size=64)
    trainer.fit(model, train, val, ckpt_path=checkpoint[0] if checkpoint else None)
    weights = sum(float(p.double().sum()) for p in model.parameters())
    print(f"done at step {trainer.global_step}, epoch {trainer.current_epoch}: weights {weights!r}")


if __name__ == "__main__":
    main()

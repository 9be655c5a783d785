"""Train with an average of the weights, which each group initializes at random.

Run as a script: ``lightning_average_script.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

from fft.integrations.lightning import FFTStrategy

EXAMPLES = Path(__file__).parents[2] / "examples"


class PrintedAverage(EMAWeightAveraging):
    """Prints the average after each step."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        average = sum(float(p.double().sum()) for p in self._average_model.parameters())
        print(f"step {trainer.global_step}: average {average!r}", flush=True)


def main() -> None:
    sys.path.append(str(EXAMPLES))
    from lightning_trainer import Regression, samples

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=FFTStrategy(),
        max_epochs=1000,
        logger=False,
        callbacks=[PrintedAverage(decay=0.9)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(samples(256, 0), batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()

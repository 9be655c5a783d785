"""A small GAN with manual optimization, as in Lightning's documentation.

Run as a script: ``lightning_gan_script.py STRATEGY DIR``.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from fft.integrations.lightning import FFTStrategy


class GAN(lightning.LightningModule):
    """Steps the discriminator and then, against the new one, the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        real = batch[0]
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        self.toggle_optimizer(critic)
        fake = self.generator(torch.randn(len(real), 4))
        critic_loss = binary_cross_entropy_with_logits(self.critic(real), ones)
        critic_loss += binary_cross_entropy_with_logits(self.critic(fake.detach()), zeros)
        critic.zero_grad()
        self.manual_backward(critic_loss)
        critic.step()
        self.untoggle_optimizer(critic)

        self.toggle_optimizer(generator)
        fake = self.generator(torch.randn(len(real), 4))
        loss = binary_cross_entropy_with_logits(self.critic(fake), ones)
        generator.zero_grad()
        self.manual_backward(loss)
        generator.step()
        self.untoggle_optimizer(generator)
        self.log_dict({"critic": critic_loss, "loss": loss}, on_step=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), 1e-3),
            torch.optim.Adam(self.critic.parameters(), 1e-3),
        ]


def main() -> None:
    strategy, folder = sys.argv[1:]
    lightning.seed_everything(1)
    model = GAN()
    is_ddp = strategy == "ddp"
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2 if is_ddp else 1,
        strategy=DDPStrategy(find_unused_parameters=True) if is_ddp else FFTStrategy(),
        max_epochs=2,
        log_every_n_steps=1,
        logger=CSVLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    real = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    trainer.fit(model, DataLoader(TensorDataset(real), batch_size=8, shuffle=True))
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    digest = hashlib.blake2b(bits, digest_size=8).hexdigest()
    print(f"done at step {trainer.global_step}: weights {digest}")


if __name__ == "__main__":
    main()

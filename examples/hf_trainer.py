"""Trains a small GPT-2 with Hugging Face's Trainer; `fft run` starts it.

    fft run --groups 2 --trace-dir traces examples/hf_trainer.py --output runs/hf

An ordinary script for transformers: FFTTrainer stands for Trainer, and nothing else differs. The
model is built from a configuration and the data are generated, so nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from fft.integrations.huggingface import FFTTrainer

LENGTH = 32


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Sums of earlier tokens modulo the size of the vocabulary; the last tokens are padding."""

    def __init__(self, count: int, seed: int, vocabulary: int = 64) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(vocabulary, (count, LENGTH), generator=drawn)
        for place in range(2, LENGTH):
            self.tokens[:, place] = (
                self.tokens[:, place - 1] + self.tokens[:, place - 2]
            ) % vocabulary
        self.lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count,), generator=drawn)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        padding = torch.arange(LENGTH) >= self.lengths[index]
        return {"input_ids": tokens, "labels": tokens.masked_fill(padding, -100)}


def main() -> None:
    """Train, and save the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True, help="folder for checkpoints and the model")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    set_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    args = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=50,
        save_total_limit=2,
        report_to="none",
        use_cpu=not torch.accelerator.is_available(),
    )
    trainer = FFTTrainer(
        model=model,
        args=args,
        train_dataset=Sequences(2048, seed=1),
        eval_dataset=Sequences(64, seed=2),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

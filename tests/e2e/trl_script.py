"""Trains with TRL's SFTTrainer on FFT; the first argument is the output folder, the second JSON.

An ordinary script for TRL, but for the mixin. The model is built from a configuration, and the
tokenizer and the texts are made here, so nothing is downloaded.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torchft
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import fft
from fft.integrations.huggingface import FFTTrainerMixin

WORDS = 61


class Tuned(FFTTrainerMixin, SFTTrainer):
    """TRL's SFTTrainer whose optimizer steps are transactions."""


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    inner = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def texts(count: int, seed: int) -> Dataset:
    """Return texts of 6 to 27 words; a word's number is the sum of those of the two before it."""
    drawn = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        numbers = torch.randint(WORDS, (2,), generator=drawn).tolist()
        for _ in range(int(torch.randint(4, 26, (1,), generator=drawn))):
            numbers.append((numbers[-1] + numbers[-2]) % WORDS)
        rows.append({"text": " ".join(f"w{number}" for number in numbers)})
    return Dataset.from_list(rows)


def main() -> None:
    """Train as the options say."""
    out, options = sys.argv[1], json.loads(sys.argv[2])
    set_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS + 3,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=options.pop("dropout", 0.0),
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    given: dict[str, Any] = {}
    if options.pop("both", False):  # commits only with both groups, so a kill changes no bit
        pg = torchft.ProcessGroupGloo(timeout=timedelta(seconds=60))
        given["manager"] = fft.ManagerFFT(pg, None, None, min_replica_size=2)
    args = SFTConfig(
        output_dir=out,
        max_length=32,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-2,
        max_steps=8,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        report_to="none",
        use_cpu=True,
        **{"bf16": False, "gradient_checkpointing": False, **options},
    )
    trainer = Tuned(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=texts(128, seed=1),
        eval_dataset=texts(16, seed=2),
        processing_class=tokenizer(),
        **given,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

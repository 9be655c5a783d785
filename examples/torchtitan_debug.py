"""Trains torchtitan's Llama 3 debug model; `fft run` starts it.

    fft run --groups 2 --ranks 2 --trace-dir traces examples/torchtitan_debug.py

The script has a configuration and the entry point of torchtitan, and takes torchtitan's arguments,
such as ``--training.steps 50``. The only difference is that FFTTrainer replaces torchtitan's
Trainer. The text is ``pydoc_data.topics`` of CPython, so nothing is downloaded. Without a GPU the
model has two layers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch

if not torch.accelerator.is_available():
    import torchtitan_cpu  # noqa: F401

from datasets import Dataset
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.train import main

from fft.integrations.torchtitan import FFTTrainer as Trainer


class Bytes(BaseTokenizer):
    """The UTF-8 bytes of a text as its tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.eos_id = 1

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        return [0] * add_bos + [2 + byte for byte in text.encode()] + [1] * add_eos

    def decode(self, tokens: list[int]) -> str:
        return bytes(token - 2 for token in tokens if token > 1).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 258


def text(_: str) -> Any:
    """Return a dataset with a document for each topic."""
    return Dataset.from_dict({"text": [topics[name] for name in sorted(topics)]})


DATASETS["topics"] = DatasetConfig("pydoc_data.topics", text, lambda sample: sample["text"])


def debugmodel() -> Trainer.Config:
    """Return the configuration, as a ``config_registry`` of torchtitan does."""
    spec = model_registry("debugmodel")
    is_small = not torch.accelerator.is_available()
    if is_small:
        del spec.model.layers[2:]
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        model_spec=spec,
        tokenizer=Bytes.Config(),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="topics"),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=100),
        training=TrainingConfig(
            local_batch_size=2 if is_small else 8,
            seq_len=64 if is_small else 2048,
            steps=100,
            mixed_precision_param="float32" if is_small else "bfloat16",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),  # torch 2.13 has no other
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        checkpoint=CheckpointManager.Config(interval=10, last_save_model_only=False),
        debug=DebugConfig(seed=0),
    )


if __name__ == "__main__":
    sys.argv[1:1] = ["--module", "torchtitan_debug", "--config", "debugmodel"]
    main()

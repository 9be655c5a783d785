"""Trains with Hugging Face's Trainer, plain under torchrun or on FFT; the options are JSON.

It writes ``result-<process>.json`` into its output folder: a digest of the final parameters, the
events of callbacks, and the log history.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torchft
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset, Subset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import fft

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from hf_trainer import LENGTH, Sequences

BATCH = 4


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The same sequences without an index."""

    def __init__(self, data: Sequences) -> None:
        self._data = data

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self._data[n] for n in range(len(self._data)))


class SizedStream(Stream):
    """The sequences of a stream, in an order from the global generator, with a length."""

    def __init__(self, data: Sequences, shuffles: bool) -> None:
        super().__init__(data)
        self._shuffles = shuffles

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        count = len(self._data)
        order = torch.randperm(count).tolist() if self._shuffles else range(count)
        return (self._data[n] for n in order)


class Norm(torch.nn.BatchNorm1d):
    """Normalizes the last dimension of (batch, length, width)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.transpose(1, 2)).transpose(1, 2)


class Events(TrainerCallback):
    """Records the events, and kills the process at ``kill_at``, once for a mark in ``out``."""

    def __init__(self, kill_at: int | None, out: Path) -> None:
        self.seen: list[tuple[str, int]] = []
        self._kill_at = kill_at
        self._mark = out / f"killed-{os.environ.get('REPLICA_GROUP_ID')}-{os.environ['RANK']}"

    def on_epoch_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.seen.append(("epoch_begin", state.global_step))

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.seen.append(("step_begin", state.global_step))

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.seen.append(("step_end", state.global_step))
        if state.global_step == self._kill_at and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_evaluate(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.seen.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.seen.append(("save", state.global_step))

    def on_epoch_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.seen.append(("epoch_end", state.global_step))


def as_for_ddp(data: Sequences, per_step: int, processes: int = 2) -> Subset[Any]:
    """Return the data in the order in which DDP's processes read the batches of FFT's items.

    Accelerate deals batches out one by one, and FFT in items of ``per_step`` batches.
    """
    batches = [list(range(n, n + BATCH)) for n in range(0, len(data), BATCH)]
    order: list[int] = []
    for step in range(len(batches) // (per_step * processes)):
        for micro in range(per_step):
            for process in range(processes):
                order += batches[(step * processes + process) * per_step + micro]
    return Subset(data, order)


def main() -> None:
    """Train as the options say."""
    out, kind, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    set_seed(0)
    dropout = options.pop("dropout", 0.0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=options.pop("layers", 1),
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
    )
    model = GPT2LMHeadModel(config)
    if options.pop("norm", False):
        model.transformer.ln_f = Norm(config.n_embd)
    data: Any = Sequences(options.pop("samples", 256), seed=1)
    if options.pop("permuted", False) and kind == "ddp":
        data = as_for_ddp(data, options["gradient_accumulation_steps"])
    if stream := options.pop("stream", None):
        data = Stream(data) if stream == "endless" else SizedStream(data, stream == "shuffled")
    resume, kill_at = options.pop("resume", False), options.pop("kill_at", None)
    patience = options.pop("patience", None)
    export = options.pop("export", False)
    events = Events(kill_at, out)
    callbacks: list[TrainerCallback] = [events]
    if patience is not None:
        callbacks.append(EarlyStoppingCallback(patience, early_stopping_threshold=10.0))
    args = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=BATCH,
        learning_rate=3e-3,
        report_to="none",
        use_cpu=True,
        **{"save_strategy": "no", "logging_steps": 2, "lr_scheduler_type": "cosine", **options},
    )
    given: dict[str, Any] = {}
    if kind == "ddp":
        made: type[Trainer] = Trainer
    else:
        from fft.integrations.huggingface import FFTTrainer as made
    if kind == "both":  # commits only with both groups, so that a kill does not change the bits
        pg = torchft.ProcessGroupGloo(timeout=timedelta(seconds=60))
        shard_pg = fft.ShardProcessGroupGloo() if "fsdp" in options else None
        given["manager"] = fft.ManagerFFT(pg, None, None, min_replica_size=2, shard_pg=shard_pg)
    trainer = made(
        model=model,
        args=args,
        train_dataset=data,
        eval_dataset=Sequences(16, seed=2),
        callbacks=callbacks,
        **given,
    )
    trainer.train(resume_from_checkpoint=resume or None)
    if export:
        trainer.save_model(str(out / "export"))
        trainer.evaluate()
    hasher = hashlib.sha256()
    # of the optimizer, because FSDP2 keeps some parameters of the model whole after an evaluation
    parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        shards = parameter.detach()
        whole = shards.full_tensor() if isinstance(shards, DTensor) else shards
        hasher.update(whole.contiguous().view(torch.uint8).numpy().data)
    buffers = {n: b.tolist() for n, b in model.named_buffers() if "running" in n}
    result = {
        "digest": hasher.hexdigest()[:16],
        "buffers": buffers,
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "events": events.seen,
        "history": trainer.state.log_history,
        "is_sharded": all(isinstance(each, DTensor) for each in parameters),
        "is_writer": trainer.is_world_process_zero(),
    }
    process = os.environ["RANK"]
    if kind != "ddp":
        process = f"{os.environ['REPLICA_GROUP_ID']}-{process}"
    (out / f"result-{process}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

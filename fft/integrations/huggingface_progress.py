"""The state of a Hugging Face ``Trainer`` that rollbacks restore, and that joining groups fetch."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

import fft

_COUNTERS = ("max_steps", "global_step", "epoch", "num_input_tokens_seen", "total_flos")
_BEST = ("best_metric", "best_global_step", "best_model_checkpoint")
"""Fields of the ``TrainerState`` that are part of the state of the job, with `_COUNTERS`."""
_SUMS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")
"""Numbers of the Trainer itself that are part of the state of the job."""
_TOKENS = "_total_train_tokens"
"""The trained tokens of TRL's trainers. They have their metrics in ``_metrics["train"]``."""
_PER_PROCESS_SUFFIXES = ("_runtime", "_per_second")
"""Suffixes of the names of metrics that differ between processes."""


class Progress:
    """The counters, sums and stateful callbacks of a Trainer, registered as ``extra``."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._history: tuple[int, str] = (0, "[]")
        """Number of entries of the encoded log history, and the encoding."""

    def _exportable(self) -> dict[str, Any]:
        each = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        found = [one for one in each if isinstance(one, ExportableState)]
        return {f"{type(one).__name__} {number}": one for number, one in enumerate(found)}

    def state_dict(self) -> dict[str, Any]:
        trainer, history = self._trainer, self._trainer.state.log_history
        if self._history[0] != len(history):
            self._history = len(history), json.dumps(_without_process_metrics(history))
        metrics = trainer._metrics["train"] if hasattr(trainer, _TOKENS) else {}
        return {
            "metrics": json.dumps([metrics, getattr(trainer, _TOKENS, 0)]),
            "counters": {name: getattr(trainer.state, name) for name in (*_COUNTERS, *_BEST)},
            "history": self._history[1],
            "callbacks": {name: one.state() for name, one in self._exportable().items()},
            "sums": {name: float(getattr(trainer, name)) for name in (*_SUMS, "current_flos")},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer, steps = self._trainer, state["counters"]["max_steps"]
        if steps != trainer.state.max_steps:
            raise fft.FftError(
                f"FFTTrainer: this group computed max_steps={trainer.state.max_steps}, and the job "
                f"has {steps}, so their schedules differ: the number of steps in num_train_epochs "
                f"depends on the number of groups. Pass max_steps={steps} in TrainingArguments"
            )
        for name, value in state["counters"].items():
            setattr(trainer.state, name, value)
        history = json.loads(state["history"])
        is_at_start = trainer.state.global_step == 0  # saved before `eval_on_start` has logged
        if not is_at_start and _without_process_metrics(trainer.state.log_history) != history:
            trainer.state.log_history = history
        for name, one in self._exportable().items():
            saved = state["callbacks"].get(name, {})
            vars(one).update(saved.get("args", {}) | saved.get("attributes", {}))
        for name, value in state["sums"].items():
            setattr(trainer, name, value)
        trainer._tr_loss = torch.tensor(trainer._tr_loss, device=trainer.args.device)
        if hasattr(trainer, _TOKENS):
            metrics, trainer._total_train_tokens = json.loads(state.get("metrics", "[{}, 0]"))
            trainer._metrics["train"] = defaultdict(list, metrics)


class StepMetrics:
    """The metrics that one of TRL's trainers collects in a step function; empty for others.

    The step function may be repeated, so the trainer gets the metrics of a step only after its
    commit. While the step function runs, the trainer collects into an empty dict.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer if hasattr(trainer, _TOKENS) else None
        self._names: list[str] = []
        if self._trainer is not None:
            self._before = trainer._metrics["train"], trainer._total_train_tokens
            trainer._metrics["train"] = defaultdict(list)

    def take(self) -> list[float]:
        """Return the step's tokens and the mean of each metric, and remove them from the trainer.

        All groups must have the same metrics.
        """
        trainer = self._trainer
        if trainer is None:
            return []
        found, tokens = trainer._metrics["train"], trainer._total_train_tokens
        trainer._metrics["train"], trainer._total_train_tokens = self._before
        self._names = sorted(name for name in found if found[name] and name != "num_tokens")
        # one value each, because the last item of a data epoch may have fewer micro-batches
        means = [sum(found[name]) / len(found[name]) for name in self._names]
        return [tokens - trainer._total_train_tokens, *means]

    def add(self, means: list[float], workers: int) -> None:
        """Add the means over all ranks to the metrics of the trainer."""
        trainer = self._trainer
        if trainer is not None:
            trainer._total_train_tokens += round(workers * means[0])
            trainer._metrics["train"]["num_tokens"] = [trainer._total_train_tokens]
            for name, value in zip(self._names, means[1:], strict=True):
                trainer._metrics["train"][name].append(value)


def _without_process_metrics(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the log entries without the metrics that differ between processes."""
    return [{k: v for k, v in e.items() if not k.endswith(_PER_PROCESS_SUFFIXES)} for e in history]

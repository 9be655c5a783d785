"""Hugging Face's ``Trainer`` on FFT's transactions: one optimizer step is one transaction.

``FFTTrainer`` replaces ``transformers.Trainer``. For another subclass of ``Trainer``, such as TRL's
``SFTTrainer``, write ``class Tuned(FFTTrainerMixin, SFTTrainer): ...``. The mixin replaces the loop
over batches of `Trainer._run_epoch`, and keeps the rest of the ``Trainer``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
from collections import namedtuple
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import Trainer
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

import fft
from fft.integrations import huggingface_sharding as sharding
from fft.integrations.huggingface_data import loader_of
from fft.integrations.huggingface_progress import Progress, StepMetrics
from fft.integrations.processes import groups, process_group, ranks, shard_process_group

logger = logging.getLogger(__name__)
_Base: Any = Trainer if TYPE_CHECKING else object
_MANAGER_FILE = "fft_manager.pt"
"""File of a checkpoint with the position of the job. It is written last: without it the checkpoint
is incomplete."""
_OF_DDP = (
    "ddp_backend",
    "ddp_broadcast_buffers",
    "ddp_bucket_cap_mb",
    "ddp_static_graph",
)
"""Arguments that have no effect; ``ddp_timeout`` and ``ddp_find_unused_parameters`` have one."""
_Computed = namedtuple("_Computed", "loss grad_norm rate flos tokens add_metrics")
"""The results of a step function that its commit needs."""


class FFTTrainerMixin(_Base):
    """Runs the steps of a ``Trainer`` as transactions; ``manager`` has settings of yours.

    Raises FftError if an argument of the Trainer is not supported.
    """

    control: Any
    current_flos: float
    _begun_step: int | None = None
    """The step whose ``on_step_begin`` callbacks have run."""

    def __init__(self, *args: Any, manager: fft.ManagerFFT | None = None, **kwargs: Any) -> None:
        self._txns: Iterator[fft.Transaction] | None = None
        self._own_files = f"group-{os.environ.get('REPLICA_GROUP_ID', '0')}"
        """Folder of this rank's random states in a checkpoint."""
        if ranks() > 1:
            self._own_files += f"-rank-{os.environ['RANK']}"
        super().__init__(*args, **kwargs)
        if ranks() > 1 and self.optimizer is not None:
            raise fft.FftError(
                "FFTTrainer: optimizers= has the parameters before sharding; pass optim= in "
                "TrainingArguments, or optimizer_cls_and_kwargs="
            )
        self.manager = manager or _manager(self.args)

    def create_accelerator_and_postprocess(self) -> None:
        _refuse_unsupported(self.args, ranks())
        _name_ignored(self.args)
        if ranks() > 1:
            sharding.make_alone(self.args)
        # without the plugin, because Accelerate would shard over a process group of its own
        plugin, self.args.fsdp_plugin_args = self.args.fsdp_plugin_args, None
        super().create_accelerator_and_postprocess()
        self.args.fsdp_plugin_args = plugin
        if ranks() > 1:
            self.accelerator.native_amp = False  # FSDP2's precision policy replaces autocast
        # Accelerate would wrap the model in torch's DDP; FFT averages the gradients instead
        prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = functools.partial(prepare, evaluation_mode=True)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as ``Trainer.train``; True resumes from the newest complete checkpoint, if any."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _newest_complete(Path(self.args.output_dir))
        done = super().train(resume_from_checkpoint, *args, **kwargs)
        if ranks() == 1:  # evaluate() and save_model() need the shards of the other ranks
            self.manager.shutdown()
        return done

    def create_optimizer(self, model: Any = None) -> Any:
        if ranks() > 1 and not isinstance(self.model, FSDPModule):
            mesh = self.manager.shard_mesh()
            sharding.shard(self.model, self.args.fsdp_plugin_args, self.accelerator, mesh)
        optimizer = super().create_optimizer(model)
        if ranks() > 1:
            optimizer.register_load_state_dict_pre_hook(sharding.shard_optimizer_state)
        return optimizer

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        if ranks() == 1:  # otherwise `create_optimizer` moves the shards
            super()._move_model_to_device(model, device)

    def get_total_train_batch_size(self, args: Any) -> Any:
        return super().get_total_train_batch_size(args) * _workers()

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return the Trainer's values, with the number of steps that all ranks together need for
        an epoch."""
        if not hasattr(dataloader, "dataset"):
            raise fft.FftError(
                "FFTTrainer: expected a torch DataLoader from get_train_dataloader(), got a "
                f"{type(dataloader).__name__}"
            )
        values = super().set_initial_training_values(args, dataloader)
        if not has_length(dataloader):
            return values
        epochs, items, *others, max_steps = values  # for one process, which would take all items
        per_epoch = math.ceil(items / _workers())
        if args.max_steps > 0:
            epochs = math.ceil(max_steps / per_epoch)
        else:
            max_steps = math.ceil(args.num_train_epochs * items / _workers())
        return epochs, per_epoch, *others, max_steps

    def _prepare_for_training(self, max_steps: int, dataloader: Any, resume: str | None) -> Any:
        prepared = super()._prepare_for_training(max_steps, dataloader, resume)
        self._tr_loss = torch.tensor(0.0, device=self.args.device)
        self._total_loss_scalar = 0.0
        self._globalstep_last_logged = self._initial_global_step = self.state.global_step
        extra: dict[str, Any] = {"trainer": Progress(self)}
        scheduler = self.lr_scheduler
        if isinstance(scheduler, ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR":
            extra["scheduler"], scheduler = scheduler, None  # the Trainer steps it by a metric
        # FFT steps the inner optimizer, so the scheduler would warn that no step came before it
        self.optimizer._opt_called = True
        scaler = self.accelerator.scaler
        self.manager.register(self.model, self.optimizer, scheduler, extra, scaler=scaler)
        unused = bool(self.args.ddp_find_unused_parameters)
        self.manager.sync_gradients(self.model, find_unused_parameters=unused)
        if resume is not None:
            self._resume(Path(resume))
        self._source = loader_of(dataloader, self.args)
        self._txns = self.manager.transactions(self._source, max_steps=max_steps)
        self._begun = next(self._txns, None)  # joins the job, and fetches its state if it runs
        self._progress_at_start = Progress(self).state_dict()
        self._update_writer()
        return prepared

    def _resume(self, folder: Path) -> None:
        """Continue at the position of a checkpoint, with the random states of this group."""
        if not (folder / _MANAGER_FILE).exists():
            raise fft.FftError(
                f"{folder}: expected {_MANAGER_FILE}, found none: the checkpoint is incomplete, or "
                "FFTTrainer did not write it. Pass another one, or load its weights with "
                "from_pretrained()"
            )
        self.manager.load_state_dict(torch.load(folder / _MANAGER_FILE, weights_only=True))
        self._load_rng_state(str(folder / self._own_files))

    def _run_epoch(
        self, model: Any, *, trial: Any, ignore_keys_for_eval: Any, start_time: float, **_: Any
    ) -> None:
        """Train to the end of the job. The Trainer calls this once, with its first epoch."""
        # the Trainer has reset the sums in the meantime
        Progress(self).load_state_dict(self._progress_at_start)
        while (txn := self._next_txn()) is not None:
            with txn:
                computed = self._compute(model, txn)
            if not txn.committed:
                continue
            self._begun_step = None
            self._update_writer()
            report = functools.partial(
                self._maybe_log_save_evaluate,
                *(self._tr_loss, computed.grad_norm, model, trial, self.state.epoch),
                *(ignore_keys_for_eval, start_time, computed.rate),
            )
            if not txn.skipped:
                self._count(txn, computed)
                self._event("on_step_end")
                report()
            self._end_epoch(txn, report)
        self.control.should_training_stop = True  # also if the job was drained

    def _next_txn(self) -> fft.Transaction | None:
        """Begin the next transaction, and tell the callbacks once for each step."""
        txn, self._begun = self._begun or next(self._txns or iter(()), None), None
        if txn is not None and txn.step != self._begun_step:
            self._begun_step = txn.step
            self._event("on_step_begin")
            txn.keep_changes()  # of the callbacks
        return txn

    def _compute(self, model: Any, txn: fft.Transaction) -> _Computed:
        """Compute the gradients of one step: the step function. It changes no counter."""
        parts, device = txn.batch, self.args.device
        state, before = self.state, (self.current_flos, self.state.num_input_tokens_seen)
        metrics = StepMetrics(self)
        self.current_gradient_accumulation_steps = len(parts)
        tokens = self._get_num_items_in_batch(parts, device)
        if torch.is_tensor(tokens) and self.args.average_tokens_across_devices:
            tokens = txn.mean(tokens)  # so the mean of the gradients is that of all tokens
        loss = torch.zeros((), device=device)
        for number, inputs in enumerate(parts):
            last = number == len(parts) - 1
            self.accelerator.gradient_state._set_sync_gradients(last)
            with contextlib.nullcontext() if last else self.manager.no_sync():
                loss += self.training_step(model, inputs, tokens)
            self.current_flos += float(self.floating_point_ops(inputs))
            self._track_num_input_tokens(inputs)
            if not last:
                self._event("on_substep_end")
        own = [loss.item(), self.current_flos, state.num_input_tokens_seen, *metrics.take()]
        self.current_flos, state.num_input_tokens_seen = before
        mean = txn.mean(torch.tensor(own, dtype=torch.float64, device=device)).tolist()
        norm = self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
        norm = self._get_grad_norm(model, grad_norm=norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self._event("on_pre_optimizer_step")
        txn.log(loss=mean[0])
        workers = self.manager.num_participants() * ranks()
        flos, seen = (workers * (now - first) for now, first in zip(mean[1:3], before, strict=True))
        add_metrics = functools.partial(metrics.add, mean[3:], workers)
        return _Computed(mean[0], norm, self._get_learning_rate(), flos, round(seen), add_metrics)

    def _count(self, txn: fft.Transaction, computed: _Computed) -> None:
        """Count a committed step."""
        self._event("on_optimizer_step")
        loss, state, items = computed.loss, self.state, self._source
        if self.args.logging_nan_inf_filter and not math.isfinite(loss):
            loss = self._tr_loss / (1 + state.global_step - self._globalstep_last_logged)
        self._tr_loss += loss
        self.current_flos += computed.flos
        state.num_input_tokens_seen += computed.tokens
        computed.add_metrics()
        state.global_step += 1
        state.epoch = state.global_step / state.max_steps
        if items.items_per_data_epoch is not None:
            state.epoch = txn.items.stop / items.items_per_data_epoch

    def _end_epoch(self, txn: fft.Transaction, report: Any) -> None:
        """End the data epoch, and the job, if it is time."""
        has_ended = self._source.items_per_data_epoch is not None and txn.ends_data_epoch
        if self.control.should_epoch_stop:
            raise fft.FftError(
                "FFTTrainer: a callback has set control.should_epoch_stop, but FFT cannot skip "
                "the rest of an epoch; set control.should_training_stop instead"
            )
        if has_ended or self.control.should_training_stop:
            self._event("on_epoch_end")
            report()
        if self.control.should_training_stop:
            if self.state.global_step < self.state.max_steps:
                self.manager.stop()
        elif has_ended:
            self._event("on_epoch_begin")
            source, keeps_workers = self._source, self.args.dataloader_persistent_workers
            if isinstance(source, fft.CursorLoader) and not keeps_workers:
                source.close()  # new data workers get what the callbacks have changed

    def _event(self, name: str) -> None:
        handler = getattr(self.callback_handler, name)
        self.control = handler(self.args, self.state, self.control)

    def is_world_process_zero(self) -> bool:
        return self.manager.is_writer if self._txns else super().is_world_process_zero()

    def _update_writer(self) -> None:
        """Update whether this process logs; that changes when the writer's group leaves."""
        state, was_writer = self.state, self.state.is_world_process_zero
        is_writer = state.is_world_process_zero = state.is_local_process_zero = (
            self.manager.is_writer
        )
        for each in self.callback_handler.callbacks if is_writer and not was_writer else ():
            if isinstance(each, ProgressCallback) and each.training_bar is None:
                each.on_train_begin(self.args, state, self.control)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Let one rank write the Trainer's files, and each rank its random states."""
        state, run = self.state, self._get_output_dir(trial)
        folder = Path(run, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        writes, parts = self.manager.is_writer, (self.model, self.optimizer.optimizer)
        with self.manager.atomic(), sharding.whole_states(*parts, keep=writes):
            if writes:
                super()._save_checkpoint(model, trial)
            else:
                if trial is None:
                    self.store_flos()
                if (step := state.best_global_step) is not None:
                    best = os.path.join(run, f"{PREFIX_CHECKPOINT_DIR}-{step}")
                    state.best_model_checkpoint = best
            self._save_rng_state(str(folder / self._own_files))
            if writes:
                partial = folder / f"{_MANAGER_FILE}.partial"
                torch.save(self.manager.state_dict(), partial)
                partial.replace(folder / _MANAGER_FILE)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as ``Trainer.save_model``, on one rank. Call it on all ranks."""
        writes, parts = self.is_world_process_zero(), () if _internal_call else (self.model,)
        with sharding.whole_states(*parts, keep=writes):
            if writes:
                super().save_model(output_dir, _internal_call)

    def _load_best_model(self) -> None:
        """Load the best checkpoint, once the group that writes it has finished."""
        done = Path(self.state.best_model_checkpoint) / _MANAGER_FILE
        end = time.monotonic() + self.args.ddp_timeout
        while not done.exists() and time.monotonic() < end:
            time.sleep(0.1)  # another process writes it, which cannot notify this one
        if not done.exists():
            raise fft.FftError(
                f"{done}: not found within ddp_timeout; give all groups the same output_dir"
            )
        super()._load_best_model()


class FFTTrainer(FFTTrainerMixin, Trainer):
    """``transformers.Trainer`` whose optimizer steps are transactions across replica groups."""


def _workers() -> int:
    """Return the number of ranks of all groups at the start of the job."""
    return groups() * ranks()


def _manager(args: Any) -> fft.ManagerFFT:
    limit, is_cuda = timedelta(seconds=args.ddp_timeout), args.device.type == "cuda"
    pg = process_group(is_cuda, limit)
    shard_pg = shard_process_group(is_cuda, limit) if ranks() > 1 else None
    # the Trainer reads its counters, which are part of the state, before its first step
    config = fft.ManagerConfig(learners="never")
    return fft.ManagerFFT(pg, None, None, min_replica_size=1, shard_pg=shard_pg, config=config)


def _refuse_unsupported(args: Any, ranks: int) -> None:
    """Raise FftError for arguments of a Trainer that cannot work."""
    fsdp = args.fsdp_plugin_args or {}
    is_offloaded = fsdp.get("cpu_offload") or fsdp.get("cpu_ram_efficient_loading")
    is_partial = "SHARDED" in fsdp.get("state_dict_type", "")
    for is_wrong, text in (
        (ranks > 1 and not args.fsdp, "several ranks need fsdp=True: pass it, or use more groups"),
        (args.fsdp and ranks == 1, "fsdp= needs several ranks: pass --ranks 2, or leave it out"),
        (fsdp.get("fsdp_version", 2) != 2, "FSDP1 is not supported: pass version=2 in fsdp_config"),
        (is_offloaded, "cpu_offload and cpu_ram_efficient_loading must be false: leave them out"),
        (is_partial, "checkpoints have whole tensors: leave state_dict_type out of fsdp_config"),
        (args.fp16 and ranks > 1, "fp16= needs one rank in a group: pass bf16=True"),
        (args.n_gpu > 1, "DataParallel is not supported: give each process one GPU"),
        (args.deepspeed, "deepspeed= is not supported: leave it out"),
        (args.auto_find_batch_size, "auto_find_batch_size= is not supported: set a batch size"),
    ):
        if is_wrong:
            raise fft.FftError(f"FFTTrainer: {text}")


def _name_ignored(args: Any) -> None:
    """Warn, in one process of the job, of arguments of torch's DDP, which FFT replaces."""
    given = [name for name in _OF_DDP if getattr(args, name, None) is not None]
    if given and os.environ.get("REPLICA_GROUP_ID", "0") == os.environ.get("RANK", "0") == "0":
        logger.warning("FFTTrainer ignores %s: FFT replaces torch's DDP", ", ".join(given))


def _newest_complete(folder: Path) -> str | None:
    """Return the newest checkpoint in ``folder`` that was written to its end, or None."""
    found = [p.parent for p in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{_MANAGER_FILE}")]
    if not found:
        logger.warning("%s has no complete checkpoint: the training begins at the start", folder)
        return None
    return str(max(found, key=lambda p: int(p.name.rpartition("-")[2])))

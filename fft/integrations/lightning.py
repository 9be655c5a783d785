"""Lightning's Trainer on FFT's transactions; needs the extra ``lightning``.

Pass ``Trainer(strategy=FFTStrategy())`` and start the script with ``fft run``. A transaction begins
when Lightning draws the first micro-batch of an optimizer step. `FFTStrategy.optimizer_step` (with
manual optimization, `FFTStrategy.training_step`) runs its step function, votes, and repeats it
after a rollback. Lightning's other code, except the hooks around backward, runs between two
transactions, once for each committed step.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import fft
from fft.errors import Drained, FftError
from fft.integrations.lightning_parts import (
    Batches,
    Inputs,
    Logs,
    TrainerState,
    averaged_models,
    refuse_unsupported,
)
from fft.integrations.processes import groups, process_group, ranks, shard_process_group
from fft.train.state.plain_state import hyper_of, set_hyperparameters
from fft.train.state.random_states import capture_random

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class FFTStrategy(SingleDeviceStrategy):
    """A Lightning strategy that makes each optimizer step a transaction of all replica groups.

    The training data come from the ``DataLoader`` of the script. With all groups present, each rank
    gets the batches that it would get with Lightning's ``DDPStrategy`` and as many processes. Each
    group evaluates the whole validation data, so the results are equal on all groups.

    Args:
        manager: The manager to use, instead of one that is made from ``options``.
        device: Device of this rank. None selects its GPU, or the CPU if it has no GPU.
        find_unused_parameters: As for ``DDPStrategy``: permits that a parameter receives no
            gradient on a rank while it receives one on others.
        options: Arguments of ``fft.ManagerFFT``.

    Raises:
        FftError: ``options`` are given together with a manager.
    """

    strategy_name = "fft"
    is_distributed = True  # otherwise Lightning ignores `self.log(…, sync_dist=True)`

    def __init__(
        self,
        manager: fft.ManagerFFT | None = None,
        device: str | torch.device | None = None,
        find_unused_parameters: bool = False,
        **options: Any,
    ) -> None:
        if manager is not None and options:
            names = ", ".join(f"{name}=" for name in options)
            raise FftError(
                f"FFTStrategy: expected a manager or options for one, got manager= and {names}; "
                "pass these options to ManagerFFT"
            )
        if device is None:
            local = os.environ.get("LOCAL_RANK", "0")
            device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
        super().__init__(device=device)
        self.manager = manager or _make_manager(self.root_device, options)
        self._ranks, self._finds_unused = ranks(), find_unused_parameters
        self._data: Any = None
        """The `Batches` of the fit, once Lightning has asked for them."""
        self._txns: Iterator[fft.Transaction] | None = None
        self._txn: Any = None
        """The last `fft.Transaction`; None before the first and after the last one."""
        self._state: TrainerState
        self._logs: Logs
        self._closures: list[Callable[[], Any]] = []
        """The closures of the open transaction, one for each micro-batch so far."""
        self._inputs: Inputs
        """The micro-batches of the open transaction, as the hooks have left them."""
        self._attempt: Generator[None, None, None] | None = None
        """The running step function. It is suspended between two micro-batches."""
        self._replay_index: int | None = None
        """Index of the micro-batch that a replay recomputes, or None outside a replay."""
        self._is_stopped = False  # whether Lightning has ended the training
        self._on_sigterm: Any = None

    # --- set up ---

    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()  # as DDPStrategy does: dropout masks then match
        trainer = self._trainer
        self._name_files(trainer)
        trainer._accelerator_connector.use_distributed_sampler = False  # see `process_dataloader`
        if self._ranks > 1:
            self.lightning_module._device_mesh = self.manager.shard_mesh()
        rank_zero_only.rank = 0 if self.is_global_zero else 1

    @property
    def _trainer(self) -> Trainer:
        return self.lightning_module.trainer

    def _name_files(self, trainer: Trainer) -> None:
        """Give loggers a folder for each process, and checkpoints one that all groups share."""
        job = os.environ.get("FFT_BUS", "").rpartition("/")[2] or "local"
        group, start = os.environ.get("REPLICA_GROUP_ID", "0"), os.environ.get("FFT_START", "1")
        for each in trainer.loggers:
            if vars(each).get("_version", "") is None:
                each._version = f"{job}-g{group}-{start}"
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                # no Path, because it may be a URL
                callback.dirpath = os.path.join(trainer.default_root_dir, "checkpoints")

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        refuse_unsupported(trainer, self._ranks)
        if "_state" in vars(self):
            raise FftError(
                "FFTStrategy: expected one call of trainer.fit(), got a second one; train all "
                "epochs in one call"
            )
        module, optimizers = self.lightning_module, self.optimizers
        self._state = TrainerState(trainer, lambda: self._data.begin_epoch())
        self._logs = Logs(trainer)
        self._inputs = Inputs(self)
        extra: dict[str, Any] = {"lightning": self._state, **averaged_models(trainer)}
        if not module.automatic_optimization:
            # `training_step` steps them itself, several times in one transaction if it wants to
            extra |= {f"optimizer_{i}": each for i, each in enumerate(optimizers)}
            optimizers = []
        scaler = getattr(self.precision_plugin, "scaler", None)
        self.manager.register(module, optimizers, scaler=scaler, extra=extra)
        self.manager.sync_gradients(module, find_unused_parameters=self._finds_unused)
        self._on_sigterm = signal.getsignal(signal.SIGTERM)

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self._trainer
        if trainer.state.fn != TrainerFn.FITTING or not trainer.training:
            return dataloader  # each group evaluates all data
        if self._data is not None:
            raise FftError(
                "FFTStrategy: expected one train dataloader, got several; join their datasets"
            )
        self._data = Batches(dataloader, trainer, groups() * self._ranks, self._next_batch)
        trainer.limit_train_batches = len(self._data)  # Lightning would apply a fraction again
        return self._data

    def on_train_start(self) -> None:
        # Lightning's handler would end the loop, but this group leaves with its next commit and
        # must vote until then
        if callable(self._on_sigterm):
            signal.signal(signal.SIGTERM, self._on_sigterm)

    # --- transactions ---

    @property
    def handles_gradient_accumulation(self) -> bool:
        return True  # so that `optimizer_step` is called for each micro-batch

    def _next_batch(self) -> Any:
        """Return the next micro-batch. Begin a transaction if it is the first of a step."""
        if self._txn is None or len(self._closures) == self._data.micro_batches or self._is_manual:
            self._begin()
        return self._txn.batch[len(self._closures)]

    @property
    def _is_manual(self) -> bool:
        return not self.lightning_module.automatic_optimization

    def _begin(self) -> None:
        """Begin the next transaction. Raises StopIteration after the last one, and Drained."""
        if self._txns is None:
            last = self._data.total_steps
            self._txns = self.manager.transactions(self._data.source, max_steps=last)
        self._txn = next(self._txns, None)
        self._closures, self._attempt, self._replay_index = [], None, None
        if self._txn is None:
            if self._data.is_last(self.manager.current_step()):
                raise StopIteration
            raise Drained("this replica group has left the job before the end of trainer.fit()")
        rank_zero_only.rank = 0 if self.is_global_zero else 1
        self._state.begin()

    def _begin_again(self) -> None:
        """Begin the next transaction after a rollback: a replay, or a later step if the job
        continued without this rank."""
        closures = self._closures
        try:
            self._begin()
        except StopIteration:
            raise Drained("the job reached its last step without this replica group") from None
        self._closures = closures

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Lightning calls this after the hooks that may change the batch
        self._inputs.keep(batch, is_first=self._attempt is None)

    def _begin_step(self) -> None:
        """Save what a rollback restores: hooks have run since the transaction began."""
        self._txn.keep_changes()
        self._logs.save()
        self._state.save_buffers()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._txn is None or not self._is_manual:
            return super().training_step(*self._inputs.of(self._replay_index, args), **kwargs)
        self._data.is_skipped = False
        is_replay = False
        self._begin_step()
        while True:
            with self._txn:
                self._replay_index = 0 if is_replay else None
                output = super().training_step(*self._inputs.of(self._replay_index, args), **kwargs)
                self._sync_logs()
            if self._txn.committed:
                self._state.end()
                return output
            self._logs.restore()
            self._begin_again()
            is_replay = True

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self._is_manual:
            return super().optimizer_step(optimizer, closure, **kwargs)
        self._data.is_skipped = False
        results: list[Any] = []

        if self._attempt is None:
            self._begin_step()
        rng = capture_random(None)
        hyper = [hyper_of(group) for group in optimizer.param_groups]

        def run() -> None:
            if self._replay_index is not None:  # hooks that run between two closures may set these
                for restore in rng:
                    restore()
                for group, values in zip(optimizer.param_groups, hyper, strict=True):
                    set_hyperparameters(group, values)
            results[:] = [closure()]

        self._closures.append(run)
        while True:
            if self._attempt is None:
                self._attempt = self._run(optimizer)
            try:
                next(self._attempt)
            except StopIteration:
                self._attempt = None
            else:
                return results[0]  # Lightning draws the next micro-batch of this step
            if self._txn.committed:
                self._state.end()
                return results[0]
            self._logs.restore()
            self._begin_again()
            self._replay_index = 0

    def _run(self, optimizer: torch.optim.Optimizer) -> Generator[None, None, None]:
        """Run one attempt of the step function, as a generator that yields between two
        micro-batches."""
        size, done = self._data.micro_batches, 0
        with self._txn:
            while True:
                while done < len(self._closures):
                    is_last = done + 1 == size
                    if self._replay_index is not None:
                        self._replay_index = done
                    with contextlib.nullcontext() if is_last else self.manager.no_sync():
                        self._closures[done]()
                    done += 1
                self._replay_index = None
                if done == size:
                    break
                with self.manager.atomic(), self._state.of_last_commit():
                    yield
                if self._is_stopped:
                    self.manager.stop()
                    return
            plugin, scaler = self.precision_plugin, getattr(self.precision_plugin, "scaler", None)
            if scaler is not None:
                scaler.unscale_(optimizer)
            plugin._after_closure(self.lightning_module, optimizer)  # hooks, and clipping
            self._sync_logs()

    def _sync_logs(self) -> None:
        """Average the epoch's metrics with ``sync_dist=True`` in the last step of the epoch."""
        loop = self._trainer.fit_loop.epoch_loop
        if not (loop.batch_progress.is_last_batch or self._data.is_last(self._txn.step + 1)):
            return
        for metric in loop._results.values():
            if metric.is_tensor and metric.meta.on_epoch and metric.meta.sync.should:
                metric.compute()  # the result is kept until the end of the epoch

    @property
    def _is_in_step(self) -> bool:
        # an evaluation may run between two micro-batches of a step; a fault must not interrupt it
        return self._trainer.training and self.manager.is_in_txn

    def reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean", **_: Any
    ) -> Any:
        if not isinstance(tensor, torch.Tensor) or not self._is_in_step:
            return tensor  # an evaluation, which has the same result on all groups
        op = str(reduce_op).lower().removeprefix("reduceop.").removeprefix("redoptype.")
        if op not in ("none", "mean", "avg", "sum"):
            raise FftError(
                f"FFTStrategy: expected a mean or a sum over the groups, got {reduce_op}; use "
                "reduce_fx='mean', or sync_dist=False"
            )
        mean = self._txn.mean(tensor.float())
        return mean * self.manager.num_participants() * self._ranks if op == "sum" else mean

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        if self._is_in_step:
            raise FftError(
                "FFTStrategy: self.all_gather() in training_step is not supported; reduce by "
                'strategy.manager.allreduce() (see "Embeddings of all groups" in FFT\'s '
                "documentation)"
            )
        return tensor

    # --- files ---

    @property
    def is_global_zero(self) -> bool:
        if self._txn is not None:
            return self.manager.is_writer
        # before the first transaction, group 0 writes the hyperparameters
        is_first = os.environ.get("REPLICA_GROUP_ID", "0") == "0"
        return is_first and os.environ.get("RANK", "0") == "0"

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        # Lightning broadcasts only whether a file exists; a file that another group has just
        # written counts as missing
        return False if isinstance(obj, bool) and not self.is_global_zero else obj

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._ranks == 1:
            return super().lightning_module_state_dict()
        return get_model_state_dict(self.lightning_module, options=_WHOLE)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self._ranks == 1:
            return super().optimizer_state(optimizer)
        return get_optimizer_state_dict(self.lightning_module, optimizer, options=_WHOLE)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if self._txn is not None:
            checkpoint["fft"] = self.manager.state_dict()
            if "loops" in checkpoint:  # not with save_weights_only=True
                checkpoint["loops"]["fit_loop"] = self._state.counters()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._trainer.state.fn == TrainerFn.FITTING and "fft" in checkpoint:
            self.manager.load_state_dict(checkpoint["fft"])
        return checkpoint

    # --- the end ---

    def on_train_end(self) -> None:
        if self._txns is None or self._txn is None:
            return
        self._data.refuse_skipped()
        self._is_stopped, is_within_step = True, self._attempt is not None
        next(self._attempt or iter(()), None)  # drops the open step
        is_over = is_within_step and self._txn.committed
        if not is_over and not self._data.is_last(self.manager.current_step()):
            self.manager.stop()  # early stopping, which all groups decide after the same step
        for _ in self._txns:
            raise FftError("FFTStrategy: a transaction has begun after the end of trainer.fit()")

    def teardown(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
        if self._trainer.state.fn == TrainerFn.FITTING:
            self.manager.shutdown()
        super().teardown()


def _make_manager(device: torch.device, options: Mapping[str, Any]) -> fft.ManagerFFT:
    is_cuda, limit = device.type == "cuda", timedelta(seconds=60)
    given: dict[str, Any] = {"min_replica_size": 1, **options}
    # the first step waits for all groups, whose imports of Lightning take different times
    given["timeouts"] = {"join_window": 30.0, **given.get("timeouts", {})}
    # a joining group must fetch the state before it computes, because the state contains
    # Lightning's counters
    config = given.pop("config", fft.ManagerConfig()).model_copy(update={"learners": "never"})
    if ranks() > 1:
        given.setdefault("shard_pg", shard_process_group(is_cuda, limit))
    return fft.ManagerFFT(process_group(is_cuda, limit), None, None, config=config, **given)

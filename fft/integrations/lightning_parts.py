"""Data, counters and logs of a Lightning Trainer, for `fft.integrations.lightning`."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer import call
from torch.distributed.tensor import DTensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torchmetrics import Metric

import fft
from fft.errors import FftError
from fft.train.data.batch_copy import copied
from fft.train.data.loaders import sample_order
from fft.train.state.step_state import Buffer, capture_buffers, restore_buffers

logger = logging.getLogger(__name__)
_UNSUPPORTED = {
    GradientAccumulationScheduler: "use one value of Trainer(accumulate_grad_batches=…)",
    Timer: "use Trainer(max_steps=…), or `fft run --timeout`; clocks of groups differ",
    BatchSizeFinder: "find the batch size in a run without FFT",
    StochasticWeightAveraging: "use WeightAveraging",
    LearningRateFinder: "find the learning rate in a run without FFT",
}
"""Unsupported callbacks, each with the fix for the error message."""


class _Loader(fft.CursorLoader):
    sets_epoch = False  # Lightning does not call it, but its users do


class Batches:
    """A replacement for Lightning's train dataloader, which yields this rank's micro-batches in
    DDP's order.

    One item of the FFT loader holds all micro-batches of a rank in one step. The number of steps in
    an epoch is fixed, so it does not depend on the groups that are present.
    """

    def __init__(
        self, dataloader: Any, trainer: Trainer, world: int, draw: Callable[[], Any]
    ) -> None:
        """Take the data, order and options of ``dataloader``.

        Args:
            dataloader: The dataloader of the script. FFT loads its samples by number instead.
            trainer: The trainer.
            world: Number of ranks of all groups.
            draw: Returns the next micro-batch.

        Raises:
            FftError: The data cannot be divided, or there is no batch for each rank.
        """
        self._trainer, self._draw = trainer, draw
        self.is_skipped = False
        """Whether the script has skipped the last batch: no step function has begun with it."""
        _refuse_unfit_loader(dataloader)
        self.dataset, self.micro_batches = dataloader.dataset, trainer.accumulate_grad_batches
        self._is_manual = not trainer.lightning_module.automatic_optimization
        size, samples = dataloader.batch_size, -(-len(dataloader.sampler) // world)
        batches = samples // size if dataloader.drop_last else -(-samples // size)
        limit = trainer.limit_train_batches
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        self._steps = batches // self.micro_batches
        if self._steps == 0:
            raise FftError(
                f"FFTStrategy: expected at least {self.micro_batches} batches of {size} samples "
                f"for each of {world} ranks, found {batches}; reduce batch_size or "
                "accumulate_grad_batches"
            )
        if left := batches % self.micro_batches:
            logger.warning(
                "the last %d batches of each epoch are left out: accumulate_grad_batches=%d does "
                "not divide the %d batches of a rank",
                left,
                self.micro_batches,
                batches,
            )
        order = partial(_ddp_order, dataloader, world, self._steps, size * self.micro_batches)
        options = {
            name: getattr(dataloader, name)
            for name in ("num_workers", "pin_memory", "worker_init_fn", "timeout")
            if getattr(dataloader, name)
        }
        if dataloader.num_workers:
            options["prefetch_factor"] = dataloader.prefetch_factor
            options["multiprocessing_context"] = dataloader.multiprocessing_context
        self._keeps_workers = dataloader.persistent_workers
        self.source = _Loader(
            dataloader.dataset,
            batch_size=None,
            order=order,
            seed=_seed(),
            collate_fn=partial(_collated, dataloader.collate_fn, size),
            **options,
        )

    def __len__(self) -> int:
        return self._steps * self.micro_batches

    def __iter__(self) -> Iterator[Any]:
        # DataLoader draws this number, too; without it the dropout masks would differ from DDP's
        torch.empty((), dtype=torch.int64).random_()
        self.begin_epoch()
        return self

    def begin_epoch(self) -> None:
        """End the data workers, as DataLoader does: new ones get what hooks of the epoch change."""
        if not self._keeps_workers:
            self.source.close()

    def __next__(self) -> Any:
        self.refuse_skipped()
        batch = self._draw()
        self.is_skipped = True  # until a step function begins with it
        return batch

    def refuse_skipped(self) -> None:
        """Raise FftError if the script has skipped the last batch."""
        if self.is_skipped:
            raise FftError(
                "FFTStrategy: expected a step for each batch, but the last one was skipped: the "
                "batch was None, on_train_batch_start() returned -1, or optimizer_step() of the "
                "module did not call optimizer.step(closure=closure). Multiply the loss by 0 where "
                "a batch must not count, or set trainer.should_stop to end the training"
            )

    @property
    def total_steps(self) -> int | None:
        """Number of steps of the whole job, or None if it is not known."""
        trainer = self._trainer
        epochs, steps = trainer.fit_loop.max_epochs, trainer.max_steps
        ends = [] if epochs in (None, -1) else [epochs * self._steps]
        # with manual optimization Lightning counts each call of step()
        ends += [steps] if steps != -1 and not self._is_manual else []
        return min(ends, default=None)

    def is_last(self, step: int) -> bool:
        """Return whether the job is over after ``step`` steps."""
        return self.total_steps is not None and step >= self.total_steps


def _refuse_unfit_loader(dataloader: Any) -> None:
    """Raise FftError for data that cannot be divided among the ranks."""
    found, fix = f"a {type(dataloader).__name__}", "return a torch DataLoader"
    if isinstance(dataloader, DataLoader):
        if isinstance(dataloader.dataset, IterableDataset):
            found, fix = "an IterableDataset", "use a dataset with len() and samples by index"
        elif dataloader.batch_size is None or type(dataloader.batch_sampler) is not BatchSampler:
            found, fix = "a batch_sampler", "pass batch_size= and sampler="
        else:
            return
    raise FftError(f"FFTStrategy: cannot divide {found} among the groups; {fix}")


def _seed() -> int:
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def _ddp_order(
    dataloader: Any, world: int, steps: int, size: int, data_epoch: int
) -> list[list[int]]:
    """Return the samples of each item of a data epoch, as Lightning's DDP divides them.

    Args:
        world: Number of ranks of all groups.
        steps: Number of steps of an epoch.
        size: Number of samples of an item.
    """
    sampler = dataloader.sampler
    if type(sampler) is RandomSampler and not sampler.replacement:
        generator = torch.Generator().manual_seed(_seed() + data_epoch)
        own = torch.randperm(len(dataloader.dataset), generator=generator).tolist()
    elif isinstance(sampler, SequentialSampler):
        own = list(range(len(dataloader.dataset)))
    else:
        own = sample_order(sampler, _seed(), data_epoch)
    total = -(-len(own) // world) * world
    own = (own * -(-total // len(own)))[:total]  # as DistributedSampler pads it
    ranks = [own[rank::world] for rank in range(world)]
    return [r[step * size : (step + 1) * size] for step in range(steps) for r in ranks]


def _collated(collate: Callable[[list[Any]], Any], size: int, samples: list[Any]) -> list[Any]:
    """Return the micro-batches, of ``size`` samples each, of one item."""
    return [collate(samples[i : i + size]) for i in range(0, len(samples), size)]


class Inputs:
    """The micro-batches of a step as Lightning's hooks have left them, which a replay gets again.

    Lightning calls the hooks before the step function, once. If a replay has another batch, because
    groups have left or joined, they are called for that batch.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._kept: list[Any] = []
        self._place: Any = None
        """The place of the micro-batches in the data."""

    def keep(self, batch: Any, is_first: bool) -> None:
        """Copy the next micro-batch, before the step function can change it."""
        if is_first:
            self._kept, self._place = [], self._place_now()
        self._kept.append(copied(batch))

    def _place_now(self) -> Any:
        return self._strategy._txn.items.start, self._strategy.manager.participating_rank()

    def of(self, number: int | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of ``training_step`` for micro-batch ``number`` of a replay, or
        ``args`` if it is None."""
        if number is None:
            return args
        strategy = self._strategy
        loop = strategy._trainer.fit_loop.epoch_loop
        if self._place != self._place_now():
            self._kept, self._place = [None] * len(self._kept), self._place_now()
        if self._kept[number] is None:
            index = loop.batch_progress.current.ready - len(self._kept) + number
            self._kept[number] = copied(self._prepared(strategy._txn.batch[number], index))
        batch = copied(self._kept[number])
        loop._results.batch, loop._results.batch_size = batch, None
        return (batch, *args[1:])

    def _prepared(self, batch: Any, index: int) -> Any:
        """Return a batch after Lightning's hooks, in the order of its `_TrainingEpochLoop`."""
        trainer, module = self._strategy._trainer, self._strategy.lightning_module
        batch = self._strategy.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = self._strategy.batch_to_device(batch, dataloader_idx=0)
        call._call_callback_hooks(trainer, "on_train_batch_start", batch, index)
        call._call_lightning_module_hook(trainer, "on_train_batch_start", batch, index)
        return batch


class TrainerState:
    """The counters of Lightning's loops and the states of its schedulers and callbacks, registered
    with FFT.

    Lightning changes them outside of step functions. During a transaction the live counters already
    include this step's micro-batches, so `state_dict` returns the counters saved at its start.
    """

    def __init__(self, trainer: Trainer, begin_epoch: Callable[[], None]) -> None:
        self._trainer, self._begin_epoch = trainer, begin_epoch
        self._begun: dict[str, Any] | None = None
        """Counters at the begin of the open transaction; None between two transactions."""
        self._buffers: list[Buffer] = []
        """Buffers at the begin of the open transaction."""

    def begin(self) -> None:
        """Save the counters when the first attempt at a step begins; a replay keeps them."""
        if self._begun is None:
            self._begun = self._trainer.fit_loop.state_dict()

    def end(self) -> None:
        """Note that the transaction is committed."""
        self._begun = None

    def counters(self) -> dict[str, Any]:
        """Return the counters of the loops at the last commit."""
        return self._begun or self._trainer.fit_loop.state_dict()

    def _modules(self) -> list[torch.nn.Module]:
        return list(self._trainer.lightning_module.modules())

    def save_buffers(self) -> None:
        """Save the buffers before the first micro-batch of a step changes them."""
        if self._trainer.accumulate_grad_batches > 1:
            self._buffers = list(capture_buffers(self._modules()))

    @contextlib.contextmanager
    def of_last_commit(self) -> Iterator[None]:
        """Put the buffers of the last commit into the model, between two micro-batches of a step.

        A validation and a checkpoint there have the weights of the last commit, too.
        """
        own = list(capture_buffers(self._modules()))
        restore_buffers(self._modules(), self._buffers)
        try:
            yield
        finally:
            restore_buffers(self._modules(), own)

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        callbacks = call._call_callbacks_state_dict(trainer)
        for state in callbacks.values():
            state.pop("current_score", None)  # `ModelCheckpoint` does not load it
        return {
            "fit_loop": self.counters(),
            "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
            "callbacks": callbacks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        for config, own in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(own)
        loop, loaded = trainer.fit_loop, state["fit_loop"]
        now = loop.state_dict()
        if loaded == (self._begun or now):
            return  # a rollback: only the step function has run since
        call._call_callbacks_load_state_dict(trainer, {"callbacks": state["callbacks"]})
        epoch = trainer.current_epoch
        loop.load_state_dict(loaded if self._begun is None else _advanced(loaded, self._begun, now))
        self._begun = self._begun and loaded
        _keep_running(loop)
        loop._data_fetcher.fetched = loop.epoch_loop.batch_progress.current.ready
        if trainer.current_epoch != epoch:  # the hooks have run for another epoch
            call._call_callback_hooks(trainer, "on_train_epoch_start")
            call._call_lightning_module_hook(trainer, "on_train_epoch_start")
            self._begin_epoch()


def _advanced(loaded: Any, before: Any, now: Any) -> Any:
    """Return ``loaded`` with each counter increased by its difference between ``before`` and
    ``now``."""
    if isinstance(loaded, dict):
        both = before.keys() & now.keys()
        return {k: _advanced(v, before[k], now[k]) if k in both else v for k, v in loaded.items()}
    return loaded + now - before if type(loaded) is int else loaded


def _keep_running(loop: _Loop) -> None:
    """Clear the restart flags that `load_state_dict` sets for a loop that has not started; this
    loop is already running."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for each in vars(loop).values():
        if isinstance(each, _Loop):
            _keep_running(each)


def averaged_models(trainer: Trainer) -> dict[str, Any]:
    """Return the models of `WeightAveraging` callbacks, which are not in the callbacks' states."""
    callbacks = [c for c in trainer.callbacks if isinstance(c, WeightAveraging)]
    return {f"average_{i}": each._average_model for i, each in enumerate(callbacks)}


class Logs:
    """Logged values, torchmetrics and counts of calls that a step function changes.

    A replay changes them again.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._results = trainer.fit_loop.epoch_loop._results
        self._metrics = [m for m in trainer.lightning_module.modules() if isinstance(m, Metric)]
        loop = trainer.fit_loop.epoch_loop
        self._counts = [
            loop.manual_optimization.optim_step_progress,
            loop.automatic_optimization.optim_progress.optimizer.zero_grad,
        ]
        self._counted: list[dict[str, Any]] = []
        self._logged: dict[str, dict[str, Any]] = {}
        self._states: list[dict[str, Any]] = []

    def save(self) -> None:
        """Save the values; Lightning replaces them, and torchmetrics may edit tensors in place."""
        self._counted = [each.state_dict() for each in self._counts]
        self._logged = {key: dict(vars(each)) for key, each in self._results.items()}
        self._states = [
            {name: _copied(value) for name, value in vars(m).items() if name in _names_in(m)}
            for m in self._metrics
        ]

    def restore(self) -> None:
        """Restore the values after a rollback, except those of hooks outside step functions."""
        for count, state in zip(self._counts, self._counted, strict=True):
            count.load_state_dict(state)
        for key, each in list(self._results.items()):
            if each.meta.fx.startswith("on_train_"):
                continue
            if key not in self._logged:
                del self._results[key]
            else:
                vars(each).clear()
                vars(each).update(self._logged[key])
        for metric, state in zip(self._metrics, self._states, strict=True):
            vars(metric).update({name: _copied(value) for name, value in state.items()})


def _names_in(metric: Metric) -> set[str]:
    return {*metric._defaults, "_update_count", "_computed", "_forward_cache"}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def refuse_unsupported(trainer: Trainer, ranks: int) -> None:
    """Raise FftError for callbacks, arguments and models that cannot work with FFTStrategy."""
    for callback in trainer.callbacks:
        for kind, fix in _UNSUPPORTED.items():
            if isinstance(callback, kind):
                raise FftError(f"FFTStrategy: {kind.__name__} is not supported; {fix}")
        if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
            raise FftError(
                "FFTStrategy: ModelCheckpoint(train_time_interval=…) is not supported; pass "
                "every_n_train_steps=, because clocks of groups differ"
            )
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise FftError(
            "FFTStrategy: Trainer(val_check_interval=…) as a time is not supported; pass a number "
            "of batches, because clocks of groups differ"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise FftError(
            "FFTStrategy: Trainer(reload_dataloaders_every_n_epochs=…) is not supported; change "
            "the dataset in on_train_epoch_start(), which new data workers see, but not its length"
        )
    module = trainer.lightning_module
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise FftError("FFTStrategy: expected training_step(batch), got dataloader_iter=")
    if ranks > 1 and not any(isinstance(p, DTensor) for p in module.parameters()):
        raise FftError(
            f"FFTStrategy: expected a model that is sharded over the {ranks} ranks of a group, "
            "found none: call fully_shard(self, mesh=self.device_mesh) in configure_model(), or "
            "start each group with --ranks 1"
        )

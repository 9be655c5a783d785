"""FFT's loader for the batches of a Hugging Face ``Trainer``."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers.trainer_utils import has_length

import fft
from fft.train.data.loaders import sample_order
from fft.train.data.worker import with_own_generators

logger = logging.getLogger(__name__)


def loader_of(dataloader: Any, args: Any) -> fft.CursorLoader | Steps:
    """Return FFT's loader for the batches of a Trainer's dataloader, in the Trainer's own order."""
    per_step = args.gradient_accumulation_steps
    seed = args.seed if args.data_seed is None else args.data_seed
    if isinstance(dataloader.dataset, IterableDataset):
        if args.dataloader_num_workers:
            raise fft.FftError("FFTTrainer: pass dataloader_num_workers=0 for an IterableDataset")
        return Steps(dataloader, per_step, seed)

    def batches(data_epoch: int) -> list[list[int]]:
        # Accelerate's BatchSamplerShard does not forward set_epoch to the sampler that it wraps
        sampler = dataloader.batch_sampler
        while inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(data_epoch)
            sampler = inner
        return sample_order(sampler, seed, data_epoch, dataloader.batch_sampler)

    workers, options = args.dataloader_num_workers, {}
    if workers:
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        options["multiprocessing_context"] = args.dataloader_multiprocessing_context
    pin = args.dataloader_pin_memory and torch.accelerator.is_available()
    options |= {"collate_fn": dataloader.collate_fn, "num_workers": workers, "pin_memory": pin}
    data = dataloader.dataset
    loader = fft.CursorLoader(data, None, seed, order=batches, micro_batches=per_step, **options)
    loader.samples_per_item = args.train_batch_size * per_step
    return loader


class Steps:
    """The micro-batches of all steps from an iterable dataset, in a loader with a state.

    Each group reads the whole data, so FFT compares what the groups draw. The global generators are
    seeded for each data epoch, so a dataset that shuffles by them has one order on all groups, also
    on one that joins.
    """

    def __init__(self, dataloader: Any, per_step: int, seed: int) -> None:
        self._dataloader, self._per_step, self._seed = dataloader, per_step, seed
        self._drawn = 0
        self.items_per_data_epoch: int | None = None
        """Number of items in a data epoch, or None if the dataset has no length."""
        if has_length(dataloader):
            self.items_per_data_epoch = math.ceil(len(dataloader) / per_step)

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._drawn = state["drawn"]

    def __iter__(self) -> Iterator[list[Any]]:
        first = self._drawn
        for number, item in enumerate(self._items(), 1):
            if number > first:
                self._drawn = number
                yield item

    def _items(self) -> Iterator[list[Any]]:
        for data_epoch in itertools.count():
            if hasattr(self._dataloader, "set_epoch"):
                self._dataloader.set_epoch(data_epoch)
            batches = with_own_generators(self._dataloader, self._seed, data_epoch)
            items = 0
            while item := list(itertools.islice(batches, self._per_step)):
                items += 1
                yield item
            if not items:
                raise fft.errors.DataError("FFTTrainer: the train_dataset has no samples")
            if self.items_per_data_epoch not in (None, items):
                logger.warning(
                    "data epoch %d of the train_dataset has %d steps, and by its len() %d: the "
                    "number of steps and the epochs in the logs follow len(); correct it",
                    *(data_epoch, items, self.items_per_data_epoch),
                )

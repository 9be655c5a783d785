"""FFT's loader for the batches of a Hugging Face ``Trainer``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

import fft
from fft.train.data.loaders import sample_order


def loader_of(dataloader: Any, args: Any) -> fft.CursorLoader | fft.StreamLoader:
    """Return FFT's loader for the batches of a Trainer's dataloader, in the Trainer's own order."""
    per_step = args.gradient_accumulation_steps
    seed = args.seed if args.data_seed is None else args.data_seed
    if isinstance(dataloader.dataset, IterableDataset):
        if args.dataloader_num_workers:
            raise fft.FftError("FFTTrainer: pass dataloader_num_workers=0 for an IterableDataset")
        return fft.StreamLoader(functools.partial(_stream, dataloader, per_step), seed=seed)

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


def _stream(dataloader: Any, per_step: int, first: int, stride: int) -> Iterator[list[Any]]:
    """Return the micro-batches of every ``stride``-th step of the repeated dataset, beginning with
    step ``first``."""

    def batches() -> Iterator[Any]:
        for data_epoch in itertools.count():
            if hasattr(dataloader, "set_epoch"):
                dataloader.set_epoch(data_epoch)
            batch = None
            for batch in dataloader:
                yield batch
            if batch is None:
                raise fft.DataError("FFTTrainer: the train_dataset has no samples")

    endless = batches()
    steps = iter(lambda: list(itertools.islice(endless, per_step)), [])
    return itertools.islice(steps, first, None, stride)

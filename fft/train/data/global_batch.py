"""Steps with a fixed number of samples, whatever the number of groups (``global_batch=``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fft.errors import DataError
from fft.train.data.source import named
from fft.train.gradients.reducer import Reducer


def samples_in(loader: Any) -> int | None:
    """Return the number of samples in each batch of ``loader``, or None if it is not known."""
    for name in ("samples_per_item", "batch_size"):
        if isinstance(each := getattr(loader, name, None), int):
            return each
    return rows_of(loader[0]) if isinstance(loader, list | tuple) and loader else None


def rows_of(batch: Any) -> int | None:
    """Return the length of the first tensor in ``batch``, or None if there is none."""
    leaves = tree_leaves(batch)
    rows = (leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim)
    return next(rows, None)


def slices_of(loader: Any, global_batch: int, takers: int, groups: int) -> int:
    """Return the number of slices that a step of ``global_batch`` samples takes.

    Args:
        loader: The loader of the script.
        global_batch: Number of samples in a step, on all groups together.
        takers: Number of items in a slice.
        groups: Number of groups that the job expects.

    Raises:
        DataError: Batches of ``loader`` do not make up such a step.
    """
    call, each = f"global_batch={global_batch}", samples_in(loader)
    if each is None:
        raise DataError(
            f"{call}: {named(loader)} does not state the number of samples in a batch; pass an "
            "fft.CursorLoader, or set the attribute samples_per_item of the loader"
        )
    if getattr(loader, "drop_last", True) is False:
        raise DataError(
            f"{call}: with drop_last=False the last batch of a data epoch may have fewer than "
            f"{each} samples, and so a step fewer than {global_batch}; pass drop_last=True"
        )
    if getattr(loader, "micro_batches", None) is not None:
        raise DataError(
            f"{call}: FFT decides how many batches of batch_size= a rank takes in a step; remove "
            "micro_batches= from the loader, and loop over txn.batches"
        )
    share = each * takers
    per_group = f"one batch of {each} samples" + (f" for each of {takers} ranks" * (takers > 1))
    if global_batch < 1 or global_batch % share:
        raise DataError(
            f"{call}: expected a multiple of {share}, the samples that a group takes at once "
            f"({per_group}); pass global_batch={max(1, round(global_batch / share)) * share}, or "
            "another batch_size"
        )
    if global_batch < share * groups:
        raise DataError(
            f"{call}: {groups} groups take at least {share * groups} samples in a step "
            f"({per_group} in each group); raise global_batch, or reduce batch_size"
        )
    return global_batch // share


class Batches(Iterator[Any]):
    """The batches of a rank in one step, for a loop with one ``backward()`` for each.

    The gradients are reduced in the ``backward()`` of the last batch; those before it only
    accumulate. A rollback restores the reducers if the loop is left early.
    """

    def __init__(self, batches: Sequence[Any], reducers: Sequence[Reducer]) -> None:
        self._batches, self._reducers = batches, reducers
        self._taken = 0
        self._quiet: list[bool] = []
        """For each reducer, whether it was quiet before the loop."""

    def __next__(self) -> Any:
        if self._taken == len(self._batches):
            raise StopIteration
        batch = self._batches[self._taken]
        self._taken += 1
        if self._taken == 1:
            self._quiet = [reducer.quiet(True) for reducer in self._reducers]
        if self._taken == len(self._batches):
            for reducer, quiet in zip(self._reducers, self._quiet, strict=True):
                reducer.quiet(quiet)
        return batch

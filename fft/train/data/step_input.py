"""The input of one attempt at a step, with its position in the data. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fft.errors import FftError
from fft.train.limits import Feature, reason

NO_DATA_EPOCHS = "not available for this loader, which has no data epochs; pass an fft.CursorLoader"
"""Reason why a txn has no data epochs: the loader does not count them."""
SHARDED = f"not available {reason(Feature.DATA_POSITION, Feature.SHARDED)}"
"""Reason why a txn has neither data epochs nor progress: each group reads a shard."""
LOCAL_STEPS = f"not available {reason(Feature.DATA_POSITION, Feature.LOCAL_STEPS)}"
"""Reason why a txn has neither data epochs nor progress: the groups take local steps."""


@dataclass(frozen=True, slots=True)
class DataEpochs:
    """Number of completed data epochs ``before`` a txn and ``after`` its commit."""

    before: int
    after: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """The input of one attempt."""

    batch: Any
    """A copy, which the step function may change."""
    is_last: bool
    """There are no items for another txn of all groups."""
    waited_ms: float
    """Time spent on the input of this step in all attempts so far, including the copy."""
    slice: int | None
    """Number of the batch's slice of the data, or None if the batch does not count."""
    item: int
    """Number of the item of the data."""
    counted: DataEpochs | str = NO_DATA_EPOCHS
    """Data epochs of the loader, or the reason why there are none."""
    digest: str | None = None
    """Digest of the data that must be equal on all ranks, or None if it cannot be compared."""
    shard: str = ""
    """Name of the shard that the data are drawn from; empty if all ranks draw the same data."""

    ids: list[int] | list[str] | None = None
    """Ids of the samples for the audit, or None if they are not known."""
    taken: range | None = None
    """Numbers of the items of all ranks, or None if they are not known."""
    consumed: float | None = None
    """Fraction of the data that is consumed with this txn, or None if the data have no known
    end."""
    dealt: dict[str, list[int]] | None = None
    """Numbers of all slices and items in ``batch``, which is then a list of batches, if the job
    fixes the number of slices in a txn; else None."""

    @property
    def items(self) -> range:
        """Return `taken`. Raises FftError if it is None."""
        if self.taken is None:
            raise FftError(f"txn.items: {self.counted}")
        return self.taken

    @property
    def progress(self) -> float:
        """Return `consumed`. Raises FftError if it is None."""
        if self.consumed is not None:
            return self.consumed
        if self.counted in (SHARDED, LOCAL_STEPS):
            raise FftError(f"txn.progress: {self.counted}")
        raise FftError(
            "txn.progress: not available for data without a known end; give transactions() a list, "
            "an fft.CursorLoader with data_epochs=, or an fft.StreamLoader with items="
        )

    @property
    def data_epochs(self) -> DataEpochs:
        """Return the counts of data epochs. Raises FftError if the data have none."""
        if isinstance(self.counted, str):
            raise FftError(f"txn.ends_data_epoch, txn.data_epoch: {self.counted}")
        return self.counted

    def describe(self, step: int, peer: object) -> str:
        """Describe the batch in messages about a failure; ``step`` is that of its txn."""
        where = f"in the txn of step {step}, on {peer}"
        if self.slice is None:
            return f"{where}, with a batch that does not count"
        return f"{where}, with slice {self.slice} of the data (item {self.item})"

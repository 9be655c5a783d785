"""The contribution of a group to an average across the groups, packed into buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.distributed_c10d import Work

BUCKET_MB = 1024.0
"""Default maximum size of a bucket in MiB, as in torchft."""

Reduce = Callable[[torch.Tensor, str], Work]
"""Starts averaging a tensor in place across the groups; the text describes its layout."""


@dataclass(frozen=True)
class Packing:
    """The packing of the values of a contribution into buckets.

    Attributes:
        is_weighted: Weight each group; its buckets contain the weight.
        bucket_mb: Maximum size of a bucket in MiB. Defaults to `BUCKET_MB`.
    """

    is_weighted: bool = False
    bucket_mb: float | None = None

    def buckets_of(self, values: Mapping[str, torch.Tensor], weight: float) -> Iterator[_Bucket]:
        """Pack ``values`` in order into buckets of one dtype each, up to the maximum size."""
        cap = int((BUCKET_MB if self.bucket_mb is None else self.bucket_mb) * 2**20)
        open_: dict[str, torch.Tensor] = {}
        size, dtype = 0, None
        for name, value in values.items():
            if open_ and (value.dtype != dtype or size + value.nbytes > cap):
                yield self._bucket(open_, weight)
                open_, size = {}, 0
            open_[name], dtype = value, value.dtype
            size += value.nbytes
        yield self._bucket(open_, weight)

    def _bucket(self, values: dict[str, torch.Tensor], weight: float) -> _Bucket:
        parts = [value.reshape(-1) for value in values.values()]
        if self.is_weighted:
            if parts[0].dtype in (torch.float16, torch.bfloat16):  # too imprecise to weight
                parts = [part.float() for part in parts]
            parts = [*(part * weight for part in parts), parts[0].new_full((1,), weight)]
        own = torch.cat(parts)
        sizes = {name: value.numel() for name, value in values.items()}
        return _Bucket(sizes, self.is_weighted, own, own)


@dataclass
class _Bucket:
    """A flat buffer of contiguous values, and its reduction across groups if in progress."""

    sizes: dict[str, int]
    """Number of elements of each value."""
    is_weighted: bool
    """The last element is the weight, and the other elements are multiplied by it."""
    own: torch.Tensor
    """The contribution of this group."""
    reduced: torch.Tensor
    work: Work | None = None

    def means(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the average of each value, flat."""
        parts = list(torch.split(self.reduced, [*self.sizes.values(), *[1] * self.is_weighted]))
        if self.is_weighted:
            total = parts.pop()
            parts = [part / total for part in parts]
        return zip(self.sizes, parts, strict=True)


class Contribution:
    """The contribution of a group to one synchronization; repeated attempts reduce it unchanged."""

    def __init__(self, values: Mapping[str, torch.Tensor], packing: Packing, weight: float) -> None:
        self._buckets = list(packing.buckets_of(values, weight))

    def launch(self, reduce: Reduce, layout: str) -> None:
        """Start averaging a copy; ``layout`` identifies the contribution of the buckets."""
        for bucket in self._buckets:
            bucket.reduced = bucket.own.clone()
            bucket.work = reduce(bucket.reduced, f"{layout}{list(bucket.sizes)}")

    def wait(self) -> None:
        """Wait for the averages. Raises TxnAborted if a reduction failed."""
        for bucket in self._buckets:
            assert bucket.work is not None, "it was launched"
            bucket.work.wait()

    def own(self) -> list[torch.Tensor]:
        """Return the values of this group, in buckets."""
        return [bucket.own for bucket in self._buckets]

    def reduced(self) -> list[torch.Tensor]:
        """Return the averages after `wait`, in buckets."""
        return [bucket.reduced for bucket in self._buckets]

    def means(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the average of each value, flat, by the name of its parameter."""
        for bucket in self._buckets:
            yield from bucket.means()

"""The shape of a mesh over the ranks of a replica group, and the batches of its ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fft.errors import FftError

_OWN_BATCH = ("dp", "ddp", "fsdp", "shard", "replicate", "dp_shard", "dp_replicate", "ep")
"""Names of dimensions along which each rank works on a batch of its own."""
_SAME_BATCH = ("tp", "cp", "sp")
"""Names of dimensions along which all ranks work on the same batch."""


class BatchShare(NamedTuple):
    """The batches that a replica group takes in a step, as seen by one of its ranks."""

    size: int
    """Number of different batches."""
    number: int
    """Number of the batch that this rank takes."""
    is_first: bool
    """Whether this is the first of the ranks that take this batch."""


@dataclass(frozen=True)
class MeshLayout:
    """A mesh over the ranks of a replica group, in row-major order, as seen by one of them.

    Attributes:
        sizes: Name and size of each dimension.
        same_batch: Dimensions along which all ranks work on the same batch.
        rank: The rank whose batch and lines are asked for.
    """

    sizes: dict[str, int]
    same_batch: frozenset[str]
    rank: int

    @classmethod
    def checked(
        cls,
        names: Sequence[str] | str,
        shape: Sequence[int] | int,
        same_batch: Collection[str] | str | None,
        rank: int,
        ranks: int,
    ) -> MeshLayout:
        """Return the layout for a group of ``ranks`` ranks.

        Args:
            names: The names of the dimensions.
            shape: Their sizes.
            same_batch: Dimensions along which all ranks work on the same batch. None chooses them
                by their names.
            rank: Rank of this process in the replica group.
            ranks: Number of ranks of the replica group.

        Raises:
            FftError: The arguments contradict each other or the group, or a name is unknown.
        """
        names = (names,) if isinstance(names, str) else names
        shape = (shape,) if isinstance(shape, int) else shape
        same_batch = (same_batch,) if isinstance(same_batch, str) else same_batch
        call = f"manager.mesh({tuple(names)}, {tuple(shape)})"
        if not names or not len(set(names)) == len(names) == len(shape):
            raise FftError(
                f"{call}: expected different names and one size for each name, as in "
                "manager.mesh(('fsdp', 'tp'), (2, 2))"
            )
        if wrong := [size for size in shape if type(size) is not int or size < 1]:
            raise FftError(f"{call}: expected positive int sizes, got {wrong[0]!r}")
        if math.prod(shape) != ranks:
            raise FftError(
                f"{call}: the sizes multiply to {math.prod(shape)}, but this replica group has "
                f"{ranks} ranks; change the sizes, or the number of ranks (fft run --ranks)"
            )
        known = {*_OWN_BATCH, *_SAME_BATCH}
        if same_batch is None and (unknown := [name for name in names if name not in known]):
            raise FftError(
                f"{call}: FFT cannot tell whether the ranks along {unknown[0]!r} work on the same "
                f"batch; pass the names of such dimensions as same_batch=, or use known names: "
                f"ranks share a batch along {', '.join(_SAME_BATCH)}, and not along "
                f"{', '.join(_OWN_BATCH)}"
            )
        if unknown := [name for name in same_batch or () if name not in names]:
            raise FftError(
                f"{call}: same_batch= names {unknown[0]!r}, which is not a dimension of this mesh"
            )
        shared = _SAME_BATCH if same_batch is None else same_batch
        return cls(dict(zip(names, shape, strict=True)), frozenset({*names} & {*shared}), rank)

    def __str__(self) -> str:
        """Return a text that is equal on all ranks, and only for equal meshes."""
        ways = {name: " (same batch)" if name in self.same_batch else "" for name in self.sizes}
        return " x ".join(f"{name}={size}{ways[name]}" for name, size in self.sizes.items())

    @property
    def batches(self) -> BatchShare:
        """The batches that the group takes in a step."""
        count, number, is_first = 1, 0, True
        for name, size in self.sizes.items():
            if name in self.same_batch:
                is_first = is_first and self._coordinate(name) == 0
            else:
                count, number = count * size, number * size + self._coordinate(name)
        return BatchShare(count, number, is_first)

    def line(self, name: str) -> list[int]:
        """Return the ranks along a dimension that have the other coordinates of this rank."""
        stride = self._stride(name)
        first = self.rank - self._coordinate(name) * stride
        return [first + i * stride for i in range(self.sizes[name])]

    def _stride(self, name: str) -> int:
        names = list(self.sizes)
        return math.prod(self.sizes[each] for each in names[names.index(name) + 1 :])

    def _coordinate(self, name: str) -> int:
        return self.rank // self._stride(name) % self.sizes[name]

"""Data by the committed global cursor: which item a rank takes, and how a loader gives it.

The cursor counts *slices*; a slice is what one replica group consumes in one txn: one item of the
loader (a batch) for each of its ranks. In a txn the i-th participating group takes the i-th slice
after the cursor; COMMIT moves it by the number of participating groups, ABORT leaves it. Sources
count in items: slice ``n`` of groups of ``R`` ranks is items ``n * R`` … ``n * R + R - 1``.
Touches only the loader it is given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol, runtime_checkable

from fft.errors import FftError


class DataError(FftError):
    """The loader cannot give the items that the cursor asks for."""


class DataSource(Protocol):
    """What ``transactions`` draws from. All groups must have equal sources."""

    def items(self, first: int, count: int) -> list[Any] | None:
        """Items ``first`` … ``first + count - 1``; None if the data end before."""

    def export(self, first: int) -> Any:
        """State from which a fresh source can go on at item ``first``."""

    def load(self, state: Any, first: int) -> None:
        """Go on at item ``first`` from the ``export`` of another group."""


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class CursorLoader:
    """Batches of a map-style dataset by number, in an order that every group computes alike.

    Item ``n`` is batch ``n % batches`` of pass ``n // batches``; each pass visits every sample
    once in a new random order (the last, incomplete batch is left out). Nothing needs to be
    transferred to a group that joins.

    Args:
        dataset: ``len()`` and ``[index]``.
        batch_size: samples per item, that is, for one rank in one step.
        seed: equal on all ranks.
        passes: end after so many passes; None: never.
        collate: list of samples → batch; default: torch's ``default_collate``.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        seed: int = 0,
        passes: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if not isinstance(dataset, Sized) or batch_size < 1 or len(dataset) < batch_size:
            raise DataError(
                f"a CursorLoader needs a dataset with at least batch_size={batch_size} samples"
            )
        self._dataset: Any = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._passes = passes
        self._collate = collate
        self._batches = len(dataset) // batch_size
        self._order: tuple[int, list[int]] = (-1, [])

    def indices(self, number: int) -> list[int]:
        """Sample indexes of item ``number``."""
        import torch  # only here: the cursor itself needs no torch

        which, place = divmod(number, self._batches)
        if self._order[0] != which:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + which)
            order = torch.randperm(len(self._dataset), generator=generator).tolist()
            self._order = (which, order)
        first = place * self._batch_size
        return self._order[1][first : first + self._batch_size]

    def __getitem__(self, number: int) -> Any:
        samples = [self._dataset[i] for i in self.indices(number)]
        if self._collate is not None:
            return self._collate(samples)
        from torch.utils.data import default_collate

        return default_collate(samples)

    def ends_before(self, number: int) -> bool:
        """Whether item ``number - 1`` is past the end."""
        return self._passes is not None and number > self._passes * self._batches


class _Indexed:
    """A ``CursorLoader`` as a source."""

    def __init__(self, loader: CursorLoader) -> None:
        self._loader = loader

    def items(self, first: int, count: int) -> list[Any] | None:
        if self._loader.ends_before(first + count):
            return None
        return [_Lazy(self._loader, first + i) for i in range(count)]

    def export(self, first: int) -> Any:
        return None

    def load(self, state: Any, first: int) -> None:
        """Nothing to do: any item can be had at any time."""


class _Lazy:
    """An item of which only the rank that takes it loads the samples."""

    def __init__(self, loader: CursorLoader, number: int) -> None:
        self._loader, self._number = loader, number

    def load(self) -> Any:
        return self._loader[self._number]


class StreamSource:
    """Any stateful loader as a source: every rank draws the whole stream and keeps its items.

    Items that were drawn but not committed stay here, so that a replay sees the same objects.
    The loader must give the same items in the same order on every rank, and have
    ``state_dict`` / ``load_state_dict`` so that a group that joins can go on where the others are.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._start: int | None = None
        self._items: list[Any] = []
        self._states: list[Any] = []
        """Loader state before each of ``_items``."""

    def items(self, first: int, count: int) -> list[Any] | None:
        self._forget(first)
        if self._iterator is None:
            self._iterator = iter(self._loader)
        while len(self._items) < count:
            state = self._state()
            try:
                item = next(self._iterator)
            except StopIteration:
                return None
            self._states.append(state)
            self._items.append(item)
        return self._items[:count]

    def export(self, first: int) -> Any:
        self._forget(first)
        return self._states[0] if self._states else self._state()

    def load(self, state: Any, first: int) -> None:
        if not isinstance(self._loader, _Stateful):
            raise DataError(
                f"{type(self._loader).__name__} has no load_state_dict, so a group that joins "
                "cannot go on at the common cursor; use fft.CursorLoader or a stateful loader"
            )
        self._loader.load_state_dict(copy.deepcopy(state))
        self._iterator, self._start = None, first
        self._items, self._states = [], []

    def _forget(self, first: int) -> None:
        """Drop what was committed: everything before ``first``."""
        if self._start is None:
            self._start = first
        done = first - self._start
        if not 0 <= done <= len(self._items):
            raise DataError(f"item {first} is due, but this loader is at {self._start}")
        del self._items[:done], self._states[:done]
        self._start = first

    def _state(self) -> Any:
        if isinstance(self._loader, _Stateful):
            return copy.deepcopy(self._loader.state_dict())
        return None


def as_source(loader: Any) -> DataSource:
    """The source for what the user passed to ``transactions``."""
    return _Indexed(loader) if isinstance(loader, CursorLoader) else StreamSource(loader)


def in_any_order(source: DataSource | None) -> bool:
    """Whether items can be had before ``load`` has said where the others are."""
    return source is None or isinstance(source, _Indexed)


def loaded(item: Any) -> Any:
    """The batch that this rank takes."""
    return item.load() if isinstance(item, _Lazy) else item

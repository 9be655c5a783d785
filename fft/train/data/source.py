"""Data by the committed global cursor: which item a rank takes, and the source that provides it.

The cursor counts *slices*; a slice is what one replica group consumes in one txn: one item of the
loader (a batch) for each of its ranks, or one for all of them, if they are stages of a pipeline.
In a txn the i-th participating group takes the i-th slice
after the cursor; COMMIT moves it by the number of participating groups, ABORT leaves it. Where
groups step alone, a slice has the items of all steps up to the next synchronisation, and a group
takes the one that it holds a lease on. Sources
count in items: slice ``n`` of ``R`` items is items ``n * R`` … ``n * R + R - 1``.
Touches only the loader it is given; everything runs on the thread that trains, between two bodies.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from fft.messages.effects import StartTxn
from fft.messages.protocol import Peer
from fft.util.errors import FftError


class DataError(FftError):
    """The loader cannot give the items that the cursor asks for."""


class Superseded(Exception):
    """The txn that an item was waited for is rolled back: nobody needs it now."""


@dataclass(frozen=True, slots=True)
class Due:
    """The item that a rank takes, and those that follow as long as the members stay."""

    first: int
    """Everything before it is committed."""
    number: int
    """The item of this rank; ``number + k * step`` is that of the k-th txn after this one."""
    step: int
    """Items that all ranks of all groups take in one txn."""


@runtime_checkable
class DataSource(Protocol):
    """What ``transactions`` draws from. All ranks of all groups must have equal sources.

    Attributes:
        in_any_order: items can be had before ``load`` has said where the others are.
    """

    in_any_order: bool

    def open(self) -> None:
        """Called once before the first txn: start what takes time to start."""

    def holds(self, first: int, count: int) -> bool:
        """Whether there are items ``first`` … ``first + count - 1``. The same on every rank."""

    def take(self, due: Due) -> Any:
        """Item ``due.number``, again and again the same object until ``due.first`` passes it."""

    def export(self, first: int) -> Any:
        """State from which an equal source can continue at ``first``: plain values, tensors."""

    def load(self, state: Any, first: int) -> None:
        """Continue at item ``first`` from the ``export`` of another group."""

    def close(self) -> None:
        """End what ``open`` and ``take`` have started. Idempotent; may be opened again."""


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class ItemsSource:
    """A list or another sequence of batches: item ``n`` is ``items[n]``; it ends with the last."""

    in_any_order = True

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def open(self) -> None:
        """Nothing to start."""

    def holds(self, first: int, count: int) -> bool:
        return first + count <= len(self._items)

    def take(self, due: Due) -> Any:
        return self._items[due.number]

    def export(self, first: int) -> Any:
        return {"items": len(self._items)}

    def load(self, state: Any, first: int) -> None:
        same_data(self, {"items": len(self._items)}, state)

    def close(self) -> None:
        """Nothing to end."""


class StreamSource:
    """Any stateful loader as a source: every rank draws the whole stream and keeps its items.

    Items that were drawn but not committed stay here, so that a replay sees the same objects.
    The loader must give the same items in the same order on every rank, and have
    ``state_dict`` / ``load_state_dict`` so that a joining group can continue where the others are.
    """

    in_any_order = False

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._start: int | None = None
        self._items: list[Any] = []
        self._states: list[Any] = []
        """Loader state before each of ``_items``."""

    def open(self) -> None:
        """Nothing to start: the first item is drawn when its txn begins."""

    def holds(self, first: int, count: int) -> bool:
        self._forget(first)
        if self._iterator is None:
            self._iterator = iter(self._loader)
        while len(self._items) < count:
            state = self._state()
            try:
                item = next(self._iterator)
            except StopIteration:
                return False
            except Exception as error:
                number = first + len(self._items)
                error.add_note(f"while item {number} of {_named(self._loader)} was drawn")
                raise
            self._states.append(state)
            self._items.append(item)
        return True

    def take(self, due: Due) -> Any:
        if not self.holds(due.first, due.number - due.first + 1):
            raise DataError(
                f"item {due.number} is needed, but {_named(self._loader)} ends before it"
            )
        return self._items[due.number - due.first]

    def export(self, first: int) -> Any:
        self._forget(first)
        return self._states[0] if self._states else self._state()

    def load(self, state: Any, first: int) -> None:
        if not isinstance(self._loader, _Stateful):
            raise DataError(
                f"{_named(self._loader)} has no load_state_dict, so a group that joins cannot "
                "continue at the common cursor; use fft.CursorLoader or a stateful loader"
            )
        self._loader.load_state_dict(copy.deepcopy(state))
        self._iterator, self._start = None, first
        self._items, self._states = [], []

    def close(self) -> None:
        """Nothing to end: the loader is the user's."""

    def _forget(self, first: int) -> None:
        """Drop what was committed: everything before ``first``."""
        if self._start is None:
            if first > 0 and not isinstance(self._loader, _Stateful):
                raise DataError(
                    f"the job continues at item {first}, but {_named(self._loader)} can only begin "
                    "at its first; use fft.CursorLoader or a stateful loader"
                )
            self._start = first
        done = first - self._start
        if not 0 <= done <= len(self._items):
            raise DataError(f"item {first} is needed, but this loader is at {self._start}")
        del self._items[:done], self._states[:done]
        self._start = first

    def _state(self) -> Any:
        if isinstance(self._loader, _Stateful):
            return copy.deepcopy(self._loader.state_dict())
        return None


def as_source(loader: Any, replay_only: bool = False) -> DataSource:
    """The source for what the user passed to ``transactions``.

    Raises:
        DataError: it cannot be restored, and ``replay_only`` does not say that it need not.
    """
    if isinstance(loader, DataSource):
        return loader
    if isinstance(loader, _Stateful):
        return StreamSource(loader)
    if isinstance(loader, Sequence) and not isinstance(loader, str | bytes):
        return ItemsSource(loader)
    if replay_only:
        return StreamSource(loader)
    raise DataError(
        f"transactions() was given {_named(loader)}, which has no state_dict and load_state_dict: "
        "neither a group that joins nor a job that resumes could continue at its item. Pass "
        f"{_mend(loader)}; or a stateful loader, such as torchdata's StatefulDataLoader; or "
        "replay_only=True, if no group will join and the job will not be resumed"
    )


def _mend(loader: Any) -> str:
    """What to write in the place of ``loader``."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None:
        return "fft.CursorLoader(dataset, batch_size), fft.StreamLoader(open)"
    if not isinstance(dataset, Sized):
        return "fft.StreamLoader(open), where open(first, step) gives every step-th batch"
    size = getattr(loader, "batch_size", None) or "batch_size"
    workers = getattr(loader, "num_workers", 0)
    return f"fft.CursorLoader(dataset, {size}, num_workers={workers}, …), which takes its arguments"


def _named(loader: Any) -> str:
    return f"a {type(loader).__module__}.{type(loader).__qualname__}".replace("builtins.", "")


def same_data(source: object, mine: dict[str, Any], theirs: Any) -> None:
    """Check the ``export`` of a peer against what this source would export.

    Raises:
        DataError: they would give other items; names what differs.
    """
    if not isinstance(theirs, dict) or set(theirs) != set(mine):
        raise DataError(
            f"this rank has {_named(source)}, the others have another kind of loader; "
            "give all groups the same"
        )
    for name, value in mine.items():
        if theirs[name] != value:
            raise DataError(
                f"{_named(source)}: {name} is {value!r} here and {theirs[name]!r} where the state "
                "came from, another group or a checkpoint; give all the same data"
            )


@dataclass(frozen=True, slots=True)
class Drawn:
    """The input of one attempt."""

    batch: Any
    """A copy: the body may do with it what it likes."""
    is_last: bool
    """There are no items for another txn of all groups."""
    waited_ms: float
    """For the input of this step, by all attempts at it so far; the copy included."""
    slice: int | None
    """Number of the slice of the data that it is a part of; None: it does not count."""
    item: int
    """Number of the item of the data."""

    def in_words(self, step: int, peer: Peer) -> str:
        """For who looks for what was wrong with the batch of ``peer`` in the txn of ``step``."""
        where = f"in the txn of step {step}, on {peer}"
        if self.slice is None:
            return f"{where}, with a batch that does not count"
        return f"{where}, with slice {self.slice} of the data (item {self.item})"


class Inputs:
    """What one rank takes from ``source``, txn by txn.

    Args:
        ranks: of each replica group, that take an item each; 1, if all take the same.
        rank: which of them this process is; 0, if all take the same.
    """

    def __init__(self, source: DataSource, ranks: int, rank: int) -> None:
        self._source, self._ranks, self._rank = source, ranks, rank
        self._step, self._waited_s = -1, 0.0

    def draw(self, plan: StartTxn) -> Drawn | None:
        """The input for ``plan``; None: the data have ended. Outside of bodies.

        A spare, and a group whose weights come in this txn, compute on the first group's items.
        """
        from fft.train.data.batch_copy import copied  # with torch

        began = time.monotonic()
        ranks = self._ranks
        first, count = plan.cursor * ranks, plan.participants * ranks
        number = first + (plan.index or 0) * ranks + self._rank
        try:
            # One txn ahead, so that at the end of the data all groups leave with one commit.
            is_last = not self._source.holds(first, 2 * count)
            if is_last and not self._source.holds(first, count):
                return None
            batch = copied(self._source.take(Due(first, number, count)))
        except Exception as error:
            error.add_note(self._due(plan, number))
            raise
        if plan.step != self._step:
            self._step, self._waited_s = plan.step, 0.0
        self._waited_s += time.monotonic() - began
        return Drawn(batch, is_last, self._waited_s * 1e3, plan.slice, number)

    def _due(self, plan: StartTxn, number: int) -> str:
        """In words, for who looks for what could not be loaded."""
        which = plan.cursor + (plan.index or 0)
        counts = "" if plan.index is not None else ", in which this group does not count"
        return (
            f"as rank {self._rank} of its group was to get its batch in the txn of step "
            f"{plan.step}{counts}: item {number} of the data, of slice {which}"
        )


class LeasedInputs:
    """What one rank takes from ``source``, step by step of the slice that its group has a lease on.

    Args:
        source: gives its items in any order.
        steps: items of a slice, for each rank.
        ranks, rank: as of `Inputs`.

    Raises:
        DataError: ``source`` must be read from its beginning.
    """

    def __init__(self, source: DataSource, steps: int, ranks: int, rank: int) -> None:
        if not source.in_any_order:
            raise DataError(
                "groups that step alone read different parts of the data, and this loader can only "
                "be read from its beginning; use fft.CursorLoader or fft.StreamLoader"
            )
        self._source, self._steps, self._ranks, self._rank = source, steps, ranks, rank
        self._at, self._waited_s = -1, 0.0

    def suffice(self, plan: StartTxn) -> bool:
        """Whether there are items for all slices that are granted by now."""
        return self._hold(plan.cursor)

    def too_few(self, plan: StartTxn) -> str:
        """That there are not, with the mend."""
        each = self._steps * self._ranks
        return (
            f"the data end before the first synchronisation: {plan.participants} groups take "
            f"{each} items each, one for each step of each rank; give more items, or synchronise "
            "more often"
        )

    def suffice_after(self, plan: StartTxn) -> bool:
        """Whether there are items for those that ``plan``'s COMMIT grants."""
        return self._hold(plan.next_cursor)

    def _hold(self, slices: int) -> bool:
        return self._source.holds(0, slices * self._steps * self._ranks)

    def draw(self, lease: int, position: int) -> Drawn:
        """The input of a step, ``position`` steps into the slice. Outside of bodies."""
        from fft.train.data.batch_copy import copied  # with torch

        began, ranks = time.monotonic(), self._ranks
        number = (lease * self._steps + position) * ranks + self._rank
        try:
            batch = copied(self._source.take(Due(0, number, ranks)))
        except Exception as error:
            error.add_note(
                f"as rank {self._rank} of its group was to get its batch for step {position} of "
                f"slice {lease}: item {number} of the data"
            )
            raise
        if number != self._at:
            self._at, self._waited_s = number, 0.0
        self._waited_s += time.monotonic() - began
        return Drawn(batch, False, self._waited_s * 1e3, lease, number)

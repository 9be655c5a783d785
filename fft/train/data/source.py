"""Data by the committed global cursor: the item that a rank takes, and the source of the items.

The cursor counts *slices*. A slice is the data that one replica group consumes in one txn: one item
of the loader (a batch) for each of its ranks. Stages of a pipeline share an item, and so do ranks
along dimensions of a mesh such as ``tp``. In
a txn the i-th participating group takes the i-th slice after the cursor. COMMIT advances the cursor
by the number of participating groups; ABORT leaves it. If the job fixes the number of slices
(``global_batch=``), they are dealt to the participating groups in turn (`StartTxn.slices`). If
groups take local steps, a slice has the items of all steps up to the next synchronization, and a
group takes the slice of its lease.

Sources count in items: slice ``n`` of ``R`` items is items ``n * R`` … ``n * R + R - 1``. This
module accesses only the given loader, and runs on the training thread between two step functions.
"""

from __future__ import annotations

import copy
import logging
import pickle
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal, Protocol, runtime_checkable

from fft.errors import DataError, FftError, UnequalData
from fft.messages.effects import StartTxn
from fft.train.data.digests import combined, digest_of, ids_of, runs_no_code
from fft.train.data.retries import forbid_retry, is_ahead, name_item, retried
from fft.train.data.step_input import LOCAL_STEPS, NO_DATA_EPOCHS, DataEpochs, StepInput
from fft.util.files import refuse_long_temp_dir

logger = logging.getLogger(__name__)

Sharded = Literal["group", "rank"]
Identify = Callable[[Any], Any]
"""Function that maps a batch to its identity, such as its sample ids."""
ORDER_FIX = (
    "pass a loader whose state restores the order, such as fft.CursorLoader or fft.StreamLoader, "
    "to transactions()"
)
AUGMENTATION_FIX = (
    "pass fft.Loader(loader, identify=lambda batch: <its ids>), which FFT then compares"
)
BATCHES_AS_ORDER = "sampler=batch_sampler"
OPEN_STREAM = (
    "fft.StreamLoader(open_stream), where open_stream(first, stride) returns every stride-th batch "
    "from batch first on"
)
_STATE, _NEXT, _ENDED = "loader_state", "next_digests", "ended"
"""Keys of the exported state of a `StreamSource`. The last one is there only after the end."""


@dataclass(frozen=True, slots=True)
class Due:
    """An item that a rank takes, and the following ones while the membership stays."""

    first: int
    """All items before this one are committed."""
    number: int
    """The item of this rank; ``number + k * step`` is that of the k-th txn after this one."""
    step: int
    """Number of items that all ranks of all groups take in one txn."""
    stride: int = 0
    """Distance between the items of this rank in one txn; 0 if it takes one item in a txn."""

    @property
    def begin(self) -> int:
        """The first item that this rank takes in this txn."""
        return self.first + (self.number - self.first) % self.stride if self.stride else self.number

    @property
    def offsets(self) -> range:
        """Distances of the items that this rank takes in one txn from the first of them."""
        width = self.first + self.step - self.begin
        return range(0, width, self.stride) if self.stride else range(1)

    def takes(self, number: int) -> bool:
        """Return whether this rank takes an item, in this txn or later, if the members stay."""
        past = number - self.begin
        return past >= 0 and past % self.step in self.offsets

    def following(self) -> Iterator[int]:
        """Yield the items that this rank takes from this txn on, in order and without an end."""
        for begin in count(self.begin, self.step):
            yield from (begin + offset for offset in self.offsets)


@runtime_checkable
class DataSource(Protocol):
    """The source that ``transactions`` draws from. All ranks of all groups must have equal sources.

    A source may have two more attributes: ``items_per_data_epoch`` for ``txn.data_epoch``, and
    ``items_in_all`` for ``txn.progress``.

    Attributes:
        in_any_order: Items can be taken in any order, without a prior ``load``.
    """

    in_any_order: bool

    def open(self) -> None:
        """Start slow parts, such as workers; called once before the first txn."""

    def holds(self, first: int, count: int) -> bool:
        """Return whether items ``first`` … ``first + count - 1`` exist; the same on all ranks."""

    def take(self, due: Due) -> Any:
        """Return item ``due.number``: the same object until ``due.first`` has passed it."""

    def export(self, first: int) -> Any:
        """Return plain values and tensors from which an equal source can continue at ``first``."""

    def load(self, state: Any, first: int) -> None:
        """Continue at item ``first`` from the ``export`` of another group."""

    def close(self) -> None:
        """End everything that ``open`` and ``take`` started. Idempotent; it may be reopened."""


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class Loader:
    """A loader with settings, for ``transactions``. A loader that needs none is passed as it is.

    ``fft.CursorLoader`` and ``fft.StreamLoader`` take ``identify`` and ``global_batch`` themselves.

    Args:
        loader: A loader with ``state_dict`` and ``load_state_dict``, a sequence of batches, or a
            `DataSource` of yours.
        sharded: ``"group"``: each group passes a stateful loader over its own shard of the data,
            from which each of its ranks takes its item. ``"rank"``: each rank passes a loader over
            its own shard; ranks that share a batch by ``manager.mesh`` pass equal loaders. None:
            all ranks pass a loader over the whole data.
        identify: Function that returns the identity of a batch, such as its sample ids. FFT
            compares the identities, instead of the contents, between the ranks that draw the same
            items. For loaders with random augmentation. The trace contains the ids.
        replay_only: Accept any iterable; no group can join later, and the run cannot be resumed.
        global_batch: Number of samples in each step, on all groups together, whatever their number:
            a multiple of the samples in one batch of each rank of a group. The step function loops
            over ``txn.batches``. None: each group takes one batch for each of its ranks, so a step
            has fewer samples while a group is away.

    Raises:
        DataError: ``loader`` does not support a setting.
    """

    def __init__(
        self,
        loader: Any,
        *,
        sharded: Sharded | None = None,
        identify: Identify | None = None,
        replay_only: bool = False,
        global_batch: int | None = None,
    ) -> None:
        if isinstance(loader, Loader):
            raise DataError("fft.Loader: got another fft.Loader; pass all settings to one of them")
        if sharded not in (None, "group", "rank"):
            raise DataError(f"fft.Loader: sharded={sharded!r}: expected 'group' or 'rank'")
        if isinstance(loader, DataSource) and (sharded or identify or replay_only):
            raise DataError(
                f"fft.Loader: {named(loader)} divides the data among the groups itself; remove "
                "sharded= and replay_only=, pass identify= to fft.CursorLoader or "
                "fft.StreamLoader, and define ids(batch) in a source of yours"
            )
        if sharded and not isinstance(loader, _Stateful):
            raise DataError(
                f"fft.Loader: {named(loader)} with sharded={sharded!r} has no state_dict and "
                "load_state_dict, so a group that returns could not continue its shard; pass a "
                "stateful loader, such as torchdata's StatefulDataLoader, or fft.StreamLoader over "
                "the whole data"
            )
        self.loader, self.sharded, self.identify = loader, sharded, identify
        own = getattr(loader, "global_batch", None) if isinstance(loader, DataSource) else None
        self.replay_only = replay_only
        self.global_batch: int | None = own if global_batch is None else global_batch


def settings_of(loader: Any) -> Loader:
    """Return the loader that the script passed to ``transactions``, with its settings."""
    return loader if isinstance(loader, Loader) else Loader(loader)


class Identified:
    """A source whose batches ``identify`` can identify.

    Attributes:
        identify: Function from a batch to its identity; None uses the content of the batch.
    """

    identify: Identify | None = None

    def ids(self, batch: Any) -> list[int] | list[str] | None:
        """Return the sample ids in ``batch`` for the trace, or None if they are not known."""
        return None if self.identify is None else ids_of(self.identify(batch))


class ItemsSource(Identified):
    """A list or another sequence of batches, where item ``n`` is ``items[n]``."""

    in_any_order = True

    def __init__(self, items: Sequence[Any], identify: Identify | None = None) -> None:
        self._items, self.identify = items, identify
        self._digest: str | None = None

    def open(self) -> None:
        """Do nothing: there is nothing to start."""

    def holds(self, first: int, count: int) -> bool:
        return first + count <= len(self._items)

    def take(self, due: Due) -> Any:
        return self._items[due.number]

    def export(self, first: int) -> Any:
        return {"items": len(self._items)}

    def load(self, state: Any, first: int) -> None:
        check_same_data(self, {"items": len(self._items)}, state)

    @property
    def items_in_all(self) -> int:
        """Number of items."""
        return len(self._items)

    def fingerprint(self, first: int, count: int) -> str | None:
        """Return a digest of the length and, if it is the same on all ranks, of the first item."""
        if self._digest is None and len(self._items) > 0:
            found: Any = None
            if self.identify is not None:
                found = self.identify(self._items[0])
            elif runs_no_code(self._items):
                found = self._items[0]
            self._digest = digest_of((len(self._items), found))
        return self._digest

    def close(self) -> None:
        """Do nothing: there is nothing to end."""


class StreamSource(Identified):
    """Any stateful loader as a source: every rank draws the whole stream and keeps its items.

    Items that were drawn but not committed stay here, so that a replay gets the same objects. The
    loader must return the same items in the same order on every rank. It needs ``state_dict`` and
    ``load_state_dict``, so that a joining group can continue at the common cursor. Both are
    verified: the votes carry digests of the items, and a state carries the digests of the items
    that were drawn after it.

    Args:
        loader: An iterable of batches.
        identify: Function from a batch to its identity; None uses the content of the batch.
        of: Suffix of an item's name in messages, such as the shard; empty without shards.
    """

    in_any_order = False

    def __init__(self, loader: Any, identify: Identify | None = None, of: str = "") -> None:
        self._loader = loader
        self._of = of
        self.identify = identify
        self.items_per_data_epoch: int | None = getattr(loader, "items_per_data_epoch", None)
        self._iterator: Iterator[Any] | None = None
        self._start: int | None = None
        self._items: list[Any] = []
        self._states: list[Any] = []
        """State of the loader before each of ``_items``."""
        self._loaded: tuple[Any] | None = None
        """The state that was loaded, until an item is drawn. Some loaders adopt it only then."""
        self._before: tuple[Any] | None = None
        """State before the item that was drawn last."""
        self._digests: list[str] = []
        """Digest of each of ``_items``."""
        self._expected: list[str] = []
        """Digests of the next items, as drawn by the process that exported the loaded state."""
        self._ended = False
        """The loader is exhausted. Many loaders restart if they are iterated again."""

    def open(self) -> None:
        """Do nothing: the first item is drawn when its txn begins."""

    def holds(self, first: int, count: int) -> bool:
        self._forget(first)
        while len(self._items) < count:
            number = first + len(self._items)
            try:
                drawn = self._next(number)
            except FftError:
                raise
            except Exception as error:
                error.add_note(f"while item {number} of {named(self._loader)} was drawn")
                name_item(error, f"item {number}{self._of}", number)
                raise
            if drawn is None:
                return False
            state, item, digest = drawn
            self._loaded, self._before = None, (state,)
            self._states.append(state)
            self._items.append(item)
            self._digests.append(digest)
        return True

    def _next(self, number: int) -> tuple[Any, Any, str] | None:
        """Draw item ``number``.

        Returns:
            The state of the loader before it, the item and its digest; None at the end.
        """
        if self._ended:
            return None
        if self._iterator is None:
            self._iterator = iter(self._loader)
        state = self._state()
        try:
            item = next(self._iterator)
        except StopIteration:
            self._ended = True
            return None
        except Exception as error:
            self._put_back(state, error)
            raise
        try:
            return state, item, self._digest(item, number)
        except FftError:
            raise
        except Exception as error:  # raised by identify: a further attempt needs the same item
            self._put_back(state, error)
            raise

    @property
    def start(self) -> int | None:
        """Number of the first item that can be taken, or None before the loader is read."""
        return self._start

    def skip(self, end: int) -> bool:
        """Draw the items before ``end`` and drop them; after an error it can be called again.

        Returns:
            False if the loader ends before.
        """
        for number in range(self._start or 0, end):
            if not self.holds(number, 1):
                return False
            self._forget(number + 1)
        return True

    def fingerprint(self, first: int, count: int) -> str | None:
        """Return a digest of items ``first`` … ``first + count - 1``, which must be drawn."""
        self._forget(first)
        return combined(self._digests[:count])

    def _put_back(self, state: Any, error: Exception) -> None:
        """Return the loader to ``state``, so that the item whose loading failed can be drawn again.

        Depending on its class, an iterator that has raised ends or continues after the item.
        """
        if not isinstance(self._loader, _Stateful):
            forbid_retry(error)
        elif self._before is not None and _are_equal(self._before[0], state):
            forbid_retry(error)
            error.add_note(
                f"the item is not drawn again, because {named(self._loader)} would repeat earlier "
                "ones: its state_dict() has not changed since the item before; let it return the "
                "number of items drawn, also after load_state_dict()"
            )
        else:
            self._load(state)

    def _load(self, state: Any) -> None:
        """Return the loader to ``state``."""
        self._loader.load_state_dict(copy.deepcopy(state))
        self._loaded, self._iterator = (state,), None

    def _digest(self, item: Any, number: int) -> str:
        """Return the digest of item ``number``.

        Raises:
            UnequalData: After `load`, this is not the item that the exporting process drew.
        """
        digest = digest_of(item, self.identify)
        if self._expected and (expected := self._expected.pop(0)) != digest:
            raise UnequalData(
                f"{named(self._loader)} does not continue with the same items after "
                f"load_state_dict: item {number} has digest {digest} here, and had {expected} in "
                "the process that saved the state. Items would be trained twice or never. Causes "
                f"and fixes: (1) the state does not restore the order: {ORDER_FIX}. (2) Only "
                f"random augmentation differs: {AUGMENTATION_FIX}"
            )
        return digest

    def take(self, due: Due) -> Any:
        if not self.holds(due.first, due.number - due.first + 1):
            raise DataError(
                f"{named(self._loader)}: expected item {due.number}, but the loader ends before "
                "it; all ranks must read the same number of items"
            )
        return self._items[due.number - due.first]

    def export(self, first: int) -> Any:
        self._forget(first)
        state = self._states[0] if self._states else self._state()
        exported = {_STATE: state, _NEXT: list(self._digests)}
        if self._ended and not self._items:
            exported[_ENDED] = True
        return exported

    def load(self, state: Any, first: int) -> None:
        if not isinstance(self._loader, _Stateful):
            raise DataError(
                f"{named(self._loader)} has no load_state_dict, so a group that joins cannot "
                "continue at the common cursor; use fft.CursorLoader or a stateful loader"
            )
        self._expected, self._ended = [], False
        if isinstance(state, dict) and set(state) - {_ENDED} == {_STATE, _NEXT}:
            self._expected, self._ended = list(state[_NEXT]), state.get(_ENDED, False)
            state = state[_STATE]
        self._load(state)
        self._before, self._start = None, first
        self._items, self._states, self._digests = [], [], []

    def close(self) -> None:
        """Do nothing: the loader belongs to the user."""

    def _forget(self, first: int) -> None:
        """Drop the committed items, which are those before ``first``."""
        if self._start is None:
            if first > 0 and not isinstance(self._loader, _Stateful):
                raise DataError(
                    f"the job continues at item {first}, but {named(self._loader)} can only begin "
                    "at its first; use fft.CursorLoader or a stateful loader"
                )
            self._start = first
        done = first - self._start
        if not 0 <= done <= len(self._items):
            end = self._start + len(self._items)
            raise DataError(
                f"{named(self._loader)}: expected item {first} of the data, but the items "
                f"{self._start} to {end} are available; pass a new loader to transactions(), and "
                "restore its position with the manager's state or with a checkpoint"
            )
        del self._items[:done], self._states[:done], self._digests[:done]
        self._start = first

    def _state(self) -> Any:
        if self._loaded is not None:
            return copy.deepcopy(self._loaded[0])
        if isinstance(self._loader, _Stateful):
            return copy.deepcopy(self._loader.state_dict())
        return None


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two states of a loader are equal for certain."""
    try:
        return pickle.dumps(one) == pickle.dumps(other)
    except Exception:  # noqa: BLE001 - a state can be any object
        return False


def as_source(given: Any) -> DataSource:
    """Return the source for the loader that the user passed to ``transactions``.

    Args:
        given: A `DataSource`, a stateful loader, or a sequence of batches; or a `Loader` of it.

    Raises:
        DataError: The position of the loader cannot be restored, and ``replay_only`` is not set.
    """
    settings = settings_of(given)
    loader, identify = settings.loader, settings.identify
    if isinstance(loader, DataSource):
        return loader
    if workers := getattr(loader, "num_workers", 0):
        refuse_long_temp_dir(f"{named(loader)} with num_workers={workers}")
    if isinstance(loader, _Stateful):
        return StreamSource(loader, identify)
    if isinstance(loader, Sequence) and not isinstance(loader, str | bytes):
        if isinstance(loader, list | tuple) and any(map(_is_loader, loader)):
            raise DataError(f"transactions() was given {named(loader)} of loaders; {_ONE_LOADER}")
        return ItemsSource(loader, identify)
    if isinstance(loader, zip | enumerate | map):
        hint = ". txn.step counts the steps" if isinstance(loader, enumerate) else ""
        raise DataError(f"transactions() was given {named(loader)}; {_ONE_LOADER}{hint}")
    if settings.replay_only:
        return StreamSource(loader, identify)
    raise DataError(
        f"transactions() was given {named(loader)}, which has no state_dict and load_state_dict: "
        "neither a group that joins nor a job that resumes could continue at its item. Pass "
        f"{_suggested_loader(loader)}; or a stateful loader, such as torchdata's "
        "StatefulDataLoader; or fft.Loader(loader, replay_only=True), if no group will join and "
        "the job will not be resumed"
    )


_ONE_LOADER = (
    "a rollback and a group that joins need one loader whose position can be restored. Combine "
    "the datasets, for example by torch.utils.data.StackDataset(first, second) or ConcatDataset, "
    "and pass one fft.CursorLoader over the result"
)


def _is_loader(value: Any) -> bool:
    """Return whether ``value`` is a loader, rather than a batch."""
    return isinstance(value, DataSource) or (
        hasattr(value, "dataset") and hasattr(value, "batch_sampler")
    )


def _suggested_loader(loader: Any) -> str:
    """Return the expression that can replace ``loader`` in the script."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None:
        return "fft.CursorLoader(dataset, batch_size), fft.StreamLoader(open_stream)"
    if not isinstance(dataset, Sized):
        return OPEN_STREAM
    size = getattr(loader, "batch_size", "batch_size")
    options = [f"num_workers={getattr(loader, 'num_workers', 0)}", *_order_options(loader)]
    return (
        f"fft.CursorLoader(dataset, {size}, {', '.join(options)}, …), which takes the arguments of "
        "torch's DataLoader"
    )


def _order_options(loader: Any) -> list[str]:
    """Return arguments for a CursorLoader that keep the order of a DataLoader."""
    sampler: Any = getattr(loader, "sampler", None)
    own = type(sampler).__name__
    options = [] if getattr(loader, "drop_last", True) else ["drop_last=False"]
    if getattr(loader, "batch_size", 1) is None:  # the user passed a batch sampler
        return [BATCHES_AS_ORDER]
    if own == "SequentialSampler":
        return ["shuffle=False", *options]
    if own == "RandomSampler":
        of_dataset = not sampler.replacement and sampler.num_samples == len(loader.dataset)
        return options if of_dataset else ["sampler=sampler", *options]
    if own == "DistributedSampler":  # the cursor divides the items among the ranks
        return options if sampler.shuffle else ["shuffle=False", *options]
    return options if sampler is None else ["sampler=sampler", *options]


def named(loader: Any) -> str:
    """Return the class of ``loader`` for messages."""
    return f"a {type(loader).__module__}.{type(loader).__qualname__}".replace("builtins.", "")


def check_same_data(source: object, mine: dict[str, Any], theirs: Any) -> None:
    """Compare the ``export`` of a peer with that of this source.

    Raises:
        DataError: The sources would return different items; the message names the difference.
    """
    if not isinstance(theirs, dict) or set(theirs) != set(mine):
        raise DataError(
            f"this rank has {named(source)}, but other ranks use another kind of loader; pass the "
            "same kind on all groups"
        )
    for name, value in mine.items():
        if theirs[name] != value:
            raise DataError(
                f"{named(source)}: {name} is {value!r} here but {theirs[name]!r} in the state of "
                "another group or of the checkpoint; pass the same data on all groups"
            )


class Inputs:
    """The inputs of one rank from ``source``, txn by txn.

    Args:
        source: The source of the items.
        ranks: Number of items that the ranks of a replica group take in a step.
        rank: Number of this rank's item among them. Ranks may take the same item.

    Attributes:
        alive: Called while a failed item waits for its next attempt.
    """

    def __init__(self, source: DataSource, ranks: int, rank: int) -> None:
        self.alive: Callable[[], object] = lambda: None
        self._source, self._ranks, self._rank = source, ranks, rank
        self._step, self._waited_s = -1, 0.0

    def draw(self, plan: StartTxn) -> StepInput | None:
        """Return the input for ``plan``, or None if the data have ended; not in a step function.

        A spare, and a group that fetches its state in this txn, take the first group's items.
        """
        from fft.train.data.batch_copy import copied  # imports torch

        began = time.monotonic()
        ranks = self._ranks
        slices = plan.dealt_to(plan.index or 0)
        first, count = plan.cursor * ranks, (plan.fixed_slices or plan.participants) * ranks
        items = [each * ranks + self._rank for each in slices]
        number, stride = items[0], plan.participants * ranks if plan.fixed_slices else 0

        def take(ahead: bool = True) -> tuple[bool, list[Any]] | None:
            # Look one txn ahead, so that at the end of the data all groups leave with one commit.
            is_last = ahead and not self._source.holds(first, 2 * count)
            if (is_last or not ahead) and not self._source.holds(first, count):
                return None
            due = (Due(first, item, count, stride) for item in items)
            return is_last, [copied(self._source.take(each)) for each in due]

        try:
            try:
                taken = retried(take, f"item {number}", self.alive)
            except Exception as error:
                if not is_ahead(error, first + count):
                    raise
                taken = take(ahead=False)  # report the error in the txn that needs that item
            if taken is None:
                return None
            is_last, batches = taken
            fingerprint = getattr(self._source, "fingerprint", None)
            digest: str | None = None
            if fingerprint is not None:
                compared = partial(fingerprint, first, count)
                digest = retried(compared, f"item {number}", self.alive)
            ids = _ids_in(self._source, batches)
        except Exception as error:
            error.add_note(self._due(plan, number))
            raise
        if plan.step != self._step:
            self._step, self._waited_s = plan.step, 0.0
        self._waited_s += time.monotonic() - began
        waited_ms, epochs = self._waited_s * 1e3, self._data_epochs(plan, is_last)
        return StepInput(
            batches if plan.fixed_slices else batches[0],
            is_last,
            waited_ms,
            plan.slice,
            number,
            epochs,
            digest,
            ids=ids,
            taken=range(first, plan.next_cursor * ranks),
            consumed=self._consumed(plan, is_last),
            dealt={"slices": list(slices), "items": items} if plan.fixed_slices else None,
        )

    def _consumed(self, plan: StartTxn, is_last: bool) -> float | None:
        """Return `StepInput.consumed`.

        Remaining items that do not suffice for another txn count as consumed.
        """
        total = getattr(self._source, "items_in_all", None)
        if total is None:
            return None
        done = plan.next_cursor * self._ranks / total
        return 1.0 if is_last else min(1.0, done)

    def _data_epochs(self, plan: StartTxn, is_last: bool) -> DataEpochs | str:
        """Return `StepInput.counted`.

        The last txn ends the data epoch even if a few items remain.
        """
        size = getattr(self._source, "items_per_data_epoch", None)
        if size is None:
            return NO_DATA_EPOCHS
        first, after = plan.cursor * self._ranks, plan.next_cursor * self._ranks
        return DataEpochs(first // size, -(-after // size) if is_last else after // size)

    def _due(self, plan: StartTxn, number: int) -> str:
        """Describe the item that could not be loaded, for the error."""
        which = plan.cursor + (plan.index or 0)
        counts = "" if plan.index is not None else ", in which this group does not contribute"
        return (
            f"while the batch of rank {self._rank} of its group was drawn for the txn of step "
            f"{plan.step}{counts}: item {number} of the data, of slice {which}"
        )


def _ids_in(source: DataSource, batches: list[Any]) -> list[Any] | None:
    """Return the ids of the samples in all batches, or None if those of a batch are not known."""
    find = getattr(source, "ids", None)
    if find is None:
        return None
    found: list[list[Any]] = [ids for batch in batches if (ids := find(batch)) is not None]
    return [each for ids in found for each in ids] if len(found) == len(batches) else None


class LeasedInputs:
    """The inputs of one rank for local steps, from the slice that its group leases.

    Args:
        source: A source that returns its items in any order.
        steps: Number of items in a slice, for each rank.
        ranks: Number of ranks per replica group that take an item each.
        rank: Number of this process among them.
    """

    def __init__(self, source: DataSource, steps: int, ranks: int, rank: int) -> None:
        self.alive: Callable[[], object] = lambda: None
        """Called while a failed item waits for its next attempt."""
        self._source, self._steps, self._ranks, self._rank = source, steps, ranks, rank
        self._at, self._waited_s = -1, 0.0

    def suffice(self, plan: StartTxn) -> bool:
        """Return whether the data contain all slices that are granted so far."""
        return self._hold(plan.cursor)

    def too_few(self, plan: StartTxn) -> str:
        """Return the message for data that do not suffice, with the fix."""
        each = self._steps * self._ranks
        return (
            f"the data end before the first synchronization: {plan.participants} groups take "
            f"{each} items each, one for each step of each rank; pass more items, or synchronize "
            "more often"
        )

    def has_slices_after(self, plan: StartTxn) -> bool:
        """Return whether the data contain the slices that ``plan``'s COMMIT grants."""
        return self._hold(plan.next_cursor)

    def _hold(self, slices: int) -> bool:
        return self._source.holds(0, slices * self._steps * self._ranks)

    def draw(self, lease: int, position: int) -> StepInput:
        """Return the input of a step; not in a step function.

        Args:
            lease: Number of the slice.
            position: Number of steps before this one in the slice.
        """
        from fft.train.data.batch_copy import copied  # imports torch

        began, ranks = time.monotonic(), self._ranks
        number = (lease * self._steps + position) * ranks + self._rank
        try:
            due = Due(0, number, ranks)
            batch = retried(lambda: copied(self._source.take(due)), f"item {number}", self.alive)
        except Exception as error:
            error.add_note(
                f"while the batch of rank {self._rank} of its group was drawn for step {position} "
                f"of slice {lease}: item {number} of the data"
            )
            raise
        if number != self._at:
            self._at, self._waited_s = number, 0.0
        self._waited_s += time.monotonic() - began
        return StepInput(batch, False, self._waited_s * 1e3, lease, number, LOCAL_STEPS)

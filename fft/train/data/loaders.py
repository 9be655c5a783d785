"""Loaders by item number, on torch's ``DataLoader``: workers prefetch only this rank's items.

torch's iterator asks a batch sampler for the next item to load. This module passes it a
`_Schedule`, which computes the items that this rank needs as long as the membership does not change
(`fft.train.data.source.Due`). It never ends: if there is nothing to load it sends an empty request,
so one iterator and its workers live as long as the training. Answers carry their item number. After
a change of the membership, answers that this rank still needs are kept, the others are dropped, and
workers skip obsolete requests that they have not begun.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from inspect import signature
from itertools import count
from math import lcm
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.signal_handling import _remove_worker_pids, _set_worker_pids
from torch.utils.data.distributed import DistributedSampler

from fft.errors import DataError
from fft.train.data.digests import digest_of, runs_no_code
from fft.train.data.retries import WorkerDied, forbid_retry, name_item
from fft.train.data.source import (
    BATCHES_AS_ORDER,
    OPEN_STREAM,
    Due,
    Identified,
    Identify,
    check_same_data,
    named,
)
from fft.train.data.worker import (
    Answer,
    Data,
    Reader,
    Request,
    Samples,
    Substreams,
    begin_worker,
    keep_sockets,
    same,
    seeded,
)
from fft.util.files import refuse_long_temp_dir
from fft.util.names import unknown

logger = logging.getLogger(__name__)

Indexes = list[int] | list[list[int]]
"""Sample indexes of an item: of one batch, or of each micro-batch."""

_ENDING_S = 1.0
"""Time for a worker to end after its connection was closed, in seconds."""
_OPTIONS = (
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "pin_memory_device",
    "persistent_workers",
    "worker_init_fn",
    "multiprocessing_context",
    "timeout",
)
_REFUSED = {
    "sampler": "a stream has no samples by index; open_stream(first, stride) decides the order",
    "batch_sampler": f"pass batch_size=None and {BATCHES_AS_ORDER}",
    "order": "a stream has no samples by index; open_stream(first, stride) decides the order",
    "generator": "the order comes from seed=",
    "in_order": "items always come in order",
}


class _Schedule:
    """The batch sampler, which decides the next item to request."""

    def __init__(
        self, samples: Callable[[int], Indexes | None], items: int | None, workers: int
    ) -> None:
        self.samples, self.items = samples, items
        self.due: Due | None = None
        self.asked: dict[int, int] = {}
        """Serial number of each open request, by its item."""
        self.ready: dict[int, Answer] = {}
        """Loaded items that this rank still needs, by item number."""
        self.is_careful = False
        """Request only the item that is due, because a worker has died at an unknown item."""
        self._serials = count(1)
        self._ahead = max(1, workers)
        """Number of workers, at least 1: torch asks them in turn."""

    def __iter__(self) -> _Schedule:
        return self

    def __next__(self) -> Request:
        number = self._next()
        if number is None or self.due is None:
            return Request(None, 0, None)
        self.asked[number] = serial = next(self._serials)
        # The items of all workers repeat after ``turns`` of them, each after ``step`` items.
        step, each = self.due.step, len(self.due.offsets)
        if self.due.stride and step % self.due.stride == 0:  # at equal distances, across txns, too
            step, each = self.due.stride, 1
        turns = lcm(self._ahead, each)
        distance, streams = turns // each * step, turns // self._ahead
        return Request(number, distance, self.samples(number), streams, serial)

    def _next(self) -> int | None:
        if self.due is None:
            return None
        numbers = iter([self.due.number]) if self.is_careful else self.due.following()
        missing = (n for n in numbers if n not in self.asked and n not in self.ready)
        number = next(missing, None)
        if number is None:
            return None
        return None if self.items is not None and number >= self.items else number

    def wants(self, number: int) -> bool:
        """Return whether this rank takes item ``number``, now or later, if the members stay."""
        return self.due is not None and self.due.takes(number)

    def newest_obsolete(self) -> int:
        """Return the serial number of the newest open request that is not wanted, or 0."""
        return max((s for n, s in self.asked.items() if not self.wants(n)), default=0)


class _Loader(Identified):
    """Base class of loaders by number: a `DataSource` on torch's ``DataLoader``."""

    in_any_order = True

    def __init__(
        self,
        data: Data,
        seed: int,
        samples: Callable[[int], Indexes | None],
        items: int | None,
        identity: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        for name in options:
            if name not in _OPTIONS:
                known = {*_OPTIONS, *signature(type(self)).parameters} - {"options"}
                nearest = unknown("argument", name, known)
                why = _REFUSED.get(name, nearest)
                raise DataError(f"{self._name} does not take {name}=: {why}")
        workers = options.get("num_workers", 0)
        if workers:
            refuse_long_temp_dir(f"{self._name} with num_workers={workers}")
        self._items = self.items_in_all = items
        """Number of items, on all ranks and in all data epochs, or None if there is no end."""
        self._identity = identity
        # one number, so that no worker reads it in the middle of a write
        self._obsolete = torch.zeros((), dtype=torch.int64, device="cpu") if workers > 0 else None
        if self._obsolete is not None:
            self._obsolete.share_memory_()  # type: ignore[no-untyped-call]
        self._reader = Reader(self._name, data, seed, self._obsolete)
        self._samples = samples
        self._workers = workers
        self._seed = seed
        users = options.pop("worker_init_fn", None)
        self._needs_workers = users is not None
        self._options = {**options, "worker_init_fn": partial(begin_worker, users)}
        self._make()  # torch checks the options
        self._schedule: _Schedule | None = None
        self._iterator: Any = None
        self._died_at: int | None = None
        """The item that was due when a worker died, until it is taken. Items ahead wait until then,
        so that a further death is that item's."""
        self._fingerprint: str | None = None
        """The digest of the settings and the probe."""

    @property
    def _name(self) -> str:
        return f"fft.{type(self).__name__}"

    def _make(self) -> tuple[_Schedule, DataLoader[Any]]:
        schedule = _Schedule(self._samples, self._items, self._workers)
        # a separate generator, because torch draws a seed for the workers when they start
        own = torch.Generator().manual_seed(self._seed)
        made: DataLoader[Any] = DataLoader(
            self._reader,
            batch_sampler=schedule,  # type: ignore[arg-type]  # of requests
            collate_fn=same,
            generator=own,
            **self._options,
        )
        return schedule, made

    def __getitem__(self, number: int) -> Any:
        """Load item ``number`` on the calling thread."""
        return self._reader.read_here(Request(number, 1, self._samples(number)))

    # --- DataSource ---

    def open(self) -> None:
        """Start the workers, which idle until the first `take`."""
        if self._workers > 0:
            keep_sockets()
        self._open()

    def _open(self) -> None:
        if self._iterator is None:
            if self._obsolete is not None:
                self._obsolete.zero_()
            self._schedule, loader = self._make()
            with torch.device("cpu"):  # a script may have called torch.set_default_device()
                self._iterator = iter(loader)
            self._unwatch()

    def holds(self, first: int, count: int) -> bool:
        return self._items is None or first + count <= self._items

    def take(self, due: Due) -> Any:
        """Return item ``due.number``, waiting until it is loaded.

        Raises:
            Exception: The error of loading the item, with a note that names it; or the error of
                torch's loader if ``timeout`` has passed.
            WorkerDied: A worker has ended. The next call starts new ones.
        """
        if self._died_at is not None and not due.takes(self._died_at):
            self._died_at = None
        self._open()
        schedule = self._schedule
        assert schedule is not None
        schedule.due = due
        schedule.is_careful = self._died_at is not None
        if self._obsolete is not None:
            self._obsolete.fill_(schedule.newest_obsolete())
        for number in [n for n in schedule.ready if not schedule.wants(n)]:
            del schedule.ready[number]
        while due.number not in schedule.ready:
            try:
                answer = self._next()
            except Exception as error:
                dead = self._dead_workers(_ENDING_S)
                if not dead:
                    if self._workers > 0:
                        forbid_retry(error)  # a worker that hangs would be left behind
                    self.close()  # open requests are lost
                    raise
                self._died_at = due.number
                for process in self._iterator._workers:  # a busy one would end seconds later
                    process.kill()
                self.close()
                died = WorkerDied(self._death(dead, due.number))
                name_item(died, f"item {due.number}", due.number)
                raise died from error
            except BaseException:
                self.close()
                raise
            if answer.number is None:
                continue
            schedule.asked.pop(answer.number, None)
            if answer.kind != "unwanted" and schedule.wants(answer.number):
                schedule.ready[answer.number] = answer
        if due.number == self._died_at:
            self._died_at = None
        answer = schedule.ready[due.number]
        if answer.kind == "failed":
            del schedule.ready[due.number]
            answer.value.reraise()
        return answer.value

    def _next(self) -> Answer:
        """Return the next answer. Only in here an ended worker may raise an error.

        torch's handler of SIGCHLD would raise it wherever the main thread is, such as in a step
        function. On another thread torch finds the end of a worker within 5 s.
        """
        iterator = self._iterator
        if self._workers > 0 and threading.current_thread() is threading.main_thread():
            _set_worker_pids(id(iterator), tuple(w.pid for w in iterator._workers))
            iterator._worker_pids_set = True
        try:
            if dead := self._dead_workers(0):  # it has ended since the last call
                raise WorkerDied(f"workers have ended: {dead}")
            return Answer(*next(iterator))
        finally:
            self._unwatch()

    def _unwatch(self) -> None:
        if getattr(self._iterator, "_worker_pids_set", False):
            _remove_worker_pids(id(self._iterator))
            self._iterator._worker_pids_set = False

    def _dead_workers(self, wait_s: float) -> dict[int, int]:
        """Return the exit codes of workers that have ended, by their numbers.

        Args:
            wait_s: Time for the first one to end: its connection ends before the process.
        """
        if self._workers == 0:
            return {}
        workers = self._iterator._workers
        ended = wait([w.sentinel for w in workers], wait_s)
        for w in workers:
            w.join(_ENDING_S if w.sentinel in ended else 0)
        return {i: w.exitcode for i, w in enumerate(workers) if not w.is_alive()}

    def _death(self, dead: dict[int, int], number: int) -> str:
        """Return the message on ended workers, by their exit codes, with the fix."""
        how = ", ".join(
            f"worker {worker} was ended by {signal.Signals(-code).name}"
            if code < 0
            else f"worker {worker} has ended with status {code}"
            for worker, code in dead.items()
        )
        return (
            f"{self._name}: {how} while item {number} was awaited. The kernel sends SIGKILL if "
            "memory runs out (`dmesg` names the process): pass a smaller num_workers=, "
            "prefetch_factor= or batch size. After another signal, read the items with "
            "num_workers=0 to find the code that crashes"
        )

    def export(self, first: int) -> Any:
        """Return the settings that must be equal on all ranks; a position is not needed."""
        return self._identity

    def load(self, state: Any, first: int) -> None:
        check_same_data(self, self._identity, state)

    def fingerprint(self, first: int, count: int) -> str | None:
        """Return a digest of the settings and, if possible, of a part of the data.

        A rank reads only its own items, so the items of two ranks cannot be compared. The part is
        the same on every rank.
        """
        if self._fingerprint is None:
            identity = sorted(self._identity.items())
            self._fingerprint = digest_of((self._name, identity, self._probe()))
        return self._fingerprint

    def _probe(self) -> str | None:
        """Return a digest of a part of the data that all ranks can read, or None."""
        return None

    def close(self) -> None:
        """End the workers."""
        iterator, self._iterator, self._schedule = self._iterator, None, None
        if self._workers > 0 and iterator is not None:
            iterator._shutdown_workers()


class CursorLoader(_Loader):
    """Batches of a map-style dataset by number, in an order that is the same on all groups.

    Item ``n`` is batch ``n % batches`` of data epoch ``n // batches``. A data epoch visits every
    sample once in a new random order. A group that joins needs no state of the loader.

    Before each item the global generators of torch, numpy and random are seeded from (seed, item
    number). So an item with random augmentation is bitwise identical each time and in each process
    that loads it. Generators that the dataset creates itself are not seeded. On the main thread the
    generators are restored afterwards.

    Args:
        dataset: An object with ``len()`` and ``[index]``; ``__getitems__`` is used if it exists. If
            it has ``set_epoch``, each process calls it with the number of the data epoch before it
            reads the first item of another one.
        batch_size: Number of samples per item, that is, for one rank in one step. None if
            ``sampler`` or ``order`` gives whole batches: a list of sample indexes for each.
        seed: Seed of the order and of the generators; equal on all ranks.
        data_epochs: Number of data epochs after which the data end, or None for no end.
        sampler: An iterable of sample indexes with ``len()``, such as torch's
            ``WeightedRandomSampler``. It gives the order of the samples in one data epoch, instead
            of a shuffled one. The loader iterates over it once for each data epoch. Before that it
            seeds the global generators, and the sampler's attribute ``generator``, from (``seed``,
            number of the data epoch), and calls ``set_epoch``, both only if the sampler has them.
            The order must depend on nothing else.
        order: A function from the number of the data epoch to sample indexes, instead of
            ``sampler``. Each call must return the same indexes on all ranks, and the number of
            indexes must be the same in each data epoch.
        collate: Alias of ``collate_fn``.
        collate_fn: Function that maps a list of samples to a batch; torch's ``default_collate`` by
            default.
        shuffle: Whether each data epoch has a random order, rather than that of the dataset.
            Ignored if ``sampler`` or ``order`` is given.
        drop_last: Drop the last item of a data epoch if it is incomplete. Ignored if
            ``batch_size`` is None.
        micro_batches: Number of batches in an item, which is then a list; None for one batch.
        identify: See `fft.Loader`.
        global_batch: See `fft.Loader`.
        options: torch's ``num_workers``, ``prefetch_factor``, ``pin_memory``,
            ``pin_memory_device``, ``worker_init_fn``, ``multiprocessing_context`` and ``timeout``,
            with the same meaning. ``persistent_workers`` is accepted and has no effect: workers
            live from the beginning of ``transactions`` to its end.

    Raises:
        DataError: The dataset has no full batch, or an option is unknown.
        ValueError: torch refuses an option.
    """

    sets_epoch = True
    """Whether the method ``set_epoch`` of the dataset is called, if it has one."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None,
        seed: int = 0,
        data_epochs: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        drop_last: bool = True,
        sampler: Any | None = None,
        order: Callable[[int], Any] | None = None,
        micro_batches: int | None = None,
        identify: Identify | None = None,
        global_batch: int | None = None,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise DataError(
                "fft.CursorLoader: expected a dataset with samples by index, got "
                f"{named(dataset)}, which has none; use {OPEN_STREAM}"
            )
        own = order_of(sampler, order, seed, batch_size is None)
        _refuse_small(dataset, batch_size, drop_last, micro_batches, own is not None)
        made = _Order(len(dataset), batch_size, seed, shuffle, drop_last, own, micro_batches)
        identity: dict[str, Any] = {
            "samples": len(dataset),
            "batch_size": batch_size,
            "seed": seed,
            "data_epochs": data_epochs,
            "shuffle": shuffle,
            "drop_last": drop_last,
        }
        if micro_batches is not None:
            identity["micro_batches"] = micro_batches
        if own is not None:
            identity["order"] = made.digest(0)
        items = None if data_epochs is None else data_epochs * made.items
        data = Samples(dataset, collate_fn or collate, made.items if self.sets_epoch else 0)
        self._order = made
        self.items_per_data_epoch = made.items
        """Number of items in one data epoch, over all ranks of all groups."""
        self.samples_per_item = batch_size and batch_size * (micro_batches or 1)
        """Number of samples that one rank takes in one step; None if ``order`` decides it."""
        self.indices = made.samples
        """Function from an item number to sample indexes."""
        self.drop_last, self.micro_batches = drop_last, micro_batches
        self.identify, self.global_batch = identify, global_batch
        super().__init__(data, seed, made.samples, items, identity, options)

    def fingerprint(self, first: int, count: int) -> str | None:
        """Return the digest of `_Loader` with the orders of the data epochs of these items."""
        common = super().fingerprint(first, count)
        size = self.items_per_data_epoch
        epochs = range(first // size, (first + count - 1) // size + 1)
        orders = [self._order.digest(which) for which in epochs]
        return common if common is None or None in orders else digest_of((common, orders))

    def _probe(self) -> str | None:
        """Return a digest of the identity of item 0, or of its first sample without ``identify``.

        None if ranks of a correct job could read different data, because the dataset has its own
        code or needs ``worker_init_fn``. An error of reading is raised, because a digest without
        the probe would differ from those of other ranks.
        """
        dataset = self._reader.data.origin
        try:
            if self.identify is None:
                if not runs_no_code(dataset):
                    return None
                return digest_of(dataset[_first_of(self.indices(0))])
            return None if self._needs_workers else digest_of(self[0], self.identify)
        except Exception as error:
            name_item(error, "item 0", 0)
            raise


class StreamLoader(_Loader):
    """Batches of a stream that can be opened at any item; each rank reads only its own items.

    Each worker opens the stream for a part of the rank's items. An open stream is continued, and
    opened again only when the members change. The generators are seeded as for a `CursorLoader`.

    Args:
        open: A function ``open_stream(first, stride)`` that returns an iterable of batches: items
            ``first``, ``first + stride``, ``first + 2 * stride`` and so on. All ranks number the
            items of the whole data in the same way. Item ``n`` must be the same batch for every
            ``first`` and ``stride``. If the iterator has ``close()``, it is called before another
            is opened.
        items: Number of items on all ranks together, or None if the stream never ends.
        seed: Seed of the global generators while an item is read; equal on all ranks.
        identify: See `fft.Loader`.
        options: The options of `CursorLoader`.

    Raises:
        DataError: ``open`` is not callable, or an option is unknown.
        ValueError: torch refuses an option.
    """

    def __init__(
        self,
        open: Callable[[int, int], Any],
        items: int | None = None,
        seed: int = 0,
        *,
        identify: Identify | None = None,
        **options: Any,
    ) -> None:
        if not callable(open):
            raise DataError(
                "fft.StreamLoader: expected a function open_stream(first, stride), got "
                f"{named(open)}; pass a function that returns an iterable of batches"
            )
        identity = {"items": items, "seed": seed}
        self.identify = identify
        super().__init__(Substreams(open), seed, lambda _: None, items, identity, options)

    def _probe(self) -> str | None:
        """Return a digest of item 1, which must not depend on where its stream was opened.

        Raises:
            DataError: It differs between a stream opened at item 0 and one opened at item 1.
        """
        if self._needs_workers or (self._items is not None and self._items < 2):
            return None
        data = Substreams(self._reader.data.origin)
        reader = Reader(self._name, data, self._seed, None)
        try:
            reader.read_here(Request(0, 1, None))
            items = [reader.read_here(Request(1, 1, None)) for _ in range(2)]
        finally:
            data.close()
        one, other = (digest_of(item, self.identify) for item in items)
        if one != other:
            raise DataError(
                f"{self._name}: item 1 of open_stream(0, 1) differs from that of open_stream(1, 1),"
                " so groups would draw some batches twice and others never. Let item n depend on n "
                "alone: shuffle by a generator with a seed of your own, not by the global one. If "
                "only its augmentation is random, pass identify= to fft.StreamLoader"
            )
        return one


class _Epoch(NamedTuple):
    """The order of one data epoch."""

    indexes: torch.Tensor
    """Sample indexes (int64)."""
    ends: torch.Tensor | None = None
    """Position after each batch in ``indexes``, or None if all batches have ``batch_size``."""


class _Order:
    """The assignment of samples to items. Pure.

    Args:
        own: Function from the number of the data epoch to its order, or None.

    Raises:
        DataError: ``own`` returns too few indexes, or indexes that the dataset does not have.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int | None,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        own: Callable[[int], _Epoch] | None = None,
        micro_batches: int | None = None,
    ) -> None:
        self._samples, self._batch_size = samples, batch_size
        self._seed, self._shuffle, self._own = seed, shuffle, own
        self._micro_batches = micro_batches
        self._epochs: dict[int, _Epoch] = {}
        """Orders of at most two data epochs, because prefetching may cross into the next one."""
        self._digests: dict[int, str] = {}
        """Digests of the orders of all data epochs so far, to find an order that changes."""
        self._length = samples
        """Number of sample indexes, or of batches without ``batch_size``, in one data epoch."""
        if own is not None:
            first = own(0)
            self._length, self._digests[0] = _length_of(first), _digest(first)
        size = (batch_size or 1) * (micro_batches or 1)
        is_full = drop_last and batch_size is not None
        self.items = self._length // size if is_full else -(-self._length // size)
        """Number of items in one data epoch."""
        if self.items < 1:
            least = "one batch" if batch_size is None else f"batch_size={batch_size} sample indexes"
            micro = "" if micro_batches is None else f" in each of {micro_batches} micro-batches"
            raise DataError(
                f"fft.CursorLoader: expected at least {least}{micro} from sampler= or order= for "
                f"one data epoch, found {self._length}; return more, reduce batch_size, or pass "
                "drop_last=False"
            )

    def samples(self, number: int) -> Indexes:
        """Return the sample indexes of item ``number``."""
        which, place = divmod(number, self.items)
        if self._micro_batches is None:
            return self._batch(which, place)
        first = place * self._micro_batches
        end = -(-self._length // (self._batch_size or 1))
        return [self._batch(which, n) for n in range(first, min(first + self._micro_batches, end))]

    def _batch(self, which: int, number: int) -> list[int]:
        """Return the sample indexes of a batch of data epoch ``which``."""
        if self._batch_size is None:
            indexes, ends = self._epoch(which)
            assert ends is not None, "an order without batch_size has batches"
            first, end = int(ends[number - 1]) if number else 0, int(ends[number])
        else:
            first = number * self._batch_size
            end = min(first + self._batch_size, self._length)
            if self._own is None and not self._shuffle:
                return list(range(first, end))
            indexes = self._epoch(which).indexes
        found: list[int] = indexes[first:end].tolist()
        return found

    def digest(self, which: int) -> str | None:
        """Return a digest of the order of data epoch ``which``, or None without ``own``."""
        if self._own is None:
            return None
        self._epoch(which)
        return self._digests[which]

    def _epoch(self, which: int) -> _Epoch:
        if which not in self._epochs:
            if len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            self._epochs[which] = self._made(which)
        return self._epochs[which]

    def _made(self, which: int) -> _Epoch:
        if self._own is None:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + which)
            return _Epoch(torch.randperm(self._samples, generator=generator, device="cpu"))
        with torch.device("cpu"):
            made = self._own(which)
        digest, length = _digest(made), _length_of(made)
        what = "sample indexes" if made.ends is None else "batches"
        if self._digests.setdefault(which, digest) != digest:
            raise DataError(
                f"fft.CursorLoader: expected the same {what} from sampler= or order= each "
                f"time that data epoch {which} begins, found other ones ({length}) at a "
                "further call; compute them from the number of the data epoch and the global "
                "generators, or the sampler's attribute generator, alone"
            )
        if length != self._length:
            raise DataError(
                f"fft.CursorLoader: expected {self._length} {what} from sampler= or order= "
                f"in data epoch {which}, as in data epoch 0, found {length}; return the same "
                "number in each data epoch"
            )
        low, high = int(made.indexes.min()), int(made.indexes.max())
        if low < 0 or high >= self._samples:
            raise DataError(
                f"fft.CursorLoader: expected sample indexes from 0 to {self._samples - 1} from "
                f"sampler= or order=, found indexes from {low} to {high} in data epoch {which}; "
                "return indexes of the dataset only"
            )
        return made


def _length_of(epoch: _Epoch) -> int:
    return len(epoch.indexes if epoch.ends is None else epoch.ends)


def _digest(epoch: _Epoch) -> str:
    return digest_of(epoch.indexes if epoch.ends is None else tuple(epoch))


def _first_of(samples: Indexes) -> int:
    first = samples[0]
    return first if isinstance(first, int) else first[0]


def _refuse_small(
    dataset: Any,
    batch_size: int | None,
    drop_last: bool,
    micro_batches: int | None,
    has_order: bool,
) -> None:
    """Raise DataError if ``dataset`` has no length, or too few samples for one item."""
    if not isinstance(dataset, Sized):
        raise DataError(
            f"fft.CursorLoader: expected a dataset with len(), got {named(dataset)}, which has "
            f"none; define __len__, or use {OPEN_STREAM}"
        )
    for name, value in (("batch_size", batch_size), ("micro_batches", micro_batches)):
        if value is not None and value < 1:
            raise DataError(
                f"fft.CursorLoader: expected {name}= of at least 1, got {value}; one rank takes "
                "batch_size samples, in each of its micro-batches, in one step"
            )
    if len(dataset) == 0:
        raise DataError(
            f"fft.CursorLoader: expected a dataset with samples, got {named(dataset)} with none; "
            "check what the dataset reads"
        )
    if batch_size is None and not has_order:
        raise DataError(
            "fft.CursorLoader: expected a number of samples as batch_size=, got None without an "
            "order; pass a batch sampler as sampler=, or order=lambda data_epoch: <index lists>"
        )
    size = (batch_size or 1) * (micro_batches or 1)
    if drop_last and batch_size is not None and len(dataset) < size:
        micro = "" if micro_batches is None else f" in each of {micro_batches} micro-batches"
        raise DataError(
            f"fft.CursorLoader: expected a dataset with at least batch_size={batch_size} "
            f"samples{micro}, found {len(dataset)}; reduce batch_size, or pass drop_last=False"
        )


def order_of(
    sampler: Any | None, order: Callable[[int], Any] | None, seed: int, in_batches: bool = False
) -> Callable[[int], _Epoch] | None:
    """Return a function from the number of the data epoch to its order.

    Returns None if no order was given. With ``in_batches``, the order consists of index lists.

    Raises:
        DataError: Both were given, or ``sampler`` is an iterator or divides the data among ranks.
    """
    if sampler is None and order is None:
        return None
    if sampler is not None and order is not None:
        raise DataError("fft.CursorLoader takes sampler= or order=, not both")
    if isinstance(sampler, DistributedSampler):
        raise DataError(
            "fft.CursorLoader takes no DistributedSampler: it divides the samples among the ranks "
            "itself; leave it out"
        )

    if isinstance(sampler, Iterator):
        raise DataError(
            "fft.CursorLoader: expected an iterable of sample indexes as sampler=, got "
            f"{named(sampler)}, an iterator, which ends after one data epoch; pass a list or a "
            "torch Sampler, or order=lambda data_epoch: <the indexes>"
        )

    def indexes(which: int) -> _Epoch:
        with seeded(f"{seed}/order", which):
            found = sample_order(sampler, seed, which) if order is None else order(which)
            return _in_batches(found, which) if in_batches else _Epoch(_as_indexes(found, which))

    return indexes


def _in_batches(found: Any, which: int) -> _Epoch:
    """Return the batches ``found`` as an order. Raises DataError."""
    batches = [_as_indexes(batch, which) for batch in found]
    if not all(len(batch) for batch in batches):
        raise DataError(
            "fft.CursorLoader: expected batches with at least one sample index from sampler= or "
            f"order=, found an empty one in data epoch {which}; leave it out"
        )
    ends = torch.tensor([len(batch) for batch in batches], dtype=torch.int64).cumsum(0)
    return _Epoch(torch.cat(batches) if batches else torch.empty(0, dtype=torch.int64), ends)


def _as_indexes(found: Any, which: int) -> torch.Tensor:
    """Return ``found`` as sample indexes: int64, with one dimension. Raises DataError."""
    if not isinstance(found, torch.Tensor | np.ndarray) and isinstance(found, Iterable):
        found = list(found)
    try:
        # a copy, because torch refuses arrays with negative strides
        made = torch.as_tensor(found.copy() if isinstance(found, np.ndarray) else found)
        kind = f"{made.dtype} of shape {tuple(made.shape)}"
    except (TypeError, ValueError, RuntimeError) as error:
        made, kind = None, f"values that do not make up a tensor ({error})"
    if made is not None and made.dim() == 1:
        kinds = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)
        if made.numel() == 0 or not (made.dtype in kinds or made.is_complex()):
            return made.to(torch.int64)
    raise DataError(
        "fft.CursorLoader: expected integer sample indexes in one dimension from sampler= or "
        f"order=, found {kind} in data epoch {which}; return the indexes of the samples one by "
        f"one: mask.nonzero() for a mask. For batches pass batch_size=None, {BATCHES_AS_ORDER}"
    )


def sample_order(sampler: Any, seed: int, which: int, order: Any = None) -> list[Any]:
    """Return the indexes of ``sampler`` in data epoch ``which``.

    Args:
        order: An iterable that reads ``sampler``, such as a batch sampler, to iterate over instead.
    """
    set_epoch = getattr(sampler, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(which)
    order = sampler if order is None else order
    if not hasattr(sampler, "generator"):
        return list(order)
    before = sampler.generator
    sampler.generator = torch.Generator().manual_seed(seed * 1_000_003 + which)
    try:
        return list(order)
    finally:
        sampler.generator = before

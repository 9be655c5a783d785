"""Read the items of a loader, in torch's worker processes or on the main thread.

The content of an item depends only on (seed, item number), not on the process or the time, because
the global random generators of torch, numpy and random are seeded for each item.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import random
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.queues import Queue
from types import FrameType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset, get_worker_info

from fft.util.die_with_parent import PR_SET_PDEATHSIG
from fft.util.terminal import show_error

_random_lock = threading.Lock()
"""Held while items are read, because all threads of the process share the global generators."""


class Request(NamedTuple):
    """A request to a worker for item ``number``; its next one is probably ``step`` further."""

    number: int | None
    """The item, or None for an empty request, since torch keeps a fixed number of requests open."""
    step: int
    samples: list[int] | list[list[int]] | None
    """Indexes of the dataset, one list for each micro-batch if there are any. None for a stream."""
    streams: int = 1
    """Number of interleaved streams of requests that this worker gets, each with this ``step``."""
    serial: int = 0
    """Number of this request in the order in which the trainer sends them, to all workers."""


class Answer(NamedTuple):
    """The answer to a request."""

    number: int | None
    kind: Literal["batch", "failed", "unwanted"]
    value: Any
    """The batch, or the ``ExceptionWrapper`` of the error that reading raised."""


class Data(Protocol):
    """The data that batches are read from. Each worker has its own copy."""

    origin: Any
    """The user's object, which is also torch's ``get_worker_info().dataset``."""

    def read(self, request: Request) -> Any:
        """Read the batch of one request."""


class Samples:
    """A map-style dataset; its ``set_epoch`` is called if there are ``items`` in a data epoch."""

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | None, items: int = 0
    ) -> None:
        self.origin = dataset
        self._collate = collate or torch.utils.data.default_collate
        self._items = items if callable(getattr(dataset, "set_epoch", None)) else 0
        self._epoch: int | None = None

    def read(self, request: Request) -> Any:
        samples: Any = request.samples
        assert samples is not None and request.number is not None
        if self._items:
            epoch = request.number // self._items
            # outside of a worker the script, or another loader, may have set another one
            if epoch != self._epoch or get_worker_info() is None:
                self.origin.set_epoch(epoch)
                self._epoch = epoch
        if samples and isinstance(samples[0], list):
            return [self._batch(part) for part in samples]
        return self._batch(samples)

    def _batch(self, samples: list[int]) -> Any:
        several = getattr(self.origin, "__getitems__", None)
        # preferred, as in torch's loader
        return self._collate(several(samples) if several else [self._sample(i) for i in samples])

    def _sample(self, index: int) -> Any:
        try:
            return self.origin[index]
        except Exception as error:
            error.add_note(f"while sample {index} of the dataset was read")
            raise


class Substreams:
    """A function that opens streams, which are continued if they fit.

    One stream is open at a time, or as many as the items of a rank in one txn require.
    """

    def __init__(self, opens: Callable[[int, int], Any]) -> None:
        self.origin = opens
        self._streams: dict[tuple[int, int], Iterator[Any]] = {}
        """(number of the next item, distance to the following one) → the open stream, with the
        one that was used last at the end."""

    def read(self, request: Request) -> Any:
        assert request.number is not None
        stream = self._streams.pop((request.number, request.step), None)
        self.close(keeps=request.streams - 1)
        if stream is None:
            stream = iter(self.origin(request.number, request.step))
        try:
            batch = next(stream)
        except StopIteration:
            raise EOFError(
                f"the stream ended before item {request.number}; pass the number of items: "
                "fft.StreamLoader(open_stream, items=…)"
            ) from None
        self._streams[request.number + request.step, request.step] = stream
        return batch

    def close(self, keeps: int = 0) -> None:
        """Close the open streams, except for the newest ones."""
        while len(self._streams) > keeps:
            oldest = self._streams.pop(next(iter(self._streams)))
            getattr(oldest, "close", lambda: None)()


_kept: frozenset[int] | None = None
"""Inodes of the sockets that workers may inherit, or None for all. Spawned workers inherit none."""


def keep_sockets() -> None:
    """Let workers inherit only the sockets that exist now, even if they are forked later.

    A process group is aborted by closing its sockets. The peers do not learn of it while a worker
    still holds them.
    """
    global _kept
    _kept = frozenset(_sockets().values())


def _sockets() -> dict[int, int]:
    """Return the inode of each open socket, by its descriptor, except the standard streams."""
    found: dict[int, int] = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # another thread has closed it
            status = os.fstat(fd)
            if fd > 2 and stat.S_ISSOCK(status.st_mode):
                found[fd] = status.st_ino
    return found


def _drop_sockets() -> None:
    if _kept is None:
        return
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd, inode in _sockets().items():
        if inode not in _kept:
            os.dup2(nowhere, fd)  # not closed, because inherited objects may still close the number
    os.close(nowhere)


_LAUNCHERS_S = 30.0
"""Time from SIGTERM to SIGKILL by a launcher that sets no limit, such as torchrun, in seconds."""
_KILL_DELAY_S = 10.0
"""Seconds from the deadline of a drain to the end of a worker whose trainer still lives."""


class Reader(Dataset[Any]):
    """The dataset that torch's loader sees; it answers requests.

    Args:
        name: Name of the loader in messages.
        data: The data to read from.
        seed: Seed of the global generators.
        obsolete: Serial number of a request, in shared memory. Workers skip it and all before it
            that they have not begun, because the members have changed. None without workers.
    """

    def __init__(self, name: str, data: Data, seed: int, obsolete: torch.Tensor | None) -> None:
        self._name = name
        self._seed = seed
        self._obsolete = obsolete
        self.data = data

    def __getitems__(self, request: Request) -> Answer:
        if request.number is None or self._is_obsolete(request):
            return Answer(request.number, "unwanted", None)
        worker = get_worker_info()
        if worker is None:
            return Answer(request.number, "batch", self.read_here(request))
        try:
            _seed(self._seed, request.number)
            return Answer(request.number, "batch", self._read(request))
        except Exception:  # noqa: BLE001 - raised again where the item is taken
            wrapper: Any = ExceptionWrapper  # has no types in torch
            where = f"in DataLoader worker process {worker.id}"
            return Answer(request.number, "failed", wrapper(where=where))

    def read_here(self, request: Request) -> Any:
        """Read the batch on the calling thread, and restore the global generators afterwards."""
        assert request.number is not None
        with seeded(self._seed, request.number):
            return self._read(request)

    def _is_obsolete(self, request: Request) -> bool:
        return self._obsolete is not None and request.serial <= int(self._obsolete)

    def _read(self, request: Request) -> Any:
        try:
            return self.data.read(request)
        except Exception as error:
            samples = "" if request.samples is None else f" (samples {request.samples})"
            error.add_note(f"while item {request.number}{samples} of {self._name} was loaded")
            raise


def begin_worker(users: Callable[[int], None] | None, worker: int) -> None:
    """Set up a worker; this is the ``worker_init_fn`` of torch's loader.

    A worker ends with the trainer, because torch's own watch takes 5 s, in which the worker would
    hold the trainer's connections open. A worker ignores Ctrl-C, because the trainer may need data
    to drain.

    Args:
        users: The ``worker_init_fn`` of the user, or None.
        worker: Number of the worker.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_later)
    _drop_sockets()
    info = get_worker_info()
    assert info is not None and isinstance(info.dataset, Reader)
    # User code expects its own dataset there; the object is frozen.
    object.__setattr__(info, "dataset", info.dataset.data.origin)
    atexit.register(_end_now)
    Queue._on_queue_feeder_error = _send_pickling_error  # type: ignore[attr-defined]
    if users is not None:
        users(worker)


def _end_later(_number: int, _frame: FrameType | None) -> None:
    """Handle SIGTERM in a worker by ending it after the time for a drain.

    A scheduler may send SIGTERM to all processes of a SLURM job step. The trainer then needs data
    to commit once more, and ends its workers itself. Python ends remaining child processes by
    SIGTERM, so the signal must have an effect.
    """
    timer = threading.Timer(_limit_s() + _KILL_DELAY_S, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def _limit_s() -> float:
    """Return the time limit of a drain in seconds; the trainer has refused an invalid value."""
    try:
        return float(os.environ["FFT_DRAIN_WITHIN"])
    except (KeyError, ValueError):
        return _LAUNCHERS_S


def _end_now() -> None:
    """End a spawned worker without interpreter shutdown, as a forked one ends anyway.

    torch does not wait for the thread that still sends batches. Interpreter shutdown would unwind
    that thread inside torch's C++, which aborts the worker, and torch raises that in the trainer.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0)


def _send_pickling_error(queue: Any, error: Exception, sent: Any) -> None:
    """Send the reason why an answer cannot be pickled, because the trainer waits for an answer.

    Replaces ``multiprocessing``'s hook in a worker, which only prints the error.
    """
    number, answer = sent if isinstance(sent, tuple) and len(sent) == 2 else (None, None)
    if not isinstance(answer, Answer):  # a message of torch itself
        show_error(error)
        return
    wrapper: Any = ExceptionWrapper  # has no types in torch
    if answer.kind == "failed":  # the class of the exception exists only in the worker
        told = answer.value
        said = f"{told.exc_type.__qualname__}, reported as a RuntimeError: {told.exc_msg}"
        told.exc_type, told.exc_msg = RuntimeError, said
    else:
        cannot = RuntimeError(f"item {answer.number} cannot be sent to the trainer: {error}")
        told = wrapper((type(cannot), cannot, error.__traceback__), f"in worker {os.getpid()}")
    queue.put((number, answer._replace(kind="failed", value=told)))


def same(answer: Any) -> Any:
    """Return ``answer``; the ``collate_fn`` of torch's loader, since the reader collates."""
    return answer


@contextmanager
def seeded(seed: int | str, number: int) -> Iterator[None]:
    """Seed the global generators from (``seed``, ``number``), and restore them at the end."""
    with _kept_generators():
        _seed(seed, number)
        yield


def with_own_generators(items: Iterable[Any], seed: int, number: int) -> Iterator[Any]:
    """Yield ``items``, which draw from the global generators as if nothing else did.

    The generators are seeded from (``seed``, ``number``) for the first one, and continue where the
    item before has left them.
    """
    iterator: Iterator[Any] | None = None
    states: tuple[Any, ...] = ()
    while True:
        with _kept_generators():
            if iterator is None:
                _seed(seed, number)
                iterator = iter(items)
            else:
                _set_states(states)
            try:
                item = next(iterator)
            except StopIteration:
                return
            states = _states()
        yield item


def _seed(seed: int | str, number: int) -> None:
    """Seed the global generators for one item, except CUDA's: samples are read on the CPU."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    mixed = int.from_bytes(digest, "little")
    torch.default_generator.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFF_FFFF)


@contextmanager
def _kept_generators() -> Iterator[None]:
    with _random_lock:
        states = _states()
        try:
            yield
        finally:
            _set_states(states)


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])

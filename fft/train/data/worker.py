"""The side of a loader where samples are read: in torch's worker processes, or on the main thread.

What is read for an item depends on (seed, item number) only, never on who reads it or when: the
global random generators of torch, numpy and random are seeded for each item.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from types import FrameType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset, get_worker_info

from fft.util.die_with_parent import PR_SET_PDEATHSIG

_random_lock = threading.Lock()
"""The global generators are one for all threads of the process."""


class Request(NamedTuple):
    """What a worker is asked for: item ``number``, then the one ``step`` further, and so on."""

    number: int | None
    """None: nothing. torch keeps as many requests under way as it was told to."""
    step: int
    samples: list[int] | None
    """Indexes of the dataset; None: the data are a stream."""


class Answer(NamedTuple):
    """What came of it."""

    number: int | None
    kind: Literal["batch", "failed", "unwanted"]
    value: Any
    """The batch, or the ``ExceptionWrapper`` of what its reading raised."""


class Data(Protocol):
    """What the batches are read from. Lives in each worker."""

    origin: Any
    """The object that the user gave; what torch's ``get_worker_info().dataset`` says."""

    def read(self, request: Request) -> Any:
        """The batch of one request."""


class Samples:
    """A map-style dataset."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self.origin = dataset
        self._collate = collate or torch.utils.data.default_collate

    def read(self, request: Request) -> Any:
        assert request.samples is not None
        several = getattr(self.origin, "__getitems__", None)
        if several is not None:  # as torch's loader does
            return self._collate(several(request.samples))
        return self._collate([self._sample(i) for i in request.samples])

    def _sample(self, index: int) -> Any:
        try:
            return self.origin[index]
        except Exception as error:
            error.add_note(f"while sample {index} of the dataset was read")
            raise


class Substreams:
    """A function that opens streams. One is open at a time, and gone on with if it fits."""

    def __init__(self, opens: Callable[[int, int], Any]) -> None:
        self.origin = opens
        self._stream: Iterator[Any] | None = None
        self._at = (0, 0)
        """Number of the next item of ``_stream``, and the distance to the one after it."""

    def read(self, request: Request) -> Any:
        assert request.number is not None
        if self._stream is None or self._at != (request.number, request.step):
            self._close()
            self._stream = iter(self.origin(request.number, request.step))
        stream, self._stream = self._stream, None  # what raised is not gone on with
        try:
            batch = next(stream)
        except StopIteration:
            raise EOFError(
                f"the stream ended before item {request.number}; "
                "say how many there are: fft.StreamLoader(open_stream, items=…)"
            ) from None
        self._stream, self._at = stream, (request.number + request.step, request.step)
        return batch

    def _close(self) -> None:
        close = getattr(self._stream, "close", None)
        self._stream = None
        if close is not None:
            close()


_LAUNCHERS_S = 30.0
"""Seconds from SIGTERM to SIGKILL by a launcher that does not name a limit, as torchrun."""
_AFTER_S = 10.0
"""Seconds from the limit of a drain to the end of a worker whose trainer still lives."""


class Reader(Dataset[Any]):
    """The dataset that torch's loader sees: answers requests.

    Args:
        window: (number, step) of the items that the trainer wants now, in shared memory: what was
            asked for before the members changed is not read any more. Only advice. None: there
            are no workers.
    """

    def __init__(self, name: str, data: Data, seed: int, window: torch.Tensor | None) -> None:
        self._name = name
        self._seed = seed
        self._window = window
        self.data = data

    def __getitems__(self, request: Request) -> Answer:
        if request.number is None or not self._wanted(request.number):
            return Answer(request.number, "unwanted", None)
        worker = get_worker_info()
        if worker is None:
            return Answer(request.number, "batch", self.read_here(request))
        try:
            _seed(self._seed, request.number)
            return Answer(request.number, "batch", self._read(request))
        except Exception:  # noqa: BLE001 - raised again where the item is taken
            wrapper: Any = ExceptionWrapper  # which torch does not type
            where = f"in DataLoader worker process {worker.id}"
            return Answer(request.number, "failed", wrapper(where=where))

    def read_here(self, request: Request) -> Any:
        """The batch, read by the calling thread, whose generators are put back afterwards."""
        assert request.number is not None
        with seeded(self._seed, request.number):
            return self._read(request)

    def _wanted(self, number: int) -> bool:
        if self._window is None:
            return True
        first, step = map(int, self._window)
        return step == 0 or (number >= first and (number - first) % step == 0)

    def _read(self, request: Request) -> Any:
        try:
            return self.data.read(request)
        except Exception as error:
            samples = "" if request.samples is None else f" (samples {request.samples})"
            error.add_note(f"while item {request.number}{samples} of {self._name} was loaded")
            raise


def begin_worker(users: Callable[[int], None] | None, worker: int) -> None:
    """``worker_init_fn`` of torch's loader; ``users``: the one that the user gave.

    A worker ends with the trainer: torch's own watch takes 5 s, in which it would hold the
    trainer's connections open. Ctrl-C is for the trainer, which may need data to drain.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_later)
    info = get_worker_info()
    assert info is not None and isinstance(info.dataset, Reader)
    # What user code expects there. It is frozen.
    object.__setattr__(info, "dataset", info.dataset.data.origin)
    atexit.register(_end_now)
    Queue._on_queue_feeder_error = _instead_of_what_cannot_be_sent  # type: ignore[attr-defined]
    if users is not None:
        users(worker)


def _end_later(_number: int, _frame: FrameType | None) -> None:
    """Handle SIGTERM in a worker: end it after the time for a drain.

    A scheduler may send SIGTERM to all processes of a SLURM job step. The trainer needs its data
    to commit once more, and ends its workers itself then. Python ends by SIGTERM what it could not
    end otherwise, so the signal must have an effect.
    """
    timer = threading.Timer(_limit_s() + _AFTER_S, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def _limit_s() -> float:
    """Return the seconds that a drain may take; the trainer has refused a value that is invalid."""
    try:
        return float(os.environ["FFT_DRAIN_WITHIN"])
    except (KeyError, ValueError):
        return _LAUNCHERS_S


def _end_now() -> None:
    """End a spawned worker without tearing its interpreter down, as a forked one ends anyway.

    torch does not wait for the thread that still sends batches. Torn down under it, the thread is
    unwound inside torch's C++, which aborts the worker; and torch raises that in the trainer.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0)


def _instead_of_what_cannot_be_sent(queue: Any, error: Exception, sent: Any) -> None:
    """In a worker, where an answer cannot be pickled: send why, for the trainer waits for one.

    Takes the place of the hook that ``multiprocessing`` has for this, which only prints.
    """
    number, answer = sent if isinstance(sent, tuple) and len(sent) == 2 else (None, None)
    if not isinstance(answer, Answer):  # torch's own word
        traceback.print_exception(error)
        return
    wrapper: Any = ExceptionWrapper  # which torch does not type
    if answer.kind == "failed":  # by an exception of a class that only the worker has
        told = answer.value
        said = f"{told.exc_type.__qualname__}, told as a RuntimeError: {told.exc_msg}"
        told.exc_type, told.exc_msg = RuntimeError, said
    else:
        cannot = RuntimeError(f"item {answer.number} cannot be sent to the trainer: {error}")
        told = wrapper((type(cannot), cannot, error.__traceback__), f"in worker {os.getpid()}")
    queue.put((number, answer._replace(kind="failed", value=told)))


def same(answer: Any) -> Any:
    """``collate_fn`` of torch's loader: the reader has collated already."""
    return answer


@contextmanager
def seeded(seed: int | str, number: int) -> Iterator[None]:
    """Seed the global generators from (``seed``, ``number``), and restore them at the end."""
    with _kept_generators():
        _seed(seed, number)
        yield


def _seed(seed: int | str, number: int) -> None:
    """Seed the global generators for one item. Not CUDA's: samples are read on the CPU."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    mixed = int.from_bytes(digest, "little")
    torch.default_generator.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFF_FFFF)


@contextmanager
def _kept_generators() -> Iterator[None]:
    with _random_lock:
        state = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            torch.set_rng_state(state[0])
            random.setstate(state[1])
            np.random.set_state(state[2])

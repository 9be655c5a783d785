"""Step functions that use one resource repeatedly are interrupted; the script counts leaks.

``interrupt_storm.py HOW ROUNDS FOLDER`` runs in its own process, so that leaks have no effect
elsewhere. HOW is one of these:

- ``storm``: each resource in ROUNDS step functions, by an `Interrupter`, at random moments
- ``every``: at each bytecode at which Python handles signals, one after the other; where
  `fft.train.guard.unsafe_places` calls it unsafe, at the next one that it calls safe
- ``blind``: the same, without the check for safety

It prints as JSON, for each resource, how many step functions ran, and how many left it half done.
"""

from __future__ import annotations

import _thread
import contextlib
import decimal
import io
import json
import logging
import multiprocessing
import os
import queue
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType

import torch

from fft.messages.protocol import Peer
from fft.trace.read import TraceFile
from fft.trace.writer import TraceWriter
from fft.train.guard.interrupt import Interrupted, Interrupter
from fft.train.guard.unsafe_places import Safety, classify, guarded

SWITCH_S = 1e-4
"""Interval in which threads take turns; by default an interruption takes 5 ms to be requested."""
MOST = 300
"""Maximum number of interruptions per resource, each one bytecode later than the one before."""


class Thing:
    """A resource that a step function uses.

    `use` must restore everything; `left` measures the rest.
    """

    def use(self) -> None:
        """Use it once; called in an endless loop."""
        raise NotImplementedError

    def left(self) -> int:
        """Return how much is left over, and clean it up."""
        raise NotImplementedError


class Locked(Thing):
    """A lock that is held in a ``with``."""

    def __init__(self, make: Callable[[], threading.Lock]) -> None:
        self.make, self.lock = make, make()
        self.uses = 0

    def use(self) -> None:
        with self.lock:
            pass

    def left(self) -> int:
        free: list[bool] = []

        def ask() -> None:  # on another thread, because the owner of an RLock may take it again
            free.append(self.lock.acquire(False))
            if free[0]:
                self.lock.release()

        asker = threading.Thread(target=ask)
        asker.start()
        asker.join()
        if not free[0]:
            self.lock = self.make()
        return not free[0]


class Tried(Locked):
    """A lock that is taken before a ``try``."""

    def use(self) -> None:
        self.lock.acquire()
        try:
            self.uses += 1  # an empty ``try`` would leave no trace in the bytecode
        finally:
            self.lock.release()


class TakenIfFree(Locked):
    """A lock that is tried without blocking before a ``try``."""

    def use(self) -> None:
        taken = self.lock.acquire(False)
        if taken:
            try:
                self.uses += 1
            finally:
                self.lock.release()


class Permits(Locked):
    """A semaphore of Python's own, with one permit."""

    def __init__(self) -> None:
        super().__init__(lambda: threading.Semaphore(1))  # type: ignore[arg-type,return-value]

    def left(self) -> int:
        inner: threading.Condition = self.lock._cond  # type: ignore[attr-defined]
        if not inner.acquire(False):
            self.lock = self.make()
            return 1
        inner.release()
        return super().left()


class Stacked(Locked):
    """A lock and a context on an `ExitStack`."""

    def use(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.lock)
            stack.enter_context(contextlib.nullcontext())


class Counted(Thing):
    """A ``@contextmanager`` as a statement and as a decorator."""

    def __init__(self) -> None:
        self.entered = self.left_again = 0
        self.decorated = self.context()(abs)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        self.entered += 1
        os.getpid()  # a call, at which a signal may be handled
        try:
            yield
        finally:
            os.getpid()
            self.left_again += 1

    def use(self) -> None:
        with self.context():
            pass
        self.decorated(1)

    def left(self) -> int:
        left, self.entered = self.entered - self.left_again, self.left_again
        return left


class Switch(Thing):
    """A setting of the process or the thread that a ``with`` changes."""

    def __init__(
        self,
        context: Callable[[], contextlib.AbstractContextManager[object]],
        read: Callable[[], object],
        write: Callable[[], object],
    ) -> None:
        self.context, self.read, self.write = context, read, write
        self.before = read()

    def use(self) -> None:
        with self.context():
            pass

    def left(self) -> int:
        left = self.read() != self.before
        self.write()
        return left


class Files(Thing):
    """Temporary files, folders, and an open file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open = len(os.listdir("/proc/self/fd"))

    def use(self) -> None:
        with tempfile.TemporaryDirectory(dir=self.folder):
            pass
        with tempfile.NamedTemporaryFile(dir=self.folder):
            pass
        with open(os.devnull):
            pass

    def left(self) -> int:
        found = list(self.folder.iterdir())
        for path in found:
            path.rmdir() if path.is_dir() else path.unlink()
        descriptors = len(os.listdir("/proc/self/fd"))
        more, self.open = max(0, descriptors - self.open), descriptors
        return len(found) + more


class Queued(Thing):
    """A queue whose items are taken out again."""

    def __init__(self) -> None:
        self.queue: queue.Queue[int] = queue.Queue(2)

    def use(self) -> None:
        self.queue.put(1)
        self.queue.get()

    def left(self) -> int:
        held = not self.queue.mutex.acquire(False)
        self.queue = queue.Queue(2)
        return held


class Started(Thing):
    """Threads that are started and joined, and an event."""

    def use(self) -> None:
        event = threading.Event()
        thread = threading.Thread(target=event.wait, args=(10,))
        thread.start()
        event.set()
        thread.join()

    def left(self) -> int:
        limbo: dict[object, object] = threading._limbo  # type: ignore[attr-defined]
        left = len(limbo) + (not threading._active_limbo_lock.acquire(False))  # type: ignore[attr-defined]
        limbo.clear()
        threading._active_limbo_lock.release()  # type: ignore[attr-defined]
        return left


class Logged(Locked):
    """A handler of a logger."""

    def __init__(self) -> None:
        self.handler = logging.StreamHandler(io.StringIO())
        self.logger = logging.getLogger("a body's")
        self.logger.propagate = False
        self.logger.addHandler(self.handler)
        super().__init__(self.new_lock)

    def new_lock(self) -> threading.Lock:
        self.handler.createLock()
        assert self.handler.lock is not None
        return self.handler.lock  # type: ignore[return-value]

    def use(self) -> None:
        self.logger.warning("used")


class Traced(Thing):
    """A trace whose lines are chained."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=folder.parent))
        self.opened = 0
        self.open()

    def open(self) -> None:
        self.opened += 1
        self.writer = TraceWriter(self.folder, Peer("g", self.opened, 1))

    def use(self) -> None:
        self.writer.note("used", {})

    def left(self) -> int:
        if not self.writer._lock.acquire(False):
            self.open()
            return 1
        self.writer._lock.release()
        self.writer.note("last", {})
        self.writer.close()
        assert self.writer.path is not None
        trace = TraceFile(self.writer.path)
        for _ in trace.lines():
            pass
        self.open()
        return trace.damage is not None


def _filters() -> object:
    return id(warnings.filters), id(warnings.showwarning)


def _put_back_filters() -> None:
    warnings.filters, warnings.showwarning = FILTERS  # type: ignore[misc,assignment]


FILTERS = warnings.filters, warnings.showwarning

THINGS: dict[str, Callable[[Path], Thing]] = {
    "lock": lambda _: Locked(threading.Lock),
    "rlock": lambda _: Locked(threading.RLock),  # type: ignore[arg-type]
    "condition": lambda _: Locked(threading.Condition),  # type: ignore[arg-type]
    "semaphore": lambda _: Permits(),
    "process-lock": lambda _: Locked(multiprocessing.Lock),  # type: ignore[arg-type]
    "tried": lambda _: Tried(threading.Lock),
    "tried-if-free": lambda _: TakenIfFree(threading.Lock),
    "tried-process-lock": lambda _: Tried(multiprocessing.Lock),  # type: ignore[arg-type]
    "exit-stack": lambda _: Stacked(multiprocessing.Lock),  # type: ignore[arg-type]
    "contextmanager": lambda _: Counted(),
    "files": Files,
    "queue": lambda _: Queued(),
    "threads": lambda _: Started(),
    "logging": lambda _: Logged(),
    "trace": Traced,
    "warnings": lambda _: Switch(warnings.catch_warnings, _filters, _put_back_filters),
    "decimal": lambda _: Switch(
        lambda: decimal.localcontext(prec=5),
        lambda: decimal.getcontext().prec,
        lambda: setattr(decimal.getcontext(), "prec", 28),
    ),
    "no_grad": lambda _: Switch(
        torch.no_grad, torch.is_grad_enabled, lambda: torch.set_grad_enabled(True)
    ),
    "set_grad_enabled": lambda _: Switch(
        partial(torch.set_grad_enabled, False),  # a lambda would be one more place to interrupt
        torch.is_grad_enabled,
        lambda: torch.set_grad_enabled(True),
    ),
    "autocast": lambda _: Switch(
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.is_autocast_enabled("cpu"),
        lambda: torch.set_autocast_enabled("cpu", False),
    ),
}


class Body:
    """The use of an interrupter in ``with txn:``."""

    def __init__(self, interrupter: Interrupter) -> None:
        self.interrupter = interrupter

    @guarded
    def __enter__(self) -> None:
        self.interrupter.enter()

    @guarded
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.interrupter.leave()
        return kind is Interrupted


def storm(thing: Thing, rounds: int) -> tuple[int, int]:
    """Interrupt at random moments; return (runs, runs that left something)."""
    dice = random.Random(7)
    begun, ended = threading.Semaphore(0), threading.Event()
    interrupter = Interrupter()

    def ask() -> None:
        while begun.acquire() and not ended.is_set():
            time.sleep(dice.random() * 1e-3)  # a random place in the step function
            while not interrupter.request("asked"):
                time.sleep(1e-5)

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    left = 0
    for _ in range(rounds):
        begun.release()
        with Body(interrupter):
            while True:
                thing.use()
        left += bool(thing.left())
    ended.set()
    begun.release()
    asker.join()
    interrupter.close()
    return rounds, left


class Steps:
    """A tracer that raises at the n-th bytecode that handles signals, or at the first safe one
    after.

    A handler that has the signal sent again each time runs at every such bytecode.
    """

    def __init__(self, blind: bool) -> None:
        self.blind = blind
        self.at = self.taken = 0
        self.body: FrameType | None = None
        signal.signal(signal.SIGUSR2, self.handle)

    def run(self, body: Callable[[], None], at: int) -> bool:
        """Whether ``body`` was interrupted."""
        self.at, self.taken, self.body = at, 0, sys._getframe()
        try:
            [_] = map(_thread.interrupt_main, [signal.SIGUSR2])
            body()
            self.body = None
        except Interrupted:
            return True
        return False

    @guarded
    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.body is None:
            return
        self.taken += 1
        if self.taken > self.at and (self.blind or classify(frame, self.body) is Safety.SAFE):
            self.body = None
            raise Interrupted("now")
        [_] = map(_thread.interrupt_main, [number])


def at_every_step(thing: Thing, blind: bool) -> tuple[int, int]:
    """Interrupt at every bytecode; return (runs, runs that left something)."""
    steps = Steps(blind)
    assert not steps.run(thing.use, sys.maxsize)
    thing.left()
    at = range(0, steps.taken, 1 + steps.taken // MOST)
    left = 0
    for n in at:
        failed = False
        try:
            steps.run(thing.use, n)
        except Exception:
            if not blind:
                raise
            failed = True  # something else is broken by now
        left += bool(thing.left()) or failed
    return len(at), left


def main() -> None:
    """Interrupt the uses of each resource in turn."""
    how, rounds, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    sys.setswitchinterval(SWITCH_S)
    found = {}
    for name, make in THINGS.items():
        thing = make(folder)
        thing.use()
        thing.left()
        found[name] = (
            storm(thing, rounds) if how == "storm" else at_every_step(thing, how == "blind")
        )
    print(json.dumps(found), flush=True)
    os._exit(0)  # a normal exit would wait for threads that wait for what was left half done


if __name__ == "__main__":
    main()

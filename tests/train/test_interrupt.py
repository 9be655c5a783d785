"""Tests that step functions are unwound anywhere: once per request, nowhere else, and none is
lost."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import importlib
import io
import logging
import multiprocessing
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fft.errors import FftError
from fft.train.guard.interrupt import Interrupted, Interrupter
from fft.train.guard.unsafe_places import guarded

SOAK = [500, pytest.param(2000, marks=pytest.mark.long)]
LONG_S = 60.0
LOGGER = logging.getLogger("a body's")
LOGGER.propagate = False


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    made = Interrupter()
    yield made
    made.close()


class Body:
    """The use of an interrupter in `with txn:`. It swallows its own exception."""

    def __init__(self, interrupter: Interrupter) -> None:
        self.interrupter = interrupter
        self.unwound = False
        self.asked = False

    @guarded
    def __enter__(self) -> Body:
        self.interrupter.enter()
        return self

    @guarded
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.asked = self.interrupter.leave()
        self.unwound = kind is Interrupted
        return self.unwound


class Asker:
    """A thread that requests one unwinding of each step function, some time after it was
    triggered."""

    def __init__(self, interrupter: Interrupter) -> None:
        self._interrupter = interrupter
        self._go = threading.Semaphore(0)
        self._delays: list[float] = []
        self._ended = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def ask(self, delay: float) -> None:
        self._delays.append(delay)
        self._go.release()

    def end(self) -> None:
        self._ended = True
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        while self._go.acquire() and not self._ended:
            time.sleep(self._delays.pop(0))  # a random place in the step function
            while not self._interrupter.request("asked"):
                time.sleep(1e-5)


@pytest.fixture
def asker(interrupter: Interrupter) -> Iterator[Asker]:
    made = Asker(interrupter)
    yield made
    made.end()


def compute() -> None:
    n = 0
    while True:
        n += 1


def sleep() -> None:
    time.sleep(LONG_S)


def lock() -> None:
    held = threading.Lock()
    held.acquire()
    held.acquire(timeout=LONG_S)


def wait_on_condition() -> None:
    condition = threading.Condition()
    with condition:
        condition.wait(LONG_S)


class Collected:
    """An object whose destructor takes a while."""

    def __del__(self) -> None:
        busy()


def busy(_: object = None) -> None:
    for _ in range(2000):
        pass


def collect() -> None:
    while True:
        collected = Collected()
        del collected
        busy()


def call_back() -> None:
    """Raise in a callback of a weak reference, from which Python drops exceptions."""
    while True:
        watched = Asked()
        _reference = weakref.ref(watched, busy)
        del watched
        busy()


class Asked:
    """An object that supports weak references."""


def log() -> None:
    while True:
        LOGGER.warning("a body may log")


def clean_up() -> None:
    try:
        compute()
    finally:
        for _ in range(20_000):
            pass


def sleep_before_try() -> None:
    time.sleep(LONG_S)
    try:
        compute()
    finally:
        busy()


def compute_before_try() -> None:
    """Handle a signal at the call only, where it would come before the ``try``."""
    while True:
        sum(range(200_000))
        try:
            abs(1)
        finally:
            pass


def compute_in_a_context() -> None:
    while True:
        with contextlib.nullcontext():
            sum(range(200_000))


@contextlib.contextmanager
def slow() -> Iterator[None]:
    busy()
    yield
    busy()


def enter_and_leave() -> None:
    while True:
        with slow():
            pass


@slow()
def decorated() -> None:
    compute()


@contextlib.contextmanager
def held(lock: Any) -> Iterator[None]:
    with lock:
        yield


def enter_a_lock_that_is_held(make: Callable[[], Any]) -> None:
    """Enter a lock as ``__enter__`` of Python and of a generator do, and by name."""
    lock = make()
    with lock, held(lock):
        raise AssertionError("nobody gives it back")


def wait_for_a_queue() -> None:
    queue.Queue[int]().get()


def wait_for_a_future() -> None:
    concurrent.futures.Future[int]().result()


def wait_for_an_event() -> None:
    threading.Event().wait(LONG_S)


def wait_for_a_process() -> None:
    subprocess.run(["sleep", str(LONG_S)], check=True)


WAYS = [compute, sleep, lock, wait_on_condition, clean_up, log]
MORE_WAYS = [
    sleep_before_try, compute_before_try, compute_in_a_context, enter_and_leave, decorated,
    wait_for_a_queue, wait_for_a_future, wait_for_an_event, wait_for_a_process,
    partial(enter_a_lock_that_is_held, threading.Lock),
    partial(enter_a_lock_that_is_held, threading.Semaphore),
    partial(enter_a_lock_that_is_held, multiprocessing.Lock),
    partial(enter_a_lock_that_is_held, multiprocessing.Semaphore),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS + MORE_WAYS)
def test_body_is_unwound_at_any_place(
    interrupter: Interrupter, asker: Asker, way: Callable[[], None]
) -> None:
    for delay in (0.01, 0.03, 0.0):
        with Body(interrupter) as body:
            asker.ask(delay)
            way()
        assert body.unwound and body.asked


@pytest.mark.parametrize("times", SOAK)
def test_at_random_points_each_body_is_unwound_exactly_once(
    interrupter: Interrupter, asker: Asker, times: int
) -> None:
    rng = random.Random(7)
    for _ in range(times):
        unwound = 0
        asker.ask(rng.random() * 1e-3)
        with Body(interrupter) as body:
            try:
                rng.choice(WAYS)()
            except Interrupted:
                unwound += 1
                raise
        assert body.unwound and unwound == 1


def test_a_callback_of_the_garbage_collector_is_never_cut(
    interrupter: Interrupter, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: dropped.append(raised.exc_type))

    def slow(_phase: str, _info: object) -> None:
        busy()

    gc.callbacks.append(slow)
    try:
        rng = random.Random(4)
        for _ in range(30):
            asker.ask(rng.random() * 1e-3)
            with Body(interrupter) as body:
                while True:
                    gc.collect(0)
            assert body.unwound
    finally:
        gc.callbacks.remove(slow)
    assert not dropped and not interrupter.repeated


def test_an_exception_that_python_drops_is_raised_again(
    interrupter: Interrupter, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pytest's hook stores it for a report
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    rng = random.Random(3)
    rounds = 0
    while interrupter.repeated < 3:
        rounds += 1
        asker.ask(rng.random() * 1e-3)
        with Body(interrupter) as body:
            call_back()
        assert body.unwound
    assert rounds < 1000


def test_a_destructor_is_never_cut(
    interrupter: Interrupter, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: dropped.append(raised.exc_type))
    rng = random.Random(3)
    for _ in range(100):
        asker.ask(rng.random() * 1e-3)
        with Body(interrupter) as body:
            collect()
        assert body.unwound
    assert not dropped and not interrupter.repeated


def test_swallowed_interruption_is_repeated_until_the_step_function_ends(
    interrupter: Interrupter, asker: Asker
) -> None:
    asker.ask(0.001)
    with Body(interrupter) as body:
        while interrupter.repeated < 3:
            with contextlib.suppress(Interrupted):
                compute()
        compute()
    assert body.unwound


@pytest.mark.long
def test_a_body_that_logs_leaves_no_lock_to_other_threads(
    interrupter: Interrupter, asker: Asker
) -> None:
    handler = logging.StreamHandler(io.StringIO())
    LOGGER.addHandler(handler)
    rng = random.Random(11)
    try:
        for _ in range(3000):
            asker.ask(rng.random() * 1e-4)
            with Body(interrupter) as body:
                log()
            assert body.unwound
        other = threading.Thread(target=LOGGER.warning, args=["still there?"], daemon=True)
        other.start()
        other.join(LONG_S)
        assert not other.is_alive() and "still there?" in handler.stream.getvalue()
    finally:
        LOGGER.removeHandler(handler)


REGISTER = """
taken: set[str] = set()

def register(name: str) -> None:
    if name in taken:
        raise RuntimeError(f"{name} is registered already")
    for _ in range(3000):
        pass
    taken.add(name)
"""
PARTS = 4
PACKAGE = """
import interrupted_register
interrupted_register.register(__name__)
""" + "".join(f"from . import part{n}\n" for n in range(PARTS))
PART = """
import interrupted_register
interrupted_register.register(__name__)
whole = True
"""


@pytest.mark.parametrize("packages", [60, pytest.param(600, marks=pytest.mark.long)])
def test_an_import_is_never_cut(
    interrupter: Interrupter,
    asker: Asker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    packages: int,
) -> None:
    """Each module registers its name with another, as operators do: a second time is an error."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "interrupted_register.py").write_text(REGISTER)
    names = [f"interrupted_{n}" for n in range(packages)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(PACKAGE)
        for n in range(PARTS):
            (tmp_path / name / f"part{n}.py").write_text(PART)
    importlib.invalidate_caches()
    rng = random.Random(5)
    for name in names:
        asker.ask(rng.random() * 2e-3)
        with Body(interrupter) as body:
            importlib.import_module(name)
            compute()
        assert body.unwound
        package = importlib.import_module(name)
        assert all(getattr(package, f"part{n}").whole for n in range(PARTS))


def test_outside_a_body_nothing_is_raised(interrupter: Interrupter) -> None:
    assert interrupter.request("too early") is False
    with Body(interrupter) as body:
        pass
    assert not body.unwound and not body.asked
    assert interrupter.request("too late") is False


def test_an_atomic_section_is_finished_first(interrupter: Interrupter) -> None:
    done = []
    with Body(interrupter) as body:
        with interrupter.atomic(), interrupter.atomic():
            assert interrupter.request("in the middle")
            for n in range(200_000):
                done.append(n)
        compute()
    assert body.unwound and len(done) == 200_000


def test_foreign_signal_does_not_cut_an_atomic_section(
    interrupter: Interrupter,
) -> None:
    """The request waits for the end of the section, whoever sends the signal meanwhile."""
    done = []
    with Body(interrupter) as body:
        with interrupter.atomic():
            assert interrupter.request("in the middle")
            for n in range(100):
                signal.raise_signal(signal.SIGUSR2)
                done.append(n)
        compute()
    assert body.unwound and len(done) == 100


def test_at_random_points_no_atomic_section_is_cut(interrupter: Interrupter, asker: Asker) -> None:
    """A signal may be pending when the section begins."""
    rng = random.Random(13)
    for _ in range(60):
        begun = ended = 0
        asker.ask(rng.random() * 1e-3)
        with Body(interrupter) as body:
            while True:
                with interrupter.atomic():
                    begun += 1
                    abs(1)
                    ended += 1
                busy()
        assert body.unwound and begun == ended


def test_body_that_ends_by_itself_is_not_unwound_by_a_late_request(
    interrupter: Interrupter,
) -> None:
    with Body(interrupter) as body, interrupter.atomic():
        interrupter.request("late")
        # the end of the section and that of the step function are the same to the handler
        interrupter.leave()
    assert not body.unwound


def test_the_signals_of_others_reach_their_handler() -> None:
    received: list[int] = []

    def theirs(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = signal.signal(signal.SIGUSR2, theirs)
    try:
        made = Interrupter()
        signal.raise_signal(signal.SIGUSR2)
        assert received == [signal.SIGUSR2]
        with Body(made) as body:
            made.request("ours")
            compute()
        assert body.unwound and received == [signal.SIGUSR2]
        made.close()
        made.close()
        assert signal.getsignal(signal.SIGUSR2) is theirs
        assert not [t for t in threading.enumerate() if t.name == "fft-interrupt"]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_off_the_main_thread_nothing_is_interrupted(interrupter: Interrupter) -> None:
    errors: list[FftError] = []
    asked: list[bool] = []

    def elsewhere() -> None:
        with Body(interrupter):
            asked.append(interrupter.request("a body on another thread"))
        try:
            Interrupter()
        except FftError as error:
            errors.append(error)
        interrupter.close()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert asked == [False]
    assert "main thread" in str(errors[0])
    signal.raise_signal(signal.SIGUSR2)  # it is not forwarded, and has no effect

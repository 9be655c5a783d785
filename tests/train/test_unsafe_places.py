"""Tests that an exception never comes where it would leave something half done, and elsewhere at
once."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import forked
import pytest

from fft.train.guard.unsafe_places import Safety, classify, guarded, owner

STORM = Path(__file__).with_name("interrupt_storm.py")
LIMIT_S = 280
FRAGILE = {
    "condition", "semaphore", "process-lock", "tried", "tried-if-free", "tried-process-lock",
    "exit-stack", "contextmanager", "files", "threads", "trace", "warnings", "no_grad",
    "set_grad_enabled", "autocast",
}  # fmt: skip
"""Resources that an exception at any place leaves half done; locks in C protect themselves."""


COMPILE = Path(__file__).with_name("interrupt_compile.py")


def left(how: str, rounds: int, folder: Path) -> dict[str, tuple[int, int]]:
    """Return (runs, runs that left something) for each resource that step functions use."""
    command = [sys.executable, str(STORM), how, str(rounds), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
def test_interruption_at_any_unsafe_bytecode_leaves_no_leak(tmp_path: Path) -> None:
    asked = left("every", 0, tmp_path)
    assert {name for name, (_, leaks) in asked.items() if leaks} == set()
    blind = left("blind", 0, tmp_path)
    assert {name for name, (_, leaks) in blind.items() if leaks} >= FRAGILE, blind


@pytest.mark.long
@pytest.mark.parametrize("rounds", [40, pytest.param(400, marks=pytest.mark.long)])
def test_interruptions_at_random_moments_leave_no_leak(tmp_path: Path, rounds: int) -> None:
    found = left("storm", rounds, tmp_path)
    assert {name for name, (_, leaks) in found.items() if leaks} == set()
    print(f"\n{sum(bodies for bodies, _ in found.values())} bodies")


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "bodies"),
    [
        pytest.param("aot_eager", 8, marks=pytest.mark.long),
        pytest.param("aot_eager", 40, marks=pytest.mark.long),
        pytest.param("inductor", 4, marks=pytest.mark.long),
    ],
)
def test_a_compilation_is_never_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, bodies: int
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # else it compiles only once
    log = tmp_path / "log"
    output = forked.run_script(COMPILE, backend, str(bodies), log=log, within=LIMIT_S)
    reported = json.loads(output.splitlines()[-1])
    assert reported["errors"] == [] and reported["ours"] == []
    assert reported["asked_in_vain"] > bodies / 4


# --- the rule about bytecode --------------------------------------------------------------------


class Here(Exception):
    """An exception with the frame that called."""


def _raise() -> None:
    raise Here


here = functools.partial(_raise)
"""A function in C, as waits and locks are: signals are handled when it has returned."""


def judged(function: Callable[[], object]) -> Safety:
    """Return the verdict at ``function``'s own call of `here`."""
    try:
        function()
    except Here as error:
        assert error.__traceback__ is not None
        last = error.__traceback__.tb_next
        assert last is not None
        called = last.tb_frame
        found: list[Safety] = []

        class At:  # an ended frame keeps its last instruction, but not the place of its call
            f_code, f_lasti, f_back = called.f_code, last.tb_lasti, None

        found.append(classify(At, None))  # type: ignore[arg-type]
        return found[0]
    raise AssertionError("it does not call here()")


def before_try() -> None:
    here()
    try:
        print()
    finally:
        print()


def result_before_try() -> object:
    result = other = here()
    try:
        return print(result, other)
    finally:
        print()


def condition_before_try() -> None:
    if here():
        try:
            print()
        finally:
            print()


def before_with() -> None:
    with here():  # type: ignore[attr-defined]
        print()


def in_with_before_with() -> None:
    inner = memoryview(b"")
    with memoryview(b""):
        here()
        with inner:
            print()


def call_between() -> None:
    here()
    print()
    try:
        print()
    finally:
        print()


def in_try() -> None:
    try:
        here()
    finally:
        print()


def last_of_an_inner_with() -> None:
    with memoryview(b""), memoryview(b""):
        here()


def last_of_an_inner_try() -> None:
    try:
        try:
            here()
        finally:
            print()
        print()
    finally:
        print()


def in_a_loop_of_withs() -> None:
    for _ in range(2):
        with memoryview(b""):
            here()


def without_any() -> None:
    here()


def test_lock_acquired_by_a_call_is_released_by_the_following_try() -> None:
    taken = (
        before_try, result_before_try, condition_before_try, before_with, in_with_before_with,
    )  # fmt: skip
    assert {f.__name__: judged(f) for f in taken} == {f.__name__: Safety.SOON for f in taken}
    free = (
        call_between, in_try, last_of_an_inner_with, last_of_an_inner_try, in_a_loop_of_withs,
        without_any,
    )  # fmt: skip
    assert {f.__name__: judged(f) for f in free} == {f.__name__: Safety.SAFE for f in free}


# --- the table ----------------------------------------------------------------------------------


def frame_of() -> FrameType:
    return sys._getframe(1)


def test_frames_older_than_the_step_function_do_not_count() -> None:
    class Trainer:
        def __enter__(self) -> tuple[Safety, Safety]:
            return (lambda: (classify(frame_of(), None), classify(frame_of(), sys._getframe(1))))()

        def __exit__(self, *_: object) -> None:
            pass

    @guarded
    def train() -> tuple[Safety, Safety]:
        return Trainer().__enter__()

    whole, of_body = train()
    assert whole is Safety.LATER and of_body is Safety.SAFE


def test_condition_reacquires_its_lock_after_any_exception() -> None:
    """Otherwise the end of its ``with`` releases another thread's lock."""
    found: list[Safety] = []

    class Watching:
        """A lock that runs the check when it is taken again."""

        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.release = self.lock.release

        def acquire(self, *args: int) -> bool:
            found.append(classify(sys._getframe(), None))
            return self.lock.acquire(*args)

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    condition = threading.Condition(Watching())  # type: ignore[arg-type]
    with condition:
        found.clear()
        condition.wait(1e-3)
    assert found[-1] is Safety.LATER


def test_step_function_belongs_to_the_entering_thread() -> None:
    entered: list[FrameType | None] = []

    class Txn:
        @guarded
        def __enter__(self) -> None:
            entered.append(owner(sys._getframe()))

        def __exit__(self, *_: object) -> None:
            pass

    class Step:
        def __enter__(self) -> None:
            Txn().__enter__()

        def __exit__(self, *_: object) -> None:
            pass

    @contextlib.contextmanager
    def driven():  # type: ignore[no-untyped-def]
        with Txn():
            yield

    with Txn(), Step(), driven(), contextlib.ExitStack() as stack:
        stack.enter_context(Txn())
    assert entered == list(itertools.repeat(sys._getframe(), 4))

"""Tests of guarantees of the loaders whose violation is silent: bits, places, memory, ends."""

from __future__ import annotations

import os
import random
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_data import drawn, plan
from test_loading import Noisy, bits, workers
from waiting import wait_until

import fft
from fft.errors import DataError
from fft.train.data.batch_copy import copied
from fft.train.data.source import Due, Inputs, StreamSource

# --- bits ----------------------------------------------------------------------------------------


def test_each_item_of_each_pass_and_each_seed_has_noise_of_its_own() -> None:
    def noise(seed: int, number: int) -> list[Any]:
        loader = fft.CursorLoader(Noisy(size=4), 4, seed=seed, shuffle=False)
        return bits(loader.take(Due(number, number, 1)))[1:]

    seen = [noise(*place) for place in ((1, 0), (1, 1), (1, 2), (2, 0))]
    for i, one in enumerate(seen):
        for other in seen[:i]:
            assert all(mine != theirs for mine, theirs in zip(one, other, strict=True))


def test_the_passes_of_one_seed_are_not_those_of_the_next() -> None:
    one, two = (fft.CursorLoader(range(32), 32, seed=seed, collate_fn=list) for seed in (1, 2))
    orders = [loader.indices(number) for loader in (one, two) for number in range(3)]
    assert len({tuple(order) for order in orders}) == 6


def test_two_loaders_of_one_process_do_not_disturb_each_others_noise() -> None:
    """The generators belong to the process, so only one item is read at a time."""
    inside, seeded, done = (threading.Event() for _ in range(3))

    class Slow(Noisy):
        def __getitem__(self, index: int) -> dict[str, Any]:
            first = super().__getitem__(index)
            inside.set()
            seeded.wait(0.2)  # it waits in full if the other one is kept out
            found = {**first, "n": np.random.rand()}
            done.set()
            return found

    class Other(Noisy):
        def __getitem__(self, index: int) -> dict[str, Any]:
            seeded.set()
            assert done.wait(20)
            return super().__getitem__(index)

    def other() -> None:
        assert inside.wait(20)
        fft.CursorLoader(Other(), 1, seed=9).take(Due(0, 0, 1))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other)
        disturbed = bits(fft.CursorLoader(Slow(), 1, seed=3).take(Due(0, 0, 1)))
        waiting.result(20)
    assert disturbed == bits(fft.CursorLoader(Slow(), 1, seed=3).take(Due(0, 0, 1)))


def test_unreadable_item_leaves_the_generators_unchanged(tmp_path: Path) -> None:
    """The trainer draws from the main thread's generators, and its replay must draw the same."""

    def drawn() -> list[float]:
        return [torch.rand(1).item(), random.random(), np.random.rand()]

    def seed() -> None:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)

    seed()
    wanted = drawn()
    seed()
    with pytest.raises(OSError, match="stale file handle"):
        fft.CursorLoader(OnceBroken(tmp_path / "mark"), 8, shuffle=False).take(Due(0, 0, 1))
    assert drawn() == wanted


def test_samples_are_had_together_where_the_dataset_can_give_them_so() -> None:
    class Together(Noisy):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [-index for index in indices]

    loader = fft.CursorLoader(Together(), 3, shuffle=False, collate_fn=list)
    assert loader.take(Due(1, 1, 1)) == [-3, -4, -5]


def test_the_copy_of_an_array_lies_in_memory_as_the_array_does() -> None:
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert copied(array).strides == array.strides


# --- what is kept and what is not ----------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.multiprocess
def test_a_batch_that_is_committed_is_not_kept(count: int) -> None:
    with closing(fft.CursorLoader(Noisy(), 4, num_workers=count)) as loader:
        held = [weakref.ref(loader.take(Due(n, n, 1))["x"]) for n in range(6)]
        assert [ref() is not None for ref in held] == [False] * 5 + [True]


class OnceBroken(Noisy):
    """A data set whose sample 5 cannot be loaded the first time, as from a file system that was
    away."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5 and not self.mark.exists():
            self.mark.touch()
            raise OSError("stale file handle")
        return super().__getitem__(index)


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.multiprocess
def test_retry_after_an_error_reads_the_item_again(tmp_path: Path, count: int) -> None:
    data = OnceBroken(tmp_path / "mark")
    with closing(fft.CursorLoader(data, 4, shuffle=False, num_workers=count)) as loader:
        loader.take(Due(0, 0, 1))
        with pytest.raises(OSError, match="stale file handle"):
            loader.take(Due(1, 1, 1))
        for number in (1, 2, 3):
            assert bits(loader.take(Due(number, number, 1))) == bits(loader[number])


@pytest.mark.parametrize("wanted", [Due(3, 3, 2), Due(10, 10, 2)], ids=["others", "past"])
@pytest.mark.multiprocess
def test_cancelled_item_is_not_loaded_by_its_worker(tmp_path: Path, wanted: Due) -> None:
    gate, log = tmp_path / "gate", tmp_path / "log"

    class Gated(Noisy):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index // 4 == 2:
                wait_until(gate.exists, "the test opens the gate")
            return super().__getitem__(index)

    made = fft.CursorLoader(Gated(log), 4, shuffle=False, num_workers=1, prefetch_factor=4)
    with closing(made) as loader, ThreadPoolExecutor(1) as pool:
        loader.take(Due(0, 0, 2))  # asked for ahead: 2, on which the worker waits, 4, 6, 8
        taken = pool.submit(loader.take, wanted)
        try:
            wait_until(lambda: int(loader._obsolete) > 0, "the worker is told", 10)
        finally:
            gate.touch()
        assert bits(taken.result(30))[0] == list(range(wanted.number * 4, wanted.number * 4 + 4))
        begun = {int(i) // 4 for i in log.read_text().split()}
        assert begun.isdisjoint({4, 6, 8})


@pytest.mark.multiprocess
def test_deferred_item_is_loaded_when_requested_again(tmp_path: Path) -> None:
    """Two rollbacks in a row change the members and change them back before the answers are
    taken."""
    gate = tmp_path / "gate"

    class Gated(Noisy):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index // 4 == 3:
                wait_until(gate.exists, "the test opens the gate")
            return super().__getitem__(index)

    made = fft.CursorLoader(Gated(), 4, shuffle=False, num_workers=1, prefetch_factor=4)
    with closing(made) as loader:
        loader.take(Due(0, 0, 2))  # asked for ahead: 2, 4, 6, 8
        loader.take(Due(1, 1, 1))  # and now 3, on which the worker waits, 5, 7, 9
        loader.take(Due(2, 2, 2))  # it is loaded; 5, 7 and 9 are for others
        gate.touch()
        answers = loader._iterator._worker_result_queue
        wait_until(lambda: answers.qsize() == 4, "3 is read, and the others are put aside", 10)
        for number in range(3, 10):
            assert bits(loader.take(Due(number, number, 1))) == bits(loader[number])


@pytest.mark.multiprocess
def test_ctrl_c_is_not_for_the_workers() -> None:
    """A terminal sends it to all processes; the trainer drains, and needs data until then."""
    with closing(fft.CursorLoader(Noisy(), 4, num_workers=2)) as loader:
        loader.take(Due(0, 0, 1))
        pids = workers(loader)
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        for number in range(1, 8):
            loader.take(Due(number, number, 1))
        assert workers(loader) == pids


# --- streams -------------------------------------------------------------------------------------


class Numbers:
    """An iterator with ``close`` over every ``step``-th number; item 4 fails the first time."""

    def __init__(self, log: list[str], first: int, step: int) -> None:
        self.log, self.at, self.step = log, first, step
        self.name = f"{first}+{step}"
        log.append(f"open {self.name}")

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> int:
        number, self.at = self.at, self.at + self.step
        if number == 4 and "failed" not in self.log:
            self.log.append("failed")
            raise OSError("connection reset")
        return number

    def close(self) -> None:
        self.log.append(f"close {self.name}")


def numbered(log: list[str]) -> fft.StreamLoader:
    """Return a loader of such streams."""
    return fft.StreamLoader(lambda first, step: Numbers(log, first, step))


def test_stream_is_reopened_when_members_change() -> None:
    loader = numbered(["failed"])
    taken = [loader.take(Due(n, n, 2)) for n in (0, 2, 4)]
    taken += [loader.take(Due(n, n, 1)) for n in (6, 7, 8)]  # 6 is next either way, 7 is not
    assert taken == [0, 2, 4, 6, 7, 8]


def test_a_rank_of_a_group_of_two_reads_one_stream_of_its_own_items() -> None:
    log = ["failed"]
    inputs = Inputs(numbered(log), ranks=2, rank=1)
    taken = [drawn(inputs, plan(cursor, 0, 2)).batch for cursor in (0, 2, 4)]
    assert taken == [1, 5, 9]
    probe = ["open 0+1", "close 0+1", "open 1+1", "close 1+1"]  # compared between the groups
    assert sorted(log[1:]) == sorted(["open 1+4", *probe])


def test_stream_is_closed_before_the_next_is_opened() -> None:
    log = ["failed"]
    loader = numbered(log)
    loader.take(Due(0, 1, 3))
    loader.take(Due(3, 3, 2))
    assert log[1:] == ["open 1+3", "close 1+3", "open 3+2"]


def test_failed_stream_is_reopened_at_the_item_that_failed() -> None:
    log: list[str] = []
    loader = numbered(log)
    assert [loader.take(Due(n, n, 1)) for n in (2, 3)] == [2, 3]
    with pytest.raises(OSError, match="connection reset"):
        loader.take(Due(4, 4, 1))
    assert [loader.take(Due(n, n, 1)) for n in (4, 5)] == [4, 5]
    assert log[-1] == "open 4+1"


def shuffled(own: int | None, **options: Any) -> fft.StreamLoader:
    """Return a loader that shuffles by the global generator, or by one with a seed of its own."""

    def open_stream(first: int, stride: int) -> Iterator[int]:
        generator = None if own is None else torch.Generator().manual_seed(own)
        return iter(torch.randperm(64, generator=generator).tolist()[first::stride])

    return fft.StreamLoader(open_stream, items=64, **options)


def test_stream_that_depends_on_its_first_item_is_refused() -> None:
    with pytest.raises(DataError, match=r"item 1 of open_stream\(0, 1\) differs .* by a generator"):
        shuffled(None).fingerprint(0, 2)
    assert shuffled(7).fingerprint(0, 2) == shuffled(7).fingerprint(2, 2)
    assert shuffled(7).fingerprint(0, 2) != shuffled(8).fingerprint(0, 2), "other data"
    single = fft.StreamLoader(lambda _first, _stride: iter([1.0]), items=1)
    assert single.fingerprint(0, 2) is not None, "there is no item 1"
    assert shuffled(None, identify=lambda _: 0).fingerprint(0, 2) is not None


# --- who has other data --------------------------------------------------------------------------

DATA = list(range(20))


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 2), ("data_epochs", 3), ("shuffle", False), ("drop_last", False), ("batch_size", 5)],
)
def test_joiner_with_another_order_is_refused_with_the_difference(name: str, value: Any) -> None:
    mine: dict[str, Any] = {"batch_size": 4, "seed": 1}
    state = fft.CursorLoader(DATA, **mine).export(3)
    with pytest.raises(DataError, match=f"{name} is {value} here"):
        fft.CursorLoader(DATA, **{**mine, name: value}).load(state, 3)


@pytest.mark.parametrize(("name", "value"), [("seed", 2), ("items", 30)])
def test_joiner_with_another_stream_is_refused_with_the_difference(name: str, value: int) -> None:
    state = fft.StreamLoader(iter).export(3)
    with pytest.raises(DataError, match=f"{name} is {value} here"):
        fft.StreamLoader(iter, **{name: value}).load(state, 3)


# --- loaders with a state ------------------------------------------------------------------------


class Stateful:
    """A loader that reads its place when it is iterated over, as torchdata's do; its state is a
    live object."""

    def __init__(self) -> None:
        self.state = {"next": 0}

    def __iter__(self) -> Iterator[list[int]]:
        number = self.state["next"]
        while True:
            self.state["next"] = number = number + 1
            yield [number - 1]

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


def test_exported_state_does_not_change_later() -> None:
    source = StreamSource(Stateful())
    source.take(Due(0, 3, 4))  # four items drawn
    state = source.export(2)
    assert state["loader_state"] == {"next": 2}
    source.take(Due(2, 5, 4))
    for _ in range(2):  # a job resumes from a checkpoint more than once
        resumed = StreamSource(Stateful())
        resumed.load(state, 2)
        assert resumed.take(Due(2, 3, 4)) == [3]
        assert state["loader_state"] == {"next": 2}


def test_prefetched_loader_continues_at_a_new_position() -> None:
    """The group was away; the items that it drew before are discarded."""
    ahead, away = StreamSource(Stateful()), StreamSource(Stateful())
    assert away.holds(0, 4)
    for number in range(0, 10, 2):
        ahead.take(Due(number, number + 1, 2))
    away.load(ahead.export(10), 10)
    assert [away.take(Due(10, number, 3)) for number in (10, 11, 12)] == [[10], [11], [12]]

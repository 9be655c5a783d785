"""Tests of loaders by number with real worker processes: same bits, only this rank's items, their
end."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import Forked, as_main
from waiting import wait_until

import fft
from fft.errors import DataError
from fft.messages.effects import StartTxn
from fft.messages.protocol import Token
from fft.train.data.retries import WorkerDied
from fft.train.data.source import Due, Inputs


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples with noise from all three global generators; what is loaded is recorded in a file."""

    def __init__(self, log: Path | None = None, size: int = 96) -> None:
        self.log, self.size = log, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{index}\n")
        x = index + torch.randn(3)
        return {"i": index, "x": x, "r": random.random(), "n": np.random.rand()}


def bits(batch: dict[str, Any]) -> list[Any]:
    """Return every bit of a batch of `Noisy`, comparable."""
    return [batch[name].tolist() for name in ("i", "x", "r", "n")]


def workers(loader: Any) -> list[int]:
    """Return the process ids of the workers of an open loader."""
    return [worker.pid for worker in loader._iterator._workers]


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return text.rpartition(")")[2].split()[0] == "Z"


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Yield a function that makes loaders, which are closed at the end."""
    made: list[Any] = []

    def make(kind: Callable[..., Any], *args: Any, **options: Any) -> Any:
        loader = kind(*args, **options)
        made.append(loader)
        return loader

    yield make
    for loader in made:
        loader.close()


# --- order and bits ------------------------------------------------------------------------------


def test_every_sample_comes_once_a_pass_in_an_order_of_the_pass() -> None:
    loader = fft.CursorLoader(list(range(20)), batch_size=4, seed=1, collate=list)
    first = [i for n in range(5) for i in loader[n]]
    second = [i for n in range(5, 10) for i in loader[n]]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second, "each data epoch has its own order"
    assert fft.CursorLoader(list(range(20)), 4, seed=1, collate_fn=list)[7] == loader[7]


def test_without_shuffle_and_with_the_incomplete_batch() -> None:
    loader = fft.CursorLoader(
        list(range(7)), 3, data_epochs=2, collate_fn=list, shuffle=False, drop_last=False
    )
    assert [loader[n] for n in range(4)] == [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2]]
    assert loader.holds(0, 6)
    assert not loader.holds(0, 7)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.multiprocess
def test_workers_load_the_same_bits_as_the_main_thread(
    opened: Callable[..., Any], context: str
) -> None:
    here = opened(fft.CursorLoader, Noisy(), 4, seed=3)
    there = opened(
        fft.CursorLoader, Noisy(), 4, seed=3, num_workers=2, multiprocessing_context=context
    )
    # alone; then the second of three; the first of two; a rank that has come back, further on
    dues = [Due(n, n, 1) for n in range(6)]
    dues += [Due(n, n + 1, 3) for n in range(6, 30, 3)]
    dues += [Due(n, n, 2) for n in range(30, 40, 2)] + [Due(n, n + 2, 4) for n in range(50, 70, 4)]
    pids = None
    for due in dues:
        assert bits(there.take(due)) == bits(here.take(due)), due
        pids = pids or workers(there)
    assert workers(there) == pids, "no worker was started anew"
    assert bits(here[17]) == bits(there[17])


def test_the_generators_of_the_main_thread_are_left_as_they_were() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    fft.CursorLoader(Noisy(), 4).take(Due(0, 0, 1))
    drawn = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert drawn == (torch.rand(1).item(), random.random(), np.random.rand())


@pytest.mark.multiprocess
def test_the_start_of_workers_draws_nothing_from_the_global_generator(
    opened: Callable[..., Any],
) -> None:
    torch.manual_seed(5)
    opened(fft.CursorLoader, Noisy(), 4, num_workers=2).take(Due(0, 0, 1))
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))


# --- what is loaded, and when --------------------------------------------------------------------


@pytest.mark.multiprocess
def test_only_this_ranks_items_are_loaded_and_ahead(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    loader = opened(
        fft.CursorLoader, Noisy(log), 4, data_epochs=1, num_workers=2, prefetch_factor=2
    )
    mine = [1, 4, 7, 10, 13]  # the second of three groups; two more are none of the four ahead
    expected = sorted(i for n in mine for i in loader.indices(n))
    loader.take(Due(0, 1, 3))
    wait_until(lambda: len(log.read_text().split()) == len(expected), "four items ahead")
    assert sorted(map(int, log.read_text().split())) == expected


@pytest.mark.multiprocess
def test_loader_keeps_its_prefetched_items_when_members_change(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    loader = opened(fft.CursorLoader, Noisy(log), 4, data_epochs=1, num_workers=2)
    first = bits(loader.take(Due(0, 1, 2)))
    wait_until(lambda: len(log.read_text().split()) == 20, "four items ahead: 3, 5, 7, 9")
    # rolled back: the other group is gone, and item 0 is due here, then 1, which is there, 2, …
    assert bits(loader.take(Due(0, 0, 1))) == bits(loader[0])
    assert bits(loader.take(Due(1, 1, 1))) == first
    for number in range(2, 10):
        assert bits(loader.take(Due(number, number, 1))) == bits(loader[number])
    before = len(loader.indices(0))
    seen = [int(i) for i in log.read_text().split()]
    for number in (1, 3, 5, 7, 9):  # once by the workers; and once here, to compare
        times = [seen.count(i) for i in loader.indices(number)]
        assert times == [1 if number == 1 else 2] * before, number


@pytest.mark.multiprocess
def test_members_that_change_back_get_the_items_put_aside(
    opened: Callable[..., Any],
) -> None:
    loader = opened(fft.CursorLoader, Noisy(), 4, num_workers=2)
    for number in range(12):
        for due in (Due(number, number, 2), Due(number, number + 1, 3), Due(number, number, 2)):
            assert bits(loader.take(due)) == bits(loader[due.number]), due


@pytest.mark.multiprocess
def test_a_replay_comes_from_memory(opened: Callable[..., Any], tmp_path: Path) -> None:
    log = tmp_path / "log"
    loader = opened(fft.CursorLoader, Noisy(log), 4, data_epochs=1, num_workers=1)
    batch = loader.take(Due(22, 22, 1))
    wait_until(lambda: len(log.read_text().split()) == 8, "22 and the last, 23")
    assert loader.take(Due(22, 22, 1)) is batch
    assert len(log.read_text().split()) == 8


# --- exceptions ----------------------------------------------------------------------------------


class Broken(Noisy):
    """A data set whose sample 5 cannot be loaded."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            raise KeyError("no such file")
        return super().__getitem__(index)


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.multiprocess
def test_an_exception_names_the_item_and_comes_when_that_is_due(
    opened: Callable[..., Any], count: int
) -> None:
    loader = opened(fft.CursorLoader, Broken(), 4, shuffle=False, num_workers=count)
    loader.take(Due(0, 0, 1))
    for _ in range(2):  # again, for who tries again
        with pytest.raises(KeyError) as caught:
            loader.take(Due(0, 1, 1))
        notes = getattr(caught.value, "__notes__", [])
        text = "\n".join([str(caught.value), *notes])
        assert "while item 1 (samples [4, 5, 6, 7]) of fft.CursorLoader was loaded" in text
        assert "while sample 5 of the dataset was read" in text
        assert ("in DataLoader worker process" in text) == (count > 0)
    assert bits(loader.take(Due(2, 2, 1)))[0] == [8, 9, 10, 11]


class Unsendable(Noisy):
    """A data set whose sample 5 is, or raises, an object that cannot be sent between processes."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.raises = raises

    def __getitem__(self, index: int) -> Any:
        class Local(Exception):
            pass

        if index != 5:
            return index
        if self.raises:
            raise Local("corrupt")
        return lambda: index


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.multiprocess
def test_unsendable_worker_result_raises_instead_of_hanging(
    opened: Callable[..., Any], raises: bool
) -> None:
    options = {"shuffle": False, "num_workers": 1, "collate_fn": list, "timeout": 20}
    loader = opened(fft.CursorLoader, Unsendable(raises), 4, **options)
    assert loader.take(Due(0, 0, 1)) == [0, 1, 2, 3]
    with pytest.raises(RuntimeError) as caught:
        loader.take(Due(0, 1, 1))
    if raises:
        assert "Local, reported as a RuntimeError: " in str(caught.value)
        assert "while item 1 (samples [4, 5, 6, 7])" in str(caught.value)
        assert "corrupt" in str(caught.value) and "sample 5" in str(caught.value)
    else:
        assert "item 1 cannot be sent to the trainer" in str(caught.value)
    assert loader.take(Due(2, 2, 1)) == [8, 9, 10, 11], "the worker goes on"


@pytest.mark.multiprocess
def test_an_exception_for_an_item_of_others_is_theirs(opened: Callable[..., Any]) -> None:
    loader = opened(fft.CursorLoader, Broken(), 4, shuffle=False, num_workers=2)
    loader.take(Due(0, 0, 1))  # item 1 fails, ahead
    for number in (2, 4, 6):
        loader.take(Due(number, number, 2))


class Deadly(Noisy):
    """A data set whose sample 21 ends the process that reads it, the first ``times`` times."""

    def __init__(self, log: Path, times: int, how: Callable[[], object]) -> None:
        super().__init__(log)
        self.times, self.how = times, how

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        assert self.log is not None
        if index == 21 and self.log.read_text().split().count("21") <= self.times:
            self.how()
        return sample


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def plan(cursor: int) -> StartTxn:
    """Return the begin of a txn of one group."""
    return StartTxn(Token(1, 1), cursor, "lineage", cursor, 0, 1, ("0",), 0)


@pytest.mark.multiprocess
@pytest.mark.parametrize("of_torch", [True, False])
def test_items_of_a_killed_worker_are_loaded_again_with_the_same_bits(
    opened: Callable[..., Any], tmp_path: Path, of_torch: bool
) -> None:
    loader = opened(
        fft.CursorLoader,
        Deadly(tmp_path / "log", 2, kill_self),
        4,
        shuffle=False,
        num_workers=2,
    )
    loader.open()
    before = signal.getsignal(signal.SIGCHLD)
    if not of_torch:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        inputs = Inputs(loader, 1, 0)
        batches = [inputs.draw(plan(cursor)) for cursor in range(12)]
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert (tmp_path / "log").read_text().split().count("21") == 3
    there = [bits(drawn.batch) for drawn in batches if drawn is not None]
    assert there == [bits(fft.CursorLoader(Noisy(), 4, shuffle=False)[n]) for n in range(12)]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("how", "words"),
    [(kill_self, "worker 0 was ended by SIGKILL"), (partial(os._exit, 3), "ended with status 3")],
)
def test_third_death_at_an_item_names_the_item_and_the_signal(
    opened: Callable[..., Any], tmp_path: Path, how: Callable[[], object], words: str
) -> None:
    loader = opened(
        fft.CursorLoader, Deadly(tmp_path / "log", 99, how), 4, shuffle=False, num_workers=2
    )
    loader.open()
    inputs = Inputs(loader, 1, 0)
    for cursor in range(5):  # workers die ahead, and no item is lost or accused
        assert inputs.draw(plan(cursor)) is not None
    with pytest.raises(WorkerDied, match=rf"{words} while item 5 was awaited.*num_workers") as died:
        inputs.draw(plan(5))
    assert died.value.fft_item == "item 5"  # type: ignore[attr-defined]
    assert "item 5 could not be loaded in 3 attempts" in died.value.__notes__


@pytest.mark.multiprocess
def test_death_of_an_idle_worker_raises_only_where_an_item_is_taken(
    opened: Callable[..., Any],
) -> None:
    loader = opened(fft.CursorLoader, Noisy(), 4, num_workers=1)
    loader.open()
    inputs = Inputs(loader, 1, 0)
    inputs.draw(plan(0))
    (pid,) = workers(loader)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: gone(pid), "the worker has ended", 10)  # a step function runs
    for cursor in range(1, 9):
        drawn = inputs.draw(plan(cursor))
        assert drawn is not None and bits(drawn.batch) == bits(loader[cursor])


class Sockets(Noisy):
    """A data set whose samples are the open files of the reading process."""

    def __getitem__(self, index: int) -> Any:
        found = []
        for fd in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # the descriptor of the listing itself
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
        return found


@pytest.mark.multiprocess
def test_workers_of_a_running_job_hold_none_of_its_later_sockets(
    opened: Callable[..., Any],
) -> None:
    early, _peer = socket.socketpair()
    loader = opened(fft.CursorLoader, Sockets(), 1, num_workers=1, collate_fn=lambda each: each[0])
    loader.open()
    late, peer = socket.socketpair()
    with early, _peer, late, peer:
        inputs = Inputs(loader, 1, 0)
        inputs.draw(plan(0))
        os.kill(workers(loader)[0], signal.SIGKILL)
        inode = {each: f"socket:[{os.fstat(each.fileno()).st_ino}]" for each in (early, late)}
        drawn = [inputs.draw(plan(cursor)) for cursor in range(1, 9)][-1]
        assert drawn is not None and inode[early] in drawn.batch
        assert inode[late] not in drawn.batch
        late.close()
        peer.settimeout(10)
        assert peer.recv(1) == b"", "the peer learns of the end at once"


# --- streams -------------------------------------------------------------------------------------


class Shards:
    """A data set that opens streams of noisy batches, and records in a file what it opened."""

    def __init__(self, log: Path, end: int = 1_000_000) -> None:
        self.log, self.end = log, end

    def __call__(self, first: int, step: int) -> Iterator[torch.Tensor]:
        with self.log.open("a") as file:
            file.write(f"{first}+{step}\n")
        for number in range(first, self.end, step):
            yield number + torch.rand(2)


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.multiprocess
def test_stream_is_opened_per_rank_and_again_when_members_change(
    opened: Callable[..., Any], tmp_path: Path, count: int
) -> None:
    log = tmp_path / "log"
    loader = opened(fft.StreamLoader, Shards(log), seed=2, num_workers=count)
    taken = [loader.take(Due(n, n + 1, 2)) for n in range(0, 12, 2)]
    assert [int(x[0]) for x in taken] == [1, 3, 5, 7, 9, 11]
    per_worker = 2 * max(1, count)
    found = [tuple(map(int, line.split("+"))) for line in log.read_text().split()]
    assert [step for _, step in found] == [per_worker] * max(1, count), "each opened one stream"
    taken = [loader.take(Due(n, n, 1)) for n in range(12, 18)]
    assert [int(x[0]) for x in taken] == list(range(12, 18))
    assert torch.equal(taken[-1], loader[17]), "the same bits by whatever way"


def test_stream_that_ends_too_early_raises_eof_error(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    loader = opened(fft.StreamLoader, Shards(tmp_path / "log", end=2))
    loader.take(Due(1, 1, 1))
    with pytest.raises(EOFError, match=r"ended before item 2; .*items="):
        loader.take(Due(2, 2, 1))
    counted = opened(fft.StreamLoader, Shards(tmp_path / "log", end=2), items=2)
    assert counted.holds(0, 2)
    assert not counted.holds(0, 3)


# --- arguments -----------------------------------------------------------------------------------


class Marked(Noisy):
    """A data set that knows which worker set it up."""

    mark = -1

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"mark": self.mark}


def mark(worker: int) -> None:
    """Mark the worker, as a user's ``worker_init_fn`` does."""
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.mark = worker  # type: ignore[attr-defined]


@pytest.mark.multiprocess
def test_a_worker_init_fn_finds_the_users_dataset(opened: Callable[..., Any]) -> None:
    loader = opened(fft.CursorLoader, Marked(), 4, num_workers=2, worker_init_fn=mark)
    marks = {int(loader.take(Due(n, n, 1))["mark"][0]) for n in range(4)}
    assert marks == {0, 1}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_sampler": [[1]]}, "batch_sampler=: pass batch_size=None and sampler=batch_s"),
        ({"sampler": [1, 2, 3]}, r"at least batch_size=4 sample indexes .* found 3; return more"),
        ({"sampler": [1] * 4, "order": range}, "takes sampler= or order=, not both"),
        ({"order": lambda n: [0, 1, 2, 99]}, r"found indexes from 0 to 99 in data epoch 0; return"),
        ({"micro_batches": 0}, "expected micro_batches= of at least 1, got 0"),
        ({"micro_batches": 99}, "batch_size=4 samples in each of 99 micro-batches, found"),
        ({"generator": torch.Generator()}, "does not take generator=: the order comes from seed="),
        ({"workers": 2}, "does not take workers=: .*; did you mean 'num_workers'?"),
        ({"data_epoch": 2}, "does not take data_epoch=: .*; did you mean 'data_epochs'?"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        fft.CursorLoader(Noisy(), 4, **options)


def test_torch_checks_its_own_options_at_once() -> None:
    with pytest.raises(ValueError, match="prefetch_factor"):
        fft.CursorLoader(Noisy(), 4, prefetch_factor=3)


def test_a_dataset_smaller_than_a_batch_or_without_index_is_refused() -> None:
    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

    for data, size, words in (
        ([1, 2], 4, "at least batch_size=4 samples, found 2; reduce batch_size"),
        ([1, 2], 0, "batch_size= of at least 1, got 0"),
        ([], 1, "expected a dataset with samples, got a list with none"),
        (iter([1]), 1, r"with len\(\), got a list_iterator, which has none"),
        ([1, 2], None, "got None without an order"),
    ):
        with pytest.raises(DataError, match=words):
            fft.CursorLoader(data, batch_size=size)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"use fft\.StreamLoader"):
        fft.CursorLoader(Endless(), batch_size=4)


# --- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "collect"])
@pytest.mark.multiprocess
def test_workers_end_with_the_loader(how: str) -> None:
    loader = fft.CursorLoader(Noisy(), 4, num_workers=2, persistent_workers=True)
    loader.take(Due(0, 0, 1))
    pids = workers(loader)
    gc.disable()  # no cycle keeps it alive
    try:
        if how == "close":
            loader.close()
            loader.close()
        else:
            del loader
        assert all(map(gone, pids))
    finally:
        gc.enable()


def compute_for_ever(_: int) -> None:
    """Compute as a thread that sends tensors: mostly inside torch's C++, without the GIL."""

    def compute() -> None:
        a = torch.rand(64, 64)
        while True:
            a = torch.nn.functional.normalize(a @ a)

    for _ in range(3):
        threading.Thread(target=compute, daemon=True).start()


@pytest.mark.long
@pytest.mark.multiprocess
def test_spawned_workers_exit_with_0_beside_running_threads() -> None:
    loader = fft.CursorLoader(
        Noisy(),
        4,
        num_workers=2,
        multiprocessing_context="spawn",
        worker_init_fn=compute_for_ever,
    )
    loader.take(Due(0, 0, 1))
    processes = loader._iterator._workers
    loader.close()
    assert [process.exitcode for process in processes] == [0, 0]


ORPHANS = """
import os, sys, time
import torch
import fft
from fft.train.data.source import Due


def say(*words):  # in one piece, between the lines of the others
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index:
            say("busy")
            time.sleep(600)
        return index


loader = fft.CursorLoader(Slow(), 1, shuffle=False, num_workers=2)
loader.take(Due(0, 0, 1))
say(*[w.pid for w in loader._iterator._workers])
time.sleep(600)
"""


@pytest.mark.multiprocess
def test_workers_end_with_a_killed_trainer_within_an_item(
    tmp_path: Path,
) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    trainer = Forked(as_main, str(script), talks=True)
    try:
        lines = [trainer.stdout.readline().split() for _ in range(3)]
        (pids,) = (list(map(int, line)) for line in lines if line != ["busy"])
        assert len(pids) == 2
        trainer.end()
        wait_until(lambda: all(map(gone, pids)), "the workers are gone")
        assert trainer.stdout.read() == ""
    finally:
        trainer.close()


class ByEpoch(torch.utils.data.Dataset[int]):
    epoch = -1

    def __len__(self) -> int:
        return 8

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return self.epoch


@pytest.mark.parametrize("count", [0, 2])
def test_set_epoch_of_the_dataset_gets_the_data_epoch_of_each_item(count: int) -> None:
    loader = fft.CursorLoader(ByEpoch(), batch_size=4, num_workers=count)
    try:
        for number in range(6):
            taken = loader.take(Due(number, number, 1))
            assert taken.tolist() == [number // 2] * 4
        assert loader[0].tolist() == [0] * 4, "an earlier item again"
        assert loader[5].tolist() == [2] * 4
    finally:
        loader.close()


@pytest.mark.parametrize("count", [0, 2])
def test_two_loaders_over_one_dataset_read_their_own_data_epochs(count: int) -> None:
    dataset = ByEpoch()
    trains = fft.CursorLoader(dataset, batch_size=4, num_workers=count)
    evaluates = fft.CursorLoader(dataset, batch_size=2)
    try:
        for number in range(4):
            assert trains.take(Due(number, number, 1)).tolist() == [number // 2] * 4
            assert evaluates[0].tolist() == [0] * 2
            assert trains[3].tolist() == [1] * 4
            dataset.set_epoch(7)  # as a script does for an evaluation of its own
            assert trains[3].tolist() == [1] * 4
    finally:
        trains.close()
        evaluates.close()

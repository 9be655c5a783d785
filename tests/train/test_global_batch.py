"""Tests of the batches of a fixed number of samples in each step: who takes which, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import fft
from fft.errors import DataError
from fft.messages.effects import StartTxn
from fft.messages.protocol import Token
from fft.train.data.global_batch import slices_of
from fft.train.data.source import Due, Inputs, as_source
from fft.train.data.step_input import StepInput


def plan(cursor: int, index: int | None, groups: int, slices: int) -> StartTxn:
    """Return the begin of a txn that takes a fixed number of slices."""
    begin = Token(1, 1), 0, "lineage", cursor, index, groups, ("0",), 0
    return StartTxn(*begin, next_cursor=cursor + slices, fixed_slices=slices)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("slices", range(1, 8))
def test_due_lists_the_items_of_a_rank_in_this_txn_and_later_ones(slices: int, ranks: int) -> None:
    cursor = 5
    for groups in range(1, slices + 1):
        everything = []
        for index, rank in ((i, r) for i in range(groups) for r in range(ranks)):
            txns = [plan(cursor + k * slices, index, groups, slices) for k in range(3)]
            items = [n * ranks + rank for txn in txns for n in txn.slices]
            mine = len(txns[0].slices)
            everything += items[:mine]
            for item in items[:mine]:
                due = Due(cursor * ranks, item, slices * ranks, groups * ranks)
                assert list(islice(due.following(), len(items))) == items
                assert [n for n in range(items[-1] + 1) if due.takes(n)] == items
        assert sorted(everything) == list(range(cursor * ranks, (cursor + slices) * ranks))


def drawn(inputs: Inputs, begin: StartTxn) -> StepInput:
    """Return the input of a txn that has one."""
    found = inputs.draw(begin)
    assert found is not None
    return found


def test_inputs_have_the_batches_of_a_rank_until_a_whole_step_is_missing() -> None:
    inputs = Inputs(as_source(fft.Loader([[n] for n in range(10)], identify=lambda b: b)), 1, 0)
    first = drawn(inputs, plan(0, 0, 2, 3))
    assert first.batch == [[0], [2]] and first.dealt == {"slices": [0, 2], "items": [0, 2]}
    assert first.ids == [0, 2] and first.items == range(3) and first.progress == 0.3
    assert drawn(inputs, plan(0, 1, 2, 3)).batch == [[1]]
    assert drawn(inputs, plan(3, None, 2, 3)).batch == [[3], [5]], "as the first group"
    last = drawn(inputs, plan(6, 0, 1, 3))
    assert last.batch == [[6], [7], [8]] and last.is_last and last.progress == 1.0
    assert inputs.draw(plan(9, 0, 1, 3)) is None


class Log:
    """A function that opens streams of their item numbers, and records in a file what it opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, first: int, step: int) -> Iterator[torch.Tensor]:
        with self.path.open("a") as file:
            file.write(f"{first}+{step}\n")
        for number in range(first, 1_000_000, step):
            yield torch.tensor([number])


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Yield a function that makes loaders, which are closed at the end."""
    made: list[Any] = []

    def make(kind: Callable[..., Any], *args: Any, **options: Any) -> Any:
        made.append(kind(*args, **options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def take(loader: Any, txns: list[StartTxn]) -> None:
    """Take the batches of some txns, each one twice, as a replay does."""
    inputs = Inputs(loader, 1, 0)
    for txn in txns:
        for _ in range(2):
            found = [int(batch[0]) for batch in drawn(inputs, txn).batch]
            assert found == list(txn.slices)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.multiprocess
def test_loaders_take_several_batches_per_txn_as_groups_come_and_go(
    opened: Callable[..., Any], tmp_path: Path, workers: int
) -> None:
    both = [plan(n, 0, 2, 3) for n in range(0, 15, 3)]
    alone = [plan(n, 0, 1, 3) for n in range(15, 24, 3)]
    again = [plan(n, 1, 2, 3) for n in range(24, 33, 3)]
    samples = torch.arange(100)
    one = opened(fft.CursorLoader, samples, 1, shuffle=False, num_workers=workers)
    take(one, [*both, *alone, *again])
    stream = opened(fft.StreamLoader, Log(tmp_path / "log"), num_workers=workers)
    take(stream, both)
    # the first two streams are those of the comparison between the groups
    found = [line for line in (tmp_path / "log").read_text().split() if not line.endswith("+1")]
    # two batches in a txn of three: two streams, on one worker or with one on each of two
    assert sorted(found)[:2] == ["0+3", "2+3"] and len(found) == 2
    take(stream, [*alone, *again])
    evenly = opened(fft.StreamLoader, Log(tmp_path / "evenly"), num_workers=workers)
    take(evenly, [plan(n, 1, 2, 4) for n in range(0, 20, 4)])
    steps = {line.partition("+")[2] for line in (tmp_path / "evenly").read_text().split()}
    assert steps - {"1"} == {str(2 * max(1, workers))}, "one stream for all batches of a worker"


@pytest.mark.multiprocess
def test_workers_continue_their_streams_while_the_members_stay(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    """A worker once read the position of the trainer in the middle of a write, so that it skipped
    a request and another worker opened the stream at that item."""
    stream = opened(fft.StreamLoader, Log(tmp_path / "log"), num_workers=2)
    for first in range(0, 3000, 3):
        for item in (first, first + 2):
            assert int(stream.take(Due(first, item, step=3, stride=2))) == item
    assert sorted((tmp_path / "log").read_text().split()) == ["0+3", "2+3"]


def loader(**options: Any) -> fft.CursorLoader:
    return fft.CursorLoader(list(range(64)), **{"batch_size": 4, **options})


def test_slices_are_the_samples_of_a_step_by_those_of_a_group() -> None:
    assert slices_of(loader(), 24, takers=1, groups=4) == 6
    assert slices_of(loader(), 24, takers=3, groups=2) == 2
    assert slices_of([torch.zeros(8, 2)] * 4, 32, takers=1, groups=1) == 4


@pytest.mark.parametrize(
    ("given", "samples", "expected"),
    [
        (loader(), 20, "multiple of 8, the samples that a group takes at once (one batch of 4 sam"),
        (loader(), 0, "for each of 2 ranks); pass global_batch=8"),
        (loader(), 8, "2 groups take at least 16 samples in a step"),
        (loader(drop_last=False), 16, "pass drop_last=True"),
        (loader(micro_batches=2), 16, "remove micro_batches= from the loader, and loop over txn"),
        (fft.StreamLoader(Log(Path("log"))), 16, "set the attribute samples_per_item"),
    ],
)
def test_a_global_batch_that_batches_do_not_make_up_is_refused(
    given: Any, samples: int, expected: str
) -> None:
    with pytest.raises(DataError) as caught:
        slices_of(given, samples, takers=2, groups=2)
    assert expected in str(caught.value)
    assert f"global_batch={samples}: " in str(caught.value)

"""Tests of the reductions of a txn: their results, futures and errors, and their manifest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, ProcessGroupGloo, ReduceOp
from torchft.process_group import ProcessGroupDummy

from fft.errors import FftError, TxnAborted
from fft.messages.effects import StartTxn
from fft.messages.protocol import Manifest, Token
from fft.train.gradients.reductions import ManifestBuilder, OpenTxn, Reductions
from fft.train.guard.watchers import Watchers


def test_future_is_completed_by_a_rollback_before_or_after_its_wrap() -> None:
    """The engine cancels on its own thread while the main thread may be reducing."""
    side = SimpleNamespace(pg=None, timeout=timedelta(seconds=60), logger=logging)
    manager: Any = SimpleNamespace(_torchft=side, report_error=print)
    reductions = Reductions(OpenTxn(), manager, Watchers(), None, 0)
    never: torch.futures.Future[int] = torch.futures.Future()
    before = reductions.wrap_future(never, 1)
    assert not before.done()
    reductions.cancel("a peer has failed")
    after = reductions.wrap_future(never, 2)
    assert (before.done(), before.value(), after.done(), after.value()) == (True, 1, True, 2)
    reductions.begin()
    assert not reductions.wrap_future(never, 3).done()


OPS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN)
DTYPES = (torch.float32, torch.float64, torch.int32)
REDUCTION = st.tuples(
    st.sampled_from(OPS), st.sampled_from(DTYPES), st.lists(st.integers(1, 3), max_size=2)
)


def manifest_of(reductions: Sequence[tuple[Any, torch.dtype, Sequence[int]]]) -> Manifest:
    builder = ManifestBuilder()
    for op, dtype, shape in reductions:
        builder.add(torch.zeros(tuple(shape), dtype=dtype), op)
    return builder.build()


@given(st.lists(REDUCTION, max_size=4), st.lists(REDUCTION, min_size=1, max_size=1), st.data())
def test_manifests_are_equal_exactly_where_reductions_are(
    reductions: list[Any], other: list[Any], data: st.DataObject
) -> None:
    """Two ranks that differ in one operator, type or shape of one reduction must not commit."""
    place = data.draw(st.integers(0, len(reductions)))
    changed = [*reductions[:place], *other, *reductions[place + 1 :]]
    for part in range(3):  # the same reduction except for one part
        if place < len(reductions):
            one = list(reductions[place])
            one[part] = other[0][part]
            near = [*reductions[:place], tuple(one), *reductions[place + 1 :]]
            assert (manifest_of(near) == manifest_of(reductions)) == (near == reductions)
    assert (manifest_of(changed) == manifest_of(reductions)) == (changed == reductions)


class Rank:
    """Reductions of one of two ranks, on a gloo group of threads."""

    def __init__(self, store: HashStore, rank: int, index: int | None) -> None:
        group = ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        side = SimpleNamespace(pg=group, timeout=timedelta(seconds=60), logger=logging)
        self.errors: list[Exception] = []
        manager: Any = SimpleNamespace(_torchft=side, report_error=self.errors.append)
        self.txn = OpenTxn()
        self.reductions = Reductions(self.txn, manager, Watchers(), None, 0)
        plan = StartTxn(Token(1, 1), 7, "", 0, index, 1 if index is None else 2, ("0", "1"), 0)
        self.txn.begin(plan)


def two_ranks(work: Callable[[Rank], Any], second_counts: bool = True) -> list[Any]:
    """Return the results of ``work`` on two ranks, of which the second one may not count."""
    store = HashStore()
    indices = [0, 1 if second_counts else None]

    def run(rank: int) -> Any:
        made = Rank(store, rank, indices[rank])
        if not second_counts:
            made.txn.participants = 1
        return work(made)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


@pytest.mark.parametrize(
    ("op", "second_counts", "expected"),
    [
        (ReduceOp.AVG, True, [2.0, 3.0]),
        (ReduceOp.SUM, True, [4.0, 6.0]),
        (ReduceOp.AVG, False, [1.0, 2.0]),
        (ReduceOp.SUM, False, [1.0, 2.0]),
    ],
)
def test_reduction_counts_the_groups_that_contribute(
    op: Any, second_counts: bool, expected: list[float]
) -> None:
    def work(rank: Rank) -> tuple[bool, list[float], Manifest]:
        values = [1.0, 2.0] if rank.txn.index == 0 else [3.0, 4.0]
        tensor = torch.tensor(values)
        reduction = rank.reductions.all_reduce(tensor, op, "layout")
        done = [reduction.wait() for _ in range(2)]  # a second wait changes nothing
        return all(done), tensor.tolist(), rank.reductions.manifest.build()

    first, second = two_ranks(work, second_counts)
    assert first == second
    assert first[:2] == (True, expected)


def test_future_of_a_reduction_runs_callbacks_on_the_result() -> None:
    """torchft's DiLoCo unpacks a bucket in such a callback, and its DDP returns the last future."""

    def work(rank: Rank) -> list[float]:
        tensor, found = torch.ones(2), list[float]()
        reduction = rank.reductions.all_reduce(tensor, ReduceOp.AVG)
        reduction.get_future().then(lambda _: found.extend(tensor.tolist()))
        assert reduction.wait()
        return found

    assert two_ranks(work) == [[1.0, 1.0]] * 2


class Failing(ProcessGroupDummy):
    """A group whose operations cannot be started, as one that was aborted."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        raise RuntimeError("the process group was aborted")


@pytest.mark.parametrize("by_fft", [False, True])
def test_reduction_that_cannot_start_fails_the_step_as_its_loop_expects(by_fft: bool) -> None:
    """torchft's loops learn it from the vote; FFT's own loop ends the step function."""
    txn, group, limit = OpenTxn(), Failing(0, 1), timedelta(seconds=60)
    side = SimpleNamespace(pg=group, timeout=limit, logger=logging)

    def report(error: Exception) -> None:
        txn.failure = error

    manager: Any = SimpleNamespace(_torchft=side, report_error=report)
    reductions = Reductions(txn, manager, Watchers(), None, 0)
    txn.by_fft = by_fft
    txn.begin(StartTxn(Token(1, 1), 7, "", 0, 0, 1, ("0",), 0))
    work = reductions.all_reduce(torch.ones(2), ReduceOp.AVG)
    assert work.wait()
    assert work.get_future().wait().tolist() == [1.0, 1.0]
    assert str(txn.failure) == "the process group was aborted"
    assert not txn.contributes
    if by_fft:
        with pytest.raises(TxnAborted, match="the process group was aborted"):
            reductions.all_reduce(torch.ones(2), ReduceOp.AVG)
    else:
        assert reductions.all_reduce(torch.ones(2), ReduceOp.AVG).wait()
        reductions.raise_if_failed()


def test_reduction_is_refused_in_doubt_and_between_two_txns_of_own_loop() -> None:
    txn = OpenTxn()
    side = SimpleNamespace(pg=None, timeout=timedelta(seconds=60), logger=logging)
    manager: Any = SimpleNamespace(_torchft=side, report_error=print)
    reductions = Reductions(txn, manager, Watchers(), None, 0)
    txn.begin(StartTxn(Token(1, 1), 7, "", 0, 0, 1, ("0",), 0))
    txn.voted, txn.by_fft = "step", True
    with pytest.raises(FftError, match=r"allreduce\(\) while the decision of step 7 is not known"):
        reductions.all_reduce(torch.ones(2), ReduceOp.SUM)
    txn.close()
    with pytest.raises(FftError, match=r"allreduce\(\) between two transactions"):
        reductions.all_reduce(torch.ones(2), ReduceOp.SUM)
    assert reductions.manifest.empty

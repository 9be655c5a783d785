"""Tests that a rollback frees every waiter for a txn's futures, whenever they were created."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import ReduceOp
from torchft.manager import Manager

from fft.messages.protocol import Manifest
from fft.train.gradients.recomputation import Recomputation
from fft.train.gradients.reductions import ManifestBuilder, TxnReductions
from fft.train.guard.watchers import Watchers


def _as_it_is(future: Any, default: Any, timeout: Any) -> Any:
    return future


def test_future_is_completed_by_a_rollback_before_or_after_its_wrap() -> None:
    """The engine cancels on its own thread while the main thread may be reducing."""
    reductions = TxnReductions(cast("Manager", None), Watchers(), None, Recomputation(0))
    never: torch.futures.Future[int] = torch.futures.Future()
    before = reductions.wrap(_as_it_is, never, 1, None)
    assert not before.done()
    reductions.cancel()
    after = reductions.wrap(_as_it_is, never, 2, None)
    assert (before.done(), before.value(), after.done(), after.value()) == (True, 1, True, 2)
    reductions.begin()
    assert not reductions.wrap(_as_it_is, never, 3, None).done()


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

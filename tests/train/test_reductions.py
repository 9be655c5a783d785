"""Tests that a rollback frees every waiter for a txn's futures, whenever they were created."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from fft.messages.protocol import Manifest
from fft.train.gradients.reductions import ManifestBuilder, OpenTxn, Reductions
from fft.train.guard.watchers import Watchers


def test_a_future_is_completed_by_a_rollback_before_or_after_it_was_made() -> None:
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

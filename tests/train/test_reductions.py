"""Futures of a txn that is rolled back: whoever waits for one is freed, whenever it was made."""

from __future__ import annotations

from typing import Any, cast

import torch
from torchft.manager import Manager

from fft.train.reductions import TxnReductions
from fft.train.watchers import Watchers


def _as_it_is(future: Any, default: Any, timeout: Any) -> Any:
    return future


def test_a_future_is_completed_by_a_rollback_before_or_after_it_was_made() -> None:
    """The engine cancels on a thread of its own, and the main thread may just be reducing."""
    reductions = TxnReductions(cast("Manager", None), Watchers(), None)
    never: torch.futures.Future[int] = torch.futures.Future()
    before = reductions.wrap(_as_it_is, never, 1, None)
    assert not before.done()
    reductions.cancel()
    after = reductions.wrap(_as_it_is, never, 2, None)
    assert (before.done(), before.value(), after.done(), after.value()) == (True, 1, True, 2)
    reductions.begin()
    assert not reductions.wrap(_as_it_is, never, 3, None).done()

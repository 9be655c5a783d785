"""Aborts that race with transfers under way: every waiter is freed, not only those gloo tells.

gloo forgets the waiter of a send that is queued, and of a receive that has begun, when the
connection ends. A run under many faults showed it as a rank that slept for the group's 60 s.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from rollback_harness import NOISE_S, run, until

from fft.rollback import AbortableGroup, GroupAborted, ShardProcessGroupGloo

ROUNDS = 60


def _gather(group: Any, size: int) -> Any:
    return group.all_gather_single(torch.empty(2 * size), torch.ones(size))


def _scatter(group: Any, size: int) -> Any:
    return group.reduce_scatter_single(torch.empty(size), torch.ones(2 * size))


def _racing(rank: int, ranks: int, port: int, seed: int) -> float:
    """Longest time, in seconds, from an abort to the end of the thread that was at work."""
    pg = ShardProcessGroupGloo(timedelta(seconds=60))
    group = AbortableGroup(pg)
    rng = random.Random(seed)  # equal on both ranks
    longest = 0.0
    for round_ in range(ROUNDS):
        size, after = rng.choice([4, 4096, 2_000_000]), rng.randrange(1, 12)
        group.configure(f"localhost:{port}/r{round_}", "0", rank, ranks, round_)
        done = [0]
        worker = threading.Thread(target=_work, args=(pg, size, done))
        worker.start()
        _until_done(done, after, worker)
        begin = time.monotonic()
        group.abort("test")
        worker.join(30)
        if worker.is_alive():
            raise AssertionError(f"round {round_}: still blocked 30 s after the abort")
        group.quiesce(timedelta(seconds=10))
        longest = max(longest, time.monotonic() - begin)
    group.close()
    return longest


def _until_done(done: list[int], after: int, worker: threading.Thread) -> None:
    """Wait for so many ops, or for the other rank's abort, whichever is first."""
    until(lambda: done[0] >= after or not worker.is_alive(), "the ops before the abort")


def _work(pg: Any, size: int, done: list[int]) -> None:
    ops: list[Callable[[Any, int], Any]] = [_gather, _scatter]
    try:
        while True:
            ops[done[0] % 2](pg, size).wait()
            done[0] += 1
    except (GroupAborted, RuntimeError):
        pass


@pytest.mark.multiprocess
def test_an_abort_in_the_middle_of_transfers_frees_everyone() -> None:
    longest = run(2, _racing, 11)
    print(
        f"\nabort to free, longest of {ROUNDS}: {', '.join(f'{s * 1e3:.0f} ms' for s in longest)}"
    )
    assert max(longest) < NOISE_S

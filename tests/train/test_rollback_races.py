"""Tests of aborts during transfers: every waiter is freed, including those that gloo forgets.

gloo forgets the waiter of a queued send, and of a receive that has begun, when the connection ends.
In a run under many faults a rank slept for the group's 60 s because of this.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from rollback_harness import NOISE_S, client, run
from torch.distributed import AllreduceOptions, TCPStore
from torchft import ProcessGroupGloo
from waiting import wait_until

from fft.train.process_groups import AbortableGroup, GroupAborted, ShardProcessGroupGloo, abortable

ROUNDS = 60
MINUTE = timedelta(seconds=60)


def _gather(group: Any, size: int) -> Any:
    return group.all_gather_single(torch.empty(2 * size), torch.ones(size))


def _scatter(group: Any, size: int) -> Any:
    return group.reduce_scatter_single(torch.empty(size), torch.ones(2 * size))


def _racing(rank: int, ranks: int, port: int, seed: int) -> float:
    """Return the longest time in seconds from an abort to the end of the working thread."""
    pg = ShardProcessGroupGloo(MINUTE)
    group = AbortableGroup(pg)
    longest = _race(pg, group, rank, ranks, port, seed)
    group.close()
    return longest


def _race(
    pg: ShardProcessGroupGloo, group: AbortableGroup, rank: int, ranks: int, port: int, seed: int
) -> float:
    rng = random.Random(seed)  # equal on both ranks
    longest = 0.0
    for round_ in range(ROUNDS):
        size, after = rng.choice([4, 4096, 2_000_000]), rng.randrange(1, 12)
        place = f"localhost:{port}/r{round_}"
        group.configure(place, "0", rank, ranks, round_, timeout=MINUTE)
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
    return longest


def _stranded(rank: int, ranks: int, port: int, seed: int) -> int:
    """Return how many backends have ops that gloo has forgotten; none is kept in the epoch after
    these have timed out."""
    pg = ShardProcessGroupGloo(timedelta(seconds=3))
    group, store = AbortableGroup(pg), client(port)
    _race(pg, group, rank, ranks, port, seed)
    kept = abortable._stranded_backends
    group.configure(f"localhost:{port}/next", "0", rank, ranks, ROUNDS, timeout=MINUTE)
    group._worker.join(NOISE_S)  # has retired the last round, which may be stranded as well
    found = len(kept)
    wait_until(lambda: all(work.is_over() for _, works in kept for work in works), "the timeouts")
    _meet(store, "timed out", rank, ranks)
    group.configure(f"localhost:{port}/after", "0", rank, ranks, ROUNDS + 1, timeout=MINUTE)
    wait_until(lambda: not kept, "the thread that has built the group drops them", NOISE_S)
    _meet(store, "dropped", rank, ranks)
    group.close()
    return found


def _until_done(done: list[int], after: int, worker: threading.Thread) -> None:
    """Wait for so many ops, or for the other rank's abort, whichever is first."""
    wait_until(lambda: done[0] >= after or not worker.is_alive(), "the ops before the abort")


def _work(pg: Any, size: int, done: list[int]) -> None:
    ops: list[Callable[[Any, int], Any]] = [_gather, _scatter]
    try:
        while True:
            ops[done[0] % 2](pg, size).wait()
            done[0] += 1
    except (GroupAborted, RuntimeError):
        pass


@pytest.mark.long
@pytest.mark.multiprocess
def test_an_abort_in_the_middle_of_transfers_frees_everyone() -> None:
    longest = run(2, _racing, 11)
    print(
        f"\nabort to free, longest of {ROUNDS}: {', '.join(f'{s * 1e3:.0f} ms' for s in longest)}"
    )
    assert max(longest) < NOISE_S


@pytest.mark.long
@pytest.mark.multiprocess
def test_forgotten_gloo_work_is_dropped_in_the_epoch_after_its_timeout() -> None:
    """These are two threads, a listener and tensors; another forgotten op is not needed to drop
    them."""
    assert any(sum(run(2, _stranded, seed)) for seed in (11, 12, 13)), "it has forgotten nothing"


CUTS = 50


def _cutting(rank: int, ranks: int, port: int, seed: int) -> float:
    """Return the longest time in seconds until no write can happen after a cut in mid-transfer."""
    pg = ProcessGroupGloo(MINUTE)
    group, mine, theirs = AbortableGroup(pg), client(port), client(port)
    rng, own = random.Random(seed), random.Random(rank)  # the first is equal on all
    longest = 0.0
    for round_ in range(CUTS):
        group.configure(f"localhost:{port}/c{round_}", str(rank), rank, ranks, round_)
        _meet(mine, f"built/{round_}", rank, ranks)
        received = threading.Thread(target=_abort_when_told, args=(group, theirs, f"cut/{round_}"))
        received.start()
        cutter = rng.randrange(ranks)
        with contextlib.suppress(RuntimeError):  # the cut, or the abort that follows
            works = [
                pg.allreduce([torch.ones(64, 64 if i % 2 else 1)], AllreduceOptions())
                for i in range(6)
            ]
            if rank == cutter:
                time.sleep(own.random() * 0.002)  # anywhere in the transfers
                group.cut()
                mine.set(f"cut/{round_}", b"1")
            for work in works:
                work.wait()
        received.join()
        begin = time.monotonic()
        group.quiesce(timedelta(seconds=30))
        longest = max(longest, time.monotonic() - begin)
        _meet(mine, f"quiet/{round_}", rank, ranks)
    group.close()
    return longest


def _meet(store: TCPStore, name: str, rank: int, ranks: int) -> None:
    store.set(f"{name}/{rank}", b"1")
    store.wait([f"{name}/{other}" for other in range(ranks)])


def _abort_when_told(group: AbortableGroup, store: TCPStore, key: str) -> None:
    store.wait([key])
    group.abort("another rank was cut off")


@pytest.mark.multiprocess
def test_cut_between_head_and_body_of_a_message_delays_no_rank() -> None:
    """gloo neither reads from such a connection nor closes it: this once cost a rollback 60 s."""
    longest = run(3, _cutting, 5)
    print(f"\ncut to quiet, longest of {CUTS}: {', '.join(f'{s * 1e3:.0f} ms' for s in longest)}")
    assert max(longest) < NOISE_S

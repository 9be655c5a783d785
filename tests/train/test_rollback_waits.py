"""Tests of waits on FFT's groups: their duration, their errors, and what is left of them."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from rollback_harness import NOISE_S, run, store_server
from torch.distributed import AllreduceOptions
from waiting import wait_until

from fft.train.process_groups import (
    AbortableGroup,
    CollectiveFailed,
    GroupAborted,
    ShardProcessGroupGloo,
)

LIMIT = timedelta(seconds=20)
SHORT = timedelta(seconds=2)


def all_reduce(pg: Any, rank: int) -> Any:
    return pg.allreduce([torch.ones(4, 2)], AllreduceOptions())


def exchange(pg: Any, rank: int) -> Any:
    if rank == 0:
        return pg.send([torch.ones(8)], 1, 0)
    return pg.recv([torch.zeros(8)], 0, 0)


OPS: dict[str, Callable[[Any, int], Any]] = {"all_reduce": all_reduce, "send and recv": exchange}


@pytest.fixture
def pair() -> Iterator[list[AbortableGroup]]:
    """Return two ranks of a group whose own timeout is `SHORT`."""
    server = store_server()
    groups = [AbortableGroup(ShardProcessGroupGloo(SHORT), "shard") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda r: groups[r].configure(
                    f"localhost:{server.port}/e", str(r), r, 2, timeout=LIMIT
                ),
                range(2),
            )
        )
    yield groups
    for group in groups:
        group.close()


@pytest.mark.parametrize("by_future", [False, True])
def test_reduced_tensors_are_released_without_garbage_collection(
    pair: list[AbortableGroup], by_future: bool
) -> None:
    """Otherwise each step's gradients stay in memory until the collector happens to run."""

    def reduce(rank: int) -> weakref.ref[torch.Tensor]:
        tensor = torch.ones(1000)
        work = pair[rank].pg.allreduce([tensor], AllreduceOptions())
        if by_future:
            work.get_future().then(lambda _: tensor).wait()
        work.wait()
        return weakref.ref(tensor)

    gc.disable()
    try:
        with ThreadPoolExecutor(2) as pool:
            held = list(pool.map(reduce, range(2)))
        wait_until(lambda: all(ref() is None for ref in held), "the tensors to be freed")
    finally:
        gc.enable()


@pytest.mark.parametrize("op", OPS)
def test_a_wait_ends_at_its_limit_and_the_op_goes_on(pair: list[AbortableGroup], op: str) -> None:
    work = OPS[op](pair[1].pg, 1)
    for limit in (timedelta(milliseconds=120), timedelta(seconds=-1)):
        with pytest.raises(CollectiveFailed, match="the op continues"):
            work.wait(limit)
        assert not work.is_completed()
    other = OPS[op](pair[0].pg, 0)
    assert work.wait() and other.wait()
    assert work.is_success()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "none",
    [
        timedelta(0),
        pytest.param(timedelta(microseconds=400), marks=pytest.mark.long),
        pytest.param(None, marks=pytest.mark.long),
    ],
)
def test_zero_is_no_limit_but_the_groups_own(
    pair: list[AbortableGroup], op: str, none: timedelta | None
) -> None:
    work = OPS[op](pair[1].pg, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(work.wait, none)
        threading.Event().wait(0.15)  # it must not end within this time
        assert not waiting.done()
        OPS[op](pair[0].pg, 0).wait()
        assert waiting.result(NOISE_S)
    alone = OPS[op](pair[1].pg, 1)
    with pytest.raises(CollectiveFailed, match=r"Timed out waiting 2000ms"):
        alone.wait(none)
    assert alone.is_completed() and not alone.is_success()


@pytest.mark.parametrize("op", OPS)
def test_a_failed_op_names_its_place(pair: list[AbortableGroup], op: str) -> None:
    work = OPS[op](pair[1].pg, 1)
    pair[0].cut()
    with pytest.raises(CollectiveFailed, match="Connection closed by peer") as caught:
        work.wait()
    place = "all_reduce of [4, 2], 32 B" if op == "all_reduce" else "recv from rank 0 of [8], 32 B"
    assert caught.value.fft_place == f"{place} (float32), on the shard group (rank 1 of 2)"
    assert str(caught.value).startswith(caught.value.fft_place)
    assert "/" not in str(caught.value), "no path of gloo's sources"


def test_several_tensors_are_counted_not_listed(pair: list[AbortableGroup]) -> None:
    pair[0].abort("enough")
    with pytest.raises(GroupAborted) as caught:
        pair[0].pg.allgather_into_tensor_coalesced(
            [torch.zeros(600_000), torch.zeros(8).double()], [torch.ones(1), torch.ones(1)]
        )
    assert caught.value.fft_place == (
        "all_gather_single_coalesced of 2 tensors, 2.4 MB (float32, float64), "
        "on the shard group (rank 0 of 2)"
    )
    assert str(caught.value).endswith(": enough")


def _attendants() -> int:
    return sum(thread.name == "fft-peer-wait" for thread in threading.enumerate())


def test_threads_that_wait_for_peers_are_used_again_and_end(pair: list[AbortableGroup]) -> None:
    for _ in range(20):
        works = [exchange(group.pg, rank) for rank, group in enumerate(pair)]
        assert all(work.wait() for work in works)
    assert _attendants() <= 2
    # gloo notifies no receiver from any source: its thread sleeps for the group's timeout
    forgotten = pair[1].pg.recv_anysource([torch.zeros(8)], 0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(forgotten.wait)
        wait_until(lambda: forgotten._attended, "the wait")
        pair[1].abort("test")
        with pytest.raises(GroupAborted, match="recv from any rank"):
            waiting.result(NOISE_S)
    pair[1].quiesce(LIMIT)
    assert forgotten.is_completed() and pair[1].pending() == 0
    pair[0].abort("test")
    wait_until(lambda: _attendants() == 0, "the threads to end")


ROUNDS = 40


def _racing(rank: int, ranks: int, port: int) -> float:
    """Return the longest time in seconds until all is quiet after an abort in mid-transfer."""
    group = AbortableGroup(ShardProcessGroupGloo(timedelta(seconds=60)))
    rng = random.Random(3)  # equal on both ranks
    longest = 0.0
    for round_ in range(ROUNDS):
        group.configure(f"localhost:{port}/p{round_}", "0", rank, ranks, round_)
        size, after = rng.choice([4, 4096, 2_000_000]), rng.randrange(1, 12)
        longest = max(longest, _abort_amid(group, rank, size, after, rng.random() < 0.5))
    group.close()
    return longest


def _abort_amid(group: AbortableGroup, rank: int, size: int, after: int, any_source: bool) -> float:
    done = [0]
    worker = threading.Thread(target=_shift, args=(group.pg, rank, size, any_source, done))
    worker.start()
    wait_until(lambda: done[0] >= after or not worker.is_alive(), "the ops before the abort")
    begin = time.monotonic()
    group.abort("test")
    worker.join(30)
    assert not worker.is_alive(), "still blocked 30 s after the abort"
    group.quiesce(timedelta(seconds=10))
    return time.monotonic() - begin


def _shift(pg: Any, rank: int, size: int, any_source: bool, done: list[int]) -> None:
    """Send to the other rank and receive from it, repeatedly."""
    out, there = torch.empty(size), torch.ones(size)
    try:
        while True:
            works = [pg.send([there], 1 - rank, 0)]
            works.append(pg.recv_anysource([out], 0) if any_source else pg.recv([out], 1 - rank, 0))
            for work in works:
                work.wait()
            done[0] += 1
    except (GroupAborted, CollectiveFailed):
        pass


@pytest.mark.multiprocess
def test_an_abort_in_the_middle_of_sends_and_receives_frees_everyone() -> None:
    longest = run(2, _racing)
    print(f"\nabort to quiet, longest of {ROUNDS}: {[f'{s * 1e3:.0f} ms' for s in longest]}")
    assert max(longest) < NOISE_S

"""`ShardProcessGroupNCCL` on a library that records its calls: their order, and whose id is used.

The library connects as torch's backend does: rank 0 draws an id and puts it into the store of the
rendezvous, the others read it there. The store, the rendezvous and all of FFT's are real.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from rollback_harness import store_server
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed.distributed_c10d import Store, Work

import fft
from fft.train.nccl_library import TorchNccl
from fft.train.process_group import AbortableGroup, GroupAborted
from fft.util.errors import FftError

LIMIT = timedelta(seconds=30)
OTHER = "fft-other"


class Op(Work):
    """A collective that is over when all ranks have issued it, or its communicator is aborted."""

    def __init__(self, over: threading.Event) -> None:
        super().__init__()
        self.over = over

    def is_completed(self) -> bool:
        return self.over.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert self.over.wait(LIMIT.total_seconds())
        return True


class Recorder:
    """The library. ``calls``: of all ranks, in order; ``hangs``: ranks whose connecting does."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, str]] = []
        self.hangs: set[int] = set()
        self.fails: set[int] = set()
        self.issued: dict[tuple[str, int], list[threading.Event]] = {}
        self.lock = threading.Lock()
        self.connecting = threading.Event()

    def note(self, call: str, made: Made) -> None:
        with self.lock:
            self.calls.append((call, made.rank, made.id))

    def make(self, store: Store, rank: int, world_size: int, timeout: timedelta, name: str) -> Made:
        return Made(self, store, rank, world_size, name)

    def connect(self, made: Made) -> None:
        if made.rank == 0:
            made.store.set("0", secrets.token_hex(8))
        made.id = made.store.get("0").decode()
        self.note("connect", made)
        self.connecting.set()
        if made.rank in self.fails:
            raise RuntimeError("NCCL error: remote process exited")
        if made.rank in self.hangs:
            assert made.aborted.wait(LIMIT.total_seconds())
            raise RuntimeError("NCCL error: aborted")
        made.store.add("connected", 1)

    def of(self, rank: int) -> list[str]:
        """What was called on one rank."""
        return [call for call, who, _ in self.calls if who == rank]


class Made:
    """A communicator."""

    def __init__(self, library: Recorder, store: Store, rank: int, world: int, name: str) -> None:
        self.library, self.store, self.rank, self.world, self.name = (
            library,
            store,
            rank,
            world,
            name,
        )
        self.id = ""
        self.aborted = threading.Event()
        self.ops: list[threading.Event] = []

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Op:
        assert not self.aborted.is_set(), "an op on an aborted communicator"
        self.library.note("allreduce", self)
        mine = threading.Event()
        with self.library.lock:
            others = self.library.issued.setdefault((self.id, len(self.ops)), [])
            others.append(mine)
            if len(others) == self.world:
                for each in others:
                    each.set()
        self.ops.append(mine)
        return Op(mine)

    def abort(self) -> None:
        assert not self.aborted.is_set(), "aborted twice"
        self.aborted.set()
        self.library.note("abort", self)
        for op in self.ops:
            op.set()


class Pair:
    """Two ranks of one shard group, in threads."""

    def __init__(self) -> None:
        self.library, self.server = Recorder(), store_server()
        self.groups = [
            AbortableGroup(fft.ShardProcessGroupNCCL(LIMIT, self.library), "shard")
            for _ in range(2)
        ]

    def each(self, work: Callable[[int], Any], ranks: int = 2) -> list[Any]:
        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(work, range(ranks)))

    def build(self, record: str) -> None:
        self.each(lambda r: self.configure(r, record))

    def configure(self, rank: int, record: str) -> None:
        address = f"localhost:{self.server.port}/fft/shard/{record}"
        self.groups[rank].configure(address, "0", rank, 2, 7, rank, 2, None, timeout=LIMIT)

    def reduce(self, rank: int) -> Any:
        return self.groups[rank].pg.allreduce([torch.ones(2)], AllreduceOptions())


@pytest.fixture
def pair() -> Any:
    made = Pair()
    yield made
    for group in made.groups:
        group.close()


def test_every_epoch_has_an_id_of_its_own_and_is_aborted_before_the_next(pair: Pair) -> None:
    for record in range(5):
        pair.build(str(record))
        for work in pair.each(pair.reduce):
            work.wait()
    assert [pair.library.of(rank) for rank in (0, 1)] == [
        ["connect", "allreduce", *["abort", "connect", "allreduce"] * 4]
    ] * 2
    ids = [found for call, rank, found in pair.library.calls if call == "connect" and rank == 0]
    assert len(set(ids)) == 5, "never one that was used"
    assert [i for c, r, i in pair.library.calls if c == "connect" and r == 1] == ids
    assert pair.server.num_keys() <= 12, "keys of earlier epochs are taken back"


def test_a_rank_that_waits_for_the_other_is_freed_and_the_group_is_built_anew(pair: Pair) -> None:
    pair.build("1")
    work = pair.reduce(0)  # the other never comes
    assert pair.groups[0].pending() == 1
    for group in pair.groups:
        group.abort("rollback")
        group.quiesce(LIMIT)
    work.wait()
    with pytest.raises(GroupAborted, match="rollback"):
        pair.reduce(0)
    pair.build("2")
    for again in pair.each(pair.reduce):
        again.wait()
    assert pair.library.of(0) == ["connect", "allreduce", "abort", "connect", "allreduce"]


def test_a_rendezvous_that_was_used_is_refused(pair: Pair) -> None:
    pair.build("1")
    with pytest.raises(ValueError, match=r"shard/1 was used for an earlier group of rank 0"):
        pair.configure(0, "1")
    assert pair.library.of(0) == ["connect", "abort"], "the id that lies there was not taken"


def test_who_hangs_in_connecting_is_aborted(pair: Pair) -> None:
    pair.library.hangs = {0, 1}

    def rank(number: int) -> None:
        with pytest.raises(GroupAborted, match="another rank has died"):
            pair.configure(number, "1")

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(rank, number) for number in range(2)]
        assert pair.library.connecting.wait(LIMIT.total_seconds())
        for group in pair.groups:
            group.abort("another rank has died")
        for each in done:
            each.result(LIMIT.total_seconds())
    for group in pair.groups:
        assert group._worker is not None
        group._worker.join(LIMIT.total_seconds())
    connected = {rank for call, rank, _ in pair.library.calls if call == "connect"}
    assert {rank for call, rank, _ in pair.library.calls if call == "abort"} >= connected
    pair.library.hangs = set()
    pair.build("2")


def test_what_could_not_connect_is_aborted_once(pair: Pair) -> None:
    pair.library.fails = {1}
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(pair.configure, number, "1") for number in range(2)]
        with pytest.raises(RuntimeError, match="remote process exited"):
            done[1].result(LIMIT.total_seconds())
        done[0].result(LIMIT.total_seconds())
    assert pair.library.of(1) == ["connect", "abort"]
    pair.library.fails = set()
    pair.build("2")


def test_what_was_built_for_nobody_is_aborted(pair: Pair) -> None:
    """The rollback comes when the communicator is connected, and the group has it not yet."""
    both = threading.Barrier(2)  # who aborts takes back the id, which the other would wait for
    for group in pair.groups:
        build = group._target._create_pg

        def late(*args: Any, build: Any = build, group: Any = group) -> Any:
            made = build(*args)
            both.wait(LIMIT.total_seconds())
            group.abort("rolled back meanwhile")
            return made

        group._target._create_pg = late

    def rank(number: int) -> None:
        with pytest.raises(GroupAborted, match="meanwhile"):
            pair.configure(number, "1")
        worker = pair.groups[number]._worker
        assert worker is not None
        worker.join(LIMIT.total_seconds())

    pair.each(rank)
    assert pair.library.of(0) == pair.library.of(1) == ["connect", "abort"]


def test_the_members_notes_are_exchanged(pair: Pair) -> None:
    for rank, group in enumerate(pair.groups):
        group.note = f"of rank {rank}"
    pair.build("1")
    assert [group.notes for group in pair.groups] == [{1: "of rank 1"}, {0: "of rank 0"}]


def test_its_mesh_is_of_the_device_and_stays_good(pair: Pair) -> None:
    pair.build("1")
    meshes = [group.pg.mesh("shard") for group in pair.groups]
    assert [(m.device_type, m.size(), tuple(m.get_coordinate())) for m in meshes] == [
        ("cuda", 2, (0,)),
        ("cuda", 2, (1,)),
    ]
    pair.build("2")
    for group in pair.groups:
        assert group.pg.mesh("shard").get_group() is group.pg
        group.pg.unregister()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_use() -> None:
    store = store_server()
    with pytest.raises(FftError, match=r"needs a GPU.*fft\.ShardProcessGroupGloo"):
        TorchNccl().make(store, 0, 1, LIMIT, OTHER)

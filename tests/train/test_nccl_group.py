"""Tests of `ShardProcessGroupNCCL` on a library that records its calls: their order, and the ids
used.

The library connects as torch's backend does: rank 0 draws an id and puts it into the store of the
rendezvous, and the others read it there. The store, the rendezvous and all FFT code are real.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchft
from rollback_harness import store_server
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed.distributed_c10d import Store, Work
from torchft.process_group import ProcessGroupWrapper

import fft
from fft.errors import FftError
from fft.train.process_groups import AbortableGroup, GroupAborted, nccl_library
from fft.train.process_groups.nccl_library import TorchNccl

LIMIT = timedelta(seconds=30)
OTHER = "fft-other"


class Op(Work):
    """A collective that completes when all ranks have issued it, or its communicator is aborted."""

    def __init__(self, over: threading.Event) -> None:
        super().__init__()
        self.over = over

    def is_completed(self) -> bool:
        return self.over.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert self.over.wait(LIMIT.total_seconds())
        return True


class Recorder:
    """The library. ``calls``: of all ranks, in order; ``hangs``: ranks that hang in connecting.

    ``sticks``: ranks that wait inside NCCL with the lock that an abort needs, as in torch.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, str]] = []
        self.hangs: set[int] = set()
        self.fails: set[int] = set()
        self.sticks: set[int] = set()
        self.stuck, self.let_go = threading.Event(), threading.Event()
        self.issued: dict[tuple[str, int], list[threading.Event]] = {}
        self.lock = threading.Lock()
        self.connecting = threading.Event()

    def note(self, call: str, made: Made) -> None:
        with self.lock:
            self.calls.append((call, made.rank, made.id))

    def make(self, store: Store, rank: int, world_size: int, timeout: timedelta, name: str) -> Made:
        return Made(self, store, rank, world_size, name)

    def finish(self, made: Made) -> None:
        assert made.store.add("finish", 1) <= made.world
        self.note("finish", made)
        if made.rank in self.sticks:
            with made.lock:
                self.stuck.set()
                assert self.let_go.wait(LIMIT.total_seconds())
            raise RuntimeError("NCCL error: not connected in time")

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

    def of(self, rank: int) -> list[str]:
        """Return the calls of one rank."""
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
        self.lock = threading.Lock()
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
        with self.lock:
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


def test_each_epoch_has_its_own_id_and_is_aborted_before_the_next(pair: Pair) -> None:
    for record in range(5):
        pair.build(str(record))
        for work in pair.each(pair.reduce):
            work.wait()
    assert [pair.library.of(rank) for rank in (0, 1)] == [
        ["connect", "finish", "allreduce", *["abort", "connect", "finish", "allreduce"] * 4]
    ] * 2
    ids = [found for call, rank, found in pair.library.calls if call == "connect" and rank == 0]
    assert len(set(ids)) == 5, "never one that was used"
    assert [i for c, r, i in pair.library.calls if c == "connect" and r == 1] == ids
    assert pair.server.num_keys() <= 16, "keys of earlier epochs are taken back"


def test_rank_waiting_for_its_peer_is_freed_and_the_group_is_rebuilt(pair: Pair) -> None:
    pair.build("1")
    work = pair.reduce(0)  # the other rank never comes
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
    once = ["connect", "finish", "allreduce"]
    assert pair.library.of(0) == [*once, "abort", *once]


def test_a_rendezvous_that_was_used_is_refused(pair: Pair) -> None:
    pair.build("1")
    with pytest.raises(ValueError, match=r"shard/1 was used for an earlier group of rank 0"):
        pair.configure(0, "1")
    assert pair.library.of(0) == ["connect", "finish", "abort"], (
        "the id that lies there was not taken"
    )


def test_hanging_connect_is_aborted(pair: Pair) -> None:
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


def test_failed_connect_is_aborted_once(pair: Pair) -> None:
    pair.library.fails = {1}
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(pair.configure, number, "1") for number in range(2)]
        with pytest.raises(RuntimeError, match="remote process exited"):
            done[1].result(LIMIT.total_seconds())
        pair.groups[0].abort("the other could not connect")
        with pytest.raises(GroupAborted, match="could not connect"):
            done[0].result(LIMIT.total_seconds())
    assert pair.library.of(1) == ["connect", "abort"]
    pair.library.fails = set()
    pair.build("2")


def test_ranks_do_not_wait_within_nccl_before_all_have_begun(pair: Pair) -> None:
    """Rank 1 does not come; rank 0 waits at the store, and a rollback frees its thread at once."""
    pair.library.hangs = {1}
    deadline = time.monotonic() + LIMIT.total_seconds()
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(pair.configure, number, "1") for number in range(2)]
        while not (
            (store := pair.groups[0]._generation.store) and store.missing == ("fft/begun/1",)
        ):
            assert time.monotonic() < deadline, "it does not wait for the other at the store"
        for each in pair.groups:
            each.abort("rolled back")
        for each in done:
            with pytest.raises(GroupAborted, match="rolled back"):
                each.result(LIMIT.total_seconds())  # type: ignore[attr-defined]
    worker = pair.groups[0]._worker
    assert worker is not None
    worker.join(LIMIT.total_seconds())
    assert not worker.is_alive()
    assert pair.library.of(0) == ["connect", "abort"]


def test_group_stuck_in_connecting_is_abandoned_and_ends_by_itself(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """torch permits no abort meanwhile: the rollback continues without it, and the next group is
    not affected when the remaining thread is released."""
    pair.library.sticks = {0, 1}
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(pair.configure, number, "1") for number in range(2)]
        assert pair.library.stuck.wait(LIMIT.total_seconds())
        for group in pair.groups:
            group.abort("rolled back")  # returns, with the lock still held
        for each in done:
            with pytest.raises(GroupAborted, match="rolled back"):
                each.result(LIMIT.total_seconds())
    assert "the abort of a group that is connecting has not ended within 0.05 s" in caplog.text
    left = [group._worker for group in pair.groups]
    pair.library.sticks = set()
    hold, second = threading.Event(), pair.library.connect

    def slow(made: Made) -> None:
        second(made)
        assert hold.wait(LIMIT.total_seconds())

    pair.library.connect = slow  # type: ignore[method-assign]
    pair.library.connecting.clear()
    with ThreadPoolExecutor(2) as pool:
        again = [pool.submit(pair.configure, number, "2") for number in range(2)]
        assert pair.library.connecting.wait(LIMIT.total_seconds())
        pair.library.let_go.set()  # the first one is released while the second connects
        for worker in left:
            assert worker is not None
            worker.join(LIMIT.total_seconds())
        hold.set()
        for each in again:
            each.result(LIMIT.total_seconds())
    for work in pair.each(pair.reduce):
        work.wait()
    mends = [ids for call, _, ids in pair.library.calls if call == "abort"]
    assert len(mends) == len({(r, i) for c, r, i in pair.library.calls if c == "abort"})
    first = next(i for c, _, i in pair.library.calls if c == "connect")
    assert set(mends) == {first}, "only the group that was left was aborted, once by each rank"


def test_late_abort_error_of_a_connecting_group_is_dropped() -> None:
    """`is_aborted`: a group whose connection was aborted is not handed out."""
    library, store = Recorder(), store_server()
    group = fft.ShardProcessGroupNCCL(LIMIT, library)
    finish = library.finish

    def rolled_back(made: Made) -> None:
        finish(made)
        group.abort()

    library.finish = rolled_back  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="aborted while it connected"):
        group._create_pg(store, 0, 1)
    assert library.of(0) == ["connect", "finish", "abort"], "and it is aborted once"


def test_unused_group_is_aborted(pair: Pair) -> None:
    """The rollback comes when the communicator is connected but the group does not have it yet."""
    # A rank that aborts withdraws the id, for which the other would wait
    both = threading.Barrier(2)
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
    assert pair.library.of(0) == pair.library.of(1) == ["connect", "finish", "abort"]


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


class Native:
    """A replacement for torch's ProcessGroupNCCL that records its arguments."""

    made: Native

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=None)
            self._timeout, self.group_name = timedelta(minutes=10), ""

    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None:
        self.options, self.place = options, (rank, size)
        names = [name for name in os.environ if name.startswith("TORCH_NCCL_")]
        self.environment = {name: os.environ[name] for name in names}
        self.calls: list[str] = []
        Native.made = self

    def _set_sequence_number_for_group(self) -> None:
        self.calls.append("numbered")

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(f"connect {device}")


class Outer:
    """A replacement for torch's ProcessGroup."""

    BackendType = torch.distributed.ProcessGroup.BackendType

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.backends: dict[str, Native] = {}

    def _set_default_backend(self, kind: object) -> None:
        self.kind = kind

    def _register_backend(self, device: torch.device, kind: object, backend: Native) -> None:
        self.backends[device.type] = backend

    def _get_backend(self, device: torch.device) -> Native:
        return self.backends[device.type]


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """torch as it is on a machine with a GPU."""
    for name in list(os.environ):
        if name.startswith("TORCH_NCCL_"):
            monkeypatch.delenv(name)
    for name in (*nccl_library._SETTINGS, nccl_library._LIMIT):
        monkeypatch.setenv(name, "")  # registered so that changes are undone
        del os.environ[name]
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Native, raising=False)
    monkeypatch.setattr(torch.distributed, "ProcessGroup", Outer)
    return monkeypatch


def test_torch_nccl_group_is_made_abortable(
    native: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = TorchNccl()
    made = library.make(store_server(), 1, 2, LIMIT, OTHER)
    assert Native.made.calls == ["numbered"], "not connected: that can be aborted"
    library.connect(made)
    assert Native.made.calls == ["numbered", "connect cuda:3"]
    assert Native.made.place == (1, 2)
    options = Native.made.options
    assert options.config.blocking is False, "a blocking call of NCCL's cannot be aborted"
    assert options._timeout == timedelta(hours=24), (
        "torch's watchdog does not judge how long ops take"
    )
    assert options.group_name == OTHER
    assert Native.made.environment == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else its watchdog ends the process at an abort
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",
    }, "when torch reads them"
    assert not caplog.records


def test_conflicting_nccl_setting_is_changed_and_reported(
    native: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torchrun sets 1 for its workers."""
    native.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    native.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "7")
    native.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    TorchNccl().make(store_server(), 0, 1, LIMIT, OTHER)
    assert Native.made.environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert Native.made.environment["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "7"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING was 1 and is 0 now" in caplog.text
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in caplog.text


def test_torchfts_group_over_nccl_outlives_aborts_too(native: pytest.MonkeyPatch) -> None:
    found: list[str | None] = []

    class Across(torchft.ProcessGroupNCCL):  # type: ignore[misc]
        def __init__(self) -> None:
            ProcessGroupWrapper.__init__(self, LIMIT)

        def _create_pg(self, store: Store, rank: int, world_size: int) -> Any:
            found.append(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))
            return SimpleNamespace(abort=lambda: None)

    group, server = AbortableGroup(Across()), store_server()
    native.setattr(torch.cuda, "is_available", lambda: False)
    group.configure(f"localhost:{server.port}/fft/across/1", "0", 0, 1, timeout=LIMIT)
    group.close()
    assert found == ["0"], "when torch reads it"


def test_hanging_abort_is_abandoned_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    go, ended = threading.Event(), threading.Event()

    def abort() -> None:
        assert go.wait(LIMIT.total_seconds())
        ended.set()

    assert not nccl_library.abort_within(abort, 0.01, "a group")
    assert "the abort of a group has not ended within 0.01 s" in caplog.text
    go.set()
    assert ended.wait(LIMIT.total_seconds())


def test_failed_abort_is_reported_to_the_caller() -> None:
    def abort() -> None:
        raise RuntimeError("NCCL error")

    with pytest.raises(RuntimeError, match="NCCL error"):
        nccl_library.abort_within(abort, LIMIT.total_seconds(), "a group")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_names_the_gloo_alternative() -> None:
    store = store_server()
    with pytest.raises(FftError, match=r"needs a GPU.*fft\.ShardProcessGroupGloo"):
        TorchNccl().make(store, 0, 1, LIMIT, OTHER)

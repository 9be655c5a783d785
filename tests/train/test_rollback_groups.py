"""Tests of aborting real gloo: which waiters are freed, which groups are unaffected, what is
left."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rollback_harness import NOISE_S, client, run, store_server
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
)
from torchft.process_group import ProcessGroupGloo
from waiting import wait_until

from fft.errors import FftError
from fft.train.process_groups import (
    AbortableGroup,
    GroupAborted,
    ShardProcessGroupGloo,
    abortable,
    sockets,
)
from fft.train.process_groups.rendezvous import RendezvousStore

MINUTE = timedelta(seconds=60)
LIMIT = timedelta(seconds=20)
SENTINEL = 12345.0


def configure(
    group: AbortableGroup, port: int, epoch: str, rank: int, ranks: int, limit: timedelta = LIMIT
) -> None:
    group.configure(f"localhost:{port}/{epoch}", str(rank), rank, ranks, timeout=limit)


def allreduce(group: AbortableGroup, tensor: torch.Tensor) -> Any:
    return group.pg.allreduce([tensor], AllreduceOptions())


def on_threads(ranks: int, body: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(ranks) as pool:
        return [f.result(60) for f in [pool.submit(body, rank) for rank in range(ranks)]]


# -- a blocked collective


def _blocked(rank: int, ranks: int, port: int) -> Any:
    """Let ranks 0 and 1 enter a large allreduce; the last one enters only when 0 has rolled
    back."""
    store = client(port)
    group = AbortableGroup(ProcessGroupGloo(MINUTE))
    configure(group, port, "e1", rank, ranks)
    tensor = torch.full((1_000_000,), float(rank))
    if rank == ranks - 1:
        store.set("last configured", "1")
        store.get("rank 0 is over")
        late = allreduce(group, tensor)
        store.set("late entered", "1")
        store.get("all checked")
        group.abort("over")
        group.quiesce(LIMIT)
        return late.is_success()
    freed: list[float] = []

    def wait() -> None:
        try:
            allreduce(group, tensor).wait()
        except RuntimeError:
            freed.append(time.monotonic())

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_until(lambda: group.pending() == 1, "the allreduce to start")
    assert waiter.is_alive()
    store.set(f"blocked {rank}", "1")
    # From here on the other rank's abort may free this one. It would also fail a configure() of the
    # last rank that still waits for its connections.
    store.wait(["blocked 0", "blocked 1", "last configured"])
    start = time.monotonic()
    group.abort("test")
    returned = time.monotonic()
    waiter.join(30)
    group.quiesce(LIMIT)
    quiet = time.monotonic()
    tensor.fill_(SENTINEL)
    store.set(f"rank {rank} is over", "1")
    store.get("late entered")
    untouched = bool((tensor == SENTINEL).all())
    store.add("checked", 1)
    if rank == 0:
        wait_until(lambda: store.add("checked", 0) == ranks - 1, "the others to check")
        store.set("all checked", "1")
    untouched = untouched and bool((tensor == SENTINEL).all())
    return returned - start, freed[0] - start, quiet - start, untouched, group.pending()


@pytest.mark.multiprocess
def test_abort_frees_a_blocked_rank_and_its_tensor_stays_untouched() -> None:
    *blocked, late = run(3, _blocked)
    assert late is False
    for took, freed, quiet, untouched, pending in blocked:
        print(f"abort {took * 1e3:.2f} ms, freed {freed * 1e3:.2f} ms, quiet {quiet * 1e3:.2f} ms")
        assert freed < NOISE_S  # not by the timeout of the group, a minute
        assert untouched
        assert pending == 0


# -- several groups in one process


def _connections() -> set[str]:
    """Return the TCP connections of this process by inode, without listeners."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    sock.getpeername()
                    found.add(link)
        except OSError:
            continue
    return found


def test_abort_of_one_group_leaves_every_other_connection_alone() -> None:
    server = store_server()
    ranks = 3
    first = [AbortableGroup(ProcessGroupGloo(MINUTE)) for _ in range(ranks)]
    second = [AbortableGroup(ProcessGroupGloo(MINUTE)) for _ in range(ranks)]
    with socket.create_server(("localhost", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        on_threads(ranks, lambda r: configure(second[r], server.port, "second", r, ranks))
        before = _connections()
        on_threads(ranks, lambda r: configure(first[r], server.port, "first", r, ranks))

        blocked = threading.Event()

        def rank(r: int) -> list[float]:
            mine = allreduce(first[r], torch.ones(8)) if r else None
            if r == 0:
                wait_until(lambda: first[1].pending() == first[2].pending() == 1, "others to block")
                blocked.set()
            assert blocked.wait(30)
            first[r].abort("test")
            first[r].quiesce(LIMIT)
            assert mine is None or not mine.is_success()
            with pytest.raises(GroupAborted, match="test"):
                allreduce(first[r], torch.ones(8))
            tensor = torch.full((8,), float(r))
            allreduce(second[r], tensor).wait()
            first[r].close()
            return tensor.tolist()

        assert on_threads(ranks, rank) == [[3.0] * 8] * ranks
        # The store's server is another thread and closes its ends a moment later. Connections of
        # earlier tests may end meanwhile; `second` and `ours` show that others live.
        wait_until(lambda: _connections() <= before, "the first group's connections to go")
        ours.sendall(b"still here")
        assert theirs.recv(16) == b"still here"
        ours.close()
        theirs.close()
    for group in second:
        group.close()


def test_gloo_threads_have_the_names_by_which_quiesce_finds_them() -> None:
    """gloo of torch 2.11 does not name the thread of its connections, which inherits its name."""

    def loops_and_op_threads() -> tuple[set[str], set[str]]:
        loops, ops = abortable._LOOP_THREAD, abortable._OP_THREAD
        return {t for t, _ in sockets._threads(loops)}, {t for t, _ in sockets._threads(ops)}

    def are_named() -> bool:  # a thread names itself after its start
        loops, ops = loops_and_op_threads()
        return len(loops - before[0]) == ranks and len(ops - before[1]) == 2 * ranks

    before, server, ranks = loops_and_op_threads(), store_server(), 2
    groups = [AbortableGroup(ProcessGroupGloo(MINUTE)) for _ in range(ranks)]
    on_threads(ranks, lambda r: configure(groups[r], server.port, "named", r, ranks))
    wait_until(are_named, "one loop and two threads for ops in each rank", NOISE_S)
    for group in groups:
        group.close()


def test_thread_name_is_restored() -> None:
    comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    before = comm.read_text()
    with sockets.thread_name("fft-test"):
        assert comm.read_text() == "fft-test\n"
    assert comm.read_text() == before


def test_a_look_at_a_socket_leaves_its_flags_to_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise torch's store client, connecting on another thread, lost its blocking mode."""
    make: Any = socket.socket
    with socket.create_server(("localhost", 0)) as listener:
        listener.setblocking(False)  # as a connection is while it is being made

        def connected_meanwhile(*args: Any, **kwargs: Any) -> socket.socket:
            made: socket.socket = make(*args, **kwargs)
            os.set_blocking(listener.fileno(), True)
            return made

        monkeypatch.setattr(socket, "socket", connected_meanwhile)
        assert len(sockets._listeners()) > 0
        assert os.get_blocking(listener.fileno())
        monkeypatch.undo()
        socket.setdefaulttimeout(5.0)
        try:
            sockets._listeners()
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(listener.fileno())


# -- configure()


def test_abort_frees_a_configure_that_waits_for_a_missing_member() -> None:
    server = store_server()
    group = AbortableGroup(ProcessGroupGloo(MINUTE))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(configure, group, server.port, "e1", 0, 2)
        wait_until(lambda: server.num_keys() == 1, "rank 0 to publish its address")
        start = time.monotonic()
        group.abort("nobody comes")
        with pytest.raises(GroupAborted, match="nobody comes"):
            waiting.result(10)
        took = time.monotonic() - start
        print(f"configure() free after {took * 1e3:.2f} ms")
        assert took < NOISE_S
    group.close()
    assert server.num_keys() == 0
    assert not _helper_threads()


def test_listeners_of_aborted_configures_are_closed_without_gc() -> None:
    server = store_server()
    group = AbortableGroup(ProcessGroupGloo(MINUTE))
    gc.disable()
    try:
        configure(group, server.port, "first", 0, 1)
        before = _usage()[0]
        with ThreadPoolExecutor(1) as pool:
            for number in range(5):
                key = f"e{number}/fft/listeners/0"
                waiting = pool.submit(configure, group, server.port, f"e{number}", 0, 2)
                wait_until(lambda key=key: server.check([key]), "rank 0 to publish its address")
                group.abort("nobody comes")
                assert isinstance(waiting.exception(10), GroupAborted)
        configure(group, server.port, "last", 0, 1)
        # five listeners, with their event loops, would be 20 files; the store closes its ends later
        wait_until(
            lambda: _usage()[0] <= before + 6, "connections of aborted configures to end", 30
        )
        group.close()
    finally:
        gc.enable()


def test_first_of_two_aborts_gives_the_cause() -> None:
    """If a rollback is followed by a shutdown, the working thread gets the rollback's cause."""
    server = store_server()
    groups = [AbortableGroup(ProcessGroupGloo(MINUTE)) for _ in range(2)]
    on_threads(2, lambda r: configure(groups[r], server.port, "e1", r, 2))
    work = allreduce(groups[0], torch.ones(4))
    groups[0].abort("rank 7 has died")
    groups[0].abort("the process group is closed")
    with pytest.raises(GroupAborted, match="rank 7 has died"):
        work.wait()
    with pytest.raises(GroupAborted, match="rank 7 has died"):
        allreduce(groups[0], torch.ones(4))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(configure, groups[0], server.port, "e2", 0, 2)
        wait_until(lambda: server.check(["e2/fft/listeners/0"]), "rank 0 to publish its address")
        groups[0].abort("nobody comes")
        groups[0].abort("the process group is closed")
        with pytest.raises(GroupAborted, match="nobody comes"):
            waiting.result(10)
    for group in groups:
        group.close()


def test_configure_names_the_missing_rank() -> None:
    server = store_server()
    group = AbortableGroup(ProcessGroupGloo(MINUTE))
    with pytest.raises(TimeoutError, match="fft/listeners/1"):
        configure(group, server.port, "e1", 0, 2, timedelta(seconds=2.0))  # the store answers in it
    with pytest.raises(GroupAborted, match="fft/listeners/1"):
        allreduce(group, torch.ones(1))
    group.close()


def _leave_addresses(server: TCPStore) -> dict[str, bytes]:
    """Write what a member leaves in the store that died right after publishing its addresses.

    Its address is made the greater one, so that gloo waits for it to connect.
    """
    groups = [AbortableGroup(ProcessGroupGloo(MINUTE)) for _ in range(2)]
    on_threads(2, lambda r: configure(groups[r], server.port, "old", r, 2))
    left = {key: server.get(f"old/{key}") for key in ("fft/listeners/1", "0/1")}
    for group in groups:
        group.close()
    assert b"127.0.0.1" in left["fft/listeners/1"]
    here, there = socket.inet_aton("127.0.0.1"), socket.inet_aton("127.0.0.2")
    return {key: value.replace(here, there) for key, value in left.items()}


def test_abort_releases_configure_after_a_peer_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    server = store_server()
    left = _leave_addresses(server)
    group = AbortableGroup(ProcessGroupGloo(MINUTE))
    for key, value in left.items():
        server.set(f"new/{key}", value)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(configure, group, server.port, "new", 0, 2, timedelta(seconds=3))
        wait_until(lambda: server.check(["new/0/0"]), "gloo to publish its address")
        group.abort("the peer died")
        with pytest.raises(GroupAborted, match="the peer died"):
            waiting.result(10)
    # the rest of it ends by its own limit, without affecting the group
    wait_until(lambda: not _helper_threads(), "the helper thread to end", 10)
    with pytest.raises(GroupAborted):
        allreduce(group, torch.ones(1))
    group.close()


@pytest.mark.long
def test_configure_names_the_address_of_a_peer_that_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    server = store_server()
    left = _leave_addresses(server)
    for key, value in left.items():
        server.set(f"new/{key}", value)
    ((host, port),) = json.loads(left["fft/listeners/1"])["listeners"]
    group, began = AbortableGroup(ProcessGroupGloo(MINUTE)), time.monotonic()
    with pytest.raises(ConnectionError, match=rf"cannot reach .* at {host}:{port} from 127"):
        configure(group, server.port, "new", 0, 2, LIMIT)
    assert time.monotonic() - began < 10
    group.close()


def _helper_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "fft-configure"]


def test_a_configured_group_works_through_torchfts_own_methods() -> None:
    """torchft's Manager calls pg.configure() itself, which must have the same effect."""
    server = store_server()
    groups = [ProcessGroupGloo(MINUTE) for _ in range(2)]
    handles = [AbortableGroup(pg) for pg in groups]

    def rank(r: int) -> list[float]:
        groups[r].configure(f"localhost:{server.port}/e1", str(r), r, 2, 1, 0, 1, [0, 1])
        tensor = torch.ones(2)
        allreduce(handles[r], tensor).wait()
        assert groups[r].size() == 2
        groups[r].abort()
        with pytest.raises(GroupAborted, match=r"abort\(\) was called"):
            allreduce(handles[r], tensor)
        handles[r].quiesce(LIMIT)
        assert groups[r].size() == 2
        with pytest.raises(GroupAborted):
            groups[r]._pg.allreduce([tensor])
        groups[r].shutdown()
        return tensor.tolist()

    assert on_threads(2, rank) == [[2.0, 2.0]] * 2
    assert "configure" not in vars(groups[0])


def test_group_configured_before_adoption_is_refused() -> None:
    server = store_server()
    pg = ProcessGroupGloo(MINUTE)
    pg.configure(f"localhost:{server.port}/e1", "0", 0, 1)
    with pytest.raises(ValueError, match="configured already"):
        AbortableGroup(pg)


@pytest.mark.parametrize("options", [{}, {"enable_reconfigure": True}])
def test_group_of_torch_itself_is_refused(options: dict[str, bool]) -> None:
    pg = dist.ProcessGroup(dist.HashStore(), 0, 1)
    if options and not hasattr(pg, "reconfigure"):
        pytest.skip("this torch has no groups that can be reconfigured")
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, **options)
    pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    pg._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    with pytest.raises(FftError, match=r"torchft\.process_group\.ProcessGroupGloo\(\)"):
        AbortableGroup(pg)


def test_a_shard_group_keeps_its_shape() -> None:
    server = store_server()
    pg = ShardProcessGroupGloo(MINUTE)
    group = AbortableGroup(pg)
    with pytest.raises(RuntimeError, match="before mesh"):
        pg.mesh()
    configure(group, server.port, "e1", 0, 1)
    assert pg.mesh("a").size() == 1
    with pytest.raises(ValueError, match="rank 0 of 1"):
        configure(group, server.port, "e2", 0, 2)
    other = ShardProcessGroupGloo(MINUTE)
    handle = AbortableGroup(other)
    configure(handle, server.port, "e3", 0, 1)
    assert other.mesh("a").get_group().group_name != pg.mesh("a").get_group().group_name
    assert pg.mesh("a") == pg.mesh("a")
    # DTensor would apply what it caches of one to the other, including the group
    assert other.mesh("a") != pg.mesh("a")
    for shard, owner in ((pg, group), (other, handle)):
        owner.close()
        shard.unregister()


# -- which Works are complete when


OPERATIONS: dict[str, Callable[[Any, int], Any]] = {
    "allreduce": lambda pg, r: pg.allreduce([torch.ones(4)], AllreduceOptions()),
    "allreduce_coalesced": lambda pg, r: pg.allreduce_coalesced(
        [torch.ones(4)], AllreduceCoalescedOptions()
    ),
    "all_gather_single": lambda pg, r: pg.all_gather_single(torch.ones(8), torch.ones(4)),
    "_allgather_base": lambda pg, r: pg._allgather_base(torch.ones(8), torch.ones(4)),
    "allgather": lambda pg, r: pg.allgather(
        [[torch.ones(4), torch.ones(4)]], [torch.ones(4)], AllgatherOptions()
    ),
    "reduce_scatter_single": lambda pg, r: pg.reduce_scatter_single(torch.ones(4), torch.ones(8)),
    "_reduce_scatter_base": lambda pg, r: pg._reduce_scatter_base(torch.ones(4), torch.ones(8)),
    "barrier": lambda pg, r: pg.barrier(BarrierOptions()),
    "broadcast": lambda pg, r: pg.broadcast([torch.ones(4)], BroadcastOptions()),
    "alltoall_base": lambda pg, r: pg.alltoall_base(
        torch.ones(4), torch.ones(4), [], [], AllToAllOptions()
    ),
    "send and recv": lambda pg, r: (
        pg.send([torch.ones(4)], 1, 0) if r == 0 else pg.recv([torch.ones(4)], 0, 0)
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_op_is_tracked_to_its_end_and_ends_on_abort(name: str) -> None:
    server = store_server()
    groups = [AbortableGroup(ShardProcessGroupGloo(MINUTE)) for _ in range(2)]
    on_threads(2, lambda r: configure(groups[r], server.port, "e1", r, 2))

    def complete(r: int) -> None:
        work = OPERATIONS[name](groups[r].pg, r)
        assert work.wait()
        assert work.is_completed()
        assert groups[r].pending() == 0

    on_threads(2, complete)
    # rank 1 enters alone and never waits itself
    work = OPERATIONS[name](groups[1].pg, 1)
    assert groups[1].pending() == 1
    groups[1].abort("test")
    groups[1].quiesce(LIMIT)
    assert work.is_completed()
    assert groups[1].pending() == 0
    with pytest.raises(RuntimeError):
        work.wait()
    with pytest.raises(GroupAborted):
        OPERATIONS[name](groups[1].pg, 1)
    for group in groups:
        group.close()


# -- over and over


def _usage() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _cycle(rank: int, ranks: int, port: int, cycles: int) -> Any:
    store = client(port)
    group = AbortableGroup(ProcessGroupGloo(MINUTE))
    usage, keys, times = [], [], []
    for cycle in range(cycles):
        start = time.monotonic()
        configure(group, port, f"e{cycle}", rank, ranks)
        times.append(time.monotonic() - start)
        tensor = torch.ones(100)
        allreduce(group, tensor).wait()
        assert tensor[0] == ranks
        if cycle % 2 == rank:  # one side aborts with an op pending, the other is reconfigured
            work = allreduce(group, tensor)
            group.abort("test")
            group.quiesce(LIMIT)
            assert work.is_completed()
        usage.append(_usage())
        keys.append(store.num_keys())
    group.close()
    return usage, keys, sorted(times)[len(times) // 2], _usage()


@pytest.mark.long
@pytest.mark.multiprocess
def test_two_hundred_reconfigurations_leave_nothing_behind() -> None:
    for usage, keys, median, end in run(2, _cycle, 200):
        print(f"configure() {median * 1e3:.2f} ms; fds, threads {usage[10]} .. {usage[-1]}")
        # Threads and sockets of the previous group may still be ending. A leak in every tenth cycle
        # would add 10.
        assert max(fds for fds, _ in usage[100:]) <= max(fds for fds, _ in usage[:100]) + 5
        assert max(n for _, n in usage[100:]) <= max(n for _, n in usage[:100]) + 5
        assert max(keys) <= 12, "at most this rendezvous and the one before"
        assert end <= usage[0]


def test_rendezvous_store_supports_the_calls_of_torch() -> None:
    server = store_server()
    store = RendezvousStore(dist.PrefixStore("p", client(server.port)), timedelta(seconds=5))
    store.set("a", b"1")
    assert store.get("a") == b"1"
    assert store.add("n", 2) == 2
    assert store.multi_get(["a", "n"]) == [b"1", b"2"]
    assert store.compare_set("c", b"", b"x") == b"x"
    assert store.check(["a", "c"])
    assert not store.check(["b"])
    with pytest.raises(TimeoutError, match="no b in the rendezvous store"):
        store.wait(["a", "b"], timedelta(seconds=0.01))
    assert server.num_keys() == 3
    store.cancel("enough")
    with pytest.raises(RuntimeError, match="enough"):
        store.wait(["b"])
    with pytest.raises(RuntimeError, match="enough"):
        store.set("d", b"1")
    assert store.reclaim(everyone=False)
    assert server.num_keys() == 0


@pytest.mark.parametrize("name", ["^docker0", "eth-nowhere"])
def test_gloo_interface_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    expected = rf"GLOO_SOCKET_IFNAME={re.escape(name)}: .*; this host has"
    with pytest.raises(FftError, match=expected):
        AbortableGroup(ProcessGroupGloo())

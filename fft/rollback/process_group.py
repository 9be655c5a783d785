"""Process groups that can really be aborted, and rebuilt under the objects that hold them.

`AbortableGroup` adopts a torchft process group object, the user's own. For gloo it makes the
device itself, so that it knows the addresses of the group's connections and can shut exactly those
down: nothing else frees a thread that waits in a gloo collective. Other backends abort their own
way. `ShardProcessGroupGloo` is the group that FSDP2 shards over on CPU.

Touches the adopted object (never its class or module), the group's own sockets, and the keys of
the group's own rendezvous. One short-lived thread runs while a group is configured.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    ReduceScatterOptions,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, PrefixStore, Work
from torchft.process_group import (
    ProcessGroup,
    ProcessGroupGloo,
    ProcessGroupWrapper,
)

from fft.rollback import sockets
from fft.rollback.rendezvous import RendezvousStore, store_client
from fft.rollback.sockets import Address

logger = logging.getLogger(__name__)

_ADDRESS_KEY = "fft/listeners/{rank}"
# Pauses, in seconds, between two looks at pending Works: torch offers nothing to wait on that
# neither raises the op's error nor blocks an accelerator stream.
_FIRST_PAUSE = 0.0001
_LONGEST_PAUSE = 0.002
# c10d's OpType of gloo Works that are complete only once somebody has waited for them: SEND, RECV,
# RECVANYSOURCE.
_COMPLETE_BY_WAIT = frozenset({12, 13, 14})
# How long, at most, a wait for a gloo op goes on after an abort that gloo has not told it of.
_SLICE = timedelta(milliseconds=50)
_SLICE_IS_OVER = "Operation timed out!"  # what torch says when a Work's wait(timeout) ends early
_OP_THREAD = "pt_gloo_runloop"  # torch's name for the threads that carry out gloo's ops
_LOOP_THREAD = "gloo_tcp_loop"  # gloo's name for the threads that read and write its connections
_ROUNDS_NS = 5_000_000
# How long close() waits for what the last configure() left behind, in seconds.
_CLOSE_LIMIT = 5.0
_mesh_numbers = itertools.count()
_stranded_backends: list[tuple[object, deque[Any]]] = []
_stranded_lock = threading.Lock()


class GroupAborted(RuntimeError):
    """The process group was aborted, and nobody has configured it since. Says the cause."""


@dataclass
class _Era:
    """One configuration of a group: from one configure() to the next."""

    rank: int = 0
    world_size: int = 1
    cause: str | None = None
    settled: threading.Event = field(default_factory=threading.Event)
    backend: object | None = None
    error: Exception | None = None
    store: RendezvousStore | None = None
    client: Any = None
    store_addr: str = ""
    own: frozenset[Address] = frozenset()
    peers: frozenset[Address] = frozenset()
    works: deque[Work | _GlooWork] = field(default_factory=deque)
    entering: int = 0
    stranded: bool = False
    """Aborted with ops that gloo has forgotten: they write nothing, but end only by timeout."""


@dataclass
class _Still:
    """A look at ops of gloo that do not end: two alike show that these write nothing any more.

    Each op thread sleeps from the one to the other, and nothing can wake it but its timeout: every
    connection is closed, or is one that gloo will not read from again. Such a one is left by an op
    that failed between the head and the body of a message: gloo waits for the op's buffer, which is
    gone, reads neither the rest nor the end of the connection, and turns in circles until some
    op's timeout. Both ends of it are shut down, so nothing arrives; gloo's loop has gone round it
    ``_ROUNDS_NS`` long, thousands of times, and not one byte was read.
    """

    parked: dict[str, str]
    """Op threads with their context switches."""
    open: dict[str, int]
    """Connections with the bytes that lie in them."""
    ran: dict[str, int]
    """Nanoseconds that those of gloo's loops have run that do not sleep."""

    def like(self, before: _Still) -> bool:
        """Whether nothing but loops has moved since."""
        return self.parked == before.parked and self.open == before.open

    def is_for_good(self, before: _Still) -> bool:
        """Whether this look and one like it before show that nothing will move."""
        if not self.open:
            return True
        # A loop that has been asleep had nothing to read; one that waits for a core may yet.
        rounds = [ran - before.ran.get(task, ran) for task, ran in self.ran.items()]
        return bool(rounds) and min(rounds) >= _ROUNDS_NS


class _AbortedBackend:
    """Stands where the backend was: knows the group's shape and refuses everything else."""

    def __init__(self, era: _Era) -> None:
        self._era = era

    def size(self) -> int:
        return self._era.world_size

    def rank(self) -> int:
        return self._era.rank

    def abort(self) -> None:
        """Nothing is left to abort."""

    def shutdown(self) -> None:
        """Nothing is left to shut down."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise GroupAborted(self._era.cause or "the process group was aborted")


class _GlooWork(Work):
    """A gloo Work that an abort frees in any case.

    gloo forgets the waiter of a transfer that is under way, or just being queued, when the
    connection ends: it sleeps until the op's own timeout. So ``wait`` waits in slices, and looks
    for an abort between them. ``by_wait``: a Work of `_COMPLETE_BY_WAIT`, complete when its
    ``wait`` has ended, however it did.
    """

    def __init__(
        self, work: Work, era: _Era, by_wait: bool, waiting: AbstractContextManager[None]
    ) -> None:
        super().__init__()
        self._work = work
        self._era = era
        self._around = waiting
        self._by_wait = by_wait
        self._lock = threading.Lock()
        self._waiting = 0
        self._over = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        with self._lock:
            if self._by_wait and self._era.cause is not None and not self._over:
                raise GroupAborted(self._era.cause)
            self._waiting += 1
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        try:
            with self._around:
                return self._wait(deadline)
        finally:
            with self._lock:
                self._waiting -= 1

    def _wait(self, deadline: float | None) -> bool:
        while True:
            left = _SLICE if deadline is None else min(_SLICE, _left(deadline))
            try:
                done = self._work.wait(left)
            except RuntimeError as error:
                if str(error) != _SLICE_IS_OVER:
                    self._over = True
                    raise
                if self._era.cause is not None:
                    raise GroupAborted(self._era.cause) from None
                if deadline is not None and time.monotonic() >= deadline:
                    raise
            else:
                self._over = True
                return done

    def end(self) -> None:
        """After an abort: wait on behalf of one who never will, so that the op is over."""
        with self._lock:
            if self._over or self._waiting or not self._by_wait:
                return
            self._waiting += 1
        try:
            self._wait(time.monotonic())
        except RuntimeError as error:  # it was aborted
            logger.debug("aborted op ended with: %s", error)
        finally:
            with self._lock:
                self._waiting -= 1

    def is_completed(self) -> bool:
        if self._by_wait:
            with self._lock:
                return self._over and not self._waiting
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self.is_completed() and self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def synchronize(self) -> None:
        self._work.synchronize()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future()

    def _get_op_type(self) -> int:
        kind: int = self._work._get_op_type()  # type: ignore[attr-defined]
        return kind


@dataclass(frozen=True)
class _Call:
    """The arguments of torchft's configure()."""

    store_addr: str
    replica_id: str
    rank: int
    world_size: int
    quorum_id: int | None
    group_rank: int | None
    group_world_size: int | None
    global_ranks: list[int] | None

    def note_in(self, pg: Any) -> None:
        """Leave in `pg` what torchft's own configure() leaves there."""
        pg._replica_id = self.replica_id
        pg._rank = self.rank
        pg._quorum_id = self.quorum_id
        pg._group_rank = self.group_rank
        pg._group_world_size = self.group_world_size
        pg._global_ranks = self.global_ranks

    def as_args(self) -> tuple[Any, ...]:
        return (
            self.store_addr,
            self.replica_id,
            self.rank,
            self.world_size,
            self.quorum_id,
            self.group_rank,
            self.group_world_size,
            self.global_ranks,
        )


class AbortableGroup:
    """Handle on one torchft process group that FFT can abort, wait out and configure again.

    Args:
        pg: the group, not yet configured. It is hooked as an object: its ``configure``, ``abort``
            and ``shutdown`` lead here from now on, until `close`.

    All methods may be called from any thread. If several members of one process group live in
    one process, an abort by one of them also ends the connections between the others.

    Raises:
        ValueError: `pg` has been configured already, so its connections cannot be told any more.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        self.pg = pg
        self.waiting: AbstractContextManager[None] = nullcontext()
        """Entered around every wait for an op of gloo, by whoever waits; not within itself."""
        self._target: Any = _innermost(pg)
        self._wrapper = isinstance(self._target, ProcessGroupWrapper)
        if self._wrapper and self._target._pg is not None:
            raise ValueError(f"{pg!r} is configured already: make the AbortableGroup first")
        self._gloo = self._wrapper and _can_tell_sockets(self._target)
        self._lock = threading.Lock()
        self._configuring = threading.Lock()
        self._era = _Era()
        self._past: list[_Era] = []
        # Store clients by host:port, kept for the next rendezvous there. A new connection makes
        # torch look up host names on both ends, the store's only thread included: seconds, where
        # a name server is slow to answer.
        self._clients: dict[str, list[Any]] = {}
        self._devices: list[tuple[Any, Address]] = []
        self._worker: threading.Thread | None = None
        self._hooks: list[str] = []
        self._native_configure: Callable[..., None] = self._target.configure
        self._native_abort: Callable[[], None] = self._target.abort
        self._hook()

    # -- what FFT calls

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Abort what there is, meet the other members at `store_addr`, and build the group anew.

        Arguments are torchft's; `store_addr` must never have been used before. `timeout` bounds
        the whole call (None: the group's own timeout).

        Raises:
            GroupAborted: `abort` was called meanwhile.
            TimeoutError: a member did not come; the text names the missing ranks.
            ValueError: rank or world size do not fit the mesh made of this group.
            RuntimeError: the backend could not connect, as when a member aborts or dies meanwhile.
                The group is aborted then; configure it again at another `store_addr`.
        """
        call = _Call(
            store_addr,
            replica_id,
            rank,
            world_size,
            quorum_id,
            group_rank,
            group_world_size,
            global_ranks,
        )
        default: timedelta = getattr(self._target, "_timeout", timedelta(seconds=60))
        limit = timeout or default
        deadline = time.monotonic() + limit.total_seconds()
        with self._configuring:
            if isinstance(self._target, ShardProcessGroupGloo):
                self._target.check_shape(rank, world_size)
            self.abort("the process group is configured anew")
            self.quiesce(limit)
            era = self._begin(call)
            device = _current_accelerator()
            self._worker = threading.Thread(
                target=self._build,
                args=(era, call, deadline, device),
                name="fft-configure",
                daemon=True,
            )
            self._worker.start()
            if not era.settled.wait(deadline - time.monotonic()):
                raise self._give_up(era, limit)
        self._raise_failure(era)

    def abort(self, cause: str) -> None:
        """Fail every op that is pending on this group in this process, and refuse new ones.

        Idempotent, returns in milliseconds; the first `cause` of a configuration stays. A thread
        that is blocked in a collective or in `configure` comes free at once. Tensors of the failed
        ops may still be written until `quiesce` has returned.
        """
        with self._lock:
            era = self._era
            first = era.cause is None
            if first:
                era.cause = cause
        if not first:
            return
        era.settled.set()
        store = era.store
        if store is not None:
            store.cancel(cause)
        if self._gloo:
            # Reading first: gloo then closes the connection by itself, whereas a write that fails
            # before it has done so would leave its waiter asleep.
            sockets.shut_down(era.own, era.peers, writing=False)
        else:
            self._native_abort()
            self._entomb(era)

    def cut(self) -> int:
        """End the group's connections as a network would, without a word; how many there were.

        For faults injected on purpose. The group's next ops fail; configure it again.
        """
        era = self._era
        return len(sockets.shut_down(era.own, era.peers, writing=True))

    def quiesce(self, timeout: timedelta) -> None:
        """After `abort`: wait until no op of the old group can write a tensor any more.

        Then the group lets go of the old backend, which ends with the next `configure` or `close`.

        Raises:
            TimeoutError: ops are still pending after `timeout`; the text names them.
            RuntimeError: the group is not aborted.
        """
        era = self._era
        if era.cause is None:
            raise RuntimeError("quiesce() needs an aborted process group: call abort() first")
        deadline = time.monotonic() + timeout.total_seconds()
        pause = _FIRST_PAUSE
        seen: _Still | None = None
        while self._count(era) and not era.stranded:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{_describe(era)} still pending {timeout.total_seconds():g} s after abort "
                    f"({era.cause})"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
            if self._gloo:
                closely = pause == _LONGEST_PAUSE
                now = self._look(era, closely)
                if now is None or seen is None or not now.like(seen):
                    seen = now
                else:
                    era.stranded = closely and now.is_for_good(seen)
        self._entomb(era)

    def _look(self, era: _Era, closely: bool) -> _Still | None:
        """How the group's ops stand; None if one of them moves.

        ``closely``: at connections, too, that gloo has not closed: mostly it is about to.
        """
        # an op that was just starting may have made a connection since
        open_ = sockets.shut_down(era.own, era.peers, writing=True)
        for work in list(era.works):
            if isinstance(work, _GlooWork):
                work.end()
        if era.entering or (open_ and not closely):
            return None
        parked = sockets.parked_threads(_OP_THREAD)
        ran = sockets.run_times(_LOOP_THREAD) if open_ else {}
        return None if parked is None else _Still(parked, open_, ran)

    def pending(self) -> int:
        """How many ops issued through the group since the last configure() are not complete."""
        return self._count(self._era)

    def close(self) -> None:
        """Abort, drop the backend, delete this member's rendezvous keys, unhook the object."""
        self.abort("the process group is closed")
        self.quiesce(timedelta(seconds=_CLOSE_LIMIT))
        if self._worker is not None:
            self._worker.join(_CLOSE_LIMIT)
        for era in (*self._take_past(), self._era):
            self._retire(era, everyone=False)
        self._clients.clear()
        self._devices.clear()
        for name in self._hooks:
            self._target.__dict__.pop(name, None)
        self._hooks.clear()
        if self._wrapper:
            self._target._pg = None

    # -- configuring

    def _begin(self, call: _Call) -> _Era:
        if self._wrapper:
            call.note_in(self._target)
        era = _Era(call.rank, call.world_size)
        with self._lock:
            self._past.append(self._era)
            self._era = era
        return era

    def _build(self, era: _Era, call: _Call, deadline: float, device: int | None) -> None:
        """Thread body: meet and build. Outlives its configure() only if that one gave up."""
        backend: object | None = None
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)
            backend = self._make(era, call, deadline)
        except Exception as error:  # noqa: BLE001 - raised again in configure()
            era.error = error
        with self._lock:
            kept = era.cause is None and backend is not None
            if kept:
                era.backend = backend
                if self._wrapper:
                    self._target._pg = backend
        era.settled.set()
        if kept:
            for past in self._take_past():
                self._retire(past, everyone=True)  # all members are past that rendezvous
            return
        sockets.shut_down(era.own, era.peers, writing=True)
        del backend
        if era.store is not None:
            era.store.reclaim(everyone=False)

    def _make(self, era: _Era, call: _Call, deadline: float) -> object:
        if not self._wrapper:
            self._native_configure(*call.as_args())
            return self._target
        era.store_addr, _, prefix = call.store_addr.partition("/")
        era.client = self._take_client(era.store_addr, deadline)
        store = RendezvousStore(PrefixStore(prefix, era.client), _left(deadline))
        with self._lock:
            era.store = store
            if era.cause is not None:
                store.cancel(era.cause)
        if not self._gloo:
            return self._target._create_pg(store, call.rank, call.world_size)
        devices = self._take_devices()
        era.own = frozenset(address for _, address in devices)
        era.peers = _exchange(store, era)
        made = _gloo_group(store, [d for d, _ in devices], call, self._target._timeout, deadline)
        with self._lock:
            self._devices = devices
        return made

    def _take_devices(self) -> list[tuple[Any, Address]]:
        """gloo's devices with their listeners: kept from one configuration to the next.

        To drop one takes gloo 10 ms, in which no Python runs. After a configuration that failed
        they are made anew, since connections of it may still lie unclaimed at the listener.
        """
        with self._lock:
            devices, self._devices = self._devices, []
        return devices or [sockets.listener_of(create) for create in _device_makers()]

    def _give_up(self, era: _Era, limit: timedelta) -> TimeoutError:
        store = era.store
        waiting = store.missing if store is not None else ("the store's answer",)
        error = TimeoutError(
            f"configure() of rank {era.rank} of {era.world_size} got no further in "
            f"{limit.total_seconds():g} s; waiting for {', '.join(waiting) or 'connections'}"
        )
        self.abort(str(error))
        return error

    def _raise_failure(self, era: _Era) -> None:
        if era.cause is not None:
            raise GroupAborted(era.cause) from era.error
        if era.error is not None:
            self.abort(f"configure() failed: {era.error}")
            raise era.error

    def _take_client(self, address: str, deadline: float) -> Any:
        """A store client that nobody else uses meanwhile."""
        with self._lock:
            free = self._clients.get(address)
            kept = free.pop() if free else None
        if kept is not None:
            try:
                kept.num_keys()
                return kept
            except RuntimeError as error:
                logger.debug("store %s: connecting anew (%s)", address, error)
        host, _, port = address.rpartition(":")
        try:
            return store_client(host.strip("[]"), int(port), _left(deadline).total_seconds())
        except OSError as error:
            raise ConnectionError(f"the group's store at {address}: {error}") from error

    def _retire(self, era: _Era, everyone: bool) -> None:
        """Drop what an ended configuration still holds, and its keys (RendezvousStore.reclaim)."""
        if era.stranded:
            _keep_stranded(era)
        era.backend = None  # joins gloo's threads; they have nothing left to do
        reached = era.store is not None and era.store.reclaim(everyone)
        with self._lock:
            client, era.client, era.store = era.client, None, None
            if client is not None and reached:
                # one host:port at a time: when the store moves, the old connections go
                self._clients = {era.store_addr: self._clients.get(era.store_addr, [])}
                self._clients[era.store_addr].append(client)

    def _take_past(self) -> list[_Era]:
        with self._lock:
            past, self._past = self._past, []
        return past

    def _entomb(self, era: _Era) -> None:
        if self._wrapper:
            with self._lock:
                if self._era is era:
                    self._target._pg = _AbortedBackend(era)

    # -- hooks on the adopted object

    def _hook(self) -> None:
        hooks: dict[str, Callable[..., Any]] = {
            "configure": self.configure,
            "abort": self._hooked_abort,
            "shutdown": self.close,
        }
        if self._wrapper:
            hooks["_run_context"] = self._entry(self._target._run_context)
            hooks["_wrap_work"] = self._tracker(self._target._wrap_work)
        for name, function in hooks.items():
            setattr(self._target, name, function)
            self._hooks.append(name)

    def _hooked_abort(self, errored: bool = True) -> None:
        self.abort("abort() was called on the process group")

    def _entry(self, native: Callable[[], Any]) -> Callable[[], Any]:
        """In place of torchft's `_run_context`, which every op enters to be issued."""

        @contextmanager
        def enter() -> Iterator[None]:
            with self._lock:
                era = self._era
                if era.cause is not None:
                    raise GroupAborted(era.cause)
                era.entering += 1
            try:
                with native():
                    yield
            finally:
                with self._lock:
                    era.entering -= 1

        return enter

    def _tracker(self, native: Callable[[Work, object], Work]) -> Callable[[Work, object], Work]:
        """In place of torchft's `_wrap_work`, which every op's Work passes."""

        def track(work: Any, opts: object) -> Work:
            with self._lock:
                era = self._era
                if self._gloo:
                    by_wait = work._get_op_type() in _COMPLETE_BY_WAIT
                    work = _GlooWork(work, era, by_wait, self.waiting)
                _forget_completed(era.works)
                era.works.append(work)
            return native(work, opts)

        return track

    def _count(self, era: _Era) -> int:
        with self._lock:
            _forget_completed(era.works)
            return len(era.works) + era.entering


class ShardProcessGroupGloo(ProcessGroupGloo):  # type: ignore[misc]
    """The process group that FSDP2 shards over on CPU: rebuilt under the model, not replaced.

    torchft's gloo group plus the operations that FSDP2 needs and torchft does not pass on.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        self._group_name: str | None = None
        self._shape: tuple[int, int] | None = None

    def rank(self) -> int:
        """Rank in the group as configured last; 0 before."""
        return self._rank or 0

    def check_shape(self, rank: int, world_size: int) -> None:
        """Raise ValueError if a mesh was made of this group with another rank or size."""
        if self._shape not in (None, (rank, world_size)):
            raise ValueError(
                f"the model is sharded as rank {self._shape[0]} of {self._shape[1]}; the group "
                f"cannot become rank {rank} of {world_size}: build a new model on a new group"
            )

    def mesh(self, name: str = "shard") -> DeviceMesh:
        """A one-dimensional CPU mesh over this group, its dimension called `name`.

        Needs no default process group. The mesh stays good over later configurations of the same
        shape. Raises RuntimeError before the first configure().
        """
        if self._rank is None or self._pg is None:
            raise RuntimeError("configure() the shard process group before mesh()")
        self._shape = (self._rank, self.size())
        group_name = GroupName(self._group_name or f"fft-{name}-{next(_mesh_numbers)}")
        if self._group_name is None:
            self._set_group_name(group_name)
            _register_process_group(group_name, self)
        mesh = DeviceMesh(
            "cpu",
            torch.arange(self.size(), dtype=torch.int),
            mesh_dim_names=(name,),
            _init_backend=False,
            _rank=self._rank,
        )
        mesh._dim_group_names = [group_name]
        mesh._pg_registry[group_name] = self
        return mesh

    def unregister(self) -> None:
        """Take the group's name out of torch's registry; meshes made of it are void after."""
        if self._group_name is not None:
            _unregister_process_group(GroupName(self._group_name))
            self._group_name = None
            self._shape = None

    def _issue(self, name: str, *args: Any) -> Work:
        opts = self._opts_hook(args[-1])
        with self._run_context():
            work: Work = getattr(self.parent, name)(*args[:-1], opts)
            wrapped: Work = self._wrap_work(work, opts)
            return wrapped

    def _allgather_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: AllgatherOptions | None = None
    ) -> Work:
        return self._issue("_allgather_base", output, input, opts or AllgatherOptions())

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: AllgatherOptions | None = None
    ) -> Work:
        return self._issue("all_gather_single", output, input, opts or AllgatherOptions())

    def _reduce_scatter_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: ReduceScatterOptions | None = None
    ) -> Work:
        return self.reduce_scatter_single(output, input, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: ReduceScatterOptions | None = None
    ) -> Work:
        # What gloo's own does, an all-reduce of a copy, but on a Work that can be aborted: gloo's
        # waits without any limit.
        copy = input.detach().clone(memory_format=torch.contiguous_format)
        reduce = AllreduceOptions()
        if opts is not None:
            reduce.reduceOp = opts.reduceOp
        return _ScatterWork(self.allreduce([copy], reduce), copy, output, self.rank())


class _ScatterWork(Work):
    """An all-reduce of which this rank keeps its part, when it has waited for it."""

    def __init__(self, work: Work, reduced: torch.Tensor, output: torch.Tensor, rank: int) -> None:
        super().__init__()
        self._work = work
        self._reduced: torch.Tensor | None = reduced
        self._output = output
        self._rank = rank

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = self._work.wait() if timeout is None else self._work.wait(timeout)
        if self._reduced is not None:
            size = self._output.numel()
            part = self._reduced.reshape(-1).narrow(0, self._rank * size, size)
            self._output.detach().copy_(part.view(self._output.shape))
            self._reduced = None
        return done

    def is_completed(self) -> bool:
        if self._reduced is None:
            return True
        return self._work.is_completed() and not self._work.is_success()

    def is_success(self) -> bool:
        return self.is_completed() and self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return [self._output]

    def synchronize(self) -> None:
        self.wait()


def _innermost(pg: Any) -> Any:
    """The torchft group that owns a backend, behind torchft wrappers around other groups."""
    while isinstance(pg, ProcessGroupWrapper) and isinstance(pg._pg, ProcessGroup):
        pg = pg._pg
    return pg


def _can_tell_sockets(target: Any) -> bool:
    """Whether the sockets of this group will be known, and say so once where they will not be."""
    if not isinstance(target, ProcessGroupGloo):
        return False
    own_device = type(target)._create_pg is ProcessGroupGloo._create_pg
    if own_device and sockets.supported():
        return True
    logger.warning(
        "%s: gloo cannot be aborted here (%s); a rollback waits for the group's timeout",
        type(target).__name__,
        "no /proc/self/fd" if own_device else "the class makes its own gloo devices",
    )
    return False


def _device_makers() -> list[Callable[[], Any]]:
    """One maker for each gloo device, chosen as torch chooses them (GLOO_SOCKET_IFNAME)."""
    gloo = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not names:
        return [gloo.create_default_device]
    return [lambda name=name: gloo.create_device(interface=name) for name in names]  # type: ignore[misc]


def _exchange(store: RendezvousStore, era: _Era) -> frozenset[Address]:
    """Publish this member's listeners and return those of all the others; waits for them."""
    store.set(_ADDRESS_KEY.format(rank=era.rank), json.dumps(sorted(era.own)))
    keys = [_ADDRESS_KEY.format(rank=r) for r in range(era.world_size) if r != era.rank]
    texts = store.multi_get(keys) if keys else []
    return frozenset((str(host), int(port)) for t in texts for host, port in json.loads(t))


def _gloo_group(
    store: RendezvousStore, devices: list[Any], call: _Call, timeout: timedelta, deadline: float
) -> dist.ProcessGroup:
    """What torchft's ProcessGroupGloo._create_pg builds, on devices of our own."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = devices
    options._threads = 2 * len(devices)
    # for connecting, where gloo waits up to five times as long; ops get the group's own below
    options._timeout = _left(deadline) / 5
    backend: Any = dist.ProcessGroupGloo(store, call.rank, call.world_size, options)
    backend._set_default_timeout(timeout)
    backend._set_sequence_number_for_group()
    if call.global_ranks:
        backend.options.global_ranks_in_group = call.global_ranks
    if call.group_rank is not None and call.group_world_size:
        slot = call.group_rank % call.group_world_size
        backend.options.group_name = f"torchft_quorum_{call.quorum_id}_rank_{slot}"
    pg = dist.ProcessGroup(store, call.rank, call.world_size)
    pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    kinds = ["cpu"]
    kinds += ["cuda"] if torch.cuda.is_available() else []
    kinds += ["xpu"] if torch.xpu.is_available() else []
    for kind in kinds:
        pg._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, backend)
    return pg


def _forget_completed(works: deque[Work | _GlooWork]) -> None:
    """Drop completed Works, wherever they stand, and their tensors with them."""
    for _ in range(len(works)):
        work = works.popleft()
        if not work.is_completed():
            works.append(work)


def _keep_stranded(era: _Era) -> None:
    """Never drop a backend with a sleeping op: that would join its thread, for the op's timeout.

    A stranded op costs two threads, a listener and its tensors. Backends whose ops have timed out
    since are dropped here.
    """
    with _stranded_lock:
        for backend, works in list(_stranded_backends):
            _forget_completed(works)
            if not works:
                _stranded_backends.remove((backend, works))
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(backend))
        # one reference more than Python knows of: at its exit the interpreter drops the others
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(era.backend))
        _stranded_backends.append((era.backend, era.works))


def _describe(era: _Era) -> str:
    kinds = Counter(str(getattr(w, "_get_op_type", lambda: "op")()) for w in era.works)
    parts = [f"{n} x {kind}" for kind, n in sorted(kinds.items())]
    if era.entering:
        parts.append(f"{era.entering} calls being issued")
    return ", ".join(parts) or "nothing"


def _left(deadline: float) -> timedelta:
    """Time until `deadline` (monotonic seconds), at least a millisecond."""
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _current_accelerator() -> int | None:
    """The caller's accelerator, for the thread that works for it; None without one."""
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_device_index()

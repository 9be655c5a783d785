"""Process groups that can be aborted at any time and rebuilt in place, under their holders.

`AbortableGroup` adopts a torchft process group object of the user. For gloo it creates the device
itself, so that it knows the addresses of the group's connections and can shut down exactly those.
Nothing else frees a thread that waits in a gloo collective. Other backends have their own abort.
`works` has the pending operations and their waits; `backend` tracks them.

This module accesses the adopted object (never its class or module), the group's sockets, and the
keys of the group's rendezvous. One short-lived thread runs while a group is configured.
"""

from __future__ import annotations

import ctypes
import json
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore
from torchft.process_group import (
    ProcessGroup,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    ProcessGroupWrapper,
)

from fft.bus.addresses import HOW_TO_REACH, PROBE_S, joined, why_no_route, why_unreachable
from fft.errors import DeviceLost
from fft.train.guard import accelerator
from fft.train.guard.torchft_adapter import configuration_of
from fft.train.process_groups import sockets
from fft.train.process_groups.backend import TrackedBackend
from fft.train.process_groups.gloo import check_interfaces, device_makers, gloo_group, time_left
from fft.train.process_groups.nccl_library import configure_nccl_env
from fft.train.process_groups.op_errors import GroupAborted
from fft.train.process_groups.rendezvous import ConfigureCall, RendezvousStore, store_client
from fft.train.process_groups.shard import ShardGroup
from fft.train.process_groups.sockets import Address
from fft.train.process_groups.works import Generation, TrackedWork, forget_ended

logger = logging.getLogger(__name__)

_ADDRESS_KEY = "fft/listeners/{rank}"
_USED_KEY = "fft/met/{rank}"
# Pauses between two polls of pending Works, in seconds. torch's waits are no alternative, because
# they raise the op's error or block an accelerator stream.
_FIRST_PAUSE = 0.0001
_LONGEST_PAUSE = 0.002
_OP_THREAD = "pt_gloo_runloop"  # torch's name for the threads that carry out gloo's ops
_LOOP_THREAD = "gloo_tcp_loop"  # gloo's name for the threads that read and write its connections
_ROUNDS_NS = 5_000_000
_CLIENTS = 2
"""Maximum number of connections to a group's store that are kept for later configurations. A series
of aborted ones uses more."""
# How long close() waits for pending ops and for the thread of the last configure(), in seconds.
_CLOSE_LIMIT = 5.0
_PROBE_AFTER_S = 3.0
"""Time without a connection of gloo until `_unreached` searches for missing members, in seconds.

With `PROBE_S` it stays below the 10 s in which the address of a missing member is reported.
"""
_STORE_S = 8.0
"""Time limit for a connection to a store, in seconds, in which the kernel sends the first packet 4
times."""
_stranded_backends: list[tuple[object, deque[Any]]] = []
_stranded_lock = threading.Lock()


@dataclass
class _OpsSnapshot:
    """A snapshot of gloo ops that do not end. Two equal ones show that the ops no longer write.

    Each op thread sleeps between the two, and only its timeout can wake it: each connection is
    closed, or gloo will not read it again. Such a connection remains after an op failed between
    the head and the body of a message. gloo then waits for the op's buffer, which is gone, and
    polls the connection without reading it until some op's timeout. Both ends are shut down, so no
    data arrive. gloo's loop has polled for ``_ROUNDS_NS``, thousands of times, and read no byte.
    """

    parked: dict[str, str]
    """Context switches of each op thread."""
    open: dict[str, int]
    """Unread bytes of each open connection."""
    ran: dict[str, int]
    """Run time of each gloo loop that does not sleep, in nanoseconds."""

    def is_unchanged_since(self, before: _OpsSnapshot) -> bool:
        """Return whether nothing except loops has moved since ``before``."""
        return self.parked == before.parked and self.open == before.open

    def is_permanent(self, before: _OpsSnapshot) -> bool:
        """Return whether this snapshot and an equal earlier one show that nothing will move."""
        if not self.open:
            return True
        # A sleeping loop has nothing to read; a loop that waits for a core may still read.
        rounds = [ran - before.ran.get(task, ran) for task, ran in self.ran.items()]
        return bool(rounds) and min(rounds) >= _ROUNDS_NS


class AbortableGroup:
    """Handle on one torchft process group that FFT can abort, quiesce and configure again.

    All methods may be called from any thread. If several members of one process group live in
    one process, an abort by one of them also ends the connections between the others.

    Args:
        pg: The group, not yet configured. Its methods ``configure``, ``abort`` and ``shutdown`` are
            replaced on the object until `close`.
        name: The group's name in errors, such as "shard" for "on the shard group".

    Raises:
        ValueError: `pg` has been configured already, so its connections cannot be identified.
        FftError: GLOO_SOCKET_IFNAME names an interface that gloo cannot listen on.
    """

    def __init__(self, pg: ProcessGroup, name: str = "process") -> None:
        self.pg = pg
        self.name = name
        self.waiting: AbstractContextManager[None] = nullcontext()
        """Context that a thread enters around every wait for a gloo op; it is never nested."""
        self.note = ""
        """Text that the other members receive in the rendezvous."""
        self.address: str | None = None
        """IP address of this host for gloo's connections; None lets gloo resolve the host name."""
        self.notes: dict[int, str] = {}
        """Notes of the other members in the last rendezvous, by rank."""
        self._target: Any = _innermost(pg)
        self._wrapper = isinstance(self._target, ProcessGroupWrapper)
        if self._wrapper and self._target._pg is not None:
            raise ValueError(f"{pg!r} is configured already: make the AbortableGroup first")
        self._gloo = self._wrapper and _can_tell_sockets(self._target)
        if self._gloo:
            check_interfaces()
        self._lock = threading.Lock()
        self._configuring = threading.Lock()
        self._generation = Generation(name)
        self._past: list[Generation] = []
        # Store clients by host:port, kept for the next rendezvous there. For a new connection torch
        # looks up host names on both ends, also on the store's only thread. That takes seconds with
        # a slow name server.
        self._clients: dict[str, list[Any]] = {}
        self._devices: list[tuple[Any, Address]] = []
        self._worker: threading.Thread | None = None
        self._hooks: list[str] = []
        self._native_configure = configuration_of(self._target)
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
        """Abort the current group, rendezvous at `store_addr`, and build a new one.

        The arguments are those of torchft, except `timeout`.

        Args:
            store_addr: An address and prefix that was never used before.
            timeout: Limit of the whole call; by default the group's own timeout.

        Raises:
            GroupAborted: `abort` was called meanwhile.
            TimeoutError: A member did not arrive; the message names the missing ranks.
            ValueError: Rank or world size do not fit the mesh made of this group.
            RuntimeError: The backend could not connect, as when a member aborts or dies meanwhile.
                The group is then aborted; configure it again at another `store_addr`.
        """
        within = group_rank, group_world_size, global_ranks
        call = ConfigureCall(store_addr, replica_id, rank, world_size, quorum_id, *within)
        default: timedelta = getattr(self._target, "_timeout", timedelta(seconds=60))
        limit = timeout or default
        deadline = time.monotonic() + limit.total_seconds()
        with self._configuring:
            if isinstance(self._target, ShardGroup):
                self._target.check_shape(rank, world_size)
            self.abort("the process group is being reconfigured")
            self.quiesce(limit)
            generation = self._begin(call)
            given = generation, call, deadline, _current_accelerator()
            self._worker = threading.Thread(
                target=self._build, args=given, name="fft-configure", daemon=True
            )
            self._worker.start()
            while not generation.configured.wait(
                min(_PROBE_AFTER_S, time_left(deadline).total_seconds())
            ):
                if time.monotonic() >= deadline:
                    raise self._give_up(generation, limit)
                if unreached := _unreached(generation):
                    self.abort(unreached)
                    raise ConnectionError(unreached)
        self._raise_failure(generation)

    def abort(self, cause: str) -> None:
        """Fail every op that is pending on this group in this process, and refuse new ones.

        Idempotent; returns in milliseconds. The first `cause` of a configuration stays. A thread
        that is blocked in a collective or in `configure` is freed at once. Tensors of the failed
        ops may still be written until `quiesce` has returned.
        """
        with self._lock:
            generation = self._generation
            first = generation.cause is None
            if first:
                generation.cause = cause
        if not first:
            return
        generation.configured.set()
        generation.waiters.close()
        store = generation.store
        if store is not None:
            store.cancel(cause)
        if self._gloo:
            # Shut down reading first, so that gloo closes the connection by itself. A write that
            # failed before that would leave its waiter asleep.
            sockets.shut_down(generation.own, generation.peers, writing=False)
            for work in list(generation.works):
                work.free()
        else:
            self._native_abort()
            self._refuse_ops(generation)

    def cut(self) -> int:
        """Shut down the group's connections like a failing network, to inject a fault.

        The group's next ops fail; configure it again.

        Returns:
            The number of connections.
        """
        generation = self._generation
        return len(sockets.shut_down(generation.own, generation.peers, writing=True))

    def quiesce(self, timeout: timedelta) -> None:
        """Wait after `abort` until no op of the old group can still write a tensor.

        The next `configure` or `close` then drops the old backend.

        Raises:
            TimeoutError: Ops, or their work on a device, do not end within `timeout`.
            DeviceLost: The device has failed.
            RuntimeError: The group is not aborted.
        """
        generation = self._generation
        if generation.cause is None:
            raise RuntimeError("quiesce() needs an aborted process group: call abort() first")
        deadline = time.monotonic() + timeout.total_seconds()
        pause = _FIRST_PAUSE
        seen: _OpsSnapshot | None = None
        while generation.count() and not generation.stranded:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{generation.describe()} still pending {timeout.total_seconds():g} s after "
                    f"abort ({generation.cause})"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
            if self._gloo:
                thorough = pause == _LONGEST_PAUSE
                now = self._snapshot(generation, thorough)
                if now is None or seen is None or not now.is_unchanged_since(seen):
                    seen = now
                else:
                    generation.stranded = thorough and now.is_permanent(seen)
        self._refuse_ops(generation)
        # wait for work that the ops queued on a device, such as copying back reduced tensors
        accelerator.wait(time_left(deadline))

    def _snapshot(self, generation: Generation, thorough: bool) -> _OpsSnapshot | None:
        """Return a snapshot of the group's ops, or None if one of them moves.

        Without ``thorough``, a connection that gloo has not closed counts as a move, because gloo
        is usually about to close it.
        """
        # an op that was just starting may have opened a connection since
        open_ = sockets.shut_down(generation.own, generation.peers, writing=True)
        for work in list(generation.works):
            if isinstance(work, TrackedWork):
                work.end()
        if generation.entering or (open_ and not thorough):
            return None
        parked = sockets.parked_threads(_OP_THREAD)
        ran = sockets.run_times(_LOOP_THREAD) if open_ else {}
        return None if parked is None else _OpsSnapshot(parked, open_, ran)

    def pending(self) -> int:
        """Return the number of incomplete ops issued through the group since configure()."""
        return self._generation.count()

    def close(self) -> None:
        """Abort, drop the backend, delete this member's rendezvous keys, and remove the hooks."""
        self.abort("the process group is closed")
        try:
            self.quiesce(timedelta(seconds=_CLOSE_LIMIT))
        except DeviceLost as lost:  # a lost device no longer writes
            logger.warning("the %s group is closed without its device: %s", self.name, lost)
        if self._worker is not None and self._worker.is_alive():
            self._worker.join(_CLOSE_LIMIT)
        self._release_all()
        self._clients.clear()
        self._devices.clear()
        for name in self._hooks:
            self._target.__dict__.pop(name, None)
        self._hooks.clear()
        if self._wrapper:
            self._target._pg = None

    # -- configuring

    def _begin(self, call: ConfigureCall) -> Generation:
        if self._wrapper:
            call.apply_to(self._target)
        generation = Generation(self.name, call.rank, call.world_size)
        if self._wrapper:
            generation.timeout = self._target._timeout
        with self._lock:
            self._past.append(self._generation)
            self._generation = generation
        self._refuse_ops(generation)
        return generation

    def _build(
        self, generation: Generation, call: ConfigureCall, deadline: float, device: int | None
    ) -> None:
        """Run the rendezvous and build the backend, on a separate thread.

        The thread outlives its configure() only if that call was aborted or has timed out.
        """
        backend: object | None = None
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)
            backend = self._make(generation, call, deadline)
        except Exception as error:  # noqa: BLE001 - raised again in configure()
            generation.error = error
            # else gloo's listeners stay open until the garbage collector finds this cycle
            traceback.clear_frames(error.__traceback__)
        with self._lock:
            kept = generation.cause is None and backend is not None
            if kept:
                generation.backend = backend
                if self._wrapper:
                    self._target._pg = TrackedBackend(
                        backend, generation, self._gloo, self._get_waiting
                    )
        generation.configured.set()
        if kept:
            for past in self._take_past():
                self._release(past, everyone=True)  # all members are past that rendezvous
            return
        sockets.shut_down(generation.own, generation.peers, writing=True)
        if backend is not None and self._wrapper and not self._gloo:
            _discard(backend)
        del backend
        if generation.store is not None:
            generation.store.reclaim(everyone=False)

    def _make(self, generation: Generation, call: ConfigureCall, deadline: float) -> object:
        if not self._wrapper:
            self._native_configure(*call.as_args())
            return self._target
        generation.store_addr, _, prefix = call.store_addr.partition("/")
        generation.client = self._take_client(generation.store_addr, deadline)
        store = RendezvousStore(PrefixStore(prefix, generation.client), time_left(deadline))
        with self._lock:
            generation.store = store
            if generation.cause is not None:
                store.cancel(generation.cause)
        if not self._gloo:
            _refuse_used(store, generation.rank, call.store_addr)
            _, self.notes = _exchange(store, generation, self.note)
            if isinstance(self._target, ProcessGroupNCCL):
                configure_nccl_env()
            return self._target._create_pg(store, call.rank, call.world_size)
        devices = self._take_devices()
        generation.own = frozenset(address for _, address in devices)
        generation.peers, self.notes = _exchange(store, generation, self.note)
        # without a route, gloo can raise on its own thread, which ends the process
        for address in generation.peers:
            if (error := why_no_route(address)) is not None:
                raise ConnectionError(_unreached_text(generation, address, error))
        made = gloo_group(store, [d for d, _ in devices], call, self._target._timeout, deadline)
        sockets.keep_connections_alive(generation.own, generation.peers)
        with self._lock:
            self._devices = devices
        return made

    def _take_devices(self) -> list[tuple[Any, Address]]:
        """Return gloo's devices with their listeners, kept from the last configuration if possible.

        gloo takes 10 ms to drop a device, in which no Python runs. New devices are created after a
        failed configuration, whose connections may still wait unaccepted at the listener.
        """
        with self._lock:
            devices, self._devices = self._devices, []
        with sockets.thread_name(_LOOP_THREAD):  # gloo of torch 2.11 sets no name
            return devices or [sockets.listener_of(make) for make in device_makers(self.address)]

    def _give_up(self, generation: Generation, limit: timedelta) -> TimeoutError:
        store = generation.store
        waiting = store.missing if store is not None else ("the store's answer",)
        error = TimeoutError(
            f"configure() of rank {generation.rank} of {generation.world_size} timed out after "
            f"{limit.total_seconds():g} s; waiting for {', '.join(waiting) or 'connections'}"
        )
        self.abort(str(error))
        return error

    def _raise_failure(self, generation: Generation) -> None:
        if generation.cause is not None:
            raise GroupAborted(generation.cause) from generation.error
        if generation.error is not None:
            self.abort(f"configure() failed: {generation.error}")
            raise generation.error

    def _take_client(self, address: str, deadline: float) -> Any:
        """Return a store client for exclusive use."""
        with self._lock:
            free = self._clients.get(address)
            kept = free.pop() if free else None
        if kept is not None:
            try:
                kept.num_keys()
                return kept
            except RuntimeError as error:
                logger.debug("store %s: reconnecting (%s)", address, error)
        host, _, port = address.rpartition(":")
        try:
            limit = min(_STORE_S, time_left(deadline).total_seconds())
            return store_client(host.strip("[]"), int(port), limit)
        except OSError as error:
            raise ConnectionError(
                f"the store of a replica group at {address} cannot be reached from this host: "
                f"{error}; {HOW_TO_REACH}"
            ) from error

    def _release(self, generation: Generation, everyone: bool) -> None:
        """Drop the resources of an ended configuration, and its keys (RendezvousStore.reclaim)."""
        _drop_timed_out()
        if generation.stranded:
            _keep_stranded(generation)
        generation.backend = None  # joins gloo's threads, which are idle
        reached = generation.store is not None and generation.store.reclaim(everyone)
        with self._lock:
            client, generation.client, generation.store = generation.client, None, None
            if client is not None and reached:
                # keep clients of one host:port only, so that old connections close when it changes
                kept = [*self._clients.get(generation.store_addr, ()), client]
                self._clients = {generation.store_addr: kept[-_CLIENTS:]}

    def _release_all(self) -> None:
        """Release all configurations, on a thread: a store on a vanished host never answers."""
        generations = [*self._take_past(), self._generation]

        def release() -> None:
            for generation in generations:
                self._release(generation, everyone=False)

        thread = threading.Thread(target=release, name="fft-release", daemon=True)
        thread.start()
        thread.join(_CLOSE_LIMIT)
        if thread.is_alive():
            logger.warning(
                "the store at %s has not answered for %g s, so rendezvous keys of the %s group "
                "remain on it",
                self._generation.store_addr,
                _CLOSE_LIMIT,
                self.name,
            )

    def _take_past(self) -> list[Generation]:
        with self._lock:
            past, self._past = self._past, []
        return past

    def _get_waiting(self) -> AbstractContextManager[None]:
        return self.waiting

    def _refuse_ops(self, generation: Generation) -> None:
        """Refuse every op until there is another backend."""
        if self._wrapper:
            with self._lock:
                if self._generation is generation:
                    self._target._pg = TrackedBackend(None, generation)

    # -- hooks on the adopted object

    def _hook(self) -> None:
        hooks: dict[str, Callable[..., Any]] = {
            "configure": self.configure,
            "abort": self._hooked_abort,
            "shutdown": self.close,
        }
        for name, function in hooks.items():
            setattr(self._target, name, function)
            self._hooks.append(name)

    def _hooked_abort(self, errored: bool = True) -> None:
        self.abort("abort() was called on the process group")


def _innermost(pg: Any) -> Any:
    """Return the torchft group that owns a backend, inside torchft's wrappers."""
    while isinstance(pg, ProcessGroupWrapper) and isinstance(pg._pg, ProcessGroup):
        pg = pg._pg
    return pg


def _can_tell_sockets(target: Any) -> bool:
    """Return whether the sockets of this group can be identified; log if they cannot."""
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


def _discard(backend: Any) -> None:
    """End the connections and threads of a backend that is no longer needed."""
    try:
        backend.abort()
    except RuntimeError as error:  # a backend without abort ends with its last reference
        logger.debug("a group that is not needed was not aborted: %s", error)


def _refuse_used(store: RendezvousStore, rank: int, address: str) -> None:
    """Raise ValueError if this member has already used ``store`` for a rendezvous.

    The others would read the values of the earlier rendezvous, such as NCCL's unique id of a group
    that is gone.
    """
    if store.add(_USED_KEY.format(rank=rank), 1) != 1:
        raise ValueError(
            f"{address} was used for an earlier group of rank {rank}: pass another one"
        )


def _exchange(
    store: RendezvousStore, generation: Generation, note: str
) -> tuple[frozenset[Address], dict[int, str]]:
    """Publish this member's listeners and note, and wait for those of all others.

    Returns:
        The listeners of the other members, and their notes by rank.
    """
    entry = {"listeners": sorted(generation.own), "note": note}
    store.set(_ADDRESS_KEY.format(rank=generation.rank), json.dumps(entry))
    others = [r for r in range(generation.world_size) if r != generation.rank]
    texts = store.multi_get([_ADDRESS_KEY.format(rank=r) for r in others]) if others else []
    entries = [json.loads(text) for text in texts]
    notes = {rank: str(entry["note"]) for rank, entry in zip(others, entries, strict=True)}
    return frozenset((str(h), int(port)) for e in entries for h, port in e["listeners"]), notes


def _unreached(generation: Generation) -> str | None:
    """Return why an address of another member cannot be connected to, or None if all can.

    gloo itself reports neither address nor cause before its timeout. A connection that is closed at
    once does not disturb a listener of gloo.
    """
    if not generation.peers:  # not all members have come
        return None
    found: dict[Address, OSError] = {}

    def probe(address: Address) -> None:
        if (error := why_unreachable(address)) is not None:
            found[address] = error

    probes = [threading.Thread(target=probe, args=(one,), daemon=True) for one in generation.peers]
    for thread in probes:
        thread.start()
    for thread in probes:
        thread.join(PROBE_S)
    if found:
        return _unreached_text(generation, *next(iter(list(found.items()))))
    return None


def _unreached_text(generation: Generation, address: Address, error: OSError) -> str:
    mine = ", ".join(sorted(own for own, _ in generation.own))
    return (
        f"rank {generation.rank} of {generation.world_size} of the {generation.group} group "
        f"cannot reach another rank's gloo at {joined(*address)} from {mine}: {error}; "
        f"{HOW_TO_REACH}"
    )


def _keep_stranded(generation: Generation) -> None:
    """Keep a backend with a sleeping op, because dropping it would wait for the op's timeout.

    It holds two threads, a listener and its tensors until `_drop_timed_out`.
    """
    # an extra reference, because the interpreter drops the others at exit
    with _stranded_lock:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(generation.backend))
        _stranded_backends.append((generation.backend, generation.works))


def _drop_timed_out() -> None:
    """Drop the backends whose stranded ops have timed out."""
    with _stranded_lock:
        for backend, works in list(_stranded_backends):
            forget_ended(works)
            if not works:
                _stranded_backends.remove((backend, works))
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(backend))


def _current_accelerator() -> int | None:
    """Return the caller's accelerator index, which its worker thread sets as well, or None."""
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_device_index()

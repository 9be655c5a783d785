"""Create gloo's group as torchft and torch do, but on devices that FFT creates and knows."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from fft.errors import FftError
from fft.train.guard.unsafe_places import guarded
from fft.train.process_groups.rendezvous import ConfigureCall, RendezvousStore

VARIABLE = "GLOO_SOCKET_IFNAME"
# gloo repeats connections on its own thread, where a lost route ends the process. It reads this
# variable with its first connection.
os.environ.setdefault("GLOO_DISABLE_CONNECTION_RETRIES", "1")


def device_makers(address: str | None) -> list[Callable[[], Any]]:
    """Return one function per gloo device, which creates the device.

    The devices are those of the interfaces in GLOO_SOCKET_IFNAME. Without these there is one device
    on ``address``, or, if that is None, on the address that torch finds by the host's name.
    """
    gloo = dist.ProcessGroupGloo
    names = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    if not names and address is not None:
        return [lambda: gloo.create_device(hostname=address)]
    if not names:
        return [gloo.create_default_device]
    return [lambda name=name: gloo.create_device(interface=name) for name in names]  # type: ignore[misc]


def check_interfaces(environ: Mapping[str, str] = os.environ) -> None:
    """Raise FftError if GLOO_SOCKET_IFNAME names an interface that gloo cannot listen on.

    Without this check every epoch would fail while it builds its process groups, and be retried.
    """
    value = environ.get(VARIABLE, "")
    there = [name for _, name in socket.if_nameindex()]
    for name in filter(None, value.split(",")):
        trouble = f"this host has no network interface {name!r}"
        if name in there:
            try:
                dist.ProcessGroupGloo.create_device(interface=name)
                continue
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                trouble = f"interface {name!r} has no address, or is down (gloo: {reason})"
        raise FftError(
            f"{VARIABLE}={value}: {trouble}. gloo takes exact names, separated by commas, without "
            f"the ^ and = of NCCL_SOCKET_IFNAME; this host has {', '.join(there)}. Unset "
            f"{VARIABLE} to use the interface that leads to the bus"
        )


def gloo_group(
    store: RendezvousStore,
    devices: list[Any],
    call: ConfigureCall,
    timeout: timedelta,
    deadline: float,
) -> dist.ProcessGroup:
    """Build what torchft's ProcessGroupGloo._create_pg builds, on ``devices``."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = devices
    options._threads = 2 * len(devices)
    # for connecting, where gloo waits up to five times as long; ops use the group's timeout below
    options._timeout = time_left(deadline) / 5
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


MILLISECOND = timedelta(milliseconds=1)


class WaiterPool:
    """Threads that wait in gloo for sends and receives, so that their callers can be freed.

    There are as many threads as simultaneous waits. An idle thread ends with `close`. A waiting one
    ends when gloo releases it: usually at once, otherwise at the op's own timeout.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Callable[[], None] | None]] = []
        self._closed = False

    @guarded
    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` on a thread."""
        with self._lock:
            tasks = self._idle.pop() if self._idle else None
        if tasks is None:
            tasks = SimpleQueue()
            threading.Thread(
                target=self._serve, args=(tasks,), name="fft-peer-wait", daemon=True
            ).start()
        tasks.put(task)

    def close(self) -> None:
        """End every thread once it is idle."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for tasks in idle:
            tasks.put(None)

    def _serve(self, tasks: SimpleQueue[Callable[[], None] | None]) -> None:
        while (task := tasks.get()) is not None:
            task()
            del task  # releases its tensors
            with self._lock:
                if self._closed:
                    return
                self._idle.append(tasks)


class FailableFuture:
    """A future that wraps gloo's, and that FFT can fail."""

    def __init__(
        self,
        inner: torch.futures.Future[Any],
        failure: Callable[[BaseException], RuntimeError],
    ) -> None:
        self.outer: torch.futures.Future[Any] = torch.futures.Future()
        self._failure: Callable[[BaseException], RuntimeError] | None = failure
        """Makes the op's error. It holds tensors, so it is released when the op has ended."""
        self._first = itertools.count()  # its next() is atomic in the interpreter
        inner.add_done_callback(self._settle)

    def _settle(self, inner: torch.futures.Future[Any]) -> None:
        failure, self._failure = self._failure, None
        assert failure is not None, "a future ends once"
        try:
            value = inner.value()
        except RuntimeError as error:
            self.fail(failure(error))
            return
        if next(self._first) == 0:
            self.outer.set_result(value)

    def fail(self, error: RuntimeError) -> None:
        if next(self._first) == 0:
            self.outer.set_exception(error)


def deadline_of(timeout: timedelta | None) -> float | None:
    """Return the time, in monotonic seconds, at which a wait ends, or None without a limit.

    torch counts whole milliseconds, and zero means no limit (``kNoTimeout``). Native code, such as
    ``wait_tensor``, always passes zero. A negative timeout ends at once.
    """
    if timeout is None:
        return None
    milliseconds = int(timeout / MILLISECOND)
    return time.monotonic() + milliseconds / 1e3 if milliseconds else None


def time_left(deadline: float) -> timedelta:
    """Return the time until `deadline` (monotonic seconds), at least a millisecond."""
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))

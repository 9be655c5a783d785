"""Operations on NCCL: make a communicator for one epoch, connect it, abort it.

They set environment variables that torch reads (`configure_nccl_env`, `TorchNccl.make`). This
module needs only torch, so it can be tested without FFT's other dependencies (``python -m
tests.acceptance.gpu``).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from fft.errors import FftError

logger = logging.getLogger(__name__)

_BEGUN_KEY = "fft/begun/{rank}"
_LIMIT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
_WATCHDOG_LIMIT = timedelta(hours=24)
"""Time after which torch's watchdog considers an op failed.

FFT's windows limit the duration of a step instead. torch waits just as long for an abort, so a
caller that aborts uses `abort_within`.
"""
_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "its watchdog would end the process when a group is aborted",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "its monitor would end the process, or hold it up for 8 minutes",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "its watchdog would hold up an aborted group's end",
}
"""Variables that are 0 under FFT, with the reason. torch reads them whenever a group is made
(ProcessGroupNCCL.cpp, the constructors of ProcessGroupNCCL and HeartbeatMonitor)."""
_settings_lock = threading.Lock()


class Communicator(Protocol):
    """The result of `TorchNccl.make`: a ``torch.distributed.ProcessGroup``, which runs the ops."""

    def abort(self) -> None:
        """End all ops, in progress or not, and the connections."""


class NcclLibrary(Protocol):
    """A factory of communicators: `TorchNccl`, or a stand-in in a test."""

    def make(
        self, store: Store, rank: int, world_size: int, timeout: timedelta, name: str
    ) -> Communicator:
        """Make a communicator that is not connected."""

    def connect(self, made: Communicator) -> None:
        """Begin to connect to the other ranks; may wait for them only at ``store``."""

    def finish(self, made: Communicator) -> None:
        """Return when it is connected. If all ranks have begun, that takes only as long as they
        need."""


class TorchNccl:
    """NCCL through torch's backend."""

    def make(
        self, store: Store, rank: int, world_size: int, timeout: timedelta, name: str
    ) -> dist.ProcessGroup:
        """Make a communicator that is not connected yet, so that `connect` can be aborted.

        Raises FftError if this torch has no NCCL or there is no GPU.
        """
        if not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise FftError(
                "ShardProcessGroupNCCL needs a GPU and a torch that was built with NCCL; on CPU "
                "use fft.ShardProcessGroupGloo"
            )
        configure_nccl_env()
        os.environ.setdefault(_LIMIT, str(max(1, round(timeout.total_seconds()))))
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        # otherwise a call that waits for a peer could not be aborted
        options.config.blocking = False
        options._timeout = _WATCHDOG_LIMIT
        options.group_name = name
        backend = nccl(store, rank, world_size, options)
        backend._set_sequence_number_for_group()
        pg = dist.ProcessGroup(store, rank, world_size)
        pg._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        pg._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
        return pg

    def connect(self, made: Communicator) -> None:
        """Start NCCL's connection, in NCCL's own threads, on the current device."""
        device = torch.device("cuda", torch.cuda.current_device())
        made._get_backend(device).eager_connect_single_device(device)  # type: ignore[attr-defined]

    def finish(self, made: Communicator) -> None:
        """Wait with a first op until NCCL has connected.

        torch waits in the first op, for at most the ``timeout`` of `make`, and holds a lock
        meanwhile that an abort needs, too (``NCCLComm::getNcclComm``). So that op must not be one
        of the training.
        """
        number = torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))
        made.allreduce([number], dist.AllreduceOptions()).wait()  # type: ignore[attr-defined]


def connect_all(
    library: NcclLibrary, made: Communicator, store: Store, rank: int, world_size: int
) -> None:
    """Connect ``made`` with the other ranks; each of them calls this.

    A thread that waits for another rank inside NCCL cannot be interrupted. So no thread waits there
    before all ranks have begun, and that is awaited at ``store``, where a rollback can end the
    wait.
    """
    library.connect(made)
    store.set(_BEGUN_KEY.format(rank=rank), "1")
    store.wait([_BEGUN_KEY.format(rank=each) for each in range(world_size)])
    library.finish(made)


def configure_nccl_env() -> None:
    """Let this process survive an abort of any NCCL group that it makes from now on.

    Conflicting values (``torchrun`` sets one) are overwritten, and the log records it.
    """
    with _settings_lock:
        for name, why in _SETTINGS.items():
            was = os.environ.get(name)
            if was == "0":
                continue
            os.environ[name] = "0"
            if was is not None:
                logger.warning("%s was %s and is 0 now: %s", name, was, why)
        debug = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper()
        if debug == "DETAIL" or _is_on(os.environ.get("TORCH_NCCL_DESYNC_DEBUG", "")):
            logger.error(
                "TORCH_DISTRIBUTED_DEBUG=DETAIL or TORCH_NCCL_DESYNC_DEBUG=1 is set: with it "
                "torch kills a process whose group is aborted, so a rollback would lose it; "
                "unset it"
            )


def abort_within(abort: Callable[[], None], limit_s: float, what: str) -> bool:
    """Call ``abort`` in a thread, wait for it at most ``limit_s`` seconds; return whether it ended.

    torch's abort has no limit that a caller can set: it waits for locks. An abort that takes longer
    goes on in its thread; the log records that, and its end.

    Raises whatever ``abort`` raises within the limit.
    """
    began = time.monotonic()
    lock, failures = threading.Lock(), list[BaseException]()
    over = is_left = False

    def run() -> None:
        nonlocal over
        failure: BaseException | None = None
        try:
            abort()
        except Exception as error:  # noqa: BLE001 - raised in the caller, or logged
            failure = error
        with lock:
            over = True
            if failure is not None:
                failures.append(failure)
            if is_left:
                took = time.monotonic() - began
                logger.warning("the abort of %s has ended after %.1f s: %s", what, took, failure)

    thread = threading.Thread(target=run, name="fft-nccl-abort", daemon=True)
    thread.start()
    thread.join(limit_s)
    with lock:
        is_left = not over
    if is_left:
        logger.error(
            "the abort of %s has not ended within %g s, and continues in the background",
            what,
            limit_s,
        )
    if failures and not is_left:
        raise failures[0]
    return not is_left


def _is_on(value: str) -> bool:
    """Parse a switch as torch does."""
    return value.strip().lower() in ("1", "y", "yes", "t", "true")

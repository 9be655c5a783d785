"""The pending ops of a process group, and the waits for them.

When a connection ends, gloo does not wake the waiters of a queued send, of a receive in progress,
or of a receive from any rank. They sleep until the op's own timeout. So no wait here relies on gloo
alone; each checks for an abort every `_SLICE`. The wait of a collective may time out and be
repeated. The wait of a send or receive may not, because gloo then closes all connections. A thread
of FFT therefore waits for those in place of the caller.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work

from fft.train.guard.unsafe_places import guarded
from fft.train.process_groups.gloo import (
    MILLISECOND,
    FailableFuture,
    WaiterPool,
    deadline_of,
    time_left,
)
from fft.train.process_groups.op_errors import CollectiveFailed, GroupAborted, what
from fft.train.process_groups.rendezvous import RendezvousStore
from fft.train.process_groups.sockets import Address

# Maximum time that a wait for a gloo op continues after an abort that gloo does not report.
_SLICE = timedelta(milliseconds=50)


@dataclass
class Generation:
    """One configuration of a group: from one configure() to the next."""

    group: str = "process"
    """Name of the group in messages, such as "shard"."""
    rank: int = 0
    world_size: int = 1
    timeout: timedelta = timedelta(seconds=60)
    """Time after which gloo fails an op."""
    cause: str | None = None
    """Cause of the abort, or None if it was not aborted."""
    configured: threading.Event = field(default_factory=threading.Event)
    """Set when the configuration has succeeded, failed or was aborted."""
    backend: object | None = None
    error: Exception | None = None
    store: RendezvousStore | None = None
    client: Any = None
    store_addr: str = ""
    own: frozenset[Address] = frozenset()
    peers: frozenset[Address] = frozenset()
    works: deque[Any] = field(default_factory=deque)
    """Works that are not known to be over, oldest first; protected by `lock`."""
    entering: set[object] = field(default_factory=set)
    """One mark for each op that is just being issued."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    stranded: bool = False
    """Aborted with ops that gloo never wakes, which no longer write but end only by timeout."""
    waiters: WaiterPool = field(default_factory=WaiterPool)

    @guarded  # an interrupt must not lose a work that is just being checked
    def forget(self) -> None:
        """Drop the works that are over, and with them their tensors."""
        with self.lock:
            forget_ended(self.works)

    def count(self) -> int:
        """Return the number of ops that are being issued or pending."""
        with self.lock:
            forget_ended(self.works)
            return len(self.works) + len(self.entering)

    def describe(self) -> str:
        """Describe the pending ops in a message."""
        with self.lock:
            kinds = Counter(getattr(w, "place", "") or "op" for w in self.works)
        parts = [f"{n} x {kind}" if n > 1 else kind for kind, n in sorted(kinds.items())]
        if self.entering:
            parts.append(f"{len(self.entering)} calls being issued")
        return "; ".join(parts) or "nothing"

    def place(self, op: str, args: tuple[Any, ...]) -> str:
        """Describe an op with its tensors, its peer and this group in a message."""
        return (
            f"{what(op, args)}, on the {self.group} group (rank {self.rank} of {self.world_size})"
        )


class TrackedWork(Work):
    """A gloo Work that an abort always frees, and whose errors name the op.

    Args:
        work: gloo's Work.
        generation: The configuration of the group that the op was issued on.
        op: Name of the method.
        args: Its arguments, for messages.
        around: Context to enter around every wait.
    """

    def __init__(
        self,
        work: Work,
        generation: Generation,
        op: str,
        args: tuple[Any, ...],
        around: AbstractContextManager[None],
    ) -> None:
        super().__init__()
        self._work = work
        self._generation = generation
        self._op = op
        self._args = args
        self._around = around

    @property
    def place(self) -> str:
        """Operation, tensors, peer and group, as in the message of `CollectiveFailed`."""
        return self._generation.place(self._op, self._args)

    def is_over(self) -> bool:
        """Return whether the op can no longer write."""
        raise NotImplementedError

    def end(self) -> None:
        """Help the op to end after an abort; `AbortableGroup.quiesce` calls it."""

    def free(self) -> None:
        """Fail the op's future right after an abort, to free a thread that waits on it."""

    def is_completed(self) -> bool:
        # an aborted op has failed, though gloo may not know it yet
        return self._generation.cause is not None or self.is_over()

    def exception(self) -> Any:
        if self._generation.cause is not None and not self.is_over():
            return self._aborted()
        return self._work.exception()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def synchronize(self) -> None:
        self._work.synchronize()

    def _get_op_type(self) -> int:
        kind: int = self._work._get_op_type()  # type: ignore[attr-defined]
        return kind

    def _aborted(self) -> GroupAborted:
        return GroupAborted(self._generation.cause or "the process group was aborted", self.place)

    def _failure(self, error: BaseException | str) -> RuntimeError:
        """Return the exception for an op that failed, by our own abort or otherwise."""
        if self._generation.cause is not None:
            return self._aborted()
        return CollectiveFailed(self.place, error)

    def _late(self, timeout: timedelta | None) -> CollectiveFailed:
        seconds = 0.0 if timeout is None else timeout.total_seconds()
        return CollectiveFailed(self.place, f"timed out after {seconds:g} s (the op continues)")


class CollectiveWork(TrackedWork):
    """A collective, which runs on one of gloo's own threads."""

    _future: FailableFuture | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as in torch: with None or zero only the group's own timeout applies."""
        deadline = deadline_of(timeout)
        work, generation = self._work, self._generation
        with self._around:
            while True:
                left = _SLICE if deadline is None else min(_SLICE, time_left(deadline))
                over = work.is_completed()
                try:
                    done = work.wait(left)
                    generation.forget()
                    return done
                except RuntimeError as error:
                    if over:
                        raise self._failure(error) from error
                    # Either the slice or the op ended; the next round shows which.
                    if work.is_completed():
                        continue
                    if generation.cause is not None:
                        raise self._aborted() from None
                    if deadline is not None and time.monotonic() >= deadline:
                        raise self._late(timeout) from None

    def is_over(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_completed() and self._work.is_success()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes with the op, or fails when the group is aborted."""
        if self._future is None:
            self._future = FailableFuture(self._work.get_future(), self._failure)
        if self._generation.cause is not None:
            self.free()
        return self._future.outer

    def free(self) -> None:
        if self._future is not None and not self.is_over():
            self._future.fail(self._aborted())


class PeerWork(TrackedWork):
    """A send or a receive, which is over when gloo's own wait for it has ended or failed."""

    def __init__(
        self,
        work: Work,
        generation: Generation,
        op: str,
        args: tuple[Any, ...],
        around: AbstractContextManager[None],
    ) -> None:
        super().__init__(work, generation, op, args, around)
        self._lock = threading.Lock()
        self._attended = False
        self._ended = threading.Event()
        self._done = False
        self._error: RuntimeError | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as in torch: with None or zero only the group's own timeout applies. Repeatable."""
        deadline = deadline_of(timeout)
        if not self._ended.is_set():
            self._attend()
            with self._around:
                self._await_end(deadline, timeout)
        if self._error is not None:
            raise self._failure(self._error) from self._error
        return self._done

    def _attend(self) -> None:
        if self._generation.cause is not None:
            raise self._aborted()
        with self._lock:
            first, self._attended = not self._attended, True
        if first:
            # without an argument gloo would use the limit for connecting
            self._generation.waiters.submit(partial(self._wait_in_gloo, self._generation.timeout))

    def _wait_in_gloo(self, timeout: timedelta) -> None:
        try:
            done = self._work.wait(timeout)
        except RuntimeError as error:
            self._settle(False, error)
        else:
            self._settle(done, None)

    def _await_end(self, deadline: float | None, timeout: timedelta | None) -> None:
        while True:
            left = _SLICE if deadline is None else min(_SLICE, time_left(deadline))
            if self._ended.wait(left.total_seconds()):
                return
            if self._generation.cause is not None:
                raise self._aborted()
            if deadline is not None and time.monotonic() >= deadline:
                raise self._late(timeout)

    def _settle(self, done: bool, error: RuntimeError | None) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._done, self._error = done, error
                self._ended.set()

    def end(self) -> None:
        """Make gloo close the op's connections, which it does when a wait ends early.

        Then no data move into the tensor or out of it, even if gloo does not wake the thread that
        waits for the op.
        """
        if not self._ended.is_set():
            self._wait_in_gloo(MILLISECOND)

    def is_over(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Any:
        return self._error if self._ended.is_set() else super().exception()


class ScatterWork(Work):
    """A reduce-scatter made of all-reduces, whose results this rank copies after its wait.

    Args:
        reductions: One Work for each of the reduced tensors, which are tracked separately.
        keep: Copies this rank's parts into ``outputs``.
        outputs: The output tensors of the caller.
    """

    def __init__(
        self,
        reductions: list[CollectiveWork],
        keep: Callable[[], None],
        outputs: list[torch.Tensor],
    ) -> None:
        super().__init__()
        self._reductions = reductions
        self._keep: Callable[[], None] | None = keep
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as in torch: with None or zero only the group's own timeout applies."""
        deadline = deadline_of(timeout)
        for work in self._reductions:
            work.wait(None if deadline is None else time_left(deadline))
        if self._keep is not None:
            self._keep()
            self._keep = None
        return True

    def is_completed(self) -> bool:
        if self._keep is None:
            return True
        over = all(work.is_completed() for work in self._reductions)
        return over and not all(work.is_success() for work in self._reductions)

    def is_success(self) -> bool:
        return self._keep is None

    def exception(self) -> Any:
        errors = (work.exception() for work in self._reductions)
        return next((error for error in errors if error is not None), None)

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()


def forget_ended(works: deque[Any]) -> None:
    """Drop Works that are over, at any position, and with them their tensors."""
    for _ in range(len(works)):
        work = works.popleft()
        over = work.is_over() if isinstance(work, TrackedWork) else work.is_completed()
        if not over:
            works.append(work)

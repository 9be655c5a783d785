"""Functions that are called again, in the same processes, after a fault: `fft.restartable`.

Each call is a live block: all members of the job enter it together, and it returns on all of them
or on none. A fault of one member interrupts the call on the others. The job is complete when a call
has returned.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroup

from fft.errors import LiveBlockFailed, RestartRefused
from fft.messages.identities import Peer
from fft.train.api.live_set import LiveSet, live_set
from fft.train.api.manager import ManagerFFT
from fft.train.session.error_reports import text_of
from fft.train.session.settings import ManagerConfig

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Call:
    """One call of a restartable function, which gets it as its first argument.

    Attributes:
        iteration: Number of calls that have failed before this one, equal on all members.
        rank: Number of this process among the members, from 0.
        members: The processes that make this call, in the order of their ranks.
        group: Process group over the members, for the functions of ``torch.distributed``.
    """

    iteration: int
    rank: int
    members: tuple[Peer, ...]
    group: ProcessGroup
    _manager: ManagerFFT

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.members)

    def ping(self) -> None:
        """Report progress, as `ManagerFFT.ping`."""
        self._manager.ping()

    def atomic(self) -> AbstractContextManager[None]:
        """A section that no restart interrupts, such as writing a checkpoint."""
        return self._manager.atomic()


class _Restarts:
    """Counts the restarts of one function in this process, and enforces their limits.

    Args:
        max_restarts: Maximum number of restarts, or None.
        within_s: Only restarts in this number of past seconds count; None counts all.
        stop_on: Types of exceptions after which the function is not called again.
    """

    def __init__(
        self,
        max_restarts: int | None,
        within_s: float | None,
        stop_on: type[Exception] | tuple[type[Exception], ...],
    ) -> None:
        self._max_restarts, self._within_s, self._stop_on = max_restarts, within_s, stop_on
        self._failures: deque[float] = deque()
        """Times of the failed calls."""
        self._iteration = 0
        self._last_failed: tuple[object, ...] = ()
        """The members that failed in the last call."""

    def next_call(self, live: LiveSet, members: tuple[Peer, ...]) -> Call:
        """Return the next call. Raises RestartRefused if it would exceed ``max_restarts``."""
        self._iteration = _maximum_of_all(self._iteration, live.group)
        restarts = self._recent()
        if self._max_restarts is not None and restarts > self._max_restarts:
            window = "" if self._within_s is None else f" within {self._within_s:g} s"
            raise RestartRefused(
                f"{restarts} restarts{window} would exceed max_restarts={self._max_restarts}; "
                f"failed last: {', '.join(map(str, self._last_failed)) or 'none'}"
            )
        rank = members.index(live.me)
        return Call(self._iteration, rank, members, live.group, live.manager)

    def _recent(self) -> int:
        if self._within_s is None:
            return self._iteration
        while self._failures and time.monotonic() - self._failures[0] > self._within_s:
            self._failures.popleft()
        return len(self._failures)

    def failed(self, error: LiveBlockFailed) -> None:
        """Count a failed call."""
        self._iteration += 1
        self._failures.append(time.monotonic())
        self._last_failed = error.failed

    @contextmanager
    def stopping(self, me: Peer) -> Iterator[None]:
        """Raise RestartRefused in place of an error of a type in ``stop_on``."""
        try:
            yield
        except self._stop_on as error:
            raise RestartRefused(
                f"{text_of(error)} on {me}, whose log has the traceback, is not followed by a "
                "restart (stop_on)"
            ) from error


def _maximum_of_all(number: int, group: ProcessGroup) -> int:
    """Return the largest ``number`` of all members. A restarted process has counted from 0."""
    device = "cuda" if "nccl" in group.getBackendName() else "cpu"
    tensor = torch.tensor([number], device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return int(tensor.item())


def restartable(
    *,
    max_restarts: int | None = None,
    within_s: float | None = None,
    min_members: int = 1,
    stop_on: type[Exception] | tuple[type[Exception], ...] = (),
    hooks: Callable[[ManagerFFT], object] | None = None,
    group: ProcessGroup | None = None,
    timeouts: Mapping[str, float] | None = None,
) -> Callable[[Callable[Concatenate[Call, P], R]], Callable[P, R]]:
    """Decorate a function that is called again, in the same processes, after a fault.

    All processes that ``fft run --groups N script.py`` starts call it together. If it raises on one
    of them, or if one dies, FFT interrupts it on the others, aborts ``call.group`` and runs the
    hooks. Then the remaining processes, and those that `fft run` has restarted meanwhile, call it
    again with the same arguments. It returns on all of them or on none. The job is then complete,
    so a script calls one restartable function, once.

    The function gets a `Call` before its own arguments. FFT does not restore what it changes, such
    as weights: each call must load that from a checkpoint, or from its arguments. All members must
    return within ``vote_window`` (60 s) of the first one.

    Args:
        max_restarts: Maximum number of restarts; beyond it all members raise ``RestartRefused``.
        within_s: Only restarts in this number of past seconds count. None counts all.
        min_members: Minimum number of members. Fewer members wait ``quorum`` (60 s) for others, and
            then raise ``NotEnoughGroups``.
        stop_on: Exceptions of the function after which all members raise ``RestartRefused``.
        hooks: Called once with the manager before the first call, to add hooks by
            ``manager.on_abort``, ``on_unwound``, ``on_join``, ``health_check``, ``on_complete`` and
            ``on_leave``.
        group: As for `live_set`.
        timeouts: As for `live_set`.
    """

    def decorate(function: Callable[Concatenate[Call, P], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            # max_restarts limits the failures; the limit for the failures of a step must not
            config = ManagerConfig(max_body_failures=sys.maxsize)
            live = live_set(group, min_members=min_members, timeouts=timeouts, config=config)
            restarts = _Restarts(max_restarts, within_s, stop_on)
            with live:
                if hooks is not None:
                    hooks(live.manager)
                while True:
                    try:
                        with live.manager._live.final_block(function.__qualname__) as members:
                            call = restarts.next_call(live, members)
                            with restarts.stopping(live.me):
                                result = function(call, *args, **kwargs)
                    except LiveBlockFailed as error:
                        restarts.failed(error)
                    else:
                        return result

        return run

    return decorate

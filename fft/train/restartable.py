"""Functions that are called again, in the same processes, after a fault: `fft.restartable`.

Each call is a live block: all members of the job enter it together, and it ends on all of them or
on none. A fault of one member interrupts the call on the others. The last commit ends the job.
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
from fft.train.error_reports import text_of
from fft.train.live_set import LiveSet, live_set
from fft.train.manager import ManagerFFT
from fft.train.settings import ManagerConfig

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Call:
    """One call of a restartable function; its first argument.

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
    """The calls of one restartable function in this process.

    Args:
        most: Maximum number of restarts, or None.
        within_s: Seconds within which they count; None: the whole time.
        stop_on: Types of exceptions after which the function is not called again.
    """

    def __init__(
        self,
        most: int | None,
        within_s: float | None,
        stop_on: type[Exception] | tuple[type[Exception], ...],
    ) -> None:
        self._most, self._within_s, self._stop_on = most, within_s, stop_on
        self._failures: deque[float] = deque()
        self._iteration = 0
        self._failed: tuple[object, ...] = ()

    def call(self, live: LiveSet, members: tuple[Peer, ...]) -> Call:
        """Return the next call. Raises RestartRefused if it would be one too many."""
        self._iteration = _most_of_all(self._iteration, live.group)
        restarts = self._recent()
        if self._most is not None and restarts > self._most:
            window = "" if self._within_s is None else f" in {self._within_s:g} s"
            raise RestartRefused(
                f"{restarts} restarts{window} would exceed max_restarts={self._most}; failed "
                f"last: {', '.join(map(str, self._failed)) or 'none'}"
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
        self._failed = error.failed

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Replace an error of the function after which no restart may follow by RestartRefused."""
        try:
            yield
        except self._stop_on as error:
            raise RestartRefused(
                f"{text_of(error)} is not followed by a restart (stop_on)"
            ) from error


def _most_of_all(number: int, group: ProcessGroup) -> int:
    """Return the largest ``number`` of all members: a process that was restarted counts from 0."""
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
    of them, or if one dies, it is interrupted on all others, whatever they are doing; FFT aborts
    ``call.group`` and runs the hooks. Then the processes that remain, and those that came back
    meanwhile, call it again with the same arguments. It returns on all of them or on none. The job
    is complete then, so a script calls one restartable function, once.

    The function gets a `Call` before its own arguments. It must load what it changes, such as
    weights, from a checkpoint or from its arguments. All members must return within ``vote_window``
    (60 s) of the first one.

    Args:
        max_restarts: Maximum number of restarts; beyond it all members raise ``RestartRefused``.
        within_s: Only restarts within this number of seconds count.
        min_members: Minimum number of members; fewer wait for ``quorum`` (60 s) for others, and
            then raise ``NotEnoughGroups``.
        stop_on: Exceptions of the function after which all members raise ``RestartRefused``.
        hooks: Called once with the manager before the first call, to add hooks by
            ``manager.on_abort``, ``finalize``, ``initialize``, ``health_check``, ``completion`` and
            ``terminate``.
        group: As for `live_set`.
        timeouts: As for `live_set`.
    """

    def decorate(function: Callable[Concatenate[Call, P], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            # the limits of this function replace those of steps
            config = ManagerConfig(max_body_failures=sys.maxsize)
            live = live_set(group, min_members=min_members, timeouts=timeouts, config=config)
            restarts = _Restarts(max_restarts, within_s, stop_on)
            with live:
                if hooks is not None:
                    hooks(live.manager)
                while True:
                    try:
                        with live.manager._live.final_block(function.__qualname__) as members:
                            call = restarts.call(live, members)
                            with restarts.stopping():
                                result = function(call, *args, **kwargs)
                    except LiveBlockFailed as error:
                        restarts.failed(error)
                    else:
                        return result

        return run

    return decorate

"""Overrides of methods of torchft's Manager, and the methods that FFT's reducers need from a
manager.

Loops that are written for torchft call the former. The components of the manager
(`fft.train.api.parts`) implement all of them.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import Work
from torchft.manager import ExceptionWithTraceback, Manager

from fft.errors import Drained, FftError
from fft.train.api.parts import Parts
from fft.train.api.torchft_diloco import refuse_dropping
from fft.train.guard.torchft_adapter import TorchftAdapter
from fft.train.guard.unsafe_places import guarded
from fft.train.limits import Feature
from fft.train.session.error_reports import Reported
from fft.train.step.attempt import Limit


class ShutDownAtExit:
    """Exit handler that shuts the manager down if the script has not.

    Without it torch would abort the process, because its threads still run.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = weakref.ref(manager)
        self._pid = os.getpid()

    def __call__(self) -> None:
        manager = self._manager()
        if manager is not None and os.getpid() == self._pid:
            manager.shutdown(wait=False)


class TorchftInterface(Manager):  # type: ignore[misc]
    """Base class of ``ManagerFFT``, which creates the parts."""

    _parts: Parts
    _torchft: TorchftAdapter
    _at_exit: ShutDownAtExit

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Begin the next txn. Returns immediately except after a rollback or a membership change.

        There is no quorum call: membership changes only with an epoch, and state is current when
        this returns. ``allow_heal`` and ``shrink_only`` are accepted and not needed.

        Args:
            timeout: limit for waits on other ranks, for a new epoch or a decision. Work of this
                process, such as fetching state, has its own limits. None: only the spec's timers
                apply.

        Raises:
            Drained: this group has left; it is a ``SystemExit`` with status 0.
            TimeoutError: ``timeout`` has expired; the message names what is missing. Call it again.
            FftError: the last vote is undecided: call ``should_commit()`` again.
        """
        attempt, txn = self._parts.attempt, self._parts.txn
        self._parts.features.use(Feature.TORCHFT_LOOP)
        limit = None if timeout is None else Limit("start_quorum", timeout)
        if txn.plan is not None and txn.voted != "skip":
            txn.refuse_in_doubt("start_quorum()")
            if txn.failure is None and self._parts.reductions.manifest.empty:
                return
        if txn.plan is not None:
            # The loop skips this step, as after a scaler that found an inf: vote to skip it on all
            # ranks.
            command = attempt.vote(skip=True, limit=limit)
            if command is not None:
                assert command.skip, "one vote for a skip makes it one"
                self._parts.commits.apply(command)
        if (plan := self._parts.worker.begin(limit)) is None:
            raise Drained("this replica group has drained")
        attempt.enter_by_torchft(plan)

    def wait_quorum(self) -> None:
        """Return at once: membership is known when a txn begins."""

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Vote and return the decision, which is the same on all ranks of all groups.

        Args:
            timeout: limit for the decision, once this rank has voted. None: only the spec's timers
                apply.

        Raises:
            TimeoutError: ``timeout`` has expired in doubt: the step may still commit. Do nothing
                but call this again, until it returns.
            RuntimeError: ``max_retries`` failures in a row.
            InDoubt, Fenced, NoEpoch (NoState, NotEnoughGroups): this participant must stop.
        """
        limit = None if timeout is None else Limit("should_commit", timeout)
        command = self._parts.attempt.vote(limit=limit)
        if command is not None and command.skip:  # another rank skips this step
            self._parts.commits.apply(command)
            return False
        if command is not None:
            self._parts.commits.leave_to_loop(command)
            return True
        torchft = self._torchft
        torchft.commit_failures += 1
        if torchft.max_retries is not None and torchft.commit_failures > torchft.max_retries:
            raise RuntimeError(
                f"should_commit failed {torchft.commit_failures} times consecutively, exceeding "
                f"max_retries={torchft.max_retries}"
            )
        return False

    @guarded
    def report_error(self, e: Exception) -> None:
        """Report an error of this rank: the txn is rolled back on every rank of every group.

        Between two txns nothing is rolled back: an error there, of averaging a loss for example,
        does not affect the next txn, as in torchft. An error of the update after
        ``should_commit()`` loses this rank's state.
        """
        if self._parts.job.engine is None:
            self._parts.txn.failure = e
        else:
            self._parts.attempt.report(e)

    @guarded
    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: Any = ReduceOp.AVG
    ) -> Work:
        """Reduce as torchft does, and add the reduction to the manifest of the vote."""
        if self._parts.txn.plan is None and not self._parts.txn.by_fft:
            # complete the update first, so that a rollback can release ranks that wait in this
            # reduction
            self._parts.commits.finish()
        return self._parts.reductions.all_reduce(tensor, reduce_op, should_quantize=should_quantize)

    def errored(self) -> ExceptionWithTraceback | None:
        """Return the last error that was reported in this txn, or None."""
        error = self._parts.txn.failure
        return None if error is None else Reported(error)

    def wrap_future(
        self, fut: torch.futures.Future[Any], default: Any, timeout: timedelta | None = None
    ) -> torch.futures.Future[Any]:
        """Wrap a future as torchft does; a rollback completes it with ``default`` at once."""
        return self._parts.reductions.wrap_future(fut, default, timeout)

    @property
    def is_in_txn(self) -> bool:
        """Whether a transaction is open on this rank, in which gradients can be reduced."""
        return self._parts.txn.plan is not None

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """See torchft. Raises FftError for a DiLoCo of torchft's that would lose parameters."""
        refuse_dropping(state_dict)
        super().register_state_dict_fn(key, load_state_dict, state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Return torchft's state dict, plus lineage, data cursor and state of the loader."""
        return {**super().state_dict(), **self._parts.state.checkpoint_fields()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint; before the first step only.

        Raises:
            FftError: the manager has already joined the job.
        """
        if self._parts.job.engine is not None:
            raise FftError("load_state_dict() must come before the first step")
        super().load_state_dict(state_dict)
        self._parts.state.continue_from(state_dict)

    def shutdown(self, wait: bool = True) -> None:
        """Leave the job and end every thread, socket and file of this manager. Idempotent.

        The interpreter calls it at exit, if the script has not.
        """
        atexit.unregister(self._at_exit)
        self._parts.close()
        super().shutdown(wait)
        if self._parts.settings.alone is not None:
            self._parts.settings.alone.close()
        self._parts.loop.warn_if_left()

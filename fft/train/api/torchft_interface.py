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
from torchft.manager import Manager

from fft.errors import Drained, FftError
from fft.train.api.parts import Parts
from fft.train.api.torchft_diloco import refuse_dropping
from fft.train.guard.torchft_adapter import TorchftAdapter
from fft.train.guard.unsafe_places import guarded
from fft.train.step.worker import Limit


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
        worker = self._parts.worker
        self._parts.paradigm.refuse_torchft_loop()
        self._parts.rank.results.refuse_torchft_loop()
        limit = None if timeout is None else Limit("start_quorum", timeout)
        if worker.txn is not None and worker.voted != "skip":
            self._refuse_in_doubt("start_quorum()")
            if self._torchft.errored is None and self._parts.reductions.manifest.empty:
                return
        if worker.txn is not None:
            # The loop skips this step, as after a scaler that found an inf: vote to skip it on all
            # ranks.
            command = worker.vote_and_wait(skip=True, limit=limit)
            if command is not None:
                assert command.skip, "one vote for a skip makes it one"
                self._parts.commits.apply(command)
        if worker.begin(limit) is None:
            raise Drained("this replica group has drained")

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
        command = self._parts.worker.vote_and_wait(limit=limit)
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

    def _refuse_in_doubt(self, what: str) -> None:
        """Raise FftError in doubt: no other call would be correct for both decisions."""
        if self._parts.worker.voted is not None:
            raise FftError(
                f"{what} while the decision of step {self._torchft.step} is not known, after a "
                "should_commit() that has timed out: call should_commit() again, until it answers"
            )

    @guarded
    def report_error(self, e: Exception) -> None:
        """Report an error of this rank: the txn is rolled back on every rank of every group.

        Between two txns nothing is rolled back: an error there, of averaging a loss for example,
        does not affect the next txn, as in torchft. An error of the update after
        ``should_commit()`` loses this rank's state.
        """
        if self._parts.job.engine is None:
            super().report_error(e)
        else:
            self._parts.worker.report_error(e)

    @guarded
    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: Any = ReduceOp.AVG
    ) -> Work:
        """Reduce as torchft does, and add the reduction to the manifest of the vote."""
        self._refuse_in_doubt("allreduce()")
        if self._parts.worker.txn is None and self._parts.reductions.raises:
            raise FftError(
                "allreduce() between two transactions: a fault of another group would fail it, "
                "and FFT would not repeat it. Move it into the step function, inside `with txn:`"
            )
        if self._parts.worker.txn is None:
            # complete the update first, so that a rollback can release ranks that wait in this
            # reduction
            self._parts.commits.finish()
        return self._parts.reductions.issue(super().allreduce, tensor, should_quantize, reduce_op)

    def reduce_gradients(
        self, tensor: torch.Tensor, layout: str, op: ReduceOp.RedOpType = ReduceOp.AVG
    ) -> Work:
        """All-reduce a bucket; ``layout`` describes its gradients for the manifest."""
        return self._parts.reductions.reduce_gradients(tensor, layout, op)

    def note_gradients(self, bucket: torch.Tensor, layout: str) -> None:
        """Let a recomputed step compare a bucket that a communication hook is about to reduce."""
        self._parts.reductions.note_gradients(bucket, layout)

    def results_used(self) -> None:
        """From now on, the step function may use reduced gradients; see `Recomputation`."""
        self._parts.reductions.results_used()

    def raise_if_failed(self) -> None:
        """Forget the completed reductions of a reducer; raise TxnAborted if one has failed."""
        self._parts.reductions.raise_if_failed()

    def wrap_future(
        self, fut: torch.futures.Future[Any], default: Any, timeout: timedelta | None = None
    ) -> torch.futures.Future[Any]:
        """Wrap a future as torchft does; a rollback completes it with ``default`` at once."""
        return self._parts.reductions.wrap(super().wrap_future, fut, default, timeout)

    def num_participants(self) -> int:
        """Number of groups whose gradients count in the current txn."""
        return self._torchft.participating_replica_world_size

    @property
    def fixed_slices(self) -> int:
        """Number of slices of the data in each step, or 0 if each group takes one."""
        return self._parts.loop.fixed_slices

    @property
    def contributes(self) -> bool:
        """Whether the gradients of this rank count in the current txn, and no error was reported
        in it."""
        return self.participating_rank() is not None and self._torchft.errored is None

    @property
    def is_in_txn(self) -> bool:
        """Whether a transaction is open on this rank, in which gradients can be reduced."""
        return self._parts.worker.txn is not None

    def participating_rank(self) -> int | None:
        """Index of this group among the participating groups, or None for a spare."""
        return self._torchft.participating_replica_rank

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

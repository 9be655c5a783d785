"""torchft's Manager with the methods of torchft that FFT carries out in its own way.

For loops that are written for torchft. What each does is in the parts (`fft.train.parts`).
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
from fft.train.parts import Parts
from fft.train.torchft_adapter import TorchftAdapter
from fft.train.torchft_diloco import refuse_dropping
from fft.train.unsafe_places import guarded
from fft.train.worker import Limit


class ShutDownAtExit:
    """At the exit of a script that has not shut down: torch aborts where its threads still run."""

    def __init__(self, manager: Manager) -> None:
        self._manager = weakref.ref(manager)
        self._pid = os.getpid()

    def __call__(self) -> None:
        manager = self._manager()
        if manager is not None and os.getpid() == self._pid:
            manager.shutdown(wait=False)


class TorchftInterface(Manager):  # type: ignore[misc]
    """Whoever derives from it makes the parts."""

    _parts: Parts
    _torchft: TorchftAdapter
    _at_exit: ShutDownAtExit

    def start_quorum(
        self,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        """Begin the next txn. Returns at once, except after a rollback or a membership change.

        There is no quorum call: membership changes only with an epoch, and state is current when
        this returns. ``allow_heal`` and ``shrink_only`` are accepted and not needed.

        Args:
            timeout: for the others: an epoch that is to be formed, a decision. What this process
                does itself, such as fetching state, has limits of its own. None: the spec's timers.

        Raises:
            Drained: this group has left; it is a ``SystemExit`` with status 0.
            TimeoutError: ``timeout`` is over; says what is missing. It may be called again.
            FftError: the decision of a vote is not known: call ``should_commit()`` again.
        """
        worker = self._parts.worker
        self._parts.paradigm.refuse_torchft_loop()
        limit = None if timeout is None else Limit("start_quorum", timeout)
        if worker.txn is not None and worker.voted != "skip":
            self._refuse_in_doubt("start_quorum()")
            if self._torchft.errored is None and self._parts.reductions.manifest.empty:
                return
        if worker.txn is not None:
            # The user skips this step, as after a scaler that found an inf: all do, together.
            command = worker.prepare(skip=True, limit=limit)
            if command is not None:
                assert command.skip, "one vote for a skip makes it one"
                worker.skip(command)
        if worker.begin(limit) is None:
            raise Drained("this replica group has drained")

    def wait_quorum(self) -> None:
        """Return at once: membership is known when a txn begins."""

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Vote, and learn the decision: equal on all ranks of all groups.

        Args:
            timeout: for the decision, once this rank has voted. None: the spec's timers.

        Raises:
            TimeoutError: ``timeout`` is over, and the step may be committed all the same: nothing
                may be done but to call this again, which waits on, until it answers.
            RuntimeError: ``max_retries`` failures in a row.
            InDoubt, Fenced, NoEpoch (NoState, NotEnoughGroups): this participant must stop.
        """
        limit = None if timeout is None else Limit("should_commit", timeout)
        command = self._parts.worker.prepare(limit=limit)
        if command is not None and command.skip:  # another rank skips this step
            self._parts.worker.skip(command)
            return False
        if command is not None:
            self._parts.worker.leave_to_loop(command)
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
        """Of what is done then, nothing could be right for both decisions."""
        if self._parts.worker.voted is not None:
            raise FftError(
                f"{what} while the decision of step {self._torchft.step} is not known, after a "
                "should_commit() that has timed out: call should_commit() again, until it answers"
            )

    @guarded
    def report_error(self, e: Exception) -> None:
        """Report an error of this rank: the txn is rolled back on every rank of every group.

        Between two txns there is nothing to roll back: what failed then, such as the averaging of
        a loss, failed, and the next txn begins without it, as under torchft. Only the error of an
        update that was begun after ``should_commit()`` costs this rank its state.
        """
        if self._parts.job.engine is None:
            super().report_error(e)
        else:
            self._parts.worker.report_error(e)

    @guarded
    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: Any = ReduceOp.AVG,
    ) -> Work:
        """torchft's fault tolerant all-reduce; what it reduced goes into the vote's manifest."""
        self._refuse_in_doubt("allreduce()")
        if self._parts.worker.txn is None and self._parts.reductions.raises:
            raise FftError(
                "allreduce() between two transactions: any fault of another group would end it, "
                "and nobody would repeat it. Put it into the body, `with txn:`"
            )
        if self._parts.worker.txn is None:
            # so that whoever waits in it can be freed by a rollback
            self._parts.worker.finish_apply()
        return self._parts.reductions.issue(super().allreduce, tensor, should_quantize, reduce_op)

    def reduce_gradients(
        self, tensor: torch.Tensor, layout: str, op: ReduceOp.RedOpType = ReduceOp.AVG
    ) -> Work:
        """For the reducers: `allreduce`, of what lies in ``tensor`` as ``layout`` says."""
        return self._parts.reductions.issue_for_reducer(tensor, layout, op)

    def reduced(self) -> None:
        """For the reducers: raise if a reduction of this txn failed and the body shall unwind."""
        self._parts.reductions.all_over()

    def wrap_future(
        self,
        fut: torch.futures.Future[Any],
        default: Any,
        timeout: timedelta | None = None,
    ) -> torch.futures.Future[Any]:
        """As torchft's; a rollback completes the future with ``default`` at once."""
        return self._parts.reductions.wrap(super().wrap_future, fut, default, timeout)

    def num_participants(self) -> int:
        """Groups whose gradients count in the present txn."""
        return self._torchft.participating_replica_world_size

    @property
    def is_in_txn(self) -> bool:
        """Whether a transaction is open on this rank, in which gradients can be reduced."""
        return self._parts.worker.txn is not None

    def participating_rank(self) -> int | None:
        """Index of this group among the participating groups; None: a spare."""
        return self._torchft.participating_replica_rank

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """As torchft's. Raises FftError: of a DiLoCo of torchft's that would drop parameters."""
        refuse_dropping(state_dict)
        super().register_state_dict_fn(key, load_state_dict, state_dict)

    def state_dict(self) -> dict[str, Any]:
        """torchft's, plus lineage, data cursor and, of a stateful loader, its state there."""
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

        Called when the interpreter exits, if it was not before.
        """
        atexit.unregister(self._at_exit)
        self._parts.close()
        super().shutdown(wait)
        if self._parts.settings.alone is not None:
            self._parts.settings.alone.close()
        self._parts.loop.left_loop.tell()

"""Execution of commits on the main thread: the update of the state, and the report to the engine.

In FFT's own loop, `CommitExecutor.apply` makes the update. A loop that is written for torchft makes
the update itself (`CommitExecutor.leave_to_loop`); it is complete at the loop's next FFT call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from fft.errors import FftError
from fft.messages.effects import Apply, StartTxn
from fft.messages.protocol import Applied, ApplyFailed, Decision, Record, Token
from fft.train.guard.interrupt import Interrupted
from fft.train.session.error_reports import text_of
from fft.train.session.rank_context import RankContext
from fft.train.state.updates import LoopUpdates

logger = logging.getLogger(__name__)


class CommitExecutor:
    """The executor of commits; at most one commit is in progress.

    Attributes:
        by_loop: Monitors the updates that the user's loop makes.
    """

    def __init__(self, rank: RankContext) -> None:
        self._torchft, self._injector = rank.manager._torchft, rank.injector
        self._job, self._watchers, self._state = rank.job, rank.watchers, rank.state
        self._txn = rank.txn
        self.by_loop = LoopUpdates()
        self._committed: tuple[Record, Record | None] | None = None  # commit and epoch
        self._done_at: float | None = None
        """When the last commit was completed, on the monotonic clock; None once it was taken."""
        self._hung_at: tuple[Token, str] | None = None
        """The committed txn whose update hangs on this rank, and the monitor's reason, or None."""

    def decided(self, record: Record, plan: StartTxn, consumes: bool = True) -> None:
        """Set the position to ``record``, which commits the txn of ``plan``.

        Args:
            record: The COMMIT.
            plan: The txn.
            consumes: Whether the commit consumes the data of the txn.
        """
        # An error that was reported after the decision does not belong to the next step.
        self._txn.failure = None
        self._torchft.commit_failures = 0
        self.by_loop.forget()
        self._committed = record, self._job.local.epoch if self._job.local else None
        self._state.set_position(record)
        if consumes:
            self._state.consumed(plan)
        self._watchers.committed(record.step, len(plan.members) * self._job.world)
        if self._state.registered_state is not None and not (record.skip and self._txn.by_fft):
            self._state.registered_state.forget()
        if self._state.checks is not None:
            self._state.checks.committed()

    def apply(self, command: Apply, skip: Callable[[], None] | None = None) -> bool:
        """Apply a commit: step the registered optimizers and schedulers, unless it is a skip.

        Args:
            command: The commit.
            skip: Called to end a skipped step. None calls ``updates.skip``, which restores no
                state.

        Returns:
            Whether the update succeeded. If it failed, the next `Worker.begin` fetches the state
            from a peer, or raises the update's error if no peer holds it.

        Raises:
            Exception: The error of an ``on_commit`` callback.
        """
        updates = self._state.paradigm.committed
        end = (skip or updates.skip) if command.skip else updates.apply
        if not self._update(command, end):
            return False
        try:
            if not command.skip:
                self._run(updates.done)
                step = self._state.registered_state
                for name, text in self._state.updates.mistakes(step.unheld if step else str):
                    self._job.warn(name, text)
        except Interrupted as hang:
            self.fail(_hung(hang))
            return False
        except Exception as error:  # of a user callback, whose updates may be partial
            self.fail(error)
            raise
        self.finish()
        return True

    def _update(self, command: Apply, update: Callable[[], None]) -> bool:
        """Make the update and return whether it succeeded.

        After a failure the state is lost, which is reported to the engine.
        """
        self._hung_at = None
        self._job.executor.accept(command)
        try:
            if self._injector is not None:
                self._injector.at("apply")
            self._state.checkpoints.before_change()
            self._run(update)
        except (Exception, Interrupted) as error:
            logger.exception("the update failed after COMMIT; the state of this rank is lost")
            self.fail(_hung(error) if isinstance(error, Interrupted) else error)
            return False
        return True

    def _run(self, update: Callable[[], None]) -> None:
        """Run a part of an update. Raises Interrupted if it hangs and a peer has completed it."""
        interrupter = self._watchers.interrupter
        if interrupter is None:
            update()
            return
        interrupter.enter()
        try:
            update()
        finally:
            interrupter.leave()

    def handle_hang(self, reason: str) -> None:
        """React to a hang of the update. Called on a thread of the monitor's client.

        The other groups exclude this one until it responds. Once their records show that they have
        completed the update, it is interrupted here, and this rank fetches their state. It must not
        be interrupted earlier: all groups may hang in one operation, such as a write to one disk.
        """
        local = self._job.local
        if local is None or self.by_loop.is_made or not self._job.broadcast_hang(reason):
            return
        self._hung_at = local.token, reason
        for event in local.deferred:
            if isinstance(event, Decision) and event.record is not None:
                self.on_record(event.record)

    def on_record(self, record: Record) -> None:
        """Interrupt a hanging update if the record shows that a peer has completed it.

        Called on the engine thread for each record of the job.
        """
        if self._hung_at is None or self._job.executor.role != "applying":
            return
        (token, reason), me = self._hung_at, self._job.peer
        if record.token <= token:
            return
        is_left_out = record.kind == "epoch" and me not in record.peer_set
        has_same_shard = record.by.group != me.group and record.by.rank == me.rank
        if is_left_out or (record.kind == "abort" and has_same_shard):
            self._watchers.interrupt(reason)

    def apply_block(self, command: Apply) -> None:
        """Complete the commit of a live block, which changes no state of FFT."""
        self._job.executor.accept(command)
        self._watchers.txn_ended(committed=False)  # its duration is not that of a step
        self._committed = None  # no checkpoint is due
        self.finish()

    def leave_to_loop(self, command: Apply) -> None:
        """Let the user's loop make the update of a commit; `finish` completes it."""
        self._job.executor.accept(command)
        self._state.checkpoints.before_change()
        self.by_loop.begin()

    def finish(self) -> None:
        """Report to the engine that the pending update of the last commit is complete, if any."""
        local, executor = self._job.local, self._job.executor
        if executor.role != "applying" or local is None:
            return
        if (torn := self.by_loop.take_incomplete()) is not None:
            self.fail(RuntimeError(torn))
            return
        if not executor.transition_if(
            "applying", "applied"
        ):  # another thread has reported a failure of the update
            return
        self._done_at = time.monotonic()
        self._watchers.txn_ended(committed=True)
        self._job.post(Applied(local.token, self._state.digest_for_audit()))
        if self._committed is not None:
            self._state.checkpoints.committed(*self._committed)

    def take_idle_s(self) -> float:
        """Return the seconds of the script since the last commit; 0 if they were taken before."""
        done_at, self._done_at = self._done_at, None
        return 0.0 if done_at is None else time.monotonic() - done_at

    def fail(self, error: BaseException) -> None:
        """Report to the engine that the pending update of the last commit failed, if any."""
        local = self._job.local
        if local is None or not self._job.executor.transition_if("applying", "apply_failed"):
            return
        self.by_loop.failed()
        self._state.lost = error
        self._job.post(ApplyFailed(local.token, text_of(error)))
        self._job.note_error(error)

    def close(self) -> None:
        """Remove the optimizer hooks. Idempotent."""
        self.by_loop.close()


def nothing() -> None:
    """Do nothing at the end of a stopped job's last txn, so that a scaler keeps its scale."""


def _hung(hang: Interrupted) -> FftError:
    return FftError(f"the update hung and was interrupted: {hang}")

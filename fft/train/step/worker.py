"""The main-thread side of the engine: executes the engine's commands and reports their results.

``Restore``, ``Heal``, ``StartTxn`` and ``Finish`` are handled between two txns (`Worker.begin`).
``Apply`` arrives after a vote (`Attempt.vote`) and is executed by `fft.train.step.commits`.
The engine core makes the protocol decisions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fft.engine.loop import Engine
from fft.messages.causes import CauseCode
from fft.messages.effects import Apply, Finish, Heal, Restore, StartTxn
from fft.messages.protocol import Record
from fft.protocol.main_thread import NO_FACTS
from fft.protocol.state import members
from fft.train.session.error_reports import text_of
from fft.train.session.rank_context import RankContext
from fft.train.state.step_state import TornState
from fft.train.step.attempt import Attempt, Limit, Rollback
from fft.train.step.commits import CommitExecutor
from fft.train.step.healing import Healer
from fft.train.step.rollback_hooks import Hooks

logger = logging.getLogger(__name__)

_IDLE_S = 1.0
"""Time of the script between two transactions, such as an evaluation, from which it is traced."""


class Worker:
    """The mediator between the engine and the user's training loop, on the main thread."""

    def __init__(
        self,
        rank: RankContext,
        healer: Healer,
        commits: CommitExecutor,
        attempt: Attempt,
        join: Callable[[], Engine],
    ) -> None:
        self._torchft = rank.manager._torchft
        self._job, self._watchers = rank.job, rank.watchers
        self._state, self._groups = rank.state, rank.groups
        self._reductions, self._reducers = rank.reductions, rank.reducers
        self._healer, self._commits = healer, commits
        self._attempt, self._join = attempt, join
        self.hooks = Hooks(rank.job)
        self._work: dict[str, Callable[[Any], None]] = {
            "restore": self._restore,
            "connect": self._connect,
            "begin_body": attempt.begin,
            "apply": self._apply_too_late,
            "leave": attempt.stop,
        }
        """Handlers for the effects of commands that are taken between two txns, by effect name."""

    @property
    def is_first(self) -> bool:
        """Whether the open txn is the first one of this process."""
        return self._attempt.begun == 1

    # --- between two txns ---

    def begin(self, limit: Limit | None = None) -> StartTxn | None:
        """Finish the last commit, start its checkpoint, and execute commands until a txn may start.

        Returns:
            The txn to run, or None if the job has ended for this rank.

        Raises:
            TimeoutError: No txn could start within ``limit``; the call may be repeated.
        """
        engine, executor = self._job.engine or self._join(), self._job.executor
        self._commits.finish()
        if (idle_s := self._commits.take_idle_s()) >= _IDLE_S:
            self._job.report_idle(idle_s)
        if self._attempt.finish is None:
            self._state.refuse_unsendable()
        self._state.checkpoints.take()
        # detected late: a second optimizer stepped after the first one had been counted
        by_loop = self._commits.by_loop
        executor.lost = by_loop.take_incomplete() or executor.lost
        if by_loop.check_missed(self._torchft.step - 1):
            self._job.note("no_optimizer_step", {"step": by_loop.missed})
        while self._attempt.finish is None:
            command = self._attempt.wait(engine, limit)
            facts = self._healer.facts(command) if isinstance(command, Heal) else NO_FACTS
            executor.execute(command, self._work, facts)
            if isinstance(command, StartTxn) and executor.role == "computing":
                self._attempt.begun += 1
                return command
            if isinstance(command, Finish):
                return None
        self._attempt.stop(self._attempt.finish)
        return None

    def continue_epoch(self) -> StartTxn | Record | None:
        """Execute engine commands until the next txn of the epoch, or until the epoch after it.

        Returns:
            The txn, which has begun; the record of the next epoch, which is not built yet; or None
            if the job has ended for this rank.
        """
        engine, executor = self._job.engine, self._job.executor
        assert engine is not None, "it has joined"
        while self._attempt.finish is None:
            command = self._attempt.wait(engine, None)
            if isinstance(command, Heal):
                return command.record
            executor.execute(command, self._work, NO_FACTS)
            if isinstance(command, StartTxn) and executor.role == "computing":
                self._attempt.begun += 1
                return command
        return None

    def _connect(self, command: Heal) -> None:
        if (
            command.record.step != self._attempt.rollback.step
        ):  # the job has continued without this rank
            self._attempt.rollback = Rollback()
        if command.fetch_from is not None:
            self._commits.by_loop.forget()
            self._state.updates.loaded()
        with self._watchers.waiting():  # healing enforces its own timeouts
            self._healer.heal(command, self._state.paradigm.describe(self._reducers.models))

    def _apply_too_late(self, command: Apply) -> None:
        """Handle a commit that arrives after the step function was interrupted."""
        self._attempt.close()
        self._attempt.trace_consumption()
        self._commits.fail(RuntimeError("interrupted before the optimizer step"))

    # --- a rollback: on the engine's thread, then on the main thread ---

    def abort(self, cause: str) -> None:
        """Abort everything in which the main thread may wait, in this order. Engine thread."""
        self._groups.abort(cause, may_defer=self._may_run_collectives)
        self._healer.exchange.interrupt()
        self.hooks.on_abort.run_all()
        self._state.paradigm.interrupted(cause)  # the call may come from a failing engine

    def interrupt(self, cause: str) -> None:
        """Take the main thread out of its step function. Engine thread."""
        self._attempt.end_wait()
        if self._job.executor.role != "applying":  # otherwise the command waits for the update
            self._watchers.interrupt(cause)
        self._state.paradigm.interrupted(cause)

    def members_lost(self) -> None:
        """Abort the shard group too, if its other ranks no longer answer. Engine thread."""
        if not self._may_run_collectives():
            self._groups.run_deferred_abort()

    def _may_run_collectives(self) -> bool:
        """Return whether the ranks of this group may still run collectives between two txns.

        The script may run an evaluation there, which FFT would not repeat after an abort. Until all
        ranks of the group have completed its collectives, no rank has started the aborted txn.
        """
        local, me = self._job.local, self._job.peer
        if local is None or local.role != "rolling_back" or self._job.executor.role != "idle":
            return False
        gone = local.dead | local.suspected
        return not any(peer.group == me.group and peer != me for peer in gone)

    def _restore(self, command: Restore) -> None:
        """Wait for all operations of the aborted attempt, then restore the start of the step."""
        local = self._job.local
        assert local is not None
        if not self._attempt.rollback.cause.code.is_counted:
            groups = tuple(entry.group for entry in members(local))
            self._attempt.rollback = Rollback(command.cause, local.step, groups)
        self._attempt.give_up()
        is_mine = self._job.peer in command.cause.accused
        if is_mine and command.cause.code == CauseCode.REPLICAS_DIFFER:
            self._healer.rejected(command.cause.text)
        self._groups.unwind(command.cause.text, self._watchers.waiting(), self._torchft.timeout)
        self._reductions.reset()
        self._reducers.reset()
        with self._watchers.waiting():  # hooks have their own limits
            self.hooks.on_unwound.run()
        try:
            self._state.paradigm.restore()
        except TornState as error:  # a peer can provide the state
            logger.warning("%s; this rank fetches the state", error)
            self._job.executor.lost, self._state.lost = text_of(error), error
        if local.stuck:
            self._attempt.pause()
        if (why := self._commits.by_loop.why_lost(command.cause)) is not None:
            logger.error("%s This rank fetches the state", why)
            self._job.executor.lost, self._state.lost = why, TornState(why)
        with self._watchers.waiting():
            self.hooks.begin()
        self._job.executor.restored(command)

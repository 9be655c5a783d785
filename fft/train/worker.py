"""The main thread's side of the engine: carries out what it commands, and says what came of it.

``Restore``, ``Heal``, ``StartTxn`` and ``Finish`` come between two txns (`Worker.begin`), ``Apply``
after a vote (`Worker.vote_and_wait`); `fft.train.commits` carries it out. Nothing here decides: the
core has the protocol.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

from fft.engine.loop import Command, Engine
from fft.errors import Drained, FftError, NoLighthouseQuorum, NoState, TxnAborted
from fft.messages.causes import NO_CAUSE
from fft.messages.effects import Apply, Finish, Heal, Restore, StartTxn
from fft.messages.protocol import Fault
from fft.protocol.main_thread import NO_FACTS
from fft.train.commits import CommitExecutor
from fft.train.drain_clock import waiting_for
from fft.train.error_reports import Reported, code_of, error_of, text_of
from fft.train.healing import Healer
from fft.train.leaving import Leaving
from fft.train.process_group import GroupAborted
from fft.train.rank_context import RankContext
from fft.train.state.step_state import TornState
from fft.train.voting import Voter

logger = logging.getLogger(__name__)


class Limit:
    """The time limit of a wait, counted from its construction; its text names the call."""

    def __init__(self, call: str, timeout: timedelta) -> None:
        self._text = f"{call}(timeout={timeout.total_seconds():g} s)"
        self._deadline = time.monotonic() + timeout.total_seconds()

    def left(self) -> float:
        """Seconds, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def __str__(self) -> str:
        return self._text


class Worker:
    """Where the main thread stands between the engine and the user's loop."""

    def __init__(
        self,
        rank: RankContext,
        healer: Healer,
        voter: Voter,
        leaving: Leaving,
        commits: CommitExecutor,
        join: Callable[[], Engine],
    ) -> None:
        self._manager, self._injector = rank.manager, rank.injector
        self._job, self._watchers = rank.job, rank.watchers
        self._state, self._groups = rank.state, rank.groups
        self._reductions = rank.reductions
        self._healer, self._voter, self._leaving = healer, voter, leaving
        self._commits, self._join = commits, join
        self.has_reported = False
        """The user has reported an error in the body that is open."""
        self.txn: StartTxn | None = None
        """The txn that is open; None: between two."""
        self.voted: Literal["step", "skip"] | None = None
        """What this rank has voted for in the open txn, whose decision it does not know."""
        self._begun = 0
        """Number of txns that this process has begun."""
        self._finish: Finish | None = None
        """The engine's last word: whoever asks for a txn after it hears it again."""
        self.rolled_back = NO_CAUSE
        """Cause of the last rollback, until the loop has handled it."""
        self._work: dict[str, Callable[[Any], None]] = {
            "restore": self._restore,
            "connect": self._connect,
            "begin_body": self._enter,
            "apply": self._apply_too_late,
            "leave": self._stop,
        }
        """Effects of the main thread's table on a command that is taken between two txns."""

    @property
    def is_first(self) -> bool:
        """Whether the open txn is the first of this process."""
        return self._begun == 1

    # --- between two txns ---

    def begin(self, limit: Limit | None = None) -> StartTxn | None:
        """Do what the engine asks until a txn may begin. None: drained.

        Raises TimeoutError: its turn did not come within ``limit``; it may be asked for again.
        """
        engine, thread = self._job.engine or self._join(), self._job.thread
        self._commits.finish()
        if self._finish is None:
            self._state.refuse_unsendable()
        self._state.checkpoints.take()
        # noticed late: by a second optimizer, after the first one was counted
        by_loop = self._commits.by_loop
        thread.lost = by_loop.take_incomplete() or thread.lost
        if by_loop.check_missed(self._manager._torchft.step - 1):
            self._job.note("no_optimizer_step", {"step": by_loop.missed})
        while self._finish is None:
            command = self._wait(engine, limit)
            facts = self._healer.facts(command) if isinstance(command, Heal) else NO_FACTS
            thread.execute(command, self._work, facts)
            if isinstance(command, StartTxn) and thread.role == "computing":
                self._begun += 1
                return command
            if isinstance(command, Finish):
                return None
        self._stop(self._finish)
        return None

    def _connect(self, command: Heal) -> None:
        if command.fetch_from is not None:
            self._commits.by_loop.forget()
            self._state.updates.loaded()
        with self._watchers.waiting():  # it has limits of its own
            self._healer.heal(command, self._state.paradigm.describe(self._reductions.models))

    def _apply_too_late(self, command: Apply) -> None:
        """A decision for a body that has already raised out of its step."""
        self._close_txn()
        self._voter.committed()
        self._commits.fail(RuntimeError("interrupted before the optimizer step"))

    def body_unwound(self) -> None:
        """The body is over without a vote, if it has not voted: the rollback comes."""
        self._job.thread.unwound()

    def _wait(self, engine: Engine, limit: Limit | None) -> Command:
        """The engine's next command. Raises TimeoutError that says for whom it waits."""
        left = None if limit is None else limit.left()
        self._state.paradigm.await_command(engine, self.txn)
        try:
            with self._watchers.waiting():
                return engine.wait_command(left)
        except TimeoutError:
            text = waiting_for(engine.local, engine.participant.config, time.monotonic())
            raise TimeoutError(f"{limit}: {text}") from None

    def _stop(self, command: Finish) -> None:
        """Leave the loop after the engine has finished.

        Raises:
            Exception: The error of an update that failed here, if no peer provided the state.
            FftError: The error that the engine names.
            Drained: The job continues without this rank, so the code after the loop, which is meant
                for the end of the training, must not run.
        """
        self._finish = command
        self._leave_txn(command.error)
        lost, local = self._state.lost, self._job.local
        failed = None if isinstance(lost, TornState) else lost
        if failed is not None and command.error in (None, "NoState", "NoEpoch"):
            note = f"this update failed after its COMMIT, and the state is lost: {command.reason}"
            if note not in getattr(failed, "__notes__", ()):
                failed.add_note(note)
            raise failed
        if command.error is not None:
            raise error_of(command) from failed
        if lost is not None:
            raise NoState(f"{lost}; the rank left before it could fetch the state of a peer")
        self._state.checkpoints.left()
        if local is not None and (local.epoch is None or self._job.peer in local.dead):
            began = "" if self._begun else " and made no step"
            logger.warning(
                "%s was no member of the job when it left%s: the code after the loop does not run",
                self._job.peer,
                began,
            )
            raise Drained("this replica group was excluded from the job")

    def _leave_txn(self, error: str | None = None) -> None:
        """Out: what the main thread does from now on is no step of the job's."""
        self._give_up_txn()
        self._leaving.left(error)

    def _give_up_txn(self) -> None:
        """Nothing of it is done any more on this thread."""
        self._close_txn()
        self._healer.cancel_fetch()
        self._watchers.txn_ended(committed=False)

    def _close_txn(self) -> None:
        self.txn = self.voted = None

    def _enter(self, plan: StartTxn) -> None:
        manager = self._manager
        self._groups.run_deferred_abort()  # the command is older than the abort
        self._healer.exchange.end_service(plan)
        manager._torchft.errored = None
        self._reductions.begin()
        manager._torchft.step = plan.step
        manager._torchft.participating_replica_rank = plan.index
        manager._torchft.participating_replica_world_size = plan.participants
        if self._state.step is not None and not self._reductions.raises:
            # else after the items are drawn, which may use random numbers
            self._state.step.capture()
        self.txn = plan
        self._voter.begin(plan.step)
        self._compare_updates(plan)
        if not self._reductions.raises:  # else they begin with the body
            self._voter.begin_reducers()
        self._watchers.txn_begun(plan.step)
        try:
            self._voter.ask(plan)
        except NoLighthouseQuorum:
            self._leave_txn()
            raise
        if self._injector is not None:
            self._injector.begin(plan.step, len(plan.members), plan.commits)

    def _compare_updates(self, plan: StartTxn) -> None:
        """Have the vote say that no optimizer step has followed the last commit here; not while
        there are learners, who have made no commit, and no state to give to others."""
        epoch = self._job.local.epoch if self._job.local is not None else None
        has_learners = epoch is not None and bool(epoch.learners) and plan.token.txn == 1
        if self._commits.by_loop.missed is not None and not has_learners:
            self._reductions.manifest.note("no optimizer step after the last commit")

    def _restore(self, command: Restore) -> None:
        """Wait until nothing old can write, then put back the start of the step."""
        self.rolled_back = command.cause
        self._give_up_txn()
        self._groups.unwind(
            command.cause.text, self._watchers.waiting(), self._manager._torchft.timeout
        )
        self._reductions.reset()
        try:
            self._state.paradigm.restore()
        except TornState as error:  # it can be had from a peer
            logger.warning("%s; this rank fetches the state", error)
            self._job.thread.lost, self._state.lost = text_of(error), error
        local = self._job.local
        assert local is not None
        if local.stuck:
            self._voter.pause()
        if (why := self._commits.by_loop.why_lost(command.cause)) is not None:
            logger.error("%s This rank fetches the state", why)
            self._job.thread.lost, self._state.lost = why, TornState(why)
        self._job.thread.restored(command)

    # --- the end of a txn ---

    def vote_and_wait(
        self,
        skip: bool = False,
        last: bool = False,
        limit: Limit | None = None,
        consumes: dict[str, Any] | None = None,
    ) -> Apply | None:
        """Vote and wait for the decision. The record to apply, or None: rolled back.

        ``skip``: this rank wants no optimizer step in this txn; then there is none on any.
        ``last``: leave with its commit, unless it is skipped. ``consumes``: as of `Voter.vote`.

        Raises TimeoutError: no decision within ``limit``. The vote stands; the next call waits on.
        """
        plan, engine = self.txn, self._job.engine
        if plan is None or engine is None:
            raise FftError("should_commit() without a txn: call start_quorum() first")
        if self.voted is None:
            self._job.report_not_replaceable(self._groups.can_reform)
            self._voter.vote(plan, skip, last, consumes)
            self.voted = "skip" if skip else "step"
            self.body_unwound()  # before the state came that a vote needs
        command = self._wait(engine, limit)
        self._close_txn()
        self._voter.end()
        if isinstance(command, Apply):
            engine.take(command)
            self._voter.committed()
            self._commits.decided(command.record, plan)
            return command
        if isinstance(command, Finish) and command.error is not None:
            self._job.thread.execute(command, self._work)
        return None

    # --- errors ---

    def report_error(self, error: Exception) -> None:
        """As ``ManagerFFT.report_error``, once the job is joined."""
        if self._job.thread.role == "applying" and not self._commits.by_loop.is_made:
            self._commits.fail(error)
            return
        manager = self._manager
        if self._state.updates.in_body and threading.get_ident() == self._watchers.main:
            self.has_reported = True
        first, manager._torchft.errored = manager._torchft.errored is None, Reported(error)
        if self.txn is None:
            logger.warning("failed between two txns, which changes no state: %s", text_of(error))
        elif not isinstance(error, (TxnAborted, GroupAborted)):
            kind = type(error).__name__
            self._job.post(Fault(self.txn.token, text_of(error), code_of(error), kind))
            if first:  # after it is told, for this reads source files
                self._job.note_error(error)

"""The main-thread side of the engine: executes the engine's commands and reports their results.

``Restore``, ``Heal``, ``StartTxn`` and ``Finish`` are handled between two txns (`Worker.begin`).
``Apply`` arrives after a vote (`Worker.vote_and_wait`) and is executed by `fft.train.step.commits`.
The engine core makes the protocol decisions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from fft.engine.loop import Command, Engine
from fft.errors import BusError, Drained, FftError, NoLighthouseQuorum, NoState, TxnAborted
from fft.messages.causes import NO_CAUSE, Cause, CauseCode
from fft.messages.effects import Apply, Finish, Heal, Restore, StartTxn
from fft.messages.protocol import STOP, Fault, NoStep, Record, Token, encode
from fft.protocol.main_thread import NO_FACTS
from fft.protocol.state import members
from fft.train.process_groups import GroupAborted
from fft.train.session.error_reports import Reported, code_of, error_of, text_of
from fft.train.session.participation import Participation
from fft.train.session.rank_context import RankContext
from fft.train.state.step_state import TornState
from fft.train.step.commits import CommitExecutor
from fft.train.step.healing import Healer
from fft.train.step.leaving import Leaving
from fft.train.step.preemption import waiting_for
from fft.train.step.rollback_hooks import Hooks
from fft.train.step.voting import Voter

logger = logging.getLogger(__name__)

_ALONE_S = 0.5
"""Seconds for which a rank without a step function waits for the decision, before it sends where it
is. Ranks that reach the same place meanwhile decide without that message."""
_IDLE_S = 1.0
"""Time of the script between two transactions, such as an evaluation, from which it is traced."""


class Limit:
    """The deadline of one API call, measured from construction. ``str()`` names the call."""

    def __init__(self, call: str, timeout: timedelta) -> None:
        self._text = f"{call}(timeout={timeout.total_seconds():g} s)"
        self._deadline = time.monotonic() + timeout.total_seconds()

    def left(self) -> float:
        """Return the remaining time in seconds, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def __str__(self) -> str:
        return self._text


class Rollback(NamedTuple):
    """A rollback that the training loop has yet to handle.

    Attributes:
        cause: Its cause; `NO_CAUSE` if there is none.
        step: The step that was rolled back.
        members: Names of the groups in its epoch.
    """

    cause: Cause = NO_CAUSE
    step: int = -1
    members: tuple[str, ...] = ()


class StepPresence:
    """Whether the main thread is in a step function, in which it would wait in vain for ranks that
    take part in its txn without one.

    Attributes:
        has_reported: Whether the user called ``report_error`` in the running step function.
        message: The message of the newest txn from a rank without a step function, or None. In one
            txn that of a rank that has stopped the training replaces others.
    """

    def __init__(self, job: Participation) -> None:
        self.has_reported = False
        self.message: NoStep | None = None
        self._job = job
        self._txn: StartTxn | None = None
        """The txn of the running step function, up to its vote."""

    def begin(self, txn: StartTxn) -> None:
        """Record that a step function of ``txn`` begins on this thread."""
        self.has_reported, self._txn = False, txn
        self._compare()

    def end(self) -> None:
        """Record that this thread is no longer in a step function. Idempotent."""
        self._txn = None

    def receive(self, message: NoStep) -> None:
        """Implement ``Host.no_step``. Engine thread only."""
        held = self.message
        if held is None or _precedence(message) > _precedence(held):
            self.message = message
            self._compare()

    def has_message(self, txn: StartTxn, place: str) -> bool:
        """Whether a rank has sent for ``txn`` that it is at ``place``."""
        held = self.message
        return held is not None and (held.token, held.place) == (txn.token, place)

    def _compare(self) -> None:
        """Report a fault if the message concerns the running step function.

        Both threads call it after they have written what they know, so one of them has both.
        """
        message, txn = self.message, self._txn
        if message is None or txn is None or message.token != txn.token:
            return
        is_stop = message.place == STOP
        code = CauseCode.STOPPED if is_stop else CauseCode.BLOCK_BESIDE_STEP
        text = f"{message.peer}: {message.place}, {self._job.peer}: a step"
        if not is_stop:
            text = f"the ranks are not in the same live block ({text})"
        self._job.post(Fault(txn.token, text, code, "no_step"))


def _precedence(message: NoStep) -> tuple[Token, bool]:
    return message.token, message.place == STOP


class Worker:
    """The mediator between the engine and the user's training loop, on the main thread."""

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
        self.hooks = Hooks(rank.job)
        self.step = StepPresence(rank.job)
        self.txn: StartTxn | None = None
        """The open txn, or None between two txns."""
        self.voted: Literal["step", "skip"] | None = None
        """This rank's vote in the open txn while the decision is pending, or None."""
        self._begun = 0
        """Number of txns that this process has started."""
        self._finish: Finish | None = None
        """The engine's final command. Each later call of ``begin`` handles it again."""
        self._rollback = Rollback()
        self._work: dict[str, Callable[[Any], None]] = {
            "restore": self._restore,
            "connect": self._connect,
            "begin_body": self._enter,
            "apply": self._apply_too_late,
            "leave": self._stop,
        }
        """Handlers for the effects of commands that are taken between two txns, by effect name."""

    @property
    def is_first(self) -> bool:
        """Whether the open txn is the first one of this process."""
        return self._begun == 1

    def take_rollback(self) -> Rollback:
        """Return and clear the rollback that the loop has yet to handle.

        It is the last one, but one that all ranks count is not replaced by a later one: a peer that
        has counted it may have left before this rank's loop comes to count it.
        """
        taken, self._rollback = self._rollback, Rollback()
        return taken

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
        if self._finish is None:
            self._state.refuse_unsendable()
        self._state.checkpoints.take()
        # detected late: a second optimizer stepped after the first one had been counted
        by_loop = self._commits.by_loop
        executor.lost = by_loop.take_incomplete() or executor.lost
        if by_loop.check_missed(self._manager._torchft.step - 1):
            self._job.note("no_optimizer_step", {"step": by_loop.missed})
        while self._finish is None:
            command = self._wait(engine, limit)
            facts = self._healer.facts(command) if isinstance(command, Heal) else NO_FACTS
            executor.execute(command, self._work, facts)
            if isinstance(command, StartTxn) and executor.role == "computing":
                self._begun += 1
                return command
            if isinstance(command, Finish):
                return None
        self._stop(self._finish)
        return None

    def continue_epoch(self) -> StartTxn | Record | None:
        """Execute engine commands until the next txn of the epoch, or until the epoch after it.

        Returns:
            The txn, which has begun; the record of the next epoch, which is not built yet; or None
            if the job has ended for this rank.
        """
        engine, executor = self._job.engine, self._job.executor
        assert engine is not None, "it has joined"
        while self._finish is None:
            command = self._wait(engine, None)
            if isinstance(command, Heal):
                return command.record
            executor.execute(command, self._work, NO_FACTS)
            if isinstance(command, StartTxn) and executor.role == "computing":
                self._begun += 1
                return command
        return None

    def _connect(self, command: Heal) -> None:
        if command.record.step != self._rollback.step:  # the job has continued without this rank
            self._rollback = Rollback()
        if command.fetch_from is not None:
            self._commits.by_loop.forget()
            self._state.updates.loaded()
        with self._watchers.waiting():  # healing enforces its own timeouts
            self._healer.heal(command, self._state.paradigm.describe(self._reductions.models))

    def _apply_too_late(self, command: Apply) -> None:
        """Handle a commit that arrives after the step function was interrupted."""
        self._close_txn()
        self._voter.committed()
        self._commits.fail(RuntimeError("interrupted before the optimizer step"))

    def step_aborted(self) -> None:
        """Record that the step function ended without a vote. The txn will be rolled back.

        It has no effect after a vote.
        """
        self._job.executor.unwound()

    def _wait_without_step(self, engine: Engine, place: str) -> Command:
        """Return the engine's next command. If it takes long, send that this rank is at ``place``.

        One message from each place is enough: every rank in a step of this txn receives it.
        """
        with suppress(TimeoutError):
            return self._wait(engine, Limit(place, timedelta(seconds=_ALONE_S)))
        if (txn := self.txn) is not None and not self.step.has_message(txn, place):
            try:
                engine.bus.broadcast(encode(NoStep(self._job.peer, txn.token, place)))
            except BusError as error:  # the timeouts of the ranks in a step remain
                logger.warning("could not send that this rank is at %s: %s", place, error)
        return self._wait(engine, None)

    def _wait(self, engine: Engine, limit: Limit | None) -> Command:
        """Return the engine's next command. Raises TimeoutError, which names the awaited ranks."""
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
            FftError: The error of the engine's ``Finish`` command.
            Drained: The job continues without this rank. The code after the loop, which is meant
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
        """Leave the job's step loop. Later work of the main thread is outside FFT."""
        self._give_up_txn()
        self._leaving.left(error)

    def _give_up_txn(self) -> None:
        """Abandon the open txn on this thread."""
        self._close_txn()
        self._healer.cancel_fetch()
        self._watchers.txn_ended(committed=False)

    def _close_txn(self) -> None:
        self.txn = self.voted = None
        self.step.end()

    def _enter(self, plan: StartTxn) -> None:
        manager = self._manager
        self._groups.run_deferred_abort()  # the abort was deferred after this command was issued
        self._healer.exchange.end_service(plan)
        manager._torchft.errored = None
        self._reductions.begin()
        manager._torchft.step = plan.step
        manager._torchft.participating_replica_rank = plan.index
        manager._torchft.participating_replica_world_size = plan.participants
        if self._state.registered_state is not None and not self._reductions.raises:
            # FFT's own loop captures after it loads the batch, which may consume RNG state
            self._state.registered_state.capture()
        self.txn = plan
        self._voter.begin(plan)
        self._compare_updates(plan)
        if not self._reductions.raises:  # FFT's own loop starts them with the step function
            self._voter.begin_reducers()
            self.step.begin(plan)
        self._watchers.txn_begun(plan.step)
        try:
            self._voter.ask(plan)
        except NoLighthouseQuorum:
            self._leave_txn()
            raise
        if self._injector is not None:
            self._injector.begin(plan.step, len(plan.members), plan.commits)

    def _compare_updates(self, plan: StartTxn) -> None:
        """Mark the vote's manifest if no optimizer step followed the last commit on this rank.

        The mark detects groups that differ in this. It is omitted in an epoch's first txn with a
        joiner: the joiner has made no commit, and its vote would not match.
        """
        epoch = self._job.local.epoch if self._job.local is not None else None
        has_learners = epoch is not None and bool(epoch.learners) and plan.token.txn == 1
        if self._commits.by_loop.missed is not None and not has_learners:
            self._reductions.manifest.note("no optimizer step after the last commit")

    def _restore(self, command: Restore) -> None:
        """Wait for all operations of the aborted attempt, then restore the start of the step."""
        local = self._job.local
        assert local is not None
        if not self._rollback.cause.code.is_counted:
            groups = tuple(entry.group for entry in members(local))
            self._rollback = Rollback(command.cause, local.step, groups)
        self._give_up_txn()
        is_mine = self._job.peer in command.cause.accused
        if is_mine and command.cause.code == CauseCode.REPLICAS_DIFFER:
            self._healer.rejected(command.cause.text)
        self._groups.unwind(
            command.cause.text, self._watchers.waiting(), self._manager._torchft.timeout
        )
        self._reductions.reset()
        with self._watchers.waiting():  # hooks have their own limits
            self.hooks.finalize.run()
        try:
            self._state.paradigm.restore()
        except TornState as error:  # a peer can provide the state
            logger.warning("%s; this rank fetches the state", error)
            self._job.executor.lost, self._state.lost = text_of(error), error
        if local.stuck:
            self._voter.pause()
        if (why := self._commits.by_loop.why_lost(command.cause)) is not None:
            logger.error("%s This rank fetches the state", why)
            self._job.executor.lost, self._state.lost = why, TornState(why)
        with self._watchers.waiting():
            self.hooks.begin()
        self._job.executor.restored(command)

    # --- the end of a txn ---

    def vote_and_wait(
        self,
        skip: bool = False,
        last: bool = False,
        limit: Limit | None = None,
        consumes: dict[str, Any] | None = None,
        block: str = "",
        place: str = "",
    ) -> Apply | None:
        """Vote and wait for the decision.

        A COMMIT is only accepted here; `CommitExecutor` executes it, as the update may run later.
        After an ABORT the next `begin` restores the state.

        Args:
            skip: Vote to skip the optimizer step. One such vote makes all ranks skip it.
            last: Leave the job if this txn commits and is not skipped.
            limit: Deadline of the call, or None.
            consumes: See `Voter.vote`.
            block: The entry or the end of a live block, which is the whole txn; empty for a step.
            place: ``NoStep.place`` if this rank has run no step function; then without ``limit``.

        Returns:
            The commit to apply, or None after an ABORT or the end of the job.

        Raises:
            TimeoutError: No decision within ``limit``. The vote remains cast; call again to wait.
        """
        plan, engine = self.txn, self._job.engine
        if plan is None or engine is None:
            raise FftError("should_commit() without a txn: call start_quorum() first")
        if self.voted is None:
            self._job.report_not_replaceable(self._groups.can_reform)
            self._rollback = Rollback()  # torchft's loop does not take it
            self._voter.vote(plan, skip, last, consumes, block)
            self.voted = "skip" if skip else "step"
            self.step.end()
            # no vote was cast if the fetched state is missing; then the txn is rolled back
            self.step_aborted()
        command = self._wait_without_step(engine, place) if place else self._wait(engine, limit)
        self._close_txn()
        self._voter.end()
        if isinstance(command, Apply):
            engine.take(command)
            if not command.skip:
                self._healer.committed()
            self._voter.committed()
            self._commits.decided(command.record, plan, consumes=not block)
            return command
        if isinstance(command, Finish) and command.error is not None:
            self._job.executor.execute(command, self._work)
        return None

    # --- errors ---

    def report_error(self, error: Exception) -> None:
        """Implement ``ManagerFFT.report_error`` after the job is joined."""
        if self._job.executor.role == "applying" and not self._commits.by_loop.is_made:
            self._commits.fail(error)
            return
        manager = self._manager
        if self._state.updates.in_body and threading.get_ident() == self._watchers.main:
            self.step.has_reported = True
        first, manager._torchft.errored = manager._torchft.errored is None, Reported(error)
        if self.txn is None:
            logger.warning(
                "an error was reported between two txns; it rolls nothing back: %s", text_of(error)
            )
        elif not isinstance(error, (TxnAborted, GroupAborted)):
            kind = type(error).__name__
            self._job.post(Fault(self.txn.token, text_of(error), code_of(error), kind))
            if first:  # after the fault is posted: this reads source files
                self._job.note_error(error)

"""One attempt at a transaction on the main thread: enter, exit, fail and vote, for all loops.

FFT's own loop, its local steps, live blocks and loops written for torchft share `Attempt`.
`AttemptContext` is the ``with`` statement of all but the last; its subclasses differ in what
completes the attempt, and in what follows an error.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

from fft.engine.loop import Command, Engine
from fft.errors import (
    BusError,
    DeviceLost,
    Drained,
    FftError,
    GradientMissing,
    GradientsNotReproducible,
    NoLighthouseQuorum,
    NoState,
    ResultRefused,
    TxnAborted,
)
from fft.messages.causes import NO_CAUSE, Cause, CauseCode, LeaveReason
from fft.messages.effects import Apply, Finish, StartTxn
from fft.messages.progress import Goal
from fft.messages.protocol import STOP, Fault, NoStep, Prepared, Token, encode
from fft.trace.inputs import CONSUMED, LOOP, TORCHFT, TRANSACTIONS
from fft.train.data.global_batch import rows_of
from fft.train.data.step_input import StepInput
from fft.train.gradients.recomputation import Recompute
from fft.train.guard import accelerator
from fft.train.guard.injector import InjectedFault
from fft.train.guard.interrupt import Interrupted
from fft.train.guard.unsafe_places import guarded
from fft.train.process_groups import CollectiveFailed, GroupAborted
from fft.train.session.error_reports import code_of, error_of, text_of
from fft.train.session.participation import Participation
from fft.train.session.rank_context import RankContext
from fft.train.state.step_state import TornState
from fft.train.step.commits import CommitExecutor
from fft.train.step.healing import Healer
from fft.train.step.leaving import Leaving
from fft.train.step.preemption import waiting_for
from fft.train.step.step_failures import StepFailures, retries_exceeded
from fft.util.error_places import traceback_of_caller

logger = logging.getLogger(__name__)

_ALONE_S = 0.5
"""Seconds for which a rank without a step function waits for the decision, before it sends where it
is. Ranks that reach the same place meanwhile decide without that message."""


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


class Attempt:
    """The attempt at the open txn of one rank. Main thread, unless noted otherwise.

    Attributes:
        txn: The open txn.
        presence: Whether the main thread is in a step function.
        failures: Counts the failures of step functions at one step.
        finish: The engine's final command, or None while this rank takes part.
        rollback: The rollback that the loop has yet to handle.
        begun: Number of txns that this process has started.
        preconditions: The conditions outside the job that a YES waits for.
    """

    def __init__(
        self,
        rank: RankContext,
        healer: Healer,
        leaving: Leaving,
        commits: CommitExecutor,
    ) -> None:
        self._manager, self._job, self._watchers = rank.manager, rank.job, rank.watchers
        self._state, self._groups, self._results = rank.state, rank.groups, rank.results
        self._reductions, self._reducers = rank.reductions, rank.reducers
        self._injector, self.txn = rank.injector, rank.txn
        self._healer, self.leaving, self._commits = healer, leaving, commits
        self.preconditions = rank.state.paradigm.vote_preconditions()
        self.presence = StepPresence(rank.job)
        self.failures = StepFailures(rank.settings.config.max_body_failures)
        self.finish: Finish | None = None
        self.rollback = Rollback()
        self.begun = 0
        self._warned_of_signal = False
        self._loop = ""
        """The loop of the last txn that this rank has voted in."""
        self._goal = Goal()
        """The planned end of FFT's own loop."""
        self._consumes: dict[str, Any] | None = None
        """The data that the commit of the open txn consumes, in FFT's own loop."""
        self._compares_at_vote = False
        """The vote of this txn compares the whole state, as the step function leaves it."""
        self._data: str | None = None
        """Digest of the data that this txn has drawn."""
        self._shard = ""
        """Name of the shard of the data that this rank draws from."""
        self._equality: str | None = None
        """Digest of the state, if the replicas are compared in this txn (`Vote.digest`)."""

    # --- begin ---

    def begin(self, plan: StartTxn) -> None:
        """Open the txn of ``plan``, which the engine has started.

        Raises:
            NoLighthouseQuorum: A precondition has failed in too many attempts in a row.
        """
        torchft = self._manager._torchft
        self._groups.run_deferred_abort()  # the abort was deferred after this command was issued
        self._healer.exchange.end_service(plan)
        self._reductions.begin()
        torchft.step = plan.step
        torchft.participating_replica_rank = plan.index
        torchft.participating_replica_world_size = plan.participants
        self.txn.begin(plan)
        self._begin_comparisons(plan)
        self._watchers.txn_begun(plan.step)
        try:
            for each in self.preconditions:
                each.ask(plan)
        except NoLighthouseQuorum:
            self.leave()
            raise
        if self._injector is not None:
            self._injector.begin(plan.step, len(plan.members), plan.commits)

    def _begin_comparisons(self, plan: StartTxn) -> None:
        """Decide what the votes of this txn compare.

        The first votes of a joiner compare the whole state, as the step function has left it. A
        mark in the manifest shows that no optimizer step followed the last commit on this rank. It
        is omitted in an epoch's first txn with a joiner: the joiner has made no commit, and its
        vote would not match.
        """
        self._data, self._shard = None, ""
        checks, local = self._state.checks, self._job.local
        head = None if local is None else local.head
        at_vote = bool(checks and checks.every and head and head.unproven)
        self._compares_at_vote = at_vote
        self._equality = None if checks is None or at_vote else checks.digest(plan.step)
        epoch = None if local is None else local.epoch
        has_learners = epoch is not None and bool(epoch.learners) and plan.token.txn == 1
        if self._commits.by_loop.missed is not None and not has_learners:
            self._reductions.manifest.note("no optimizer step after the last commit")

    def note_data(self, drawn: StepInput) -> None:
        """Add the digest of the data that this txn has drawn to the vote."""
        self._data, self._shard = drawn.digest, drawn.shard
        if self._goal.samples is None and self._loop != TRANSACTIONS:
            self.announce(replace(self._goal, samples=rows_of(drawn.batch)))

    def announce(self, goal: Goal) -> None:
        """Take the planned end of the loop; it is traced and reported with the first vote."""
        self._goal = goal

    def compare_now(self) -> None:
        """Compare the replicas in this txn, even if that is not due: it is the last of the job."""
        checks = self._state.checks
        if checks is not None and self._equality is None and not self._compares_at_vote:
            self._equality = checks.now()

    def end_wait(self) -> None:
        """End the wait for the preconditions, because the txn is over. Thread-safe. Idempotent."""
        for each in self.preconditions:
            each.end()

    def pause(self) -> None:
        """Wait before the next attempt, after a rollback of a job that makes no progress."""
        for each in self.preconditions:
            with self._watchers.waiting():
                each.pause()

    # --- enter and exit ---

    @guarded
    def enter(self, plan: StartTxn, has_step: bool = True) -> None:
        """Prepare the step function of one of FFT's loops, and allow interruptions.

        Args:
            plan: The txn.
            has_step: Whether a step function runs, so that ranks without one are reported.
        """
        self._state.updates.begin_step()
        self._results.begin(plan)
        if has_step:
            self.presence.begin(plan)
            self._watchers.step_begun()
        # not earlier: user code may freeze or unfreeze parameters depending on `txn.step`
        self._reducers.begin()
        self.allow_interrupts()

    def enter_by_torchft(self, plan: StartTxn) -> None:
        """Prepare the step of a loop that is written for torchft, which nothing interrupts.

        FFT's own loop captures after it loads the batch, which may consume RNG state.
        """
        if self._state.registered_state is not None:
            self._state.registered_state.capture()
        self._reducers.begin()
        self.presence.begin(plan)
        self._watchers.step_begun()

    @guarded
    def allow_interrupts(self) -> None:
        """Allow a rollback to interrupt the main thread."""
        interrupter, engine = self._watchers.interrupter, self._job.engine
        if interrupter is None or engine is None:
            return
        if interrupter.is_replaced and not self._warned_of_signal:
            self._warned_of_signal = True
            logger.warning(
                "the handler of %s was replaced after the first transaction: a rollback can no "
                "longer interrupt the step function, and waits until it ends. Install your handler "
                "before the first transaction; FFT then calls it for signals that are not FFT's",
                interrupter.signal_name,
            )
        interrupter.enter(engine.superseded)

    @guarded
    def exit(self) -> None:
        """Disable interruptions: the step function has returned or raised."""
        self._state.updates.in_body = False
        if self._watchers.interrupter is not None:
            self._watchers.interrupter.leave()
        self._watchers.body_done()

    # --- fail ---

    def step_aborted(self) -> None:
        """Record that the step function ended without a vote. The txn will be rolled back.

        It has no effect after a vote.
        """
        self._job.executor.unwound()

    def fail(self, plan: StartTxn, drawn: StepInput | None, error: BaseException) -> bool:
        """Handle an exception that left the step function. Return whether to suppress it."""
        self.step_aborted()
        if isinstance(error, Exception):
            self._step_failed(plan, drawn, error)
        return isinstance(error, Exception | Interrupted)

    def _step_failed(self, plan: StartTxn, drawn: StepInput | None, error: Exception) -> None:
        """Report an exception of the step function.

        Raises:
            StepRetriesExceeded: The exception keeps coming at one step.
            DeviceLost: The device of this process has failed for good, so it cannot compute a
                replay.
        """
        try:
            accelerator.refuse_lost(error)
        except DeviceLost as lost:
            self._job.note_error(lost)
            raise
        if isinstance(error, (TxnAborted, GroupAborted)) or self.txn.failure is not None:
            return
        # counted on all ranks after the rollback
        if isinstance(error, (ResultRefused, GradientMissing)):
            self._manager.report_error(error)
            return
        self.raise_if_retries_exceeded(plan, drawn, error, plan.step)
        self._manager.report_error(error)

    def raise_if_retries_exceeded(
        self,
        plan: StartTxn,
        drawn: StepInput | None,
        error: Exception,
        number: int,
        where: str = "",
        counted: StepFailures | None = None,
    ) -> None:
        """Raise StepRetriesExceeded if ``error`` recurred too many times at step ``number``.

        Args:
            where: Description of the step for the message; empty names its number.
            counted: The earlier failures of the same kind; None: those of step functions.
        """
        failures = counted or self.failures
        why = failures.failed(number, plan.members, error, where)
        batch = "" if drawn is None else drawn.describe(plan.step, self._job.peer)
        if batch and batch not in getattr(error, "__notes__", ()):
            error.add_note(batch)
        if why is not None:
            self._job.note_error(error)
            raise retries_exceeded(why, error) from error

    def raise_incomplete(
        self, plan: StartTxn, drawn: StepInput | None, mistake: FftError
    ) -> NoReturn:
        """Raise StepRetriesExceeded for a step function that returned before its ``backward()``.

        It is raised at once, because a replay of the same batch would end the same way, and because
        Python ignores the errors of an iterator that a script drops by leaving its loop.
        """
        mistake = mistake.with_traceback(traceback_of_caller())
        if drawn is not None and (batch := drawn.describe(plan.step, self._job.peer)):
            mistake.add_note(batch)
        self._job.note_error(mistake)
        raise retries_exceeded(
            f"a replay of step {plan.step} would end the same way", mistake
        ) from mistake

    def report(self, error: Exception) -> None:
        """Implement ``ManagerFFT.report_error`` after the job is joined."""
        if self._job.executor.role == "applying" and not self._commits.by_loop.is_made:
            self._commits.fail(error)
            return
        txn, plan = self.txn, self.txn.plan  # the main thread may close the txn meanwhile
        if self._state.updates.in_body and threading.get_ident() == self._watchers.main:
            self.presence.has_reported = True
        first, txn.failure = txn.failure is None, error
        if plan is None:
            logger.warning(
                "an error was reported between two txns; it rolls nothing back: %s", text_of(error)
            )
        elif not isinstance(error, (TxnAborted, GroupAborted)):
            kind = type(error).__name__
            self._job.post(Fault(plan.token, text_of(error), code_of(error), kind))
            if first:  # after the fault is posted: this reads source files
                self._job.note_error(error)

    # --- vote ---

    def vote(
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
        After an ABORT the next `Worker.begin` restores the state.

        Args:
            skip: Vote to skip the optimizer step. One such vote makes all ranks skip it.
            last: Leave the job if this txn commits and is not skipped.
            limit: Deadline of the call, or None.
            consumes: The data that its commit consumes, or None in torchft's loop.
            block: The entry or the end of a live block, which is the whole txn; empty for a step.
            place: ``NoStep.place`` if this rank has run no step function; then without ``limit``.

        Returns:
            The commit to apply, or None after an ABORT or the end of the job.

        Raises:
            TimeoutError: No decision within ``limit``. The vote remains cast; call again to wait.
        """
        plan, engine = self.txn.plan, self._job.engine
        if plan is None or engine is None:
            raise FftError("should_commit() without a txn: call start_quorum() first")
        if self.txn.voted is None:
            self._job.report_not_replaceable(self._groups.can_reform)
            self.rollback = Rollback()  # torchft's loop does not take it
            self._cast(plan, skip, last, consumes, block)
            self.txn.voted = "skip" if skip else "step"
            self.presence.end()
            # no vote was cast if the fetched state is missing; then the txn is rolled back
            self.step_aborted()
        command = self._wait_without_step(engine, place) if place else self.wait(engine, limit)
        self.close()
        self.end_wait()
        if isinstance(command, Apply):
            engine.take(command)
            if not command.skip:
                self._healer.committed()
            self.trace_consumption()
            self._commits.decided(command.record, plan, consumes=not block)
            return command
        if isinstance(command, Finish) and command.error is not None:
            self._job.executor.execute(command, {"leave": self.stop})
        return None

    def _cast(
        self,
        plan: StartTxn,
        skip: bool,
        last: bool,
        consumes: dict[str, Any] | None,
        block: str = "",
    ) -> None:
        """Wait for the preconditions of the vote, and cast it.

        A rank whose fetch has failed casts no vote, because its engine has the failure already.

        Args:
            consumes: The data that its commit consumes, or None in torchft's loop.
            block: The entry or the end of a live block; empty in a step.
        """
        if not block:
            self._note_loop(plan, consumes)
        self._watchers.body_done()
        with self._watchers.waiting():
            self._reductions.wait()
            self._await_preconditions(plan)
        self.inject("vote")
        if self._state.registered_state is not None:
            self._state.registered_state.note_edits()
        if not self._has_state():
            return
        # an inf in one shard is enough: the engine combines the skip flags of all ranks
        is_step = not block and self.txn.failure is None
        skip = skip or (is_step and self._must_skip(plan))
        cause, code = "", CauseCode.NONE
        if (error := self.txn.failure) is not None:
            cause, code = text_of(error), code_of(error)
        if self._compares_at_vote and not block and error is None:
            epoch = self._job.local.epoch if self._job.local is not None else None
            overlaps = epoch is not None and bool(epoch.learners)
            self._equality = self._state.digest_for_first_vote(overlaps)
        own = self._gradients() if error is None and not skip and not block else None
        repeats = self._results.recomputation.repeats(own)
        build = self._reductions.manifest.build
        manifest = build(self._data, self._shard, block, own, repeats)
        digest = self._equality
        yes = error is None
        asks = yes and not block and self._state.checkpoints.asks(plan, last, skip)
        waits = self._healer.joiners_wait
        vote = Prepared(plan.token, yes, manifest, cause, skip, digest, waits, last, code, asks)
        self._job.executor.report(vote)
        self.inject("after_vote")

    def _gradients(self) -> str | None:
        """Return the fingerprint of the tensors that a commit would apply, if the replicas compare
        it.

        A torchft loop applies its gradients itself, and may average something else.
        """
        checks = self._state.checks
        if checks is None or self._equality is None or self._loop == TORCHFT:
            return None
        return checks.gradients(self._state.paradigm.reduced())

    def _must_skip(self, plan: StartTxn) -> bool:
        """Return whether the result of the txn must be skipped; if it is refused, vote NO.

        In torchft's loop the script itself decides about the gradients.
        """
        if self._loop == TORCHFT:
            return self._state.updates.must_skip()
        try:
            return self._state.paradigm.must_skip(plan)
        except (ResultRefused, GradientsNotReproducible, Recompute, GroupAborted) as error:
            self.txn.failure = error
            return False
        except CollectiveFailed as error:  # a peer has already left the sum of the norms
            self.txn.failure = error
            self._job.note_error(error)
            return False

    def _note_loop(self, plan: StartTxn, consumes: dict[str, Any] | None) -> None:
        """Trace that another loop begins with this vote.

        The one before it has ended: however it was left, it commits nothing more.
        """
        loop, self._consumes = TORCHFT if consumes is None else TRANSACTIONS, consumes
        if loop != self._loop:
            self._loop = loop
            is_own = loop == TRANSACTIONS
            self._job.leave_reason = LeaveReason.LEFT_LOOP if is_own else LeaveReason.SHUT_DOWN
            goal = {name: value for name, value in asdict(self._goal).items() if value is not None}
            told = {"goal": goal} if is_own else {}
            self._job.note(LOOP, {"runs": loop, "from": list(plan.token), **told})
            if told and self._job.reporter is not None:
                self._job.reporter.goal = self._goal

    def trace_consumption(self) -> None:
        """Trace, before the engine continues, what the commit of the last vote consumes."""
        consumes, self._consumes = self._consumes, None
        if consumes is not None:
            self._job.trace.note(CONSUMED, consumes)

    def _await_preconditions(self, plan: StartTxn) -> None:
        """Wait until each condition holds; vote NO for the first one that does not."""
        for each in self.preconditions:
            if self.txn.failure is not None:
                return
            if (error := each.wait_until_met(plan)) is not None:
                self.txn.failure = error

    def _has_state(self) -> bool:
        """Wait for a fetch; return whether this rank can vote. A NO vote needs no state."""
        if self._healer.background_fetch is None or self.txn.failure is not None:
            return True
        with self._watchers.waiting():  # the fetch has its own limits
            return self._healer.load_fetched()

    def inject(self, phase: str) -> None:
        """Inject the planned fault of ``phase``, if any, as a reported error."""
        if self._injector is None:
            return
        try:
            self._injector.at(phase)
        except InjectedFault as fault:
            self._manager.report_error(fault)

    # --- the engine's commands ---

    def _wait_without_step(self, engine: Engine, place: str) -> Command:
        """Return the engine's next command. If it takes long, send that this rank is at ``place``.

        One message from each place is enough: every rank in a step of this txn receives it.
        """
        with suppress(TimeoutError):
            return self.wait(engine, Limit(place, timedelta(seconds=_ALONE_S)))
        plan = self.txn.plan
        if plan is not None and not self.presence.has_message(plan, place):
            try:
                engine.bus.broadcast(encode(NoStep(self._job.peer, plan.token, place)))
            except BusError as error:  # the timeouts of the ranks in a step remain
                logger.warning("could not send that this rank is at %s: %s", place, error)
        return self.wait(engine, None)

    def wait(self, engine: Engine, limit: Limit | None) -> Command:
        """Return the engine's next command. Raises TimeoutError, which names the awaited ranks."""
        left = None if limit is None else limit.left()
        self._state.paradigm.await_command(engine, self.txn.plan)
        try:
            with self._watchers.waiting():
                return engine.wait_command(left)
        except TimeoutError:
            text = waiting_for(engine.local, engine.participant.config, time.monotonic())
            raise TimeoutError(f"{limit}: {text}") from None

    # --- the end ---

    def take_rollback(self) -> Rollback:
        """Return and clear the rollback that the loop has yet to handle.

        It is the last one, but one that all ranks count is not replaced by a later one: a peer that
        has counted it may have left before this rank's loop comes to count it.
        """
        taken, self.rollback = self.rollback, Rollback()
        return taken

    def stop(self, command: Finish) -> None:
        """Leave the loop after the engine has finished.

        Raises:
            Exception: The error of an update that failed here, if no peer provided the state.
            FftError: The error of the engine's ``Finish`` command.
            Drained: The job continues without this rank. The code after the loop, which is meant
                for the end of the training, must not run.
        """
        self.finish = command
        self.leave(command.error)
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
            began = "" if self.begun else " and made no step"
            logger.warning(
                "%s was no member of the job when it left%s: the code after the loop does not run",
                self._job.peer,
                began,
            )
            raise Drained("this replica group was excluded from the job")

    def leave(self, error: str | None = None) -> None:
        """Leave the job's step loop. Later work of the main thread is outside FFT."""
        self.give_up()
        self.leaving.left(error)

    def give_up(self) -> None:
        """Abandon the open txn on this thread."""
        self.close()
        self._healer.cancel_fetch()
        self._watchers.txn_ended(committed=False)

    def close(self) -> None:
        """End the open txn on this thread. Idempotent."""
        self.txn.close()
        self.presence.end()


class AttemptContext:
    """``with`` statement around one attempt.

    Attributes:
        closed: Whether the ``with`` statement was left.
        is_stop: Whether the txn ends a stopped job without a step.
    """

    def __init__(self, attempt: Attempt, plan: StartTxn, drawn: StepInput | None = None) -> None:
        self._attempt, self._plan, self._drawn = attempt, plan, drawn
        self.closed = self.is_stop = False

    @guarded
    def __enter__(self) -> Self:
        self._enter()
        return self

    @guarded
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._exit()
        self.closed = True
        if error is None:
            error = self._complete()
        return error is None or self._fail(error)

    @guarded
    def _enter(self) -> None:
        """Prepare the step function, and allow interruptions."""
        self._attempt.enter(self._plan, not self.is_stop)

    @guarded
    def _exit(self) -> None:
        """Disable interruptions."""
        self._attempt.exit()

    def _complete(self) -> Exception | None:
        """Vote after a step function that has returned, and carry out the decision.

        Returns:
            An error to handle as one of the step function, or None.
        """
        return None

    def _fail(self, error: BaseException) -> bool:
        """Handle an exception of the step function. Return whether to suppress it."""
        return self._attempt.fail(self._plan, self._drawn, error)

"""The training loop of a group that takes local steps and synchronizes periodically.

The loop yields inner steps: transactions that the group commits or repeats on its own. The inner
steps between two synchronizations are a window. After each window one transaction of the job
performs the synchronization. A rollback of the job interrupts at most the inner step that is
running; it keeps the committed inner steps. The loop runs on the main thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator

from fft.errors import DataError, FftError, ResultRefused
from fft.messages.effects import StartTxn
from fft.train.data.source import LeasedInputs
from fft.train.data.step_input import StepInput
from fft.train.limits import Feature, reason
from fft.train.paradigms.periodic.synchronizer import Synchronizer
from fft.train.session.error_reports import text_of
from fft.train.session.rank_context import RankContext
from fft.train.session.step_results import NOT_FINITE
from fft.train.state.step_state import TornState
from fft.train.step.attempt import AttemptContext
from fft.train.step.step_failures import StepFailures
from fft.train.step.transaction import Transaction, TransactionLoop

logger = logging.getLogger(__name__)

_IN_A_STEP = f"{Feature.ALLREDUCE} {reason(Feature.ALLREDUCE, Feature.LOCAL_STEPS)}"


class PeriodicLoop:
    """Runs inner steps and synchronizations; `TransactionLoop` runs the job's transactions."""

    def __init__(
        self, rank: RankContext, loop: TransactionLoop, synchronizer: Synchronizer, own: InnerSteps
    ) -> None:
        self.loop = loop
        self.synchronizer = synchronizer
        self._steps = own
        self.job, self.watchers, self.injector = rank.job, rank.watchers, rank.injector
        self.state, self.reductions = rank.state, rank.reductions
        self.results = rank.results
        self.update_failures = StepFailures(rank.settings.config.max_body_failures)
        """Counts failed optimizer updates of inner steps."""

    def run(self, inputs: LeasedInputs, max_steps: int | None) -> Iterator[InnerTransaction]:
        """Yield inner steps until the job ends or this group leaves it."""
        loop, synchronizer = self.loop, self.synchronizer
        inputs.alive = self.watchers.ping
        self.reductions.refused = _IN_A_STEP
        synchronizer.shared.take()
        while (plan := loop.begin()) is not None:
            if loop.is_past(plan, max_steps):
                return
            if not inputs.suffice(plan):
                if loop.worker.is_first and plan.step == 0:
                    raise DataError(inputs.too_few(plan))
                return
            synchronizer.begin(plan)
            is_last = max_steps is not None and plan.step + 1 >= max_steps
            is_last = is_last or not inputs.has_slices_after(plan)
            if is_last:
                loop.attempt.compare_now()
            try:
                waited_ms = yield from self._inner_steps(plan, inputs)
            finally:
                self._steps.leave()
            if waited_ms is not None and self._synchronize(plan, is_last, waited_ms):
                yield from self._synchronized(plan, inputs)

    def _synchronized(self, plan: StartTxn, inputs: LeasedInputs) -> Iterator[InnerTransaction]:
        """Yield the inner steps that precede the next txn of the job."""
        return iter(())

    def _inner_steps(
        self, plan: StartTxn, inputs: LeasedInputs
    ) -> Generator[InnerTransaction, None, float | None]:
        """Yield the remaining inner steps of the window.

        Returns:
            Milliseconds spent waiting for data, or None after a rollback.
        """
        synchronizer, step, waited_ms = self.synchronizer, self.state.registered, 0.0
        while plan.lease is not None and self._steps.ready(plan):
            if synchronizer.phase.position >= synchronizer.schedule.steps:
                break
            if self._is_superseded() or not self._launched_in_time(plan):
                return None
            if not self._steps.begin():
                continue
            drawn = inputs.draw(plan.lease, synchronizer.phase.position)
            step.capture()
            self.watchers.txn_begun(plan.step)
            txn = self._steps.transaction(self, plan, drawn)
            try:
                yield txn
            except GeneratorExit:
                self.loop.mark_left(plan.step)
                raise
            if not txn.closed:
                raise FftError("the step function of a txn must run inside `with txn:`")
            if txn.interrupted:
                return None
            waited_ms += drawn.waited_ms if txn.committed else 0.0
        return None if self._is_superseded() else waited_ms

    def _is_superseded(self) -> bool:
        """Return whether the engine has superseded the job's txn; if so, abandon it."""
        engine = self.job.engine
        if engine is None or not engine.has_command():
            return False
        self.loop.attempt.step_aborted()
        return True

    def _launched_in_time(self, plan: StartTxn) -> bool:
        """Start the overlapped reduction if it is due. Return False if starting it failed."""
        synchronizer = self.synchronizer
        is_due = synchronizer.phase.position >= synchronizer.schedule.launch_at
        if synchronizer.is_launched or not is_due:
            return True
        with JobsPart(self.loop.attempt, plan) as part:
            self._launch(plan)
        return not part.failed

    def _launch(self, plan: StartTxn) -> None:
        """Start the reduction, unless the contribution of this group is not finite.

        The group then restarts from the last synchronization, since its parameters are not finite
        though each of its gradients was.

        Raises:
            ResultRefused: The contribution is not finite.
        """
        self.reductions.refused = ""
        try:
            own = self.synchronizer.prepare().own()
            if self.results.must_skip_nonfinite(plan, own):
                raise ResultRefused(NOT_FINITE, ends_job=False)  # no skip would mend the state
            self.synchronizer.launch()
        except ResultRefused as refused:
            self.synchronizer.begin_anew(plan, text_of(refused))
            raise
        finally:
            self.reductions.refused = _IN_A_STEP

    def _synchronize(self, plan: StartTxn, is_last: bool, waited_ms: float) -> bool:
        """Run the job's synchronization txn. Return whether the group continues after it."""
        self.watchers.txn_begun(plan.step)
        drawn = StepInput(None, is_last, waited_ms, plan.lease, plan.lease or 0)
        traced = self.synchronizer.phase.traced()
        txn = Transaction(self.loop, plan, drawn, last=is_last, consumes=traced)
        with txn:
            if not self.synchronizer.is_launched:
                self._launch(plan)
            # wait for the slowest group, up to the process group's timeout
            with self.watchers.waiting():
                self.synchronizer.finish()
        return txn.committed and not self.loop.is_over and not self.synchronizer.is_launched


class InnerSteps:
    """The inner steps of a group of one rank, which commits them without other ranks."""

    def ready(self, plan: StartTxn) -> bool:
        """Wait until an inner step may begin. Return False if the job's engine has a command."""
        return True

    def begin(self) -> bool:
        """Begin an inner step. Return False if it may not begin yet."""
        return True

    def leave(self) -> None:
        """End the inner steps, before the job's txn continues."""

    def transaction(self, loop: PeriodicLoop, plan: StartTxn, drawn: StepInput) -> InnerTransaction:
        """Return the transaction of one inner step."""
        return InnerTransaction(loop, plan, drawn)


class JobsPart(AttemptContext):
    """Context manager for code of the job's txn that runs before the inner steps end.

    Attributes:
        failed: Whether the code raised an exception, so the txn is rolled back.
    """

    failed = False

    def _fail(self, error: BaseException) -> bool:
        self.failed = True
        return super()._fail(error)


class InnerTransaction(Transaction):
    """One attempt at one inner step. The exit of ``with txn:`` commits the step or rolls it back.

    Attributes:
        batch: The batch of this group. It is a copy, so a replay gets the batch unchanged.
        step: Number of synchronizations committed before this inner step.
        inner_step: Number of inner steps of this group since the last synchronization.
        contributes: Always True, because a group without a lease gets no inner steps.
        committed: After the exit, whether the optimizer stepped or skipped this step.
        skipped: After the exit, whether the gradient scaler found an inf and the step was skipped.
    """

    def __init__(self, periodic: PeriodicLoop, plan: StartTxn, drawn: StepInput) -> None:
        super().__init__(periodic.loop, plan, drawn, last=False, consumes={})
        self.inner_step = periodic.synchronizer.phase.position
        self.interrupted = False
        self._periodic = periodic
        self._weight: float | None = None

    def weigh(self, weight: float) -> None:
        """Weight this step by ``weight``, such as its number of tokens.

        Raises:
            FftError: ``weight`` is not positive and finite.
        """
        if not 0 < weight < math.inf:
            raise FftError(f"txn.weigh({weight}): give a positive number")
        self._weight = float(weight)

    def _complete(self) -> Exception | None:
        return self._left_undone() or self._commit()

    def _fail(self, error: BaseException) -> bool:
        if isinstance(error, Exception):
            self._roll_back(error)
            return True
        self.interrupted = True
        return super()._fail(error)

    def _left_undone(self) -> Exception | None:
        """Return the reported error of a step function that ended without an exception, or None.

        Raises:
            StepRetriesExceeded: The step function ended too early or stepped a scheduler.
        """
        updates = self._periodic.state.updates
        failure = self._attempt.txn.failure
        if self._attempt.presence.has_reported and failure is not None:
            return failure  # excludes errors of the overlapped reduction
        mistake = updates.scheduled_in_body()
        if mistake is None and not updates.have_gradients:
            mistake = FftError(
                "no registered optimizer has a gradient at the end of the step function (`break`, "
                "`continue` or `return` inside `with txn:`? no backward()? zero_grad() after it?): "
                "the step would change nothing. Leave the loop between two transactions"
            )
        if mistake is not None:
            self._attempt.raise_incomplete(self._plan, self._drawn, mistake)
        return None

    def _commit(self) -> Exception | None:
        """Apply the update, unless the result of the step is refused; then return the refusal."""
        self._periodic.state.registered.note_edits()
        try:
            self.carry_out(self.must_skip)
        except ResultRefused as refused:
            if refused.ends_job:
                self._periodic.job.note_error(refused)
                raise
            return refused
        return None

    def must_skip(self) -> bool:
        """Return whether the step must be skipped. Raises ResultRefused as `ResultJudge`."""
        periodic = self._periodic
        return periodic.results.must_skip(self._plan, periodic.state.updates, self.inner_step)

    def carry_out(self, skip: Callable[[], bool]) -> bool:
        """Apply the update of the committed step. Return whether it succeeded.

        After a failure this rank has restarted from the last synchronization.
        """
        periodic, state = self._periodic, self._periodic.state
        try:
            self.skipped = skip()
            (state.skip_step if self.skipped else state.updates.apply)()
            periodic.synchronizer.stepped(self._weight)
        except FftError:
            raise
        except Exception as error:
            logger.exception(
                "the optimizer step of an inner step failed; the state of this rank is lost"
            )
            self._begin_anew(error)
            return False
        self.committed = True
        state.registered.forget()
        self._attempt.failures.committed()
        self._note("inner_commit", skipped=self.skipped)
        periodic.watchers.committed(self.step, len(self._plan.members))
        periodic.watchers.txn_ended(committed=True)
        if not self.skipped:
            state.updates.done()
        return True

    def _roll_back(self, error: Exception) -> None:
        """Restore the state at the start of the step. Other groups are not involved."""
        periodic, step = self._periodic, self._periodic.state.registered
        self._raise_if_retries_exceeded(error)
        logger.warning("an inner step failed here and is computed again: %s", text_of(error))
        periodic.state.updates.forget()
        try:
            step.restore()
        except TornState as torn:
            self._begin_anew(torn)
        else:
            self._note("inner_abort", cause=text_of(error))
            periodic.job.note_error(error)
        periodic.watchers.txn_ended(committed=False)

    def _raise_if_retries_exceeded(self, error: Exception, in_update: bool = False) -> None:
        """Raise StepRetriesExceeded if ``error`` recurs at this inner step.

        With ``in_update`` it counts the errors of all updates in this window.
        """
        number = self.step * self._periodic.synchronizer.schedule.steps
        number += 0 if in_update else self.inner_step
        where = f"step {self.step}, inner step {self.inner_step}"
        counted = self._periodic.update_failures if in_update else None
        self._attempt.raise_if_retries_exceeded(
            self._plan, self._drawn, error, number, where, counted
        )

    def _begin_anew(self, error: Exception) -> None:
        """Restart from the last synchronization, because the state of the step is lost."""
        periodic = self._periodic
        self._raise_if_retries_exceeded(error, in_update=True)
        logger.error(
            "%s; this group restarts from the last synchronization, with new inner optimizers: "
            "%d inner steps of this slice are computed again",
            text_of(error),
            self.inner_step,
        )
        periodic.synchronizer.begin_anew(self._plan, text_of(error), **self._place())
        periodic.job.note_error(error)

    def _note(self, name: str, **more: object) -> None:
        at = {"token": list(self._plan.token), **self._place()}
        self._periodic.job.note(name, {**at, **more})

    def _place(self) -> dict[str, object]:
        """Return the position of the step in the data, for the trace."""
        drawn = self._drawn
        return {"slice": drawn.slice, "item": drawn.item, "inner_step": self.inner_step}

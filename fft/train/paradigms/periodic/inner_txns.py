"""Inner steps: transactions of a group alone, or of its ranks together.

Main thread. What a body may not do is judged here, and what its failures mean.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fft.errors import FftError
from fft.messages.effects import StartTxn
from fft.train.data.drawn import Drawn
from fft.train.interrupt import Interrupted
from fft.train.paradigms.periodic.inner_scope import InnerScope
from fft.train.process_group import GroupAborted
from fft.train.reported import code_of, text_of
from fft.train.state.step_state import TornState
from fft.train.transaction import Transaction
from fft.train.unsafe_places import guarded

if TYPE_CHECKING:
    from fft.train.paradigms.periodic.loop import PeriodicLoop

logger = logging.getLogger(__name__)


class InnerTransaction(Transaction):
    """One attempt at one inner step. ``with txn:`` runs the body; leaving it commits, or repeats.

    Attributes:
        batch: what this group takes. A copy: a replay finds it as it was loaded.
        step: synchronisations committed before this one.
        inner_step: inner steps of this group since the last one.
        contributes: True: a group without a share in the data is given no inner steps.
        committed: after the body: whether the optimizer has stepped, or was to skip.
        skipped: after the body: whether the scaler has found an inf, so that nothing was stepped.
    """

    def __init__(self, periodic: PeriodicLoop, plan: StartTxn, drawn: Drawn) -> None:
        super().__init__(periodic.loop, plan, drawn, last=False, consumes={})
        self.inner_step = periodic.synchronizer.position
        self.interrupted = False
        self._periodic = periodic
        self._weight: float | None = None

    def weigh(self, weight: float) -> None:
        """Have this step count by ``weight``, such as its tokens. Raises FftError: no weight."""
        if not 0 < weight < math.inf:
            raise FftError(f"txn.weigh({weight}): give a positive number")
        self._weight = float(weight)

    @guarded
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        loop = self._loop
        loop.close_body()
        self.closed = True
        if isinstance(error, Interrupted) or (error and not isinstance(error, Exception)):
            self.interrupted = True
            return loop.unwound(self._plan, self._drawn, error)
        self._periodic.watchers.body_done()
        mistake = self._left_undone() if error is None else error
        if isinstance(mistake, Exception):
            self._roll_back(mistake)
        else:
            self._commit()
        return True

    def _left_undone(self) -> Exception | None:
        """The error that the step function has reported, if it ended without an exception.

        Raises StepRetriesExceeded if it ended too early, or stepped a scheduler.
        """
        updates = self._periodic.state.updates
        if self._loop.worker.has_reported and (reported := self._loop.reported) is not None:
            return reported  # not of a reduction that is made beside this step
        mistake = updates.scheduled_in_body()
        if mistake is None and not updates.have_gradients:
            mistake = FftError(
                "no registered optimizer has a gradient at the end of the body (`break`, "
                "`continue` or `return` inside `with txn:`? no backward()? zero_grad() after it?): "
                "the step would change nothing. Leave the loop between two transactions"
            )
        if mistake is not None:
            self._loop.refuse_undone(self._plan, self._drawn, mistake)
        return None

    def _commit(self) -> None:
        state = self._periodic.state
        assert state.step is not None, "looked at before"
        state.step.note_edits()
        self.carry_out(state.updates.must_skip)

    def carry_out(self, skip: Callable[[], bool]) -> bool:
        """The step is committed: make its update. Whether it went well; else this rank has begun
        anew from the last synchronisation."""
        periodic, state = self._periodic, self._periodic.state
        assert state.step is not None, "looked at before"
        try:
            self.skipped = skip()
            (state.updates.skip if self.skipped else state.updates.apply)()
            periodic.synchronizer.stepped(self._weight)
        except FftError:
            raise
        except Exception as error:
            logger.exception("the optimizer step of an inner step failed; this state is torn")
            self._begin_anew(error)
            return False
        self.committed = True
        state.step.forget()
        periodic.loop.worker.body_failures.committed()
        self._note("inner_commit", skipped=self.skipped)
        periodic.watchers.committed(self.step, len(self._plan.members))
        periodic.watchers.txn_ended(committed=True)
        if not self.skipped:
            state.updates.done()
        return True

    def _roll_back(self, error: Exception) -> None:
        """Put the start of the step back. Nobody else hears of it."""
        periodic, step = self._periodic, self._periodic.state.step
        assert step is not None, "looked at before"
        self._give_up_if_hopeless(error)
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

    def _give_up_if_hopeless(self, error: Exception, in_update: bool = False) -> None:
        """Raise StepRetriesExceeded if ``error`` keeps coming here; of updates, in this window."""
        number = self.step * self._periodic.synchronizer.steps
        number += 0 if in_update else self.inner_step
        where = f"step {self.step}, inner step {self.inner_step}"
        self._loop.give_up_if_hopeless(
            self._plan, self._drawn, error, number, where, in_update=in_update
        )

    def _begin_anew(self, error: Exception) -> None:
        """The state of the step is lost: take what was synchronised last."""
        periodic = self._periodic
        self._give_up_if_hopeless(error, in_update=True)
        logger.error(
            "%s; this group begins anew from what was synchronised last, with inner optimizers "
            "that have stepped nothing yet: %d inner steps of this slice are computed again",
            text_of(error),
            self.inner_step,
        )
        periodic.synchronizer.begin_anew(self._plan, text_of(error), **self._place())
        periodic.job.note_error(error)

    def _note(self, name: str, **more: object) -> None:
        at = {"token": list(self._plan.token), **self._place()}
        self._periodic.job.note(name, {**at, **more})

    def _place(self) -> dict[str, object]:
        """Of the step in the data, for the trace."""
        drawn = self._drawn
        return {"slice": drawn.slice, "item": drawn.item, "inner_step": self.inner_step}


class SharedInnerTransaction(InnerTransaction):
    """One that the ranks of the group commit or repeat together.

    ``committed`` may be False of a step whose decision came after a word of the job's; its update
    is made when the group goes on, and functions of ``manager.on_commit`` are called then.
    """

    def __init__(
        self, periodic: PeriodicLoop, inner: InnerScope, plan: StartTxn, drawn: Drawn
    ) -> None:
        super().__init__(periodic, plan, drawn)
        self._inner = inner

    @guarded
    def __enter__(self) -> Self:
        super().__enter__()
        self._inner.open_body()
        return self

    @guarded
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        periodic = self._periodic
        self._loop.close_body()
        self._inner.close_body()
        self.closed = True
        if error is not None and not isinstance(error, Exception | Interrupted):
            return self._loop.unwound(self._plan, self._drawn, error)
        periodic.watchers.body_done()
        if error is None:
            error = self._left_undone() or self._vote()
        if error is not None:
            self._give_up(error)
        return True

    def _vote(self) -> Exception | None:
        """Vote YES, and carry out the decision; or why there can be no vote."""
        state = self._periodic.state
        assert state.step is not None, "looked at before"
        state.step.note_edits()
        try:
            skip = state.updates.must_skip()
        except Exception as error:  # noqa: BLE001 - as one of the body's
            return error
        self._inner.vote(self, skip)
        return None

    def _give_up(self, error: BaseException) -> None:
        """The body has failed, or was interrupted: the group rolls the step back."""
        periodic, is_void = self._periodic, self._inner.is_rolled_back
        text = text_of(error)
        self._inner.fail(text, code_of(error), type(error).__name__)
        periodic.watchers.txn_ended(committed=False)
        self._note("inner_abort", cause=text)
        if is_void or not isinstance(error, Exception) or isinstance(error, GroupAborted):
            return
        self._give_up_if_hopeless(error)
        logger.warning("an inner step failed here and is computed again: %s", text)
        periodic.job.note_error(error)

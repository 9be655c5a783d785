"""FFT's own loop: transactions, each one attempt at one step, with the same batch until it commits.

Main thread. What a body may not do, and what its failures mean, is judged here; votes and updates
are `fft.train.worker`'s.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fft.errors import DeviceLost, FftError, TxnAborted, UnequalData
from fft.messages.causes import NO_CAUSE, CauseCode
from fft.messages.effects import StartTxn
from fft.train import accelerator
from fft.train.body_failures import hopeless
from fft.train.data.drawn import Drawn
from fft.train.data.retries import Superseded
from fft.train.data.sharded import Sharded, ShardedSource
from fft.train.data.source import (
    AUGMENTATION_MEND,
    ORDER_MEND,
    DataSource,
    Identify,
    named,
)
from fft.train.interrupt import Interrupted
from fft.train.process_group import GroupAborted
from fft.train.rank import Rank
from fft.train.rank_state import RankState
from fft.train.reductions import TxnReductions
from fft.train.unsafe_places import guarded
from fft.train.voting import Voter
from fft.train.worker import Worker
from fft.util.error_places import traceback_of_caller

logger = logging.getLogger(__name__)


class TransactionLoop:
    """The loop of one manager over its data."""

    def __init__(
        self,
        rank: Rank,
        voter: Voter,
        worker: Worker,
    ) -> None:
        self.job = rank.job
        self.worker = worker
        self.paradigm = rank.state.paradigm
        self.is_over = False
        """The last txn of all was committed."""
        self._manager, self._watchers = rank.manager, rank.watchers
        self._state, self._reductions = rank.state, rank.reductions
        self._voter = voter
        self._min_reductions = rank.settings.spec.policies.min_reductions
        """0, if a body may end without one."""
        self.left_loop = LeftLoop()
        self._warned_of_signal = False

    def run(
        self,
        loader: Any,
        max_steps: int | None,
        replay_only: bool,
        identify: Identify | None = None,
        sharded: Sharded | None = None,
    ) -> Iterator[Transaction]:
        """As ``ManagerFFT.transactions``."""
        manager, state = self._manager, self._state
        if state.step is None:
            raise FftError("call manager.register(model, optimizer) before transactions()")
        self.paradigm.refuse_loop(loader)
        if self.is_over:
            raise FftError(
                f"this job is over since step {manager._torchft.step}: its last step (max_steps), "
                "or the end of its data, has come, and all groups have left. Call transactions() "
                "once, with the total of steps; what is done between epochs fits between two txns"
            )
        self._reductions.raises = True
        self.left_loop.begun()
        state.checkpoints.resume()  # from a checkpoint, which says where the data go on
        source = state.open_source(loader, replay_only, identify, self._shards(sharded, identify))
        foreign = ForeignSteps(state, self._reductions)
        try:
            source.open()  # before there are process groups, whose sockets workers would have
            yield from self.paradigm.steps(self, source, max_steps)
        finally:
            self._reductions.raises = False  # torchft's loop may follow
            foreign.close()
            state.close_source()

    def _shards(
        self, kind: Sharded | None, identify: Identify | None
    ) -> Callable[[Any], ShardedSource] | None:
        """Return a factory of sources for loaders over a share of the data, if they have one."""
        if kind is None:
            return None
        job, state = self.job, self._state
        return lambda loader: state.shard_of(loader, kind, job.peer.group, job.bus, identify)

    def txns(
        self,
        source: DataSource | ShardedSource,
        max_steps: int | None,
        drawn_for: Callable[[int | None], object] = lambda _: None,
    ) -> Generator[Transaction, None, bool]:
        """Yield the txns of the job whose step functions share a step with all groups.

        Args:
            source: of the data.
            max_steps: committed steps after which the job is over.
            drawn_for: called with the slice of each txn before its step function begins.

        Returns:
            Whether this group is still in the job: nothing is left to do, and no commit was the
            last.
        """
        step, inputs = self._state.step, self._state.inputs_from(source)
        inputs.alive = self._watchers.ping
        assert step is not None, "looked at before"
        while (plan := self.worker.begin()) is not None:
            self.refuse_unlike_again(plan)
            if self.is_past(plan, max_steps):
                return True
            try:
                drawn = inputs.draw(plan)
            except Superseded:
                self.worker.body_unwound()
                continue
            if drawn is None:
                return True
            drawn_for(drawn.slice)
            step.capture()
            last_step = max_steps is not None and plan.step + 1 >= max_steps
            is_last, item = drawn.is_last or last_step, _place(drawn)
            self._voter.note_data(drawn)
            txn = Transaction(self, plan, drawn, is_last, item)
            if is_last:
                self._voter.compare_now()
            try:
                yield txn
            except GeneratorExit:
                self.left_loop.leave(self._manager._torchft.step, at_end=is_last and txn.committed)
                raise
            if not txn.closed:
                raise FftError("the body of a txn must run inside `with txn:`")
            if txn.committed and drawn.is_last:
                self._state.updates.lengths.data_ended()
            if txn.skipped and drawn.is_last:  # all know it now: no next txn is to tell them
                return True
        return False

    def is_past(self, plan: StartTxn, max_steps: int | None) -> bool:
        """Whether nothing is left to do. Says so where nothing has been done, either."""
        if max_steps is None or plan.step < max_steps:
            return False
        if self.worker.is_first:
            text = "this job is at step %d already, and max_steps is %d: nothing is left to do"
            logger.warning(text, plan.step, max_steps)
        return True

    def refuse_unlike_again(self, plan: StartTxn) -> None:
        """Raise if the groups keep reducing different things in this step: no replay mends that."""
        cause, self.worker.rolled_back = self.worker.rolled_back, NO_CAUSE
        if cause.code == CauseCode.DATA_DIFFERS:
            raise self._unequal(plan, cause.finding)
        if cause.code != CauseCode.MANIFESTS_DIFFER:
            return
        error = FftError(
            f"{cause.finding}: the step functions of the groups, or of the ranks of one, have not "
            "reduced the same gradients. Does a branch depend on the batch? Each step function "
            "must call backward() of the same models; multiply by 0 what is not to count"
        ).with_traceback(traceback_of_caller())
        why = self.worker.body_failures.failed(plan.step, plan.members, error)
        if why is not None:
            self.job.note_error(error)
            raise hopeless(why, error) from error

    def _unequal(self, plan: StartTxn, cause: str) -> UnequalData:
        """The error for ranks that have drawn different data; a replay would draw the same."""
        error = UnequalData(
            f"step {plan.step} was not committed: {cause}. All ranks must draw the same items in "
            f"the same order, and this rank was given {named(self._state.loader)}. Causes and "
            "fixes: (1) each group, or each rank, passes a loader over its own share of the data: "
            'call transactions(loader, sharded="group"), or "rank". (2) The seeds or other '
            "settings of the loaders differ: give all ranks the same. (3) The order was not "
            f"restored for a rank that joined: {ORDER_MEND}. (4) Only random augmentation differs: "
            f"{AUGMENTATION_MEND}"
        ).with_traceback(traceback_of_caller())
        self.job.note_error(error)
        return error

    def compare_now(self) -> None:
        """The txn is the last of the job: compare the replicas."""
        self._voter.compare_now()

    def transaction(self, plan: StartTxn, drawn: Drawn, **consumes: int) -> Transaction:
        """The job's txn that ``plan`` begins."""
        return Transaction(self, plan, drawn, drawn.is_last, consumes)

    # --- for Transaction ---

    @guarded
    def open_body(self) -> None:
        """A body begins."""
        self.worker.has_reported = False
        self._state.updates.opened()
        # not before: by `txn.step` users unfreeze what it says is due
        self._voter.begin_reducers()
        interrupter, engine = self._watchers.interrupter, self.job.engine
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
        interrupter.enter()
        if engine.superseded():  # rolled back before there was anything to unwind
            interrupter.request("rolled back before it began")

    @guarded
    def close_body(self) -> None:
        """It has ended, however."""
        self._state.updates.in_body = False
        if self._watchers.interrupter is not None:
            self._watchers.interrupter.leave()

    @property
    def reported(self) -> Exception | None:
        """What was reported as failed in the job's txn; it is rolled back."""
        error = self._manager._torchft.errored
        return None if error is None else error.original_exception

    def unwound(self, plan: StartTxn, drawn: Drawn | None, error: BaseException) -> bool:
        """``error`` has left the body, which is over without a vote. Whether it is dealt with."""
        self.worker.body_unwound()
        if isinstance(error, Exception):
            self.body_failed(plan, drawn, error)
        return isinstance(error, Exception | Interrupted)

    def body_failed(self, plan: StartTxn, drawn: Drawn | None, error: Exception) -> None:
        """An exception left the body: report it; give up if it keeps coming at one step."""
        self._refuse_lost_device(error)
        if (
            isinstance(error, (TxnAborted, GroupAborted))
            or self._manager._torchft.errored is not None
        ):
            return
        self.give_up_if_hopeless(plan, drawn, error, plan.step)
        self._manager.report_error(error)

    def _refuse_lost_device(self, error: Exception) -> None:
        """Raise DeviceLost where no replay can be computed on this process's device any more."""
        try:
            accelerator.refuse_lost(error)
        except DeviceLost as lost:
            self.job.note_error(lost)
            raise

    def give_up_if_hopeless(
        self,
        plan: StartTxn,
        drawn: Drawn | None,
        error: Exception,
        number: int,
        where: str = "",
        in_update: bool = False,
    ) -> None:
        """Raise StepRetriesExceeded if ``error`` keeps coming at the step of that ``number``.

        ``where``: the step in words; ``in_update``: it was not the body's.
        """
        counted = self.worker.update_failures if in_update else self.worker.body_failures
        why = counted.failed(number, plan.members, error, where)
        batch = "" if drawn is None else drawn.in_words(plan.step, self.job.peer)
        if batch and batch not in getattr(error, "__notes__", ()):
            error.add_note(batch)
        if why is not None:
            self.job.note_error(error)
            raise hopeless(why, error) from error

    def refuse_undone(self, plan: StartTxn, drawn: Drawn | None, mistake: FftError) -> NoReturn:
        """Raise StepRetriesExceeded for a step function that returned before its ``backward()``.

        It is raised at once, because a replay of the same batch would end the same way, and because
        Python ignores the errors of an iterator that a script drops by leaving its loop.
        """
        mistake = mistake.with_traceback(traceback_of_caller())
        if drawn is not None and (batch := drawn.in_words(plan.step, self.job.peer)):
            mistake.add_note(batch)
        self.job.note_error(mistake)
        raise hopeless(f"a replay of step {plan.step} would end the same way", mistake) from mistake

    def left_undone(self) -> FftError | None:
        """What a body that has ended well has left undone: no step could be right with it."""
        if self._manager._torchft.errored is not None:
            return None
        if self._reductions.manifest.empty and self._min_reductions:
            return FftError(
                "the body has ended without reducing a gradient across the groups (`break`, "
                "`continue` or `return` inside `with txn:`? no backward()? no "
                "sync_gradients(model)?): a body must come to its backward() for every batch. "
                "Leave the loop between two transactions, and multiply the loss by 0 where a "
                "batch must not count"
            )
        if (mistake := self._state.updates.scheduled_in_body()) is not None:
            return mistake
        for reducer in self._reductions.reducers:
            if (why := reducer.unfinished) is not None:
                return FftError(f"{why}: such gradients are not those of the other groups")
        is_idle = self._reductions.reducers and not self._state.updates.have_gradients
        if is_idle and self._min_reductions:
            return FftError(
                "gradients were reduced, and no registered optimizer has one at the end of the "
                "body (zero_grad() after backward()?): the step would change nothing. The "
                "transaction drops the gradients itself, after the step"
            )
        return None


def _place(drawn: Drawn) -> dict[str, Any]:
    """The place of a batch in the data, for the trace."""
    place: dict[str, Any] = {"item": drawn.item}
    if drawn.shard:
        place["shard"] = drawn.shard
    if drawn.ids is not None:
        place["ids"] = drawn.ids
    return place


def _warn_renamed(old: str, new: str) -> None:
    """Warn the script that it uses the deprecated name of a property of the txn."""
    warnings.warn(f"txn.{old} is deprecated; use txn.{new}", DeprecationWarning, stacklevel=3)


class Transaction:
    """One attempt at one step. ``with txn:`` runs the body; leaving it votes and decides.

    Attributes:
        batch: what this rank takes. A copy: a replay finds it as it was loaded.
        step: committed steps before this txn.
        contributes: whether what the body computes counts. A spare's does not, nor that of a group
            in the txn in which it joins: its weights are not those of the job before the end of it.
        committed: after the body: whether the txn was committed and this rank has made its update.
            A rank whose update failed fetches the state of a peer before its next transaction;
            that state has the step, and what the peer's script has done after it.
        skipped: after the body: whether it was committed without an optimizer step.
        inner_step: of groups that step alone: their steps since the last synchronisation; else 0.
    """

    def __init__(
        self,
        loop: TransactionLoop,
        plan: StartTxn,
        drawn: Drawn,
        last: bool,
        consumes: dict[str, Any],
    ) -> None:
        """``consumes``: what the trace tells of its data besides which slice they are."""
        self.batch = drawn.batch
        self.step = plan.step
        self.contributes = plan.index is not None
        self.epoch, self.attempt = plan.token
        self.committed = self.skipped = False
        self.closed = False
        self.inner_step = 0
        self._loop = loop
        self._plan = plan
        self._is_last = last
        self._drawn = drawn
        self._consumes = consumes

    @property
    def data_epoch(self) -> int:
        """Number of completed data epochs after this txn commits; the same on all ranks.

        Raises FftError if the loader counts no data epochs.
        """
        return self._drawn.data_epochs.after

    @property
    def ends_data_epoch(self) -> bool:
        """Whether this txn, if it commits, ends a data epoch. Raises FftError as `data_epoch`."""
        return self._drawn.data_epochs.after > self._drawn.data_epochs.before

    @property
    def passes(self) -> int:
        """Deprecated name of `data_epoch`."""
        _warn_renamed("passes", "data_epoch")
        return self.data_epoch

    @property
    def ends_pass(self) -> bool:
        """Deprecated name of `ends_data_epoch`."""
        _warn_renamed("ends_pass", "ends_data_epoch")
        return self.ends_data_epoch

    @property
    def progress(self) -> float:
        """Fraction of the data that is consumed once this txn commits: above 0, and 1 at the end.

        It is the same on all ranks, also where groups leave or join, so a learning rate may follow
        it. It is 1 in the last txn already. Raises FftError if the loader has no end, if groups
        take local steps, or if they read shards.
        """
        return self._drawn.progress

    def log(self, **metrics: float) -> None:
        """Put figures of this attempt into the trace."""
        self._loop.job.note("metrics", metrics)

    def weigh(self, weight: float) -> None:
        """Of groups that step alone: count this step by ``weight``. Raises FftError: of others."""
        raise FftError(
            "txn.weigh() is for groups that step alone: fft.LocalSGD or fft.DiLoCo, weighted=True"
        )

    @guarded
    def __enter__(self) -> Self:
        self._loop.open_body()
        return self

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
        if error is not None:
            return loop.unwound(self._plan, self._drawn, error)
        if (mistake := loop.left_undone()) is not None:
            loop.worker.body_unwound()
            loop.refuse_undone(self._plan, self._drawn, mistake)
        command = loop.worker.prepare(last=self._is_last, consumes=self._consumption())
        if command is not None:
            loop.is_over = self._is_last and not command.skip
            self.committed, self.skipped = loop.worker.apply(command), command.skip
            loop.paradigm.txn_committed(self)
        return True

    def _consumption(self) -> dict[str, Any]:
        plan, drawn = self._plan, self._drawn
        return {
            "slice": drawn.slice,
            "step": plan.step,
            "token": list(plan.token),
            "input_ms": round(drawn.waited_ms, 3),
            **self._consumes,
        }


class LeftLoop:
    """Whether the script of one manager has left its loop early. Main thread only."""

    def __init__(self) -> None:
        self._at: int | None = None
        """The loop was left after that step, which was not the last."""

    def begun(self) -> None:
        """A loop begins: it may continue where an earlier one was left."""
        self._at = None

    def leave(self, step: int, at_end: bool = False) -> None:
        """The script leaves the loop after ``step``; ``at_end``: no transaction was to follow."""
        self._at = None if at_end else step

    def tell(self) -> None:
        """Warn if the loop was left before its end, unless another exception is being raised."""
        at, self._at = self._at, None
        if at is not None and sys.exc_info()[1] is None:
            logger.warning(
                "the loop was left (`break`?) after step %d, before its end: the replicas are not "
                "compared once more, and no last checkpoint is taken; manager.drain() on all "
                "ranks, in the place of it, does both",
                at,
            )


class ForeignSteps:
    """Refuses such a step inside a body, and warns of one between two txns. ``close`` ends it."""

    def __init__(self, state: RankState, reductions: TxnReductions) -> None:
        self._state = state
        self._reductions = reductions
        self._thread = threading.get_ident()
        self._has_warned = False
        self._hook = register_optimizer_step_pre_hook(self._look)

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._hook.remove()

    def _look(self, optimizer: Any, *_: Any) -> None:
        updates, step = self._state.updates, self._state.step
        if threading.get_ident() != self._thread or updates.has(optimizer):
            return
        if self._state.paradigm.is_outer(optimizer):
            if updates.in_body:
                raise FftError(
                    f"{type(optimizer).__name__}.step() inside `with txn:`, of the outer "
                    "optimizer: it steps the job's parameters with each synchronisation; take the "
                    "call out"
                )
            return
        if step is not None and step.has_extra(optimizer) and not updates.in_body:
            return
        name = type(optimizer).__name__
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        if not stepped.isdisjoint(self._of_the_job()) and updates.in_body:
            raise FftError(
                f"{name}.step() inside `with txn:`, of an optimizer that is not registered, on "
                "parameters of the job: a rolled-back attempt would keep its update. Register it: "
                "manager.register(model, [optimizer, …]); the transaction steps it, after COMMIT"
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s.step() of an optimizer that is not registered: what it updates is not rolled "
                "back with a failed attempt, and its state is not brought to a group that joins; "
                "manager.register(model, [optimizer, …]) makes it part of the transaction",
                name,
            )

    def _of_the_job(self) -> set[torch.Tensor]:
        reduced = (p for r in self._reductions.reducers for p in r.parameters())
        step = self._state.step
        return {*reduced, *(() if step is None else step.parameters())}

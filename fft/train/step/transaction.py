"""FFT's own loop: each transaction attempts one step, with the same batch until it commits.

It runs on the main thread. This module checks what step functions do and classifies their failures.
`fft.train.step.voting` votes, and `fft.train.step.commits` applies updates.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fft.errors import (
    Drained,
    FftError,
    GradientMissing,
    GradientsDiffer,
    GradientsNotReproducible,
    ResultRefused,
    UnequalData,
)
from fft.messages.causes import CauseCode, LeaveReason
from fft.messages.effects import StartTxn
from fft.messages.progress import Goal
from fft.messages.protocol import STOP
from fft.train.data.global_batch import Batches, samples_in, slices_of
from fft.train.data.retries import Superseded
from fft.train.data.sharded import ShardedSource
from fft.train.data.source import AUGMENTATION_FIX, ORDER_FIX, DataSource, Loader, named
from fft.train.data.step_input import StepInput
from fft.train.gradients.reducer import Reducers
from fft.train.limits import Feature
from fft.train.session.error_reports import different_blocks
from fft.train.session.participation import Participation
from fft.train.session.rank_context import RankContext
from fft.train.session.rank_state import RankState
from fft.train.step.attempt import Attempt, AttemptContext, Rollback
from fft.train.step.commits import CommitExecutor, nothing
from fft.train.step.step_failures import retries_exceeded
from fft.train.step.worker import Worker
from fft.util.error_places import traceback_of_caller

logger = logging.getLogger(__name__)


_MOST_WRONG = 8
"""Attempts in a row at one step with wrong gradients after which a rank gives up. The diagnosis
starts earlier, and attempts are then separated by pauses."""
_SKIP_ADVICE = (
    'Such a batch is left out if the veto returns "skip" or, for NaN and inf, with '
    'config=fft.ManagerConfig(on_nonfinite="skip"). '
)
_WRONG_GRADIENTS: dict[CauseCode, tuple[type[FftError], str]] = {
    CauseCode.GRADIENTS_DIFFER: (
        GradientsDiffer,
        "A replay of the step does not help: either the memory or the device of a rank changes "
        "them, or the step function changes reduced gradients by something that differs between "
        "the groups, such as its batch",
    ),
    CauseCode.NOT_REPRODUCIBLE: (
        GradientsNotReproducible,
        "Either the device or the memory of this rank computes wrong numbers, or the step function "
        "is not deterministic: it uses a clock, an unregistered random generator, or state that "
        "FFT does not restore",
    ),
}
"""Causes that name wrong gradients, each with the error and its reason."""


class TransactionLoop:
    """The loop of one manager over its data."""

    def __init__(
        self,
        rank: RankContext,
        commits: CommitExecutor,
        attempt: Attempt,
        worker: Worker,
        watch: Callable[[], None],
    ) -> None:
        self.job, self.features = rank.job, rank.features
        self.watch = watch
        """Starts the supervision of the main thread."""
        self.commits, self.attempt, self.worker = commits, attempt, worker
        self.paradigm, self.results = rank.state.paradigm, rank.results
        self.is_over = False
        """The last txn of the job has committed."""
        self._stops: Literal["", "early", "asked"] = ""
        """Why the next txn ends the job without a step: the script has stopped it, before or after
        this rank was asked to leave."""
        self._txn: Transaction | None = None
        """The newest txn that was yielded."""
        self._manager, self._watchers = rank.manager, rank.watchers
        self._state, self._open, self._groups = rank.state, rank.txn, rank.groups
        self._reductions, self._reducers = rank.reductions, rank.reducers
        self._settings = rank.settings
        self._left_at: int | None = None
        """The step after which the loop was left early, or None."""
        self._guard: UnregisteredStepGuard | None = None
        self.fixed_slices = 0
        """`Config.fixed_slices` of this rank; known before it joins."""

    def run(self, data: Loader, max_steps: int | None) -> Iterator[Transaction]:
        """See ``ManagerFFT.transactions``."""
        manager, state = self._manager, self._state
        if state.registered_state is None:
            raise FftError("call manager.register(model, optimizer) before transactions()")
        self.paradigm.refuse_loop(data.loader)
        if self.is_over:
            raise FftError(
                f"transactions(): this job ended at step {manager._torchft.step}, because it "
                "reached max_steps or the end of its data, and all groups have left. Call "
                "transactions() once, with the total number of steps; do the work of an "
                "epoch between two transactions"
            )
        self._open.by_fft = True
        self._left_at = None  # it may continue where an earlier loop was left
        state.checkpoints.resume()  # from a checkpoint, which has the position of the data
        source = state.open_source(data, self.job.peer.group, self.job.bus)
        if not source.in_any_order:
            self.features.use(Feature.SEQUENTIAL)
        self._guard = UnregisteredStepGuard(state, self._reducers, self.job)
        try:
            # open before process groups exist, so that loader workers do not inherit their sockets
            source.open()
            self.attempt.announce(self._goal(data.loader, source, max_steps))
            yield from self.paradigm.steps(self, source, max_steps)
        finally:
            self._open.by_fft = False  # torchft's loop may follow
            self.close()
            state.close_source()
        state.checkpoints.before_change()  # the script may change the state after its loop
        if self.is_over or not self.attempt.leaving.is_asked:
            self.worker.hooks.complete()

    def close(self) -> None:
        """End the checks of a loop, which may be suspended for good. Idempotent."""
        if self._guard is not None:
            self._guard.close()

    def use_data(self, data: Loader) -> None:
        """Check the settings of the data, and fix the number of slices in a step.

        Raises:
            FftError: The job does not support them, or runs with another ``global_batch``.
            DataError: Batches of the loader do not make up such a step.
        """
        slices, global_batch = 0, data.global_batch
        in_use = {
            Feature.SHARDED: data.sharded is not None,
            Feature.SHARDED_BY_RANK: data.sharded == "rank",
            Feature.GLOBAL_BATCH: global_batch is not None,
        }
        self.features.use(*(feature for feature, is_used in in_use.items() if is_used))
        if global_batch is not None:
            if not self._reducers:
                raise FftError(
                    "global_batch=: FFT must weight the gradients; call "
                    "manager.sync_gradients(model) before"
                )
            takers, groups = self.paradigm.items_per_step, self._settings.expected_groups
            slices = slices_of(data.loader, global_batch, takers, groups)
        engine = self.job.engine
        if engine is not None and engine.participant.config.fixed_slices != slices:
            raise FftError(
                f"global_batch={global_batch}: this job has begun with another global_batch; pass "
                "loaders with the same to all calls, and call transactions() before "
                "the first live block"
            )
        self.fixed_slices = slices

    def _goal(self, loader: Any, source: DataSource | ShardedSource, max_steps: int | None) -> Goal:
        """Return the planned end of the loop, for the trace and the reports of progress."""
        if isinstance(source, ShardedSource):  # groups end at different places of their data
            return Goal(max_steps)
        return Goal(
            max_steps,
            self.paradigm.items_in_slice,
            getattr(source, "items_in_all", None),
            getattr(source, "items_per_data_epoch", None),
            samples_in(loader) if self.fixed_slices else getattr(loader, "samples_per_item", None),
        )

    def txns(
        self,
        source: DataSource | ShardedSource,
        max_steps: int | None,
        drawn_for: Callable[[int | None], object] = lambda _: None,
    ) -> Generator[Transaction, None, bool]:
        """Yield the txns of the job, for paradigms whose groups run each step together.

        Args:
            source: of the data.
            max_steps: committed steps after which the job is over.
            drawn_for: called with the slice of each txn before its step function runs.

        Returns:
            True if nothing is left to do although no commit ended the job, so this group is still a
            member.
        """
        step, inputs = self._state.registered, self._state.inputs_from(source)
        inputs.alive = self._watchers.ping
        while (plan := self.begin()) is not None:
            if self.is_past(plan, max_steps):
                return self.job.has_ended(LeaveReason.LAST_STEP)
            if source.in_any_order:  # the rehearsal has loaded an item
                self._watchers.step_begun()
            try:
                drawn = inputs.draw(plan)
            except Superseded:
                self.attempt.step_aborted()
                continue
            if drawn is None:
                is_shard = isinstance(source, ShardedSource)
                why = LeaveReason.SHARD_ENDED if is_shard else LeaveReason.LAST_STEP
                return self.job.has_ended(why)
            drawn_for(drawn.slice)
            step.capture()
            last_step = max_steps is not None and plan.step + 1 >= max_steps
            is_last = drawn.is_last or last_step or bool(self._stops)
            self.attempt.note_data(drawn)
            txn = Transaction(self, plan, drawn, is_last, _place(drawn))
            if is_last:
                self.attempt.compare_now()
            if self._stops:
                self._end_without_step(txn)
                continue
            self._txn = txn
            try:
                yield txn
            except GeneratorExit:
                if not (is_last and txn.committed):
                    self.mark_left(self._manager._torchft.step)
                raise
            if not txn.closed:
                raise FftError("the step function of a txn must run inside `with txn:`")
            if txn.committed and drawn.is_last:
                self._state.updates.lengths.data_ended()
            # all ranks see the end of the data themselves, so no further txn has to announce it
            if txn.skipped and drawn.is_last:
                return self.job.has_ended(LeaveReason.LAST_STEP)
        return False

    def stop(self) -> None:
        """See ``ManagerFFT.stop``."""
        self.features.use(Feature.STOP)
        if self._open.is_rehearsal:  # the job's steps decide when it ends
            return
        self._stop_with_next()
        if self._txn is not None and self._open.plan is not None:
            self._drop_step(self._txn)

    def _stop_with_next(self) -> None:
        local = self.job.local
        is_asked = self.attempt.leaving.is_asked or (local and self.job.peer in local.leaving)
        self._stops = self._stops or ("asked" if is_asked else "early")
        self._manager.drain(reason="the training was stopped")

    def _follow_stop(self, rollback: Rollback) -> None:
        """Stop with the rank that has called ``stop`` after the same step."""
        if self._stops:
            return
        logger.warning(
            "another rank has called manager.stop() after step %d (%s): this rank stops there, too",
            rollback.step,
            rollback.cause.finding,
        )
        self._stop_with_next()

    def _drop_step(self, txn: Transaction) -> None:
        """Let the open txn end the job without a step."""
        txn.is_stop = txn.is_last = True
        self.attempt.presence.end()
        self.attempt.compare_now()
        # the vote's manifest must contain a reduction; no tensor is sent
        self._reductions.manifest.add(torch.empty(0), "stop")

    def _end_without_step(self, txn: Transaction) -> None:
        """Run the last txn of a stopped job, which compares the replicas and changes no state.

        Raises:
            StepRetriesExceeded: Each of several attempts was rolled back.
        """
        txn.is_stop = True
        with txn:
            self._drop_step(txn)
        if txn.committed:
            return
        error = FftError(
            f"manager.stop() after step {txn.step}: the groups did not leave together, because "
            "other ranks do not vote in this transaction, or each attempt was rolled back"
        )
        if (why := self.attempt.failures.failed(txn.step, txn.epoch, error)) is not None:
            self.job.note_error(error)
            raise retries_exceeded(why, error) from error

    def is_past(self, plan: StartTxn, max_steps: int | None) -> bool:
        """Return whether ``max_steps`` is reached. Log it if this process has run no step."""
        if max_steps is None or plan.step < max_steps:
            return False
        if self.worker.is_first:
            text = "this job is at step %d already, and max_steps is %d: nothing is left to do"
            logger.warning(text, plan.step, max_steps)
        return True

    def begin(self) -> StartTxn | None:
        """Return the job's next txn, or None if the job has ended for this rank.

        Raises:
            FftError: The last rollback was one that no replay can help, or this rank has to leave.
        """
        try:
            plan = self.worker.begin()
        except (FftError, Drained):  # perhaps because peers have counted the rollback and left
            self._raise_if_unrepeatable()
            raise
        self._raise_if_unrepeatable()
        return plan

    def _raise_if_unrepeatable(self) -> None:
        """Raise if no replay can help after the last rollback, on all ranks of all groups.

        The groups keep reducing different gradients, or a result was refused again or for good.
        """
        rollback = self.attempt.take_rollback()
        cause = rollback.cause
        if not cause.code.is_counted:
            return
        if cause.code == CauseCode.BLOCKS_DIFFER:
            raise different_blocks(cause)
        if cause.code == CauseCode.STOPPED:
            self._follow_stop(rollback)
            return
        if cause.code == CauseCode.DATA_DIFFERS:
            raise self._unequal(rollback)
        if cause.code == CauseCode.RESULT_ENDS_JOB:
            raise self._refused(rollback)
        if cause.code in _WRONG_GRADIENTS:
            self._count_wrong_gradients(rollback)
            return
        if cause.code == CauseCode.RESULT_REFUSED:
            error: FftError = self._refused(rollback)
        elif cause.code == CauseCode.GRADIENT_MISSING:
            error = GradientMissing(
                f"step {rollback.step} was not committed: "
                + cause.text.replace(f"{GradientMissing.__name__}: ", "")
            ).with_traceback(traceback_of_caller())
        else:
            assert cause.code == CauseCode.MANIFESTS_DIFFER
            error = FftError(
                f"{cause.finding}: the step functions of the groups, or of the ranks of one, have "
                "not reduced the same gradients. Does a branch depend on the batch? Each step "
                "function must call backward() of the same models; multiply the loss of a batch "
                "that must not count by 0"
            ).with_traceback(traceback_of_caller())
        why = self.attempt.failures.failed(rollback.step, rollback.members, error)
        if why is not None:
            self.job.note_error(error)
            raise retries_exceeded(why, error) from error

    def _count_wrong_gradients(self, rollback: Rollback) -> None:
        """Raise if gradients keep differing at this step, between ranks or between computations.

        If the cause accuses ranks, only these give up. The supervisor's diagnosis comes before
        that, and evicts their group. After a difference between ranks, the attempt that begins is
        compared with the refused one.
        """
        cause = rollback.cause
        if cause.code == CauseCode.GRADIENTS_DIFFER:
            self.results.recomputation.repeat()
        if cause.accused and self.job.peer not in cause.accused:
            return
        kind, reason = _WRONG_GRADIENTS[cause.code]
        error = kind(
            f"step {rollback.step} was not committed: {cause.finding}. {reason}"
        ).with_traceback(traceback_of_caller())
        failed = self.attempt.failures.failed
        if (why := failed(rollback.step, rollback.members, error, most=_MOST_WRONG)) is not None:
            self.job.note_error(error)
            raise retries_exceeded(why, error) from error

    def _refused(self, rollback: Rollback) -> ResultRefused:
        """Return the error for a step whose result some rank has refused."""
        words = rollback.cause.finding.removeprefix(f"{ResultRefused.__name__}: ")
        advice = "" if self.results.on_nonfinite == "skip" else _SKIP_ADVICE
        error = ResultRefused(
            f"step {rollback.step} was not committed: {words}. The state and the checkpoints are "
            f"those of the steps before it. {advice}The traces have the losses and norms (fft "
            "report)"
        ).with_traceback(traceback_of_caller())
        self.job.note_error(error)
        return error

    def _unequal(self, rollback: Rollback) -> UnequalData:
        """Return the error for ranks that drew different data; a replay would draw it again."""
        error = UnequalData(
            f"step {rollback.step} was not committed: {rollback.cause.finding}. All ranks must "
            "draw the same items in the same order, and this rank was given "
            f"{named(self._state.loader)}. Causes and fixes: (1) each group, or each rank, passes "
            'a loader over its own share of the data: pass fft.Loader(loader, sharded="group"), '
            'or "rank". (2) The seeds or other settings of the loaders differ: give all ranks the '
            "same. (3) The order was not "
            f"restored for a rank that joined: {ORDER_FIX}. (4) Only random augmentation differs: "
            f"{AUGMENTATION_FIX}"
        ).with_traceback(traceback_of_caller())
        self.job.note_error(error)
        return error

    def mark_left(self, step: int) -> None:
        """Record that the script left the loop after ``step``, before its end."""
        self._left_at = step

    def warn_if_left(self) -> None:
        """Warn if the loop was left before its end, unless another exception is being raised."""
        at, self._left_at = self._left_at, None
        if at is not None and sys.exc_info()[1] is None:
            logger.warning(
                "the loop was left (`break`?) after step %d, before the job ended: the final "
                "comparison of the replicas and the final checkpoint are skipped; call "
                "manager.stop() on all ranks instead, which does both (manager.drain() with groups "
                "that take local steps)",
                at,
            )

    # --- for Transaction ---

    @property
    def completes_job(self) -> bool:
        """Whether the last txn completes the job, and is no drain."""
        return self._stops != "asked"

    @property
    def is_rolled_back(self) -> bool:
        """Whether the newest txn of the script was not committed on this rank."""
        return self._txn is not None and self._txn.closed and not self._txn.committed

    def mean(self, value: torch.Tensor | float) -> torch.Tensor:
        """See `Transaction.mean`."""
        tensor = torch.as_tensor(value).detach().clone()
        if not tensor.is_floating_point():
            tensor = tensor.double()
        plan = self._open.plan
        if plan is not None and plan.fixed_slices and plan.index is not None:
            # 1 exactly if the groups take equal numbers of slices
            tensor *= len(plan.slices) * plan.participants / plan.fixed_slices
        self._reductions.mean(tensor)
        if self.paradigm.items_per_step > 1:
            self._groups.average_in_group(tensor)
        return tensor

    def share_statistics(self) -> None:
        """Give all ranks, with the commit, the running statistics of the first contributing rank.

        DDP broadcasts the buffers of its first process in the same way. A joiner has computed its
        own with weights that are not the job's.
        """
        tensors = self._state.registered.statistics()
        if not tensors or self._open.failure is not None or not self.paradigm.steps_together:
            return
        # as bytes, whose sum with zeros is exact for all types
        parts = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
        packed, torchft = torch.cat(parts), self._manager._torchft
        if self._groups.has_shard_group and self.paradigm.items_per_step > 1:
            if torchft.group_rank != 0:
                packed.zero_()
            self._groups.sum_in_group(packed)
        if torchft.participating_replica_rank != 0:
            packed.zero_()
        self._reductions.share(packed)

        def take() -> None:
            shares = torch.split(packed, [len(part) for part in parts])
            for tensor, own in zip(tensors, shares, strict=True):
                # a copy, because the place in `packed` may not be aligned
                tensor.detach().copy_(own.clone().view(tensor.dtype).view_as(tensor))

        self._state.updates.take_statistics = take

    def keep_changes(self) -> None:
        """See `Transaction.keep_changes`."""
        if self._state.updates.in_body:
            raise FftError("txn.keep_changes() inside `with txn:`; call it before")
        self._state.registered.capture()

    def batches(self, drawn: StepInput) -> Iterator[Any]:
        """See `Transaction.batches`."""
        if drawn.dealt is None:
            return iter([drawn.batch])
        return Batches(drawn.batch, self._reducers)

    def find_incomplete(self) -> FftError | None:
        """Return the mistake of a step function that returned incompletely, or None."""
        if self._open.failure is not None:
            return None
        if self._reductions.manifest.empty and self._settings.spec.policies.min_reductions:
            return FftError(
                "the step function reduced no gradient across the groups (`break`, "
                "`continue` or `return` inside `with txn:`? no backward()? no "
                "sync_gradients(model)?): a step function must call backward() for every batch. "
                "Leave the loop between two transactions, and multiply the loss by 0 where a "
                "batch must not count"
            )
        if (mistake := self._state.updates.scheduled_in_body()) is not None:
            return mistake
        for reducer in self._reducers:
            if (why := reducer.unfinished) is not None:
                return FftError(f"{why}: these gradients differ from those of the other groups")
        updates = self._state.updates
        is_idle = updates.has_optimizers and not updates.have_gradients
        if is_idle and self._reducers and self._settings.spec.policies.min_reductions:
            return FftError(
                "gradients were reduced, but no parameter of a registered optimizer has one "
                "at the end of the step function (zero_grad() after backward()?), so the "
                "step would change nothing. The "
                "transaction drops the gradients itself, after the step"
            )
        return None


def _place(drawn: StepInput) -> dict[str, Any]:
    """Return the position of a batch in the data, for the trace."""
    place: dict[str, Any] = {"item": drawn.item, **(drawn.dealt or {})}
    if drawn.shard:
        place["shard"] = drawn.shard
    if drawn.ids is not None:
        place["ids"] = drawn.ids
    return place


class Transaction(AttemptContext):
    """One attempt at one step. ``with txn:`` runs the step function; leaving it votes and decides.

    Attributes:
        step: committed steps before this txn.
        contributes: whether the gradients of this rank count. They do not for a spare group, nor
            for a group in the txn in which it joins, because it has the job's weights only at the
            end of that txn.
        committed: after the step function: whether the txn was committed and this rank has made
            its update. A rank whose update failed fetches the state of a peer before its next
            transaction; that state includes the step and everything that the peer's script changed
            after it.
        skipped: after the step function: whether it was committed without an optimizer step.
        logged: the values that `log` has got in this attempt.
        inner_step: number of local steps since the last synchronization; 0 in jobs without them.
        is_stop: whether this txn ends a stopped job without a step.
        is_last: whether the job ends with its commit.
    """

    def __init__(
        self,
        loop: TransactionLoop,
        plan: StartTxn,
        drawn: StepInput,
        last: bool,
        consumes: dict[str, Any],
    ) -> None:
        """``consumes`` holds further fields for the trace entry of the consumed data."""
        super().__init__(loop.attempt, plan)
        self.step = plan.step
        self.contributes = plan.index is not None
        self.epoch, self.attempt = plan.token
        self.committed = self.skipped = False
        self.logged: dict[str, float] = {}
        self.inner_step = 0
        self._loop = loop
        self.is_last = last
        self._drawn: StepInput = drawn
        self._consumes = consumes

    @property
    def batch(self) -> Any:
        """The batch of this rank. It is a copy, so that a replay gets it as it was loaded.

        Raises FftError in a job with ``global_batch=``, where a rank has several batches.
        """
        if self._drawn.dealt is not None:
            raise FftError(
                "txn.batch: with global_batch= a rank computes one or several "
                "batches in a step; write `for batch in txn.batches:` and call backward() in it"
            )
        return self._drawn.batch

    @property
    def batches(self) -> Iterator[Any]:
        """The batches of this rank, for a loop with one ``backward()`` for each.

        With ``global_batch=`` there may be several. The gradients are reduced in the ``backward()``
        of the last one, and become the mean over the batches of all groups, so losses are not
        divided by the number of batches. Otherwise it is `batch` alone.
        """
        return self._loop.batches(self._drawn)

    @property
    def items(self) -> range:
        """Numbers of the items that this txn takes, on all ranks of all groups together.

        ``items.start`` items were consumed before this txn, and ``items.stop`` once it commits. It
        is the same on all ranks. Raises FftError if groups take local steps, or read shards.
        """
        return self._drawn.items

    @property
    def data_epoch(self) -> int:
        """Number of completed data epochs after this txn commits; the same on all ranks.

        Raises FftError if the loader does not report data epochs.
        """
        return self._drawn.data_epochs.after

    @property
    def ends_data_epoch(self) -> bool:
        """Whether this txn, if it commits, ends a data epoch. Raises FftError as `data_epoch`."""
        return self._drawn.data_epochs.after > self._drawn.data_epochs.before

    @property
    def progress(self) -> float:
        """Fraction of the data that is consumed once this txn commits: above 0, and 1 at the end.

        It is the same on all ranks, also where groups leave or join, so a learning rate may follow
        it. It is 1 in the last txn already. Raises FftError if the loader has no end, if groups
        take local steps, or if they read shards.
        """
        return self._drawn.progress

    def log(self, **metrics: float) -> None:
        """Trace metrics of this attempt; ``fft run`` and ``fft watch`` show ``loss``.

        Vetoes see the metrics that are logged in the step function. Metrics of a rank that does not
        contribute are not traced: a joining group computes them with weights that are not the
        job's.
        """
        self.logged.update(metrics)
        self._loop.results.log(metrics)
        if self.contributes:
            self._loop.job.note_metrics(metrics)

    def mean(self, value: torch.Tensor | float) -> torch.Tensor:
        """Return the mean of ``value`` over all ranks that contribute to this step.

        With ``global_batch=`` pass the mean over `batches`, which is weighted by their number.
        It is a reduction of the step function, so all groups must call it equally often and in the
        same order. A group that fetches its state gets the mean of the others. Integers are
        averaged in float64. The ranks of one group are included if they have FFT's shard group, and
        a batch each.
        """
        return self._loop.mean(value)

    def keep_changes(self) -> None:
        """Let a rollback keep what was changed between the beginning of this txn and ``with txn:``.

        For code of a trainer that runs once for each step: learning rates, random numbers, modes. A
        loop that repeats this code in each attempt must not call it. Raises FftError inside ``with
        txn:``.
        """
        self._loop.keep_changes()

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on a rank that contributes to this step.

        All ranks get the same answer, so they may decide by it, for example to leave the loop. The
        rules of `mean` apply.
        """
        return bool(self.mean(float(flag)) > 0)

    def weigh(self, weight: float) -> None:
        """Weight this local step by ``weight`` in the next synchronization.

        Raises:
            FftError: The groups take no local steps.
        """
        self._loop.features.use(Feature.WEIGH)

    def _complete(self) -> Exception | None:
        loop, attempt = self._loop, self._attempt
        if not self.is_stop:
            if (mistake := loop.find_incomplete()) is not None:
                attempt.step_aborted()
                attempt.raise_incomplete(self._plan, self._drawn, mistake)
            try:
                loop.share_statistics()
            except Exception as failed:  # noqa: BLE001 - handled like one of the step function
                return failed
        command = attempt.vote(
            skip=self.is_stop,
            last=self.is_last and loop.completes_job,
            consumes=self._consumption(),
            place=STOP if self.is_stop else "",
        )
        if command is not None:
            attempt.failures.committed()
            loop.is_over = self.is_stop or (self.is_last and not command.skip)
            skip = nothing if self.is_stop else loop.paradigm.skip_step
            self.committed = loop.commits.apply(command, skip)
            self.skipped = command.skip
            loop.paradigm.txn_committed(self)
        return None

    def _consumption(self) -> dict[str, Any]:
        plan, drawn = self._plan, self._drawn
        return {
            "slice": drawn.slice,
            "step": plan.step,
            "token": list(plan.token),
            "input_ms": round(drawn.waited_ms, 3),
            **self._consumes,
        }


class UnregisteredStepGuard:
    """A hook that rejects steps of unregistered optimizers on the job's parameters inside a step
    function, and warns about others."""

    def __init__(self, state: RankState, reducers: Reducers, job: Participation) -> None:
        self._state, self._job = state, job
        self._reducers = reducers
        self._thread = threading.get_ident()
        self._has_warned = False
        self._hook = register_optimizer_step_pre_hook(self._check_step)

    def close(self) -> None:
        """Remove the hook. Idempotent."""
        self._hook.remove()

    def _check_step(self, optimizer: Any, *_: Any) -> None:
        updates, step = self._state.updates, self._state.registered_state
        if threading.get_ident() != self._thread or updates.has(optimizer):
            return
        if self._state.paradigm.is_outer(optimizer):
            if updates.in_body:
                raise FftError(
                    f"{type(optimizer).__name__}.step() called inside `with txn:` on the "
                    "outer optimizer: FFT steps it at each synchronization; remove the call"
                )
            return
        if step is not None and step.has_extra(optimizer):
            return  # a rollback restores its state, and the parameters that it has changed
        name = type(optimizer).__name__
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        if not stepped.isdisjoint(self._of_the_job()) and updates.in_body:
            raise FftError(
                f"{name}.step() called inside `with txn:` on an unregistered optimizer with "
                "parameters of the job: a rolled-back attempt would keep its update. "
                "Register it: manager.register(model, [optimizer, …]); FFT steps it after "
                "COMMIT. In a LightningModule, return it from configure_optimizers() instead"
            )
        if not self._has_warned:
            self._has_warned = True
            self._job.warn(
                "unregistered_step",
                f"{name}.step() of an unregistered optimizer: a rollback does not undo its "
                "updates, a joining group does not fetch its state, and the groups may get "
                "different weights. Register it with its model, manager.register([model, …], "
                "[optimizer, …]), and average its gradients, manager.sync_gradients(model)",
            )

    def _of_the_job(self) -> set[torch.Tensor]:
        reduced = (p for r in self._reducers for p in r.parameters())
        step = self._state.registered_state
        return {*reduced, *(() if step is None else step.parameters())}

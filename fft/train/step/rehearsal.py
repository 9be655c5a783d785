"""The first step of a process that joins a running job, computed outside the job and undone.

The others wait for each step of a member. A first step may compile, load kernels and start workers,
and it may hang. A rehearsal does this before the process asks to join: the step function runs once,
collectives inside its replica group included. Reductions across the groups return what they are
given. The state at the start of the step is then restored, as after a rollback, and the state of
the job is fetched later. So a rehearsal changes no bit, and consumes no sample.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from fft.errors import BusError
from fft.messages.effects import StartTxn
from fft.messages.protocol import Record, Token
from fft.operate.client import JobClient, OperatorError
from fft.train.data.sharded import ShardedSource
from fft.train.data.source import DataSource
from fft.train.data.step_input import StepInput
from fft.train.guard import accelerator
from fft.train.session.error_reports import text_of
from fft.train.session.rank_context import RankContext
from fft.train.step.transaction import Transaction, TransactionLoop

logger = logging.getLogger(__name__)


class Rehearsal(Transaction):
    """A transaction outside the job, of this replica group alone, which never commits.

    Attributes:
        failure: The error of the step function, or None.
    """

    def __init__(
        self, rank: RankContext, loop: TransactionLoop, plan: StartTxn, drawn: StepInput
    ) -> None:
        super().__init__(loop, plan, drawn, last=False, consumes={})
        self.failure: Exception | None = None
        self._rank = rank

    def weigh(self, weight: float) -> None:
        """Ignore the weight, because no synchronization follows."""

    def _complete(self) -> None:
        self.failure = self._rank.txn.failure

    def _fail(self, error: BaseException) -> bool:
        """Free the other ranks of the group, which may wait for this one in a collective.

        Raises:
            DeviceLost: The device of this process has failed for good.
        """
        if not isinstance(error, Exception):
            return False
        accelerator.refuse_lost(error)
        self.failure = error
        self._rank.groups.unwind_shard(text_of(error), self._rank.watchers.waiting())
        return True


def rehearse(
    rank: RankContext, loop: TransactionLoop, source: DataSource | ShardedSource
) -> Iterator[Transaction]:
    """Yield one rehearsal if this process is about to join a job that goes on without it.

    Otherwise yield nothing. A failure is only logged, because its cause may be the weights, which
    are not the job's yet.
    """
    # The other ranks of a replacement's group are in the job, so they could not take part. With
    # "never", no step function may run before the state is fetched. A shard can be read only once.
    needs_state = rank.settings.is_replacement or rank.settings.config.learners == "never"
    if needs_state or isinstance(source, ShardedSource):
        return
    if rank.job.engine is not None or (head := _running_job(rank)) is None:
        return
    # a sequential source is still at its own position, and loads that of the job with the state
    cursor = head.cursor if source.in_any_order else rank.state.cursor
    n, mine = loop.fixed_slices, (rank.job.peer.group,)
    at, end = (Token(head.epoch, 0), head.step, head.lineage, cursor), cursor + (n or 1)
    plan = StartTxn(
        *at, index=None, participants=1, members=mine, commits=0, next_cursor=end, fixed_slices=n
    )
    torchft, txn, state = rank.manager._torchft, rank.txn, rank.state
    began, before = time.monotonic(), (torchft.step, torchft.participating_replica_world_size)
    failure: Exception | None = None
    loop.watch()
    rank.reductions.begin()
    txn.begin(plan)
    txn.is_rehearsal = True
    torchft.step, torchft.participating_replica_world_size = plan.step, 1
    rank.watchers.txn_begun(plan.step)
    try:
        if (drawn := state.inputs_from(source).draw(plan)) is None:
            return
        state.registered.capture()
        yield (rehearsal := Rehearsal(rank, loop, plan, drawn))
        failure = rehearsal.failure
    except Exception as error:  # noqa: BLE001 - data of this batch; the job's batches may be valid
        failure = error
    finally:
        loop.attempt.give_up()
        rank.reductions.reset()
        rank.reducers.reset()
        state.restore()
        state.registered.forget()
        txn.is_rehearsal = False
        torchft.step, torchft.participating_replica_world_size = before
    if failure is None:
        if state.paradigm.steps_together:
            rank.watchers.join(is_strict=True)
        logger.info("rehearsed a step in %.2f s; joining the job", time.monotonic() - began)
    else:
        text = "the step that was rehearsed before joining has failed: %s; joining anyway"
        logger.warning(text, text_of(failure), exc_info=failure)


def _running_job(rank: RankContext) -> Record | None:
    """Return the newest record of a job that goes on without this group, or None."""
    settings, job = rank.settings, rank.job
    try:
        state = JobClient(settings.bus_url, token=settings.token, bus=job.bus).job()
    except (BusError, OperatorError) as error:
        logger.warning("cannot determine whether a job is running: %s", error)
        return None
    head, others = state.head, state.groups.keys() - {job.peer.group}
    goes_on = head is not None and not (head.last or head.diverged)
    return head if goes_on and len(others) >= rank.manager._torchft.min_replica_size else None

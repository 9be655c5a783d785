"""The loop of a group that steps alone and synchronises now and then.

What the user is given are inner steps: transactions of the group, which commits or repeats each by
itself. After so many the job's transaction comes, in which nothing but the synchronisation is done.
A rollback of the job interrupts at most the inner step that is being computed; those before it
stay. Main thread.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Self

from fft.errors import DataError, FftError
from fft.messages.effects import StartTxn
from fft.messages.protocol import Synchronise
from fft.protocol.apart import own_lease
from fft.train.data.drawn import Drawn
from fft.train.data.source import DataSource, LeasedInputs
from fft.train.paradigms.periodic.inner_txns import InnerTransaction, SharedInnerTransaction
from fft.train.paradigms.periodic.synchronizer import Synchronizer
from fft.train.participation import Participation
from fft.train.rank_state import RankState
from fft.train.reductions import TxnReductions
from fft.train.transaction import TransactionLoop
from fft.train.unsafe_places import guarded
from fft.train.watchers import Watchers

_IN_A_STEP = (
    "manager.allreduce() while the groups step alone: the others are not at the same step, so that "
    "none may ever answer. Groups meet when they synchronise; write metrics with txn.log()"
)


class PeriodicLoop:
    """Runs inner steps and synchronisations for `TransactionLoop`, which has the job's side."""

    def __init__(
        self,
        loop: TransactionLoop,
        synchronizer: Synchronizer,
        watchers: Watchers,
        state: RankState,
        reductions: TxnReductions,
    ) -> None:
        self.loop = loop
        self.synchronizer = synchronizer
        self.watchers = watchers
        self.state = state
        self.inner = state.inner
        self.reductions = reductions

    @property
    def job(self) -> Participation:
        """This process in its job."""
        return self.loop.job

    def run(self, source: DataSource, max_steps: int | None) -> Iterator[InnerTransaction]:
        """Yield inner steps until the job is over, or this group has left."""
        loop, synchronizer = self.loop, self.synchronizer
        inputs = self.state.leased_inputs(source, synchronizer.steps)
        inputs.alive = self.watchers.ping
        self.reductions.refused = _IN_A_STEP
        synchronizer.shared.take()
        while (plan := loop.worker.begin()) is not None:
            loop.refuse_unlike_again(plan)
            if loop.is_past(plan, max_steps):
                return
            if not inputs.suffice(plan):
                if loop.worker.is_first and plan.step == 0:
                    raise DataError(inputs.too_few(plan))
                return
            synchronizer.begin(plan)
            is_last = max_steps is not None and plan.step + 1 >= max_steps
            is_last = is_last or not inputs.suffice_after(plan)
            if is_last:
                loop.compare_now()
            try:
                waited_ms = yield from self._inner_steps(plan, inputs)
            finally:
                if self.inner is not None:
                    self.inner.leave()
            if waited_ms is None or not self._synchronize(plan, is_last, waited_ms):
                continue
            if synchronizer.bound:
                yield from self._stand_apart(plan, inputs)

    def _inner_steps(
        self, plan: StartTxn, inputs: LeasedInputs
    ) -> Generator[InnerTransaction, None, float | None]:
        """Those that are missing. Returns how long they waited for data (ms); None: rolled back."""
        synchronizer, step, waited_ms = self.synchronizer, self.state.step, 0.0
        assert step is not None, "looked at before"
        while plan.lease is not None and (self.inner is None or self.inner.ready(plan)):
            if synchronizer.position >= synchronizer.steps:
                break
            if self._is_superseded() or not self._launched_in_time(plan):
                return None
            if self.inner is not None and not self.inner.begin():
                continue
            drawn = inputs.draw(plan.lease, synchronizer.position)
            step.capture()
            self.watchers.txn_begun(plan.step)
            txn = self._inner_step(plan, drawn)
            try:
                yield txn
            except GeneratorExit:
                self.loop.left_loop.leave(plan.step)
                raise
            if not txn.closed:
                raise FftError("the body of a txn must run inside `with txn:`")
            if txn.interrupted:
                return None
            waited_ms += drawn.waited_ms if txn.committed else 0.0
        return None if self._is_superseded() else waited_ms

    def _inner_step(self, plan: StartTxn, drawn: Drawn) -> InnerTransaction:
        if self.inner is None:
            return InnerTransaction(self, plan, drawn)
        return SharedInnerTransaction(self, self.inner, plan, drawn)

    def _is_superseded(self) -> bool:
        """Whether the job's txn has been rolled back meanwhile; then it is left here."""
        engine = self.job.engine
        if engine is None or not engine.has_word():
            return False
        self.loop.worker.body_unwound()
        return True

    def _launched_in_time(self, plan: StartTxn) -> bool:
        """Begin the reduction that is made beside the last inner steps. False: it failed."""
        synchronizer = self.synchronizer
        is_due = synchronizer.position >= synchronizer.steps - synchronizer.delay
        if synchronizer.is_launched or not is_due:
            return True
        with JobsPart(self.loop, plan) as part:
            self._launch()
        return not part.failed

    def _launch(self) -> None:
        self.reductions.refused = ""
        try:
            self.synchronizer.launch()
        finally:
            self.reductions.refused = _IN_A_STEP

    def _stand_apart(
        self, plan: StartTxn, inputs: LeasedInputs
    ) -> Generator[InnerTransaction, None, None]:
        """Of an asynchronous job: compute what this group brings to a later synchronisation, and
        ask to be in it. Nobody waits for that as long as the spec's bound lets them go on."""
        synchronizer, record = self.synchronizer, self.state.position
        engine = self.job.engine
        assert record is not None and engine is not None, "it was committed"
        synchronizer.lease = own_lease(record.leases, engine.participant.config)
        synchronizer.base = record.step
        self.state.stands_apart(record.step, len(plan.members))
        own = replace(plan, step=record.step, lineage=record.lineage, lease=synchronizer.lease)
        if (yield from self._inner_steps(own, inputs)) is None:
            return  # the engine has a word: this group leaves
        synchronizer.prepare()
        self.job.post(Synchronise())

    def _synchronize(self, plan: StartTxn, is_last: bool, waited_ms: float) -> bool:
        """The job's txn: all that is done in it across the groups, and its vote. Whether this group
        goes on from it."""
        self.watchers.txn_begun(plan.step)
        drawn = Drawn(None, is_last, waited_ms, plan.lease, plan.lease or 0)
        told = {"inner_steps": self.synchronizer.position}
        if self.synchronizer.bound:
            told["base"] = self.synchronizer.base
        txn = self.loop.transaction(plan, drawn, **told)
        with txn:
            if not self.synchronizer.is_launched:
                self._launch()
            # for the slowest group, as long as the process group does
            with self.watchers.waiting():
                self.synchronizer.finish()
        return txn.committed and not self.loop.is_over and not self.synchronizer.is_launched


class JobsPart:
    """A part of the job's txn that is over before its end. ``failed``: the txn is rolled back."""

    def __init__(self, loop: TransactionLoop, plan: StartTxn) -> None:
        self.failed = False
        self._loop, self._plan = loop, plan

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
        self._loop.close_body()
        if error is None:
            return False
        self.failed = True
        return self._loop.unwound(self._plan, None, error)

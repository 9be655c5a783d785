"""The paradigm of asynchronous pipelines, whose stages commit their steps independently."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fft.checkpoints.plan import Checkpointing
from fft.engine.loop import Engine
from fft.messages.effects import StartTxn
from fft.train.data.sharded import ShardedSource
from fft.train.data.source import DataSource
from fft.train.limits import Feature
from fft.train.paradigms.pipeline.paradigm import Pipelined
from fft.train.paradigms.stages.due import refuse_forks, schedule_of_stage
from fft.train.paradigms.stages.input import refuse_unconnected
from fft.train.paradigms.stages.output import StageOutput
from fft.train.paradigms.stages.scope import StageScope
from fft.train.session.checkpoint_schedule import CheckpointSchedule
from fft.train.session.rank_context import RankContext
from fft.train.step.transaction import Transaction, TransactionLoop

logger = logging.getLogger(__name__)


class AsyncPipeline(Pipelined):
    """Each stage has its own scope; queues connect each stage to the next one.

    Attributes:
        output: The queue to the next stage, or None before the script creates it.
    """

    kind = Feature.INDEPENDENT_STAGES
    can_reform = False
    steps_together = False

    def __init__(self, rank: RankContext, scope: StageScope) -> None:
        super().__init__(rank)
        self._scope = scope
        self.output: StageOutput | None = None

    # --- inputs and the loop ---

    def refuse_loop(self, loader: Any) -> None:
        refuse_unconnected(self._scope, self.output, loader)

    def steps(
        self, loop: TransactionLoop, source: DataSource | ShardedSource, max_steps: int | None
    ) -> Iterator[Transaction]:
        rank, output = self._rank, self.output
        assert not isinstance(source, ShardedSource), "refused before"
        if output is not None:
            output.source = source

        def make_others(computing: int | None) -> None:
            if output is not None:
                output.compute_requested(but=computing)

        is_still_in = yield from loop.txns(source, max_steps, make_others)
        if not is_still_in:
            loop.is_over |= self._has_ended_with_its_data(max_steps)
        rank.state.reshard_models()
        loop.is_over |= is_still_in
        with rank.watchers.waiting():
            self._end(loop.is_over, is_still_in)

    def _end(self, is_over: bool, is_still_in: bool) -> None:
        """Stop taking txns, and keep serving the next stage.

        Args:
            is_over: nothing is left to do for this stage.
            is_still_in: this rank is still a member, because no commit was marked as the last.
        """
        if is_over:
            self._rank.state.checkpoints.ended()
        if is_still_in:
            self._rank.job.leave()  # the next stage is held until it receives this
        if self.output is not None:
            self.output.finish(leaves=not is_over)

    def _has_ended_with_its_data(self, max_steps: int | None) -> bool:
        """Return whether the loop ended because the stage before has ended; log lost steps."""
        job, step = self._rank.job, self._rank.manager._torchft.step
        local = job.local
        others = () if local is None else local.others
        before = [other for other in others if not other.ahead and other.has_ended]
        if local is None or not before:
            return False
        if max_steps is not None and step < max_steps:
            logger.warning(
                "stage %r has ended after %d slices of the data, and so has this one, which "
                "depends on it: at step %d, before max_steps=%d",
                before[0].scope,
                before[0].cursor,
                step,
                max_steps,
            )
        return job.peer not in local.leaving

    def await_command(self, engine: Engine, txn: StartTxn | None) -> None:
        if self.output is not None:
            computing = None if txn is None else txn.slice
            self.output.serve_until_command(engine, self._rank.watchers, computing)

    def txn_committed(self, txn: Transaction) -> None:
        """Ensure that the next stage has an entry for the committed ``txn``."""
        if self.output is not None:
            self.output.committed(txn)

    # --- checkpoints ---

    def schedule(self, plan: Checkpointing, is_writing: Callable[[], bool]) -> CheckpointSchedule:
        refuse_forks(self._rank.settings.spec)
        limit_s = self._rank.limits["flow_limit"].seconds
        return schedule_of_stage(self._scope, plan, self._rank.job, is_writing, limit_s)

    def export_own(self, gives: range) -> dict[str, Any]:
        return {} if self.output is None else {"entries": self.output.export_entries(gives)}

    def load_entries(self, own: Mapping[str, Any] | None) -> Sequence[tuple[int, int]]:
        if self.output is None or own is None:
            return ()
        entries = own["entries"]
        self.output.load_entries(entries)
        return [(number, version) for number, version, _ in entries]

    # --- the end ---

    def left(self, is_failing: bool) -> None:
        if self.output is not None and not is_failing:
            with self._rank.watchers.waiting():  # the next stage may still need entries of this one
                self.output.finish(leaves=True, was_left=True)

    def close(self) -> None:
        if self.output is not None:
            self.output.close()

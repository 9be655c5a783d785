"""The paradigm of local steps with periodic synchronization: LocalSGD and DiLoCo."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fft.errors import FftError
from fft.messages.effects import StartTxn
from fft.train.checkpoint.loading import refuse_other_kind
from fft.train.data.sharded import ShardedSource
from fft.train.data.source import DataSource, LeasedInputs
from fft.train.limits import Feature
from fft.train.paradigms.lockstep import Lockstep
from fft.train.paradigms.periodic.loop import InnerSteps, PeriodicLoop
from fft.train.paradigms.periodic.synchronizer import LocalPhase, Synchronizer
from fft.train.session.paradigm import Committed, SharedState
from fft.train.session.rank_context import RankContext
from fft.train.state.step_state import TornState
from fft.train.step.rehearsal import rehearse
from fft.train.step.transaction import Transaction, TransactionLoop

logger = logging.getLogger(__name__)


class Periodic(Lockstep):
    """Groups take local steps; a txn of the job synchronizes them.

    Attributes:
        synchronizer: The LocalSGD or DiLoCo instance of the script, or None before it is created.
    """

    kind = Feature.LOCAL_STEPS
    can_reform = False
    steps_together = False

    def __init__(self, rank: RankContext) -> None:
        super().__init__(rank)
        self.synchronizer: Synchronizer | None = None

    def new_phase(self, fragments: int) -> LocalPhase:
        """Return a new local phase for a synchronizer with ``fragments`` fragments."""
        return LocalPhase(fragments)

    def synchronize_by(self, synchronizer: Synchronizer) -> None:
        """Apply ``synchronizer`` to the shared state when a txn of the job commits."""
        self.synchronizer = synchronizer
        self._rank.state.compare_by(synchronizer.shared.fingerprint)

    # --- the job ---

    def common_settings(self) -> Mapping[str, Any]:
        return {} if self.synchronizer is None else self.synchronizer.plan

    # --- committed state ---

    @property
    def committed(self) -> Committed:
        return super().committed if self.synchronizer is None else self.synchronizer

    def skip_step(self) -> None:
        self._rank.state.registered.forget()
        self.committed.skip()

    @property
    def shared(self) -> SharedState | None:
        return super().shared if self.synchronizer is None else self.synchronizer.shared

    def registered(self) -> None:
        self.synchronizer = None

    def describe(self, models: str) -> str:
        return models if self.synchronizer is None else self.synchronizer.describe()

    def is_outer(self, optimizer: torch.optim.Optimizer) -> bool:
        outer = () if self.synchronizer is None else self.synchronizer.outer
        return any(each is optimizer for each in outer)

    @property
    def steps_use_state(self) -> bool:
        return self.synchronizer is None

    def reduced(self) -> list[torch.Tensor]:
        return [] if self.synchronizer is None else self.synchronizer.reduced()

    def must_skip(self, plan: StartTxn) -> bool:
        """See `Paradigm.must_skip`; the local steps were judged one by one."""
        return self._rank.results.must_skip_nonfinite(plan, self.reduced())

    def digests_to_compare(self) -> None:
        """Compare nothing, because groups differ between two synchronizations."""

    def restore(self) -> None:
        try:
            super().restore()
        except TornState:
            if self.synchronizer is None:
                raise
            logger.exception("this group begins anew from the last synchronisation")
            self.synchronizer.start_over()

    def load_shared(self, state: Any, keep_gradients: bool) -> None:
        if self.synchronizer is None:
            super().load_shared(state, keep_gradients)
        else:
            self.synchronizer.load(state, keep_gradients)

    # --- inputs and the loop ---

    @property
    def items_in_slice(self) -> int:
        assert self.synchronizer is not None, "looked at before"
        return self.items_per_step * self.synchronizer.schedule.steps

    def refuse_loop(self, loader: Any) -> None:
        if self.synchronizer is None:
            raise FftError(
                "the spec's groups take local steps, and no synchronization is chosen: make "
                "fft.LocalSGD(manager, …) or fft.DiLoCo(manager, …) before transactions()"
            )

    def steps(
        self, loop: TransactionLoop, source: DataSource | ShardedSource, max_steps: int | None
    ) -> Iterator[Transaction]:
        assert self.synchronizer is not None, "looked at before"
        assert not isinstance(source, ShardedSource), "refused before"
        steps = self.synchronizer.schedule.steps
        inputs = LeasedInputs(source, steps, self.items_per_step, self.batches.number)
        yield from rehearse(self._rank, loop, source)
        yield from self._loop_of(loop, self.synchronizer).run(inputs, max_steps)
        self._rank.state.reshard_models()

    def _loop_of(self, loop: TransactionLoop, synchronizer: Synchronizer) -> PeriodicLoop:
        """Return the loop of this group's inner steps."""
        return PeriodicLoop(self._rank, loop, synchronizer, InnerSteps())

    def txn_committed(self, txn: Transaction) -> None:
        """Start the checkpoint that is due, before the next local step."""
        self._rank.state.checkpoints.take()

    # --- checkpoints ---

    def export_own(self, gives: range) -> dict[str, Any]:
        return {} if self.synchronizer is None else {"alone": self.synchronizer.export_own()}

    def export_shared(self) -> tuple[dict[str, Any], Mapping[str, torch.Tensor]]:
        if self.synchronizer is None:
            return super().export_shared()
        return self.synchronizer.shared.export(copy_mutable=True), {}

    def load_checkpoint(self, found: Mapping[str, Any], own: Any, buffers: Any) -> None:
        if self.synchronizer is None:
            super().load_checkpoint(found, own, buffers)
            return
        refuse_other_kind(found, are_alone=True)
        if own is not None:
            unfit = self._rank.state.registered.refuse_unfit
            unfit({**own["alone"]["state"], "buffers": own["buffers"]})
        self.synchronizer.load_state_dict(found)
        if own is not None:
            self.synchronizer.load_own(own["alone"], own["buffers"])

    def without_own(self, writer: str) -> str:
        if self.synchronizer is None:
            return super().without_own(writer)
        return "its buffers, inner optimizers and random numbers begin anew"

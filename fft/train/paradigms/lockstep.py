"""HSDP and DDP: every replica group takes part in each step. Other paradigms derive from
`Lockstep`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fft.checkpoints.plan import Checkpointing
from fft.messages.effects import StartTxn
from fft.train.checkpoint.loading import completed, refuse_other_kind
from fft.train.data.sharded import ShardedSource
from fft.train.data.source import DataSource
from fft.train.limits import Feature
from fft.train.process_groups.mesh_layout import BatchShare
from fft.train.session.checkpoint_schedule import CheckpointSchedule
from fft.train.session.paradigm import Committed, Paradigm, SharedState, VotePrecondition
from fft.train.session.rank_context import RankContext
from fft.train.state.local_tensors import leaves_of
from fft.train.step.lighthouse_vote import preconditions_of
from fft.train.step.rehearsal import rehearse
from fft.train.step.transaction import Transaction, TransactionLoop


class Lockstep(Paradigm[TransactionLoop]):
    """All groups compute each step and average its gradients, in one txn of the job."""

    kind = Feature.LOCKSTEP
    can_reform = True
    steps_together = True

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank

    # --- the job ---

    def refuse_unconnected(self) -> None:
        self._rank.groups.refuse_unconnected()

    def vote_preconditions(self) -> Sequence[VotePrecondition]:
        return preconditions_of(self._rank)

    # --- committed state ---

    @property
    def committed(self) -> Committed:
        return self._rank.state.updates

    def skip_step(self) -> None:
        self._rank.state.skip_step()

    @property
    def shared(self) -> SharedState | None:
        return self._rank.state.registered_state

    def reduced(self) -> list[torch.Tensor]:
        return [leaf for g in self._rank.state.updates.gradients() for leaf in leaves_of(g)]

    def must_skip(self, plan: StartTxn) -> bool:
        return self._rank.results.must_skip(plan, self._rank.state.updates)

    def digests_to_compare(self) -> dict[str, str] | None:
        step = self._rank.state.registered_state
        return None if step is None else step.compared_digests()

    def restore(self) -> None:
        self._rank.state.restore()

    def load_shared(self, state: Any, keep_gradients: bool) -> None:
        if self._rank.state.registered_state is not None:
            self._rank.state.registered_state.load(state, keep_gradients)

    # --- inputs and the loop ---

    @property
    def batches(self) -> BatchShare:
        rank = int(self._rank.manager._torchft.group_rank)
        if self._rank.settings.spec.samples == "per_group":
            return BatchShare(1, 0, rank == 0)
        layout = self._rank.groups.layout
        return BatchShare(self._rank.world, rank, True) if layout is None else layout.batches

    def refuse_unregistered(self) -> None:
        if "torch.distributed.pipelining.schedules" in sys.modules:
            from fft.train.paradigms.pipeline.schedule import check_registered

            check_registered(self._rank.groups.stages)

    def steps(
        self, loop: TransactionLoop, source: DataSource | ShardedSource, max_steps: int | None
    ) -> Iterator[Transaction]:
        yield from rehearse(self._rank, loop, source)
        yield from loop.txns(source, max_steps)
        self._rank.state.reshard_models()

    # --- checkpoints ---

    def schedule(self, plan: Checkpointing, is_writing: Callable[[], bool]) -> CheckpointSchedule:
        return CheckpointSchedule(plan, self._rank.job, is_writing)

    def export_shared(self) -> tuple[dict[str, Any], Mapping[str, torch.Tensor]]:
        step = self._rank.state.registered
        return step.export_changing(), step.resharded_named_parameters()

    def load_checkpoint(self, found: Mapping[str, Any], own: Any, buffers: Any) -> None:
        step = self._rank.state.registered
        refuse_other_kind(found, are_alone=False)
        step.load_checkpoint(completed(found, buffers, step))

    def without_own(self, writer: str) -> str:
        return f"the buffers are those of group {writer}, and the RNG states are reset"

"""The paradigm of groups that take local steps and synchronize now and then.

LocalSGD and DiLoCo with groups of one rank; HSDP in DiLoCo with groups of several, which have a
scope of their own for their local steps (`inner_scope`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fft.durable.plan import Checkpointing
from fft.errors import FftError
from fft.protocol.state import Config
from fft.train.checkpoint.due import Due, DueByWord
from fft.train.checkpoint.loading import refuse_other_kind
from fft.train.data.sharded import Sharded, ShardedSource
from fft.train.data.source import DataSource
from fft.train.paradigms.lockstep import Lockstep, no_shares
from fft.train.paradigms.paradigm import Committed, SharedState
from fft.train.paradigms.periodic.inner_scope import InnerScope
from fft.train.paradigms.periodic.loop import InnerTransaction, PeriodicLoop
from fft.train.paradigms.periodic.synchronizer import Synchronizer
from fft.train.rank import Rank
from fft.train.state.step_state import TornState
from fft.train.transaction import Transaction, TransactionLoop

logger = logging.getLogger(__name__)


class Periodic(Lockstep):
    """Groups step alone; a txn of the job synchronizes them.

    Attributes:
        synchronizer: The script's LocalSGD or DiLoCo; None: it has made none yet.
        inner: The scope of the ranks of this group; None: there is one rank.
    """

    can_reform = False

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self.synchronizer: Synchronizer | None = None
        self.inner = None if rank.world == 1 else InnerScope(rank)

    def synchronize_by(self, synchronizer: Synchronizer) -> None:
        """Have a COMMIT of the job step what ``synchronizer`` shares between the groups.

        Raises:
            FftError: gradients are averaged already.
        """
        self.synchronizer = synchronizer
        if self.inner is not None:
            self.inner.synchronizer = synchronizer
        self._rank.state.compare_by(synchronizer.shared.fingerprint)
        if self._rank.reductions.reducers:
            self.refuse_sync()

    # --- the job ---

    def refuse_torchft_loop(self) -> None:
        raise FftError(
            "start_quorum(), of torchft's loop, with spec="
            f"{self._rank.settings.spec.name!r}: there groups step in manager.transactions(loader)."
            " torchft's own LocalSGD and DiLoCo run with spec='hsdp'"
        )

    def common_settings(self) -> Mapping[str, Any]:
        return {} if self.synchronizer is None else self.synchronizer.plan

    def joined(self, config: Config) -> None:
        if self.inner is not None:
            self.inner.start(config)

    def interrupted(self, cause: str) -> None:
        if self.inner is not None:
            self.inner.hear_job(cause)

    # --- committed state ---

    @property
    def committed(self) -> Committed:
        return super().committed if self.synchronizer is None else self.synchronizer

    @property
    def shared(self) -> SharedState | None:
        return super().shared if self.synchronizer is None else self.synchronizer.shared

    def registered(self) -> None:
        self.synchronizer = None
        if self.inner is not None:
            self.inner.synchronizer = None

    def describe(self, models: str) -> str:
        return models if self.synchronizer is None else self.synchronizer.describe()

    def is_outer(self, optimizer: torch.optim.Optimizer) -> bool:
        outer = () if self.synchronizer is None else self.synchronizer.outer
        return any(each is optimizer for each in outer)

    def refuse_sync(self) -> None:
        if self.synchronizer is not None:
            raise FftError(
                "gradients averaged by sync_gradients(), or by DistributedDataParallel, with fft."
                f"{type(self.synchronizer).__name__}: groups that step alone have no common "
                "backward pass in which they could be; leave the call, or the wrapper, out"
            )

    def has_edited(self) -> bool:
        return False  # no step function changes what is averaged

    def digests_to_compare(self) -> None:
        """Compare nothing, since groups differ between two synchronizations."""

    @property
    def changes_extra(self) -> bool:
        return False  # a txn of the job computes nothing

    def put_back(self) -> None:
        if self.inner is not None:  # the ranks of the group put back what they commit together
            return
        try:
            super().put_back()
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

    def refuse_sharded(self, kind: Sharded) -> None:
        raise no_shares(kind)

    def refuse_loop(self, loader: Any) -> None:
        if self.synchronizer is None:
            raise FftError(
                "the spec's groups step alone, and nothing says how they synchronise: make "
                "fft.LocalSGD(manager, …) or fft.DiLoCo(manager, …) before transactions()"
            )

    def steps(
        self, loop: TransactionLoop, source: DataSource | ShardedSource, max_steps: int | None
    ) -> Iterator[InnerTransaction]:
        assert self.synchronizer is not None, "looked at before"
        assert not isinstance(source, ShardedSource), "refused before"
        inputs = self._rank.state.leased_inputs(source, self.synchronizer.steps)
        alone = PeriodicLoop(self._rank, loop, self.synchronizer, self.inner)
        yield from alone.run(inputs, max_steps)
        self._rank.state.end_gathering()

    def txn_committed(self, txn: Transaction) -> None:
        """Begin the checkpoint that is due, before the next local step."""
        self._rank.state.checkpoints.take()

    # --- checkpoints ---

    def schedule(self, plan: Checkpointing, is_writing: Callable[[], bool]) -> Due:
        if not self._rank.settings.spec.bound:
            return super().schedule(plan, is_writing)
        return DueByWord(plan, self._rank.job, self._rank.job.bus, is_writing)

    def export_own(self, gives: range) -> dict[str, Any]:
        return {} if self.synchronizer is None else {"alone": self.synchronizer.export_own()}

    def export_shared(self) -> tuple[dict[str, Any], Mapping[str, torch.Tensor]]:
        if self.synchronizer is None:
            return super().export_shared()
        return self.synchronizer.shared.export(across_body=True), {}

    def load_checkpoint(self, found: Mapping[str, Any], own: Any, buffers: Any) -> None:
        if self.synchronizer is None:
            super().load_checkpoint(found, own, buffers)
            return
        refuse_other_kind(found, are_alone=True)
        step = self._rank.state.step
        assert step is not None, "asked before"
        if own is not None:
            step.refuse_unfit({**own["alone"]["state"], "buffers": own["buffers"]})
        self.synchronizer.load_state_dict(found)
        if own is not None:
            self.synchronizer.load_own(own["alone"], own["buffers"])

    def without_own(self, writer: str) -> str:
        if self.synchronizer is None:
            return super().without_own(writer)
        return "its buffers, inner optimizers and random numbers begin anew"

    # --- the end ---

    def close(self) -> None:
        if self.inner is not None:
            self.inner.close()

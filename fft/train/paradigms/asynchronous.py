"""The paradigm of groups that synchronize without waiting for all others, with bounded staleness.

After a synchronization a group takes local steps from the state that it has received, its base.
Then it requests to take part in a later synchronization with its contribution. Other groups wait
for it only if its contribution would otherwise exceed the staleness bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fft.checkpoints.plan import Checkpointing
from fft.messages.effects import StartTxn
from fft.messages.protocol import Record, Synchronise
from fft.protocol.apart import is_brought, living, own_lease
from fft.train.data.source import LeasedInputs
from fft.train.limits import Feature
from fft.train.paradigms.periodic.loop import InnerSteps, InnerTransaction, PeriodicLoop
from fft.train.paradigms.periodic.paradigm import Periodic
from fft.train.paradigms.periodic.synchronizer import LocalPhase, Synchronizer
from fft.train.session.checkpoint_schedule import CheckpointSchedule
from fft.train.session.participation import Participation
from fft.train.step.transaction import TransactionLoop


class Asynchronous(Periodic):
    """Groups take local steps; a txn of the job synchronizes more than half of them."""

    kind = Feature.ASYNC

    def new_phase(self, fragments: int) -> LocalPhase:
        return BoundedPhase(self._rank.job, fragments)

    def load_shared(self, state: Any, keep_gradients: bool) -> None:
        if self.synchronizer is not None and self.synchronizer.has_contribution:
            self.synchronizer.take_over(state)  # it was computed before this load
        else:
            super().load_shared(state, keep_gradients)

    def _loop_of(self, loop: TransactionLoop, synchronizer: Synchronizer) -> PeriodicLoop:
        return AsynchronousLoop(self._rank, loop, synchronizer, InnerSteps())

    def schedule(self, plan: Checkpointing, is_writing: Callable[[], bool]) -> CheckpointSchedule:
        return DueToLocal(plan, self._rank.job, is_writing)


class BoundedPhase(LocalPhase):
    """A local phase whose contribution may enter a later synchronization.

    Attributes:
        base: The job step from which the local steps started.
    """

    def __init__(self, job: Participation, fragments: int) -> None:
        super().__init__(fragments)
        self.base = 0
        self._job = job

    def continues(self, plan: StartTxn) -> bool:
        """Return whether the local steps are the contribution to the txn of ``plan``."""
        if self.position == 0:
            return super().continues(plan)
        local, engine = self._job.local, self._job.engine
        assert engine is not None, "a txn has begun"
        epoch, config = None if local is None else local.epoch, engine.participant.config
        return is_brought(epoch, config, (self.lease, self.base), plan.lease)

    def enter(self, plan: StartTxn) -> None:
        """See `LocalPhase.enter`; a new phase starts from the state of ``plan``."""
        if self.lease is None:
            self.base = plan.step
        super().enter(plan)

    def begin_after(self, record: Record) -> None:
        """Start from the state of a committed ``record``, with the lease of this group."""
        assert self._job.engine is not None, "it was committed"
        self.lease = own_lease(record.leases, self._job.engine.participant.config)
        self.base = record.step

    def traced(self) -> dict[str, int]:
        """See `LocalPhase.traced`."""
        return {**super().traced(), "base": self.base}


class AsynchronousLoop(PeriodicLoop):
    """Runs the local phases of a group for `TransactionLoop`."""

    def _synchronized(self, plan: StartTxn, inputs: LeasedInputs) -> Iterator[InnerTransaction]:
        """Compute the contribution to a later synchronization, and request to join it."""
        phase, record = self.synchronizer.phase, self.state.position
        assert isinstance(phase, BoundedPhase), "of this paradigm"
        assert record is not None, "it was committed"
        phase.begin_after(record)
        if self.injector is not None:
            self.injector.begin(record.step, len(plan.members), 0)
        own = replace(plan, step=record.step, lineage=record.lineage, lease=phase.lease)
        if (yield from self._inner_steps(own, inputs)) is None:
            return  # the engine issued a command: this group leaves its local phase
        self.synchronizer.prepare()
        self.job.post(Synchronise())


class DueToLocal(CheckpointSchedule):
    """Checkpoint schedule of groups that may take local steps while others synchronize."""

    def left(self, record: Record, epoch: Record) -> frozenset[str]:
        """See `CheckpointSchedule.left`; a group in its local phase has not left the job."""
        local = self._job.local
        if local is None or local.head is None or local.head.n < record.n or record.last:
            return frozenset()
        stays = {e.entry.group for e in living(local) if set(e.entry.peers()) <= epoch.peer_set}
        return frozenset(e.group for e in epoch.members) - stays - frozenset(record.leavers)

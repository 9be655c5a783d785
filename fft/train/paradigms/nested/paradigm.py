"""The paradigm of local steps by groups of several ranks: HSDP with LocalSGD or DiLoCo.

The ranks of a group commit each local step together in an inner scope (`inner_scope`).
"""

from __future__ import annotations

from fft.errors import FftError
from fft.protocol.state import Config
from fft.train.paradigms.nested.inner_scope import InnerScope
from fft.train.paradigms.periodic.loop import PeriodicLoop
from fft.train.paradigms.periodic.paradigm import Periodic
from fft.train.paradigms.periodic.synchronizer import Synchronizer
from fft.train.rank_context import RankContext
from fft.train.transaction import TransactionLoop


class Nested(Periodic):
    """Groups take local steps in inner scopes; a txn of the job synchronizes the groups.

    Attributes:
        inner: The inner scope of the ranks of this group.
    """

    def __init__(self, rank: RankContext) -> None:
        super().__init__(rank)
        self.inner = InnerScope(rank)

    def refuse_synchronizer(self, synchronizer: Synchronizer) -> None:
        if synchronizer.packing.is_weighted:
            raise FftError(
                "weighted=True with several ranks in a replica group: each would average its shard "
                "by the weight of its own samples; leave it out, and give all ranks equally many"
            )

    def joined(self, config: Config) -> None:
        self.inner.start(config)

    def interrupted(self, cause: str) -> None:
        self.inner.hear_job(cause)

    def restore(self) -> None:
        """Leave the state unchanged, because the inner scope restores it on all ranks together."""

    def _loop_of(self, loop: TransactionLoop, synchronizer: Synchronizer) -> PeriodicLoop:
        self.inner.synchronizer = synchronizer
        return PeriodicLoop(self._rank, loop, synchronizer, self.inner)

    def close(self) -> None:
        self.inner.close()

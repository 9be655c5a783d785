"""The components of one rank that the parts of its manager share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchft.manager import Manager

from fft.protocol.timeouts import Timeout
from fft.train.gradients.reducer import Reducers
from fft.train.gradients.reductions import OpenTxn, Reductions
from fft.train.guard.injector import Injector
from fft.train.guard.watchers import Watchers
from fft.train.limits import FeaturesInUse
from fft.train.process_groups.epoch_groups import EpochGroups
from fft.train.session.participation import Participation
from fft.train.session.rank_state import RankState
from fft.train.session.scope import RankScope
from fft.train.session.settings import Settings
from fft.train.session.step_results import ResultJudge


@dataclass(frozen=True, eq=False)
class RankContext:
    """One rank of a job.

    Attributes:
        manager: torchft's side of the manager.
        settings: The arguments of the manager.
        features: The features that this rank uses.
        limits: All timeouts by name.
        scope: The instance of the protocol that this rank takes part in.
        job: This process as a participant: identity, bus, trace, engine.
        watchers: Interrupter, monitor and speed reports of the main thread.
        groups: The process groups.
        state: The registered state, its position, and the data source.
        txn: The open txn.
        reductions: The reductions of the open txn.
        reducers: The reducers, which issue some of them during backward.
        results: Judges the results of steps.
        injector: Triggers planned and commanded faults, or None.
    """

    manager: Manager
    settings: Settings
    features: FeaturesInUse
    limits: Mapping[str, Timeout]
    scope: RankScope
    job: Participation
    watchers: Watchers
    groups: EpochGroups
    state: RankState
    txn: OpenTxn
    reductions: Reductions
    reducers: Reducers
    results: ResultJudge
    injector: Injector | None

    @property
    def world(self) -> int:
        """Number of ranks of this replica group."""
        return int(self.manager._torchft.group_world_size)

"""The paradigm that a spec names.

Besides the spec and its checks, only this module distinguishes paradigms.
"""

from __future__ import annotations

from contextlib import ExitStack

from torchft.manager import Manager, WorldSizeMode

from fft.bus import ErrorBus
from fft.protocol.spec import FsmSpec
from fft.train.limits import Feature, FeaturesInUse
from fft.train.paradigms.asynchronous import Asynchronous
from fft.train.paradigms.lockstep import Lockstep
from fft.train.paradigms.nested import Nested
from fft.train.paradigms.periodic.paradigm import Periodic
from fft.train.paradigms.pipeline.paradigm import Pipelined
from fft.train.paradigms.stages.paradigm import AsyncPipeline
from fft.train.paradigms.stages.scope import StageScope, scope_of_stage
from fft.train.session.paradigm import Paradigm
from fft.train.session.rank_context import RankContext
from fft.train.session.scope import RankScope
from fft.train.session.settings import Settings
from fft.train.step.transaction import TransactionLoop


def traits_of(spec: FsmSpec, ranks: int) -> frozenset[Feature]:
    """Return the features that a spec determines for groups of ``ranks`` ranks."""
    traits = {_class_of(spec, ranks).kind}
    traits |= {Feature.ONE_RANK} if spec.ranks == "one" else set()
    traits |= {Feature.SAME_BATCH} if spec.samples == "per_group" else set()
    return frozenset(traits)


def features_of(settings: Settings, manager: Manager) -> FeaturesInUse:
    """Return the features that the spec and the arguments of the manager choose.

    Raises:
        ConfigError: They cannot be used together.
    """
    torchft, config = manager._torchft, settings.config
    ranks = torchft.group_world_size
    found = {
        Feature.SEVERAL_RANKS: ranks > 1,
        Feature.SPARES: torchft.replica_world_size_mode == WorldSizeMode.FIXED_WITH_SPARES,
        Feature.LIGHTHOUSE: config.membership == "lighthouse",
        Feature.ACTIVE: config.active,
        Feature.RECOMPUTE: config.recompute_every,
        Feature.CHECK_BUFFERS: config.check_buffers,
    }
    features = FeaturesInUse(settings.spec.name, traits_of(settings.spec, ranks))
    features.use(*(feature for feature, is_used in found.items() if is_used))
    return features


def scope_of(
    settings: Settings, manager: Manager, job_bus: ErrorBus, operation_s: float, undo: ExitStack
) -> RankScope:
    """Open the scope that this rank takes part in.

    Args:
        settings: The arguments of the manager.
        manager: torchft's side of it.
        job_bus: The bus of the job, which the caller owns.
        operation_s: Seconds for an operation on a bus.
        undo: Receives callbacks that close the buses, in case a later step fails.

    Raises:
        FftError: The replica group has fewer or more ranks than the spec has stages.
        BusError: A bus cannot be reached.
    """
    if settings.spec.stages:
        return scope_of_stage(settings, manager, job_bus, operation_s, undo)
    return RankScope(settings.spec, job_bus)


def paradigm_of(rank: RankContext) -> Paradigm[TransactionLoop]:
    """Return the paradigm that the spec of ``rank`` names.

    Raises:
        FftError: The ranks of the group share no process group.
    """
    made = _class_of(rank.settings.spec, rank.world)
    if made is AsyncPipeline:
        assert isinstance(rank.scope, StageScope), "scope_of opened it"
        return AsyncPipeline(rank, rank.scope)
    return made(rank)


def _class_of(spec: FsmSpec, ranks: int) -> type[Lockstep]:
    if spec.stages:
        return AsyncPipeline
    if spec.is_periodic:
        if spec.bound:
            return Asynchronous
        return Periodic if ranks == 1 else Nested
    return Pipelined if spec.ranks == "stages" else Lockstep

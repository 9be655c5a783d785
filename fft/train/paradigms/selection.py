"""The paradigm that a spec names.

Besides the spec and its checks, only this module distinguishes paradigms.
"""

from __future__ import annotations

from contextlib import ExitStack

from torchft.manager import Manager

from fft.bus import ErrorBus
from fft.errors import FftError
from fft.protocol.spec import FsmSpec
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


def refuse_ranks(spec: FsmSpec, ranks: int) -> None:
    """Raise FftError if the spec does not allow ``ranks`` ranks in a replica group."""
    if spec.ranks == "one" and ranks > 1:
        raise FftError(
            f"spec {spec.name!r} has replica groups of one rank, and this one has {ranks}: start "
            "it with --ranks 1, or use spec='hsdp', whose ranks hold shards, or spec='pipeline', "
            "whose ranks hold stages, or spec='hsdp_diloco', whose groups take local steps"
        )


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
    spec = rank.settings.spec
    if isinstance(rank.scope, StageScope):
        return AsyncPipeline(rank, rank.scope)
    if spec.is_periodic:
        if spec.bound:
            return Asynchronous(rank)
        return Periodic(rank) if rank.world == 1 else Nested(rank)
    return Pipelined(rank) if spec.ranks == "stages" else Lockstep(rank)

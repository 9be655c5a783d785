"""The features of FFT that cannot be used together.

A job has features that its spec determines, features that the arguments of its manager choose, and
features that its script uses later. `FeaturesInUse` holds those of one rank, and raises an error as
soon as two of them exclude each other. ``docs/reference/limits.md`` is written from `EXCLUSIONS` by
``python -m tools.reference``.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from enum import StrEnum
from typing import NamedTuple

from fft.errors import ConfigError, DataError, FftError


class Feature(StrEnum):
    """A feature, as messages and the page of limits show it."""

    # the paradigm, which the spec determines
    LOCKSTEP = "groups that step together"
    PIPELINE = "stages that step together"
    INDEPENDENT_STAGES = "independent stages"
    LOCAL_STEPS = "local steps"
    ASYNC = "asynchronous groups"
    SHARDED_LOCAL_STEPS = "local steps of sharded groups"
    ONE_RANK = "replica groups of one rank"
    SAME_BATCH = "ranks of a group that take the same batch"
    # arguments of the manager
    SEVERAL_RANKS = "several ranks in a replica group"
    SPARES = "world_size_mode=FIXED_WITH_SPARES"
    LIGHTHOUSE = 'ManagerConfig(membership="lighthouse")'
    ACTIVE = "ManagerConfig(active=…)"
    RECOMPUTE = "ManagerConfig(recompute_every=…)"
    CHECK_BUFFERS = "ManagerConfig(check_buffers=True)"
    # calls of the script
    TORCHFT_LOOP = "start_quorum(), of torchft's loop"
    ALLREDUCE = "manager.allreduce() in transactions()"
    SYNC_GRADIENTS = "sync_gradients(), or a DistributedDataParallel wrapper"
    PIPELINE_SCHEDULE = "register_pipeline()"
    STAGE_QUEUE = "fft.StageOutput and fft.StageInput"
    LOCAL_SGD = "fft.LocalSGD"
    DILOCO = "fft.DiLoCo"
    FRAGMENTS = "several fragments, or fragment_sync_delay="
    WEIGHTED = "weighted=True"
    WEIGH = "txn.weigh()"
    VETO = "manager.veto()"
    LIVE = "manager.live()"
    STOP = "manager.stop()"
    # the data
    SEQUENTIAL = "a loader that can only be read from its beginning"
    SHARDED = "sharded="
    SHARDED_BY_RANK = 'sharded="rank"'
    GLOBAL_BATCH = "global_batch="
    DATA_POSITION = "txn.items, txn.progress and txn.data_epoch"


class Exclusion(NamedTuple):
    """A feature that cannot be used together with any of some others."""

    feature: Feature
    others: Set[Feature]
    text: str
    """The reason, and the fix."""
    error: type[FftError] = FftError


_F, _X = Feature, Exclusion
_LOCAL = {_F.LOCAL_STEPS, _F.ASYNC, _F.SHARDED_LOCAL_STEPS}
_APART = {*_LOCAL, _F.INDEPENDENT_STAGES}
"""Paradigms whose groups, or stages, are at different steps."""
_NOT_LOCAL = {_F.LOCKSTEP, _F.PIPELINE, _F.INDEPENDENT_STAGES}
_ONE = (
    "start it with --ranks 1, or use spec='hsdp', whose ranks hold shards, 'pipeline', whose ranks "
    "hold stages, or 'hsdp_diloco', whose groups take local steps"
)
_TOGETHER = "groups are at different steps; leave it out, or use spec='hsdp', 'ddp' or 'pipeline'"
_ANYWHERE = "; use fft.CursorLoader, fft.StreamLoader or a list"

EXCLUSIONS = (
    _X(_F.SEVERAL_RANKS, {_F.ONE_RANK, _F.ASYNC}, _ONE, ConfigError),
    _X(_F.SPARES, {_F.ASYNC}, "no group is a spare; use DYNAMIC", ConfigError),
    _X(_F.LIGHTHOUSE, {_F.ASYNC}, "its quorum waits for all groups; leave it out", ConfigError),
    _X(_F.ACTIVE, _APART, _TOGETHER, ConfigError),
    _X(_F.RECOMPUTE, _APART, _TOGETHER, ConfigError),
    _X(_F.CHECK_BUFFERS, _LOCAL, "each group has its own buffers; leave it out", ConfigError),
    _X(
        _F.TORCHFT_LOOP,
        _LOCAL,
        "use manager.transactions(); torchft's LocalSGD and DiLoCo need spec='hsdp'",
    ),
    _X(_F.TORCHFT_LOOP, {_F.INDEPENDENT_STAGES}, "use manager.transactions(), or spec='pipeline'"),
    _X(
        _F.VETO,
        {_F.TORCHFT_LOOP},
        "to skip a step, call start_quorum() again without should_commit()",
    ),
    _X(
        _F.ALLREDUCE,
        _LOCAL,
        "no other group answers before the synchronization; write metrics with txn.log()",
    ),
    _X(
        _F.SYNC_GRADIENTS,
        _LOCAL,
        "groups have no common backward(); leave the call, or the wrapper, out",
    ),
    _X(_F.PIPELINE_SCHEDULE, {_F.LOCKSTEP, *_LOCAL}, "ranks hold no stages; use spec='pipeline'"),
    _X(
        _F.STAGE_QUEUE,
        {_F.LOCKSTEP, _F.PIPELINE, *_LOCAL},
        "no stage commits alone; use spec='pipeline_ahead'",
    ),
    _X(_F.LOCAL_SGD, _NOT_LOCAL, "groups take no local steps; use spec='local_sgd'"),
    _X(
        _F.LOCAL_SGD,
        {_F.ASYNC},
        "bases differ; use fft.DiLoCo with an outer SGD(lr=1), which does the same",
    ),
    _X(
        _F.DILOCO,
        _NOT_LOCAL,
        "groups take no local steps; use spec='diloco', 'hsdp_diloco' or 'async'",
    ),
    _X(
        _F.FRAGMENTS,
        {_F.ASYNC},
        "groups synchronize all of the model at once; give one fragment, and no delay",
    ),
    _X(
        _F.WEIGHTED,
        {_F.SHARDED_LOCAL_STEPS},
        "each rank would weigh its own shard; give all ranks equally many",
    ),
    _X(_F.WEIGH, _NOT_LOCAL, "only fft.LocalSGD and fft.DiLoCo weigh steps; remove the call"),
    _X(_F.LIVE, _APART, _TOGETHER),
    _X(_F.STOP, _APART, "no step is the last one of all groups; call manager.drain()"),
    _X(_F.SEQUENTIAL, _LOCAL, f"groups read different parts of the data{_ANYWHERE}", DataError),
    _X(
        _F.SEQUENTIAL,
        {_F.INDEPENDENT_STAGES},
        f"lost entries are computed again{_ANYWHERE}",
        DataError,
    ),
    _X(_F.SHARDED, _APART, "FFT distributes the data itself; pass a loader over all of them"),
    _X(_F.SHARDED_BY_RANK, {_F.SAME_BATCH}, 'pass sharded="group"'),
    _X(
        _F.GLOBAL_BATCH,
        {_F.PIPELINE, *_APART},
        "a rank takes one batch in a step; use spec='hsdp' or 'ddp'",
    ),
    _X(_F.GLOBAL_BATCH, {_F.SHARDED}, "no group takes the batches of others; remove one of both"),
    _X(_F.GLOBAL_BATCH, {_F.SPARES}, "the mode fixes the number of groups; remove one of both"),
    _X(
        _F.DATA_POSITION, {_F.SHARDED}, "FFT does not know the length of a shard; count its batches"
    ),
    _X(_F.DATA_POSITION, _LOCAL, "groups read different parts of the data; use txn.step"),
)


def reason(feature: Feature, other: Feature) -> str:
    """Return the text of the limit between two features."""
    (text,) = (each.text for each in EXCLUSIONS if each.feature is feature and other in each.others)
    return f"with {other}: {text}"


class FeaturesInUse:
    """The features that one rank of a job uses.

    Args:
        spec: Name of the spec.
        traits: Features that the spec determines.
    """

    def __init__(self, spec: str, traits: Iterable[Feature]) -> None:
        self._shown = dict.fromkeys(traits, f"spec={spec!r}")
        """The text of each feature in messages."""

    def use(self, *features: Feature) -> None:
        """Add features, or none of them if one is not supported.

        Raises:
            FftError: One of them cannot be used with another, or with one that is in use. The
                message has the reason and the fix.
        """
        new = {each: str(each) for each in features if each not in self._shown}
        if not new:
            return
        shown = self._shown | new
        for limit in EXCLUSIONS:
            for other in limit.others & shown.keys():
                if limit.feature in shown:
                    raise limit.error(f"{limit.feature} with {shown[other]}: {limit.text}")
        self._shown = shown

"""Schedules of ``torch.distributed.pipelining``: cleared by a rollback, averaged stage by stage.

A schedule keeps the data of a step until the step's end: losses, activations, pending receives,
counters. A rollback interrupts it anywhere, and leftovers would become part of the next attempt: a
stale loss, for example, would be propagated back again. So all of it is cleared. The flags for the
exchange of shapes between stages are reset to their values at the beginning of the step, which were
equal on all ranks of the group.

Each microbatch produces a part of the gradients, and some of them bypass autograd's hooks. They
are averaged across the groups when a stage has all of them and has divided them by the number of
microbatches (``perform_reduce_grad``), in the order of the schedule, which is the same in all
groups.

Main thread. Touches schedule and stages through their private attributes, and no process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel

from fft.errors import FftError
from fft.train.gradients.reducer import Reducer
from fft.util.living import living

_KNOWN = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
)
_INITIALISED = (
    "_stage_forward_initialized",
    "_stage_backward_initialized",
    "_stages_forward_initialized",
    "_stages_backward_initialized",
)
_OF_SCHEDULE = (
    "_internal_losses",
    "fwd_recv_ops",
    "bwd_recv_ops",
    "unshard_ops",
    "unsharded_stages",
    "backward_counter",
)
_OF_STAGE = ("backward_state", "bwd_cache", "dw_runner")


def stages_of(schedule: Any) -> list[Any]:
    """Return the stages of this rank; empty for a schedule whose construction failed."""
    held = vars(schedule)
    return list(held.get("_stages") or filter(None, [held.get("_stage")]))


def check_registered(group: object | None) -> None:
    """Raise FftError if this process has a schedule over ``group`` that is not registered.

    A group has no reference to its schedules, so all live objects are searched.
    """
    if group is None:
        return
    for found in living((PipelineScheduleSingle, PipelineScheduleMulti)):
        over = any(stage.group is group for stage in stages_of(found))
        if over and _initializer(found) not in vars(found):
            raise FftError(
                f"a {type(found).__name__} over manager.stage_group() is not registered, so a "
                "rollback would not reset it, and its gradients would not be averaged: call "
                "manager.register_pipeline(schedule)"
            )


def register_schedule(
    schedule: Any,
    group: object,
    models: Iterable[nn.Module],
    averaged: Callable[[nn.Module], Reducer],
) -> Pipeline:
    """Register the schedule, and return its `Pipeline`.

    Raises FftError as `refuse_unfit`.
    """
    refuse_unfit(schedule, group, models)
    stages = stages_of(schedule)
    return Pipeline(schedule, {stage.stage_index: averaged(stage.submod) for stage in stages})


def refuse_unfit(schedule: Any, group: object, models: Iterable[nn.Module]) -> None:
    """Raise FftError if a rollback could not clear the schedule, or if it is set up differently.

    Args:
        group: The process group that the stages must use.
        models: The registered models.
    """
    kind = type(schedule)
    known = [getattr(schedules, name) for name in _KNOWN]
    if kind not in known:
        raise FftError(
            f"FFT does not know what a rollback must clear in a {kind.__qualname__}; use one of "
            f"{', '.join(_KNOWN)}"
        )
    if not schedule._has_backward:
        raise FftError(
            f"{kind.__name__} was made without loss_fn, so it computes no gradients: pass loss_fn="
        )
    held = {parameter for model in models for parameter in model.parameters()}
    for stage in stages_of(schedule):
        _refuse_unfit(stage, f"stage {stage.stage_index}", group, held)


def _refuse_unfit(stage: Any, name: str, group: object, held: set[nn.Parameter]) -> None:
    if stage.group is not group:
        raise FftError(
            f"{name} sends and receives over a process group that FFT cannot abort: pass "
            "group=manager.stage_group() to PipelineStage"
        )
    for module in stage.submod.modules():
        if isinstance(module, DistributedDataParallel | FSDPModule):
            raise FftError(
                f"{name} is wrapped in {type(module).__name__}: pass the plain module to "
                "PipelineStage; its gradients are averaged across the replica groups by FFT"
            )
    if not any(parameter.requires_grad for parameter in stage.submod.parameters()):
        raise FftError(
            f"{name} has no parameter that is trained, and every rank must reduce something in "
            "each step: make one trainable (a norm, an adapter), or split the model differently"
        )
    if not held.issuperset(stage.submod.parameters()):
        raise FftError(
            f"{name} has parameters that are not registered: call manager.register(modules, "
            "optimizer) with the modules of all stages of this rank before register_pipeline()"
        )


class Pipeline:
    """One schedule, and the reducers of its stages.

    Args:
        schedule: A schedule that `refuse_unfit` accepts.
        reducers: Reducers by the stages' index.
    """

    def __init__(self, schedule: Any, reducers: Mapping[int, Reducer]) -> None:
        self._schedule = schedule
        self._stages = stages_of(schedule)
        self._begun_with: dict[str, bool] = {}
        for stage in self._stages:
            reducer = reducers[stage.stage_index]
            reducer.quiet(True)  # until all microbatches have been through
            stage.perform_reduce_grad = _then(stage.perform_reduce_grad, reducer.reduce)
        modules = [stage.submod for stage in self._stages]
        name = _initializer(schedule)
        setattr(schedule, name, _preserve_buffers(getattr(schedule, name), modules))

    def capture(self) -> None:
        """Save the flags at the beginning of a step."""
        found = vars(self._schedule)
        self._begun_with = {name: found[name] for name in _INITIALISED if name in found}

    def clear(self) -> None:
        """Remove all data of a step that was interrupted or has ended. Gradients are cleared
        elsewhere."""
        vars(self._schedule).update(self._begun_with)
        _clear(self._schedule, _OF_SCHEDULE)
        for stage in self._stages:
            stage.clear_runtime_states()
            _clear(stage, _OF_STAGE)


def _initializer(schedule: Any) -> str:
    """Return the name of the method that lets the stages learn the shapes."""
    return "_initialize_stage" if hasattr(schedule, "_stage") else "_initialize_stages"


def _clear(owner: object, names: Iterable[str]) -> None:
    for name in names:
        if (held := vars(owner).get(name)) is not None:
            held.clear()


def _then(first: Callable[..., Any], second: Callable[[], None]) -> Callable[..., None]:
    def both(*args: Any, **kwargs: Any) -> None:
        first(*args, **kwargs)
        second()

    return both


def _preserve_buffers(
    initialise: Callable[..., Any], modules: Iterable[nn.Module]
) -> Callable[..., Any]:
    """Restore the buffers after a schedule's initialization.

    Before its first step a schedule runs each stage once to learn the shapes. That is not a step,
    so buffers such as the statistics of a BatchNorm must not change.
    """

    def initialise_and_put_back(*args: Any, **kwargs: Any) -> Any:
        saved = [(b, b.clone()) for module in modules for b in module.buffers()]
        try:
            return initialise(*args, **kwargs)
        finally:
            with torch.no_grad():
                for buffer, value in saved:
                    buffer.copy_(value)

    return initialise_and_put_back

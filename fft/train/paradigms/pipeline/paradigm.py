"""The paradigm of pipelines whose stages commit each step together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fft.train.gradients.reducer import Reducer
from fft.train.limits import Feature
from fft.train.paradigms.lockstep import Lockstep


class Pipelined(Lockstep):
    """Each stage is averaged with the same stage of the other groups, in one txn of the job."""

    kind = Feature.PIPELINE

    def refuse_unconnected(self) -> None:
        """Accept ranks without a process group, since stages may communicate in another way."""

    def register_pipeline(self, schedule: Any, averaged: Callable[[nn.Module], Reducer]) -> None:
        # importing torch's pipelining takes half a second
        from fft.train.paradigms.pipeline.schedule import register_schedule

        state = self._rank.state
        group = self._rank.groups.stage_group()
        state.pipelines += [register_schedule(schedule, group, state.models, averaged)]

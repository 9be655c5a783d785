"""Stages that step by themselves, in threads of one process, for tests of how they end.

Each batch is a few random vectors; for a batch in `overflows` the loss is inf, so that the scaler
skips its step in both stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ahead_script import Stepper
from stage import Job, Member
from torch import nn

import fft

WIDTH = 8
_LARGE = 100.0


@dataclass
class Plan:
    """The behavior of the stages of one job."""

    batches: int
    steps: Sequence[int | None] = (None, None)
    """Maximum number of steps of each stage."""
    overflows: Sequence[Sequence[int]] = ((), ())
    """Numbers of batches that each stage skips."""
    strays: int = 0
    """Distance to a later slice for which the first stage also has an entry, or 0."""
    late: Callable[[], None] | None = None
    """A function that the last rank of group 0 calls before it begins, to wait."""
    meanwhile: Callable[[Member, int], None] | None = None
    """A function that is called in each step function, with its step."""
    ends: dict[str, int] = field(default_factory=dict)
    """Step at which each rank has ended."""

    def loader(self) -> list[torch.Tensor]:
        """Return a loader whose vectors identify their batch."""
        noise = torch.Generator().manual_seed(7)
        return [torch.randn(4, WIDTH, generator=noise) for _ in range(self.batches)]

    def train(self, member: Member, rank: int) -> None:
        """Train one rank of a group."""
        if self.late is not None and member.name == "0.1":
            self.late()
        manager, loader, steps = member.manager, self.loader(), self.steps[rank]
        model: Any = member.model
        stepper = Stepper(manager, model, _LARGE)
        data: Any = loader
        output = None
        if rank:
            data = fft.StageInput(manager, loader)
        else:
            output = fft.StageOutput(manager, model)
        for txn in manager.transactions(data, steps):
            with txn:
                vectors = model(txn.batch)
                if self.meanwhile is not None:
                    self.meanwhile(member, txn.step)
                if output is not None:
                    output.put(txn, vectors)
                    if self.strays:
                        stray = txn._drawn.slice + self.strays
                        output.load_entries([(stray, txn.step, vectors.detach())])
                skips = txn._drawn.item in self.overflows[rank]
                mean = torch.tensor(2 * _LARGE if skips else 0.0)
                stepper.backward(F.mse_loss(vectors, torch.zeros_like(vectors)), mean)
        self.ends[member.name] = manager.current_step()


def _own(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of each rank of a group.

    The equal models are created here, because threads share a random generator.
    """
    torch.manual_seed(3)
    given = {"spec": "pipeline_ahead", "register": False, **settings}
    return [{**given, "model": nn.Linear(WIDTH, WIDTH)} for _ in range(2)]


def run(traces: Path, plan: Plan, groups: int = 1, within: float = 60.0, **settings: Any) -> Job:
    """Run a job of two stages to its end; raise an error of a rank."""
    made = Job(traces, groups)
    ranks = [r for group in range(groups) for r in made.ranks(str(group), _own(settings))]
    try:
        for member in ranks:
            member.start(lambda m: plan.train(m, m.manager._group_rank))
        for member in ranks:
            member.end(within)
    finally:
        for member in ranks:
            member.manager.shutdown()
    for member in ranks:
        if member.error is not None:
            raise member.error
    return made

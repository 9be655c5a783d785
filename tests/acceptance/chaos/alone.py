"""The inner steps of a job whose groups train locally, beside its synchronizations. Pure.

The input is the notes of traces. An inner step *counts* if a synchronization consumed its slice of
the data; another group recomputes the steps of a group that was killed before that.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.slices import Slices

FEW = 20
"""Number of losses at either end of the run whose mean is reported."""
ALONE = frozenset({"local_sgd", "diloco", "hsdp_diloco", "async"})
"""Trainers of `trainer.py` whose groups train locally."""
NOTES = frozenset({"inner_commit", "inner_abort", "inner_torn", "metrics"})


@dataclass(frozen=True)
class Inner:
    """The inner steps of a run."""

    steps: int
    """Inner steps of one synchronization."""
    done: int
    """Inner steps committed by their groups."""
    counted: int
    """Inner steps that count, including those of a group that was lost after its vote."""
    repeated: int
    torn: int
    """How often a group had to restart from the last synchronization."""
    clean_ms: float
    """Median time between inner steps of one group, between two synchronizations."""
    first_loss: float
    last_loss: float

    @property
    def learned(self) -> bool:
        """Whether the loss has fallen."""
        return self.last_loss < self.first_loss

    def goodput(self, groups: int, wall_s: float) -> float:
        """Return counted steps x clean step / (wall x groups), as if no group were ever away."""
        return self.counted * self.clean_ms / 1e3 / (wall_s * groups) if wall_s else 0.0


def inner_of(lines: Iterable[Mapping[str, Any]], data: Slices) -> Inner | None:
    """Compute the inner steps from the notes, by wall clock; None if there were none.

    The ranks of a group step together, so only those of its first rank are counted.
    """
    notes: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        if line.get("note") in NOTES and line["rank"] == 0:
            notes[line["note"]].append(line)
    done = notes["inner_commit"]
    if not done:
        return None
    steps = 1 + max(line["data"]["inner_step"] for line in done)
    losses = [line["data"]["loss"] for line in notes["metrics"] if "loss" in line["data"]]
    return Inner(
        steps=steps,
        done=len(done),
        counted=(data.once + data.twice) * steps,
        repeated=len(notes["inner_abort"]),
        torn=len(notes["inner_torn"]),
        clean_ms=_clean_ms(done),
        first_loss=_mean(losses[:FEW]),
        last_loss=_mean(losses[-FEW:]),
    )


def _clean_ms(done: Sequence[Mapping[str, Any]]) -> float:
    by_process: dict[tuple[str, int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for line in done:
        by_process[line["group"], line["rank"], line["inc"]].append(line)
    gaps = [
        (b["wall"] - a["wall"]) * 1e3
        for mine in by_process.values()
        for a, b in pairwise(mine)
        if b["data"]["slice"] == a["data"]["slice"]
        and b["data"]["inner_step"] == a["data"]["inner_step"] + 1
    ]
    return statistics.median(gaps) if gaps else float("nan")


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else float("nan")

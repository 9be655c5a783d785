"""A job whose groups step alone: how its inner steps went, beside its synchronisations. Pure.

Reads the notes of traces. An inner step *counts* if its slice of the data was consumed by a
synchronisation; those of a group that was killed before it are computed again by another.
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
"""Losses at either end of the run, of which the mean is told."""
ALONE = frozenset({"local_sgd", "diloco", "hsdp_diloco", "async"})
"""Of `trainer.py`: those whose groups step alone."""
NOTES = frozenset({"inner_commit", "inner_abort", "inner_torn", "metrics"})


@dataclass(frozen=True)
class Inner:
    """The inner steps of a run."""

    steps: int
    """Of one synchronisation."""
    done: int
    """Committed by their groups."""
    counted: int
    """Of these, and of those of a group that was lost after its vote: in a synchronisation."""
    repeated: int
    torn: int
    """How often a group had to begin anew from the last synchronisation."""
    clean_ms: float
    """Median time from one to the next, of one group between two synchronisations."""
    first_loss: float
    last_loss: float

    @property
    def learned(self) -> bool:
        """Whether the loss has fallen."""
        return self.last_loss < self.first_loss

    def goodput(self, groups: int, wall_s: float) -> float:
        """Counted steps x clean step / (wall x groups): as if no group were ever away."""
        return self.counted * self.clean_ms / 1e3 / (wall_s * groups) if wall_s else 0.0


def inner_of(lines: Iterable[Mapping[str, Any]], data: Slices) -> Inner | None:
    """Of the notes, by wall clock; None: there was no inner step.

    The ranks of a group step together, so that those of its first one are counted.
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

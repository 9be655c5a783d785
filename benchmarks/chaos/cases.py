"""The matrix: which faults, where. Pure.

A place is one rank, one group, or all groups but one. Where a layout makes two of them the same,
it is done once. Cases that can be had from one running job share one: a `Suite`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fft.messages.fault_plans import PHASES

PACE_S = 0.02
HANG_GRACE_S = 2.0
HANGS_FOR_S = 8.0
"""Longer than threshold and grace: it is unwound or ended, where it is noticed at all."""
DECIDED = frozenset({"decided"})
_QUICK_BUS = ("connect_timeout=1", "bus_retry=0.5", "bus_limit=3")
_GRACE = (f"hang_grace={HANG_GRACE_S:g}",)


@dataclass(frozen=True)
class Layout:
    """Groups x ranks in each."""

    groups: int
    ranks: int

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.groups}x{self.ranks}"

    @property
    def title(self) -> str:
        """For people."""
        ranks = f"{self.ranks} FSDP2 ranks" if self.ranks > 1 else "1 rank"
        return f"{self.groups} groups × {ranks}"

    @property
    def phases(self) -> tuple[str, ...]:
        """Those that its steps have: a model without FSDP2 waits for no single reduction."""
        return tuple(p for p in PHASES if self.ranks > 1 or p != "after_allreduce")

    def places(self, whole_groups: bool) -> dict[str, list[tuple[str, int | None]]]:
        """(group, rank) of each place; rank None: the fault is the group's. Group 0 stays."""
        last = self.groups - 1
        every = [None] if whole_groups else list(range(self.ranks))
        found: dict[str, list[tuple[str, int | None]]] = {}
        if self.ranks > 1 or not whole_groups:
            found["1 rank"] = [(str(last), 0)]
        if self.ranks > 1 or whole_groups:
            found["1 group"] = [(str(last), r) for r in every]
        if last > 1:
            found["all but one"] = [(str(g), r) for g in range(1, last + 1) for r in every]
        return found


LAYOUTS = {layout.name: layout for layout in (Layout(3, 1), Layout(2, 2))}
FITTING = {
    "gpt": ("3x1", "2x2"),
    "cnn": ("3x1", "2x2"),
    "ddp": ("3x1",),
    "local_sgd": ("3x1",),
    "diloco": ("3x1",),
    "async": ("3x1",),
    "hsdp_diloco": ("2x2",),
    "pipeline": ("2x2",),
    "pipeline_ahead": ("2x2",),
}
"""Loops of `trainer.py`, and the layouts that each can train in. `gpt` and `cnn` are hsdp's."""


@dataclass(frozen=True)
class Case:
    """One fault at one phase and place."""

    kind: str
    """As in the table: a hang with the interpreter's lock is a kind of its own."""
    phase: str
    place: str
    entries: tuple[dict[str, Any], ...] = ()
    """Faults to be commanded, without names and steps."""
    evict: tuple[str, ...] = ()
    """GROUP or GROUP.RANK to be evicted instead."""
    leaves: tuple[str, ...] = ()
    """Groups that nobody brings back but us."""

    @property
    def name(self) -> str:
        """``kind/phase/place``, for people and for --case."""
        return f"{self.kind}/{self.phase}/{self.place}".replace(" ", "-")


@dataclass(frozen=True)
class Suite:
    """Cases for one job, one after the other."""

    name: str
    cases: tuple[Case, ...]
    timeouts: tuple[str, ...] = ()
    """Of the workers, NAME=SECONDS, where the defaults would make the matrix take hours."""
    allowed: frozenset[str] = field(default=frozenset())
    """Findings of the audit that DESIGN promises for these faults."""
    ends: bool = False
    """The job ends with its only case, by design."""


def suites(layout: Layout) -> list[Suite]:
    """Everything, for one layout."""
    transient = [
        *_by_phase(layout, "exception"),
        *_by_phase(layout, "network_cut"),
        *_placed(layout, "one_sided", "after_allreduce", {"kind": "one_sided"}),
        *_placed(layout, "slow", "before_allreduce", {"kind": "slow", "seconds": 0.2, "steps": 3}),
        Case("lighthouse_restart", "-", "the service", ({"kind": "lighthouse_restart"},)),
        # from here on the weights are NaN
        *_placed(layout, "nan_gradient", "before", {"kind": "nan_gradient", "where": "before"}),
    ]
    stuck = [
        *_by_phase(layout, "hang", seconds=HANGS_FOR_S),
        *_by_phase(layout, "hang", "hang with the lock", seconds=HANGS_FOR_S, holding_gil=True),
        *_by_phase(layout, "stop", seconds=HANGS_FOR_S),
    ]
    poisoned = _placed(layout, "nan_gradient", "after", {"kind": "nan_gradient", "where": "after"})
    restart = Case("bus_restart", "-", "the service", ({"kind": "bus_restart"},))
    return [
        Suite("transient", tuple(transient)),
        Suite("deaths", (*_by_phase(layout, "kill"), *_drains(layout), *_evictions(layout))),
        Suite("stuck", tuple(stuck), _GRACE),
        Suite("bus loss", tuple(_by_phase(layout, "bus_loss")), _QUICK_BUS, DECIDED),
        *(
            Suite(f"poisoned {i}", (case,), allowed=frozenset({"replicas_equal"}))
            for i, case in enumerate(poisoned)
        ),
        Suite("bus restart", (restart,), _QUICK_BUS, DECIDED, ends=True),
    ]


def _by_phase(layout: Layout, kind: str, called: str = "", **fields: Any) -> Iterator[Case]:
    for phase in layout.phases:
        yield from _placed(layout, called or kind, phase, {"kind": kind, "phase": phase, **fields})


def _placed(layout: Layout, called: str, phase: str, fault: dict[str, Any]) -> list[Case]:
    return [
        Case(called, phase, place, tuple({**fault, "group": g, "rank": r} for g, r in ranks))
        for place, ranks in layout.places(whole_groups=False).items()
    ]


def _drains(layout: Layout) -> Iterator[Case]:
    for place, groups in layout.places(whole_groups=True).items():
        if place != "1 rank":  # only a group can be drained
            names = tuple(group for group, _ in groups)
            entries = tuple({"kind": "drain", "group": name} for name in names)
            yield Case("drain", "vote", place, entries, leaves=names)


def _evictions(layout: Layout) -> Iterator[Case]:
    for place, groups in layout.places(whole_groups=True).items():
        words = tuple(g if rank is None else f"{g}.{rank}" for g, rank in groups)
        yield Case("evict", "-", place, evict=words)

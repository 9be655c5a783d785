"""The fault matrix: the faults and their places. Pure.

A place is one rank, one group, or all groups but one. If a layout makes two places equal, the case
is run once. Cases that can share a running job form a `Suite`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fft.messages.fault_plans import PHASES

PACE_S = 0.02
HANG_GRACE_S = 2.0
HANGS_FOR_S = 8.0
"""Seconds above threshold and grace, so that a hang that is noticed is unwound or ended."""
DECIDED = frozenset({"decided"})
_QUICK_BUS = ("connect_timeout=1", "bus_retry=0.5", "bus_limit=3")
_GRACE = (f"hang_grace={HANG_GRACE_S:g}",)


@dataclass(frozen=True)
class Layout:
    """The number of groups and of ranks in each."""

    groups: int
    ranks: int

    @property
    def name(self) -> str:
        """The name on the command line."""
        return f"{self.groups}x{self.ranks}"

    @property
    def title(self) -> str:
        """The name in tables."""
        ranks = f"{self.ranks} FSDP2 ranks" if self.ranks > 1 else "1 rank"
        return f"{self.groups} groups × {ranks}"

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases that its steps have: a model without FSDP2 waits for no single reduction."""
        return tuple(p for p in PHASES if self.ranks > 1 or p != "after_allreduce")

    def places(self, whole_groups: bool) -> dict[str, list[tuple[str, int | None]]]:
        """Return (group, rank) of each place; rank None if the fault is the group's.

        Group 0 is spared.
        """
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
"""Layouts in which each trainer of `trainer.py` can run; `gpt` and `cnn` use the spec hsdp."""


@dataclass(frozen=True)
class Case:
    """One fault at one phase and place."""

    kind: str
    """Kind as in the table; a hang with the interpreter's lock is a separate kind."""
    phase: str
    place: str
    entries: tuple[dict[str, Any], ...] = ()
    """Faults to command, without names and steps."""
    evict: tuple[str, ...] = ()
    """GROUP or GROUP.RANK to evict instead."""
    leaves: tuple[str, ...] = ()
    """Groups that only the benchmark brings back."""

    @property
    def name(self) -> str:
        """The case as ``kind/phase/place``, for tables and for --case."""
        return f"{self.kind}/{self.phase}/{self.place}".replace(" ", "-")


@dataclass(frozen=True)
class Suite:
    """Cases for one job, run one after the other."""

    name: str
    cases: tuple[Case, ...]
    timeouts: tuple[str, ...] = ()
    """Timeouts of the workers, NAME=SECONDS, if the defaults would make the matrix take hours."""
    allowed: frozenset[str] = field(default=frozenset())
    """Findings of the audit that DESIGN permits for these faults."""
    ends: bool = False
    """Whether the job ends with its only case, by design."""


def suites(layout: Layout) -> list[Suite]:
    """Return all suites of one layout."""
    transient = [
        *_by_phase(layout, "exception"),
        *_by_phase(layout, "network_cut"),
        *_placed(layout, "one_sided", "after_allreduce", {"kind": "one_sided"}),
        *_placed(layout, "slow", "before_allreduce", {"kind": "slow", "seconds": 0.2, "steps": 3}),
        Case("lighthouse_restart", "-", "the service", ({"kind": "lighthouse_restart"},)),
        *_placed(layout, "nan_gradient", "before", {"kind": "nan_gradient", "where": "before"}),
        *_placed(layout, "nan_gradient", "after", {"kind": "nan_gradient", "where": "after"}),
    ]
    stuck = [
        *_by_phase(layout, "hang", seconds=HANGS_FOR_S),
        *_by_phase(layout, "hang", "hang with the lock", seconds=HANGS_FOR_S, holding_gil=True),
        *_by_phase(layout, "stop", seconds=HANGS_FOR_S),
    ]
    restart = Case("bus_restart", "-", "the service", ({"kind": "bus_restart"},))
    return [
        Suite("transient", tuple(transient)),
        Suite("deaths", (*_by_phase(layout, "kill"), *_drains(layout), *_evictions(layout))),
        Suite("stuck", tuple(stuck), _GRACE),
        Suite("bus loss", tuple(_by_phase(layout, "bus_loss")), _QUICK_BUS, DECIDED),
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
        if place != "1 rank":  # a drain applies to groups only
            names = tuple(group for group, _ in groups)
            entries = tuple({"kind": "drain", "group": name} for name in names)
            yield Case("drain", "vote", place, entries, leaves=names)


def _evictions(layout: Layout) -> Iterator[Case]:
    for place, groups in layout.places(whole_groups=True).items():
        words = tuple(g if rank is None else f"{g}.{rank}" for g, rank in groups)
        yield Case("evict", "-", place, evict=words)

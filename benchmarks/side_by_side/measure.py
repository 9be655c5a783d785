"""The figures of one repetition, computed from its events. Pure.

Times are of the machine's monotonic clock, which all processes share. The fault is the first event
``fault``. The *survivors* are the processes that had committed before it, without those of the
victim's group if the fault removes that.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from benchmarks.side_by_side.events import LAUNCHER, Event
from benchmarks.side_by_side.rows import Row

_NS_PER_MS = 1e6


@dataclass(frozen=True)
class Outcome:
    """The columns. None: it never came, or the row has no such figure (see ``never``)."""

    never: bool = False
    """A survivor did not commit again within the limit."""
    waited_s: float | None = None
    """How long the recovery was waited for, if it never came."""
    next_commit_ms: float | None = None
    """Time from the fault to the next commit of the last survivor."""
    whole_ms: float | None = None
    """Time from the fault to a step that all groups contributed to and committed."""
    gap_ms: float | None = None
    """Longest time between two commits of a survivor, around or after the fault."""
    attempts_lost: int | None = None
    """Attempts lost by the survivor that lost most."""
    transfers: int | None = None
    """State transfers to processes that had lost nothing."""
    splits: int | None = None
    """Attempts that one process committed and another one of the same attempt did not."""
    phantoms: int | None = None
    """Commits that changed no parameter."""
    mismatches: int | None = None
    """Steps whose parameters differ between groups."""
    died: int | None = None
    """Processes that ended without a request."""
    step_p50_ms: float | None = None
    step_p99_ms: float | None = None
    cost_p50_ms: float | None = None
    cost_p99_ms: float | None = None
    memory_mib: float | None = None
    """Resident memory of a trainer and its children, mean over the ranks."""
    base_step_ms: float | None = None
    """Median step before the fault."""

    def plain(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return asdict(self)


def outcome(row: Row, events: Iterable[Event]) -> Outcome:
    """Compute all figures of a repetition."""
    ordered = sorted(events, key=lambda event: int(event["m"]))
    over = next((n for n, event in enumerate(ordered) if event["e"] == "over"), len(ordered))
    ordered = ordered[: over + 1]  # after this event the launcher ends the processes, one by one
    return _quiet(row, ordered) if row.fault is None else _broken(row, ordered)


# --- rows with a fault ------------------------------------------------------------------


def fault_at(events: Iterable[Event]) -> int | None:
    """Return the time of the fault in ns."""
    return next((event["m"] for event in events if event["e"] == "fault"), None)


def survivors(row: Row, events: Sequence[Event]) -> list[int]:
    """Return the pids of the survivors."""
    at = fault_at(events)
    away = row.victim[0] if row.fault is not None and row.fault.lost == "group" else LAUNCHER
    found = {
        e["pid"]: None
        for e in events
        if e["e"] == "commit" and e["g"] != away and (at is None or e["m"] < at)
    }
    return list(found)


def commits_after(events: Sequence[Event], pid: int) -> list[Event]:
    """Return the commits of one process after the fault."""
    at = fault_at(events)
    if at is None:
        return []
    return [e for e in events if e["e"] == "commit" and e["pid"] == pid and e["m"] > at]


def whole_at(row: Row, events: Sequence[Event]) -> int | None:
    """Return when the last group had committed the first step after the fault that all contributed
    to."""
    at = fault_at(events)
    steps: dict[int, dict[tuple[int, int], int]] = defaultdict(dict)
    for e in events:
        is_later = e["e"] == "commit" and at is not None and e["m"] > at
        if is_later and e["in"] and e["n"] == row.groups:
            steps[e["step"]].setdefault((e["g"], e["r"]), e["m"])
    whole = [max(who.values()) for who in steps.values() if len(who) == row.groups * row.ranks]
    return min(whole, default=None)


def _broken(row: Row, events: Sequence[Event]) -> Outcome:
    at, pids = fault_at(events), survivors(row, events)
    assert at is not None, "the launcher does not measure a repetition without its fault"
    first = [commits_after(events, pid)[:1] for pid in pids]
    never = not pids or not all(first)
    end = events[-1]["m"]
    whole = whole_at(row, events) if row.whole_s else None
    after = [e for e in events if e["m"] > at]
    return Outcome(
        never=never,
        waited_s=(end - at) / 1e9 if never else None,
        next_commit_ms=None if never else (max(e[0]["m"] for e in first) - at) / _NS_PER_MS,
        whole_ms=None if whole is None else (whole - at) / _NS_PER_MS,
        gap_ms=max((_gap(events, pid, at, end) for pid in pids), default=None),
        attempts_lost=max((_count(after, "abort", pid) for pid in pids), default=0),
        transfers=sum(_count(after, "recovered", pid) for pid in pids),
        splits=splits(events),
        phantoms=sum(e["e"] == "commit" and e["before"] == e["after"] for e in events),
        mismatches=mismatches(events),
        died=_died(row, events),
        base_step_ms=_median_step([e for e in events if e["m"] < at]),
    )


def _count(events: Iterable[Event], what: str, pid: int) -> int:
    return sum(e["e"] == what and e["pid"] == pid for e in events)


def _gap(events: Iterable[Event], pid: int, at: int, end: int) -> float:
    """Return the longest gap; if a process never commits again, it lasts until the repetition's
    end."""
    times = [e["m"] for e in events if e["e"] == "commit" and e["pid"] == pid]
    gaps = (b - a for a, b in pairwise([*times, max(end, times[-1])]) if b >= at)
    return float(max(gaps)) / _NS_PER_MS


def splits(events: Iterable[Event]) -> int:
    """Return the attempts (same step, same quorum or epoch) with both outcomes among
    contributors."""
    ends: dict[tuple[int, int], set[str]] = defaultdict(set)
    for e in events:
        if e["e"] in ("commit", "abort") and e["in"]:
            step = e["step"] - 1 if e["e"] == "commit" else e["step"]
            ends[e["q"], step].add(e["e"])
    return sum(len(found) == 2 for found in ends.values())


def mismatches(events: Iterable[Event]) -> int:
    """Return the steps after which a rank's parameters differ from its counterpart's in another
    group."""
    sums: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for e in events:
        if e["e"] == "commit":
            sums[e["step"], e["r"]][e["g"]] = e["after"]
    return len({step for (step, _), found in sums.items() if len(set(found.values())) > 1})


def _died(row: Row, events: Iterable[Event]) -> int:
    away = row.victim[0] if row.fault is not None and row.fault.lost == "group" else LAUNCHER
    return sum(e["e"] == "died" and e["of"][0] != away for e in events)


# --- rows without one -------------------------------------------------------------------


def _quiet(row: Row, events: Sequence[Event]) -> Outcome:
    steps, costs = [], []
    for pid in survivors(row, events):
        mine = [e for e in events if e["e"] == "commit" and e["pid"] == pid and e["measured"]]
        steps += [(b["m"] - a["m"]) / _NS_PER_MS for a, b in pairwise(mine)]
        costs += [e["cost_ns"] / _NS_PER_MS for e in mine[1:]]
    memory = [e["kib"] / 1024 for e in events if e["e"] == "enough"]
    if not steps:
        return Outcome(never=True)
    return Outcome(
        step_p50_ms=percentile(steps, 50),
        step_p99_ms=percentile(steps, 99),
        cost_p50_ms=percentile(costs, 50),
        cost_p99_ms=percentile(costs, 99),
        memory_mib=statistics.mean(memory) if memory else None,
        attempts_lost=sum(e["e"] == "abort" for e in events),
        splits=splits(events),
        phantoms=sum(e["e"] == "commit" and e["before"] == e["after"] for e in events),
        mismatches=mismatches(events),
        died=_died(row, events),
    )


def _median_step(events: Sequence[Event]) -> float | None:
    pids = {e["pid"] for e in events if e["e"] == "commit"}
    gaps = []
    for pid in pids:
        mine = [e["m"] for e in events if e["e"] == "commit" and e["pid"] == pid][5:]
        gaps += [(b - a) / _NS_PER_MS for a, b in pairwise(mine)]
    return statistics.median(gaps) if gaps else None


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * percent // 100) - 1))]

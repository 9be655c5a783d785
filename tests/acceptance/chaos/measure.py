"""The costs of a job's cases, computed from its traces alone. Times are wall clock of one host.

It reads only trace files. The columns are the times until the last surviving rank has reached an
event. *Heard by all*: it has received the record that ended the epoch of the fault. *Rolled back*:
it has restored its state at the start of the step. *Next commit*: it has committed a step after
that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fft.trace.audit import audit_dir
from tests.acceptance.chaos.cases import Case

Who = tuple[str, int, int]


@dataclass
class Done:
    """A case that was carried out."""

    case: Case
    names: list[str]
    """Names of its faults in the traces; if empty, ``began`` is the time of the request."""
    began: float
    """Wall clock in seconds."""
    over: float = math.inf
    """Time at which the whole job was working again."""


@dataclass(frozen=True)
class Row:
    """One case. Times are in ms from the first of its faults; None if the event did not happen."""

    layout: str
    kind: str
    phase: str
    place: str
    noticed: str
    heard_ms: float | None
    rolled_back_ms: float | None
    next_commit_ms: float | None
    attempts_lost: int
    bytes_healed: int
    audit: str
    """``clean``, or the findings of the audit of the job that the case was a part of."""

    def plain(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return asdict(self)


def judged(directory: Path, allowed: Iterable[str]) -> str:
    """Audit: return ``clean`` or the findings, beginning with VIOLATED if one is not
    ``allowed``."""
    findings = [f for f in audit_dir(directory).findings if f.violation is not None]
    broken = {f.name: f"{f.name}: {f.violation} ({f.place})" for f in findings}
    if bad := [text for name, text in broken.items() if name not in set(allowed)]:
        return "VIOLATED: " + "; ".join(bad)
    return f"by design: {', '.join(sorted(broken))}" if broken else "clean"


def median_step_ms(lines: list[dict[str, Any]], groups: int) -> float:
    """Return the median time between commits of the whole job, on one rank, in one epoch."""
    mine = [r for r in lines if r.get("on") == "applied" and (r["group"], r["rank"]) == ("0", 0)]
    steps = [
        (b["wall"] - a["wall"]) * 1e3
        for a, b in pairwise(mine)
        if (a["epoch"], a["inc"]) == (b["epoch"], b["inc"]) and len(a["members"]) == groups
    ]
    return statistics.median(steps) if steps else float("nan")


def rows(
    layout: str, done: Iterable[Done], lines: list[dict[str, Any]], audit: str
) -> Iterator[Row]:
    """Return a row for each case of a job that has ended, from all its ``lines``."""
    for one in done:
        start = _start(lines, one)
        window = [line for line in lines if start <= line["wall"] < one.over]
        epoch = max((r["epoch"] for r in lines if r["wall"] < start and "epoch" in r), default=0)
        inside = {_who(line) for line in lines if line.get("epoch") == epoch}
        yield _row(layout, one.case, _Window(window, start, epoch, inside), audit)


@dataclass(frozen=True)
class _Window:
    """The trace lines from the fault of a case until its job was whole again."""

    lines: list[dict[str, Any]]
    start: float
    epoch: int
    """The epoch in which the fault met the job."""
    inside: set[Who]

    def ends(self) -> list[dict[str, Any]]:
        """Return the records that ended an epoch, in order."""
        found = {e["record"]["n"]: e["record"] for r in self.lines if "record" in (e := _event(r))}
        return [
            record
            for _, record in sorted(found.items())
            if record["epoch"] >= self.epoch and (record["kind"] == "abort" or record["change"])
        ]

    def firsts(self, mark: Callable[[dict[str, Any]], bool]) -> dict[Who, float]:
        """Return when each member of the epoch first wrote a line with that mark."""
        found: dict[Who, float] = {}
        for line in self.lines:
            if _who(line) in self.inside and mark(line):
                found.setdefault(_who(line), line["wall"])
        return found

    def last_ms(self, found: dict[Who, float], lived_on: Iterable[Who]) -> float | None:
        """Return the time of the last survivor (of all members if there is none), in ms from the
        fault."""
        walls = [found[who] for who in lived_on if who in found] or list(found.values())
        return (max(walls) - self.start) * 1e3 if walls else None


def _start(lines: list[dict[str, Any]], one: Done) -> float:
    walls = [
        r["wall"] for r in lines if r.get("note") == "inject" and r["data"]["name"] in one.names
    ]
    return min(walls, default=one.began)


def _event(line: dict[str, Any]) -> dict[str, Any]:
    return line.get("event") or {}


def _who(line: dict[str, Any]) -> Who:
    return line["group"], line["rank"], line["inc"]


def _row(layout: str, case: Case, window: _Window, audit: str) -> Row:
    ends = window.ends()
    end = ends[0] if ends else None
    at = next((line["step"] for line in window.lines if "step" in line), 0)
    step = end["step"] if end else at
    commits = window.firsts(lambda r: r.get("on") == "applied" and r["step"] > step)
    heard: dict[Who, float] = {}
    restored: dict[Who, float] = {}
    if end is not None:
        n, token = end["n"], [end["epoch"], end["txn"]]
        heard = window.firsts(lambda r: _event(r).get("record", {}).get("n", -1) >= n)
        restored = window.firsts(
            lambda r: r.get("on") == "restored" and _event(r)["token"] == token
        )
    healed = [_event(r)["bytes"] for r in window.lines if _event(r).get("type") == "healed"]
    return Row(
        layout=layout,
        kind=case.kind,
        phase=case.phase,
        place=case.place,
        noticed=_noticed(end),
        heard_ms=window.last_ms(heard, commits),
        rolled_back_ms=window.last_ms(restored, commits),
        next_commit_ms=window.last_ms(commits, commits),
        attempts_lost=sum(record["kind"] == "abort" for record in ends),
        bytes_healed=sum(healed),
        audit=audit,
    )


def _noticed(end: dict[str, Any] | None) -> str:
    if end is None:
        return "nobody had to"
    if end["kind"] == "abort":
        return str(end["cause"]).splitlines()[0]
    if end["leavers"]:
        return f"left with a commit: group {', '.join(end['leavers'])}"
    return "let in by a commit"

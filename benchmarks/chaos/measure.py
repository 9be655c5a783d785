"""What the cases of a job cost, out of its traces alone. Times are wall clock of one host.

Reads trace files only. *Heard by all*: the last of those who lived on has heard the record that
ended the epoch of the fault. *Rolled back*: the last of them has its start of the step back. *Next
commit*: the last of them has committed a step after it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.chaos.cases import Case, Suite
from fft.audit import audit_dir, read_trace, trace_files

Who = tuple[str, int, int]


@dataclass
class Done:
    """A case that was carried out."""

    case: Case
    names: list[str]
    """Of its faults in the traces; empty: ``began`` is when it was asked for."""
    began: float
    """Wall clock, s."""
    over: float = math.inf
    """When the whole job was at work again."""


@dataclass(frozen=True)
class Row:
    """One case. Times in ms from the first of its faults; None: that did not happen."""

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
    """``clean``, or the findings; of the job that the case was a part of."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def read_lines(
    directory: Path, keep: Callable[[dict[str, Any]], bool] = lambda line: True
) -> list[dict[str, Any]]:
    """All transitions and notes of a job by time; of a long one, ``keep`` what is needed."""
    lines = [
        line
        for path in trace_files(directory)
        for _, line in read_trace(path).lines
        if line["kind"] in ("transition", "note") and keep(line)
    ]
    return sorted(lines, key=lambda line: line["wall"])


def judged(directory: Path, allowed: Iterable[str]) -> tuple[bool, str]:
    """The audit: whether nothing was found but what is ``allowed``, and what to call that."""
    findings = [f for f in audit_dir(directory).findings if f.violation is not None]
    broken = {f.name: f"{f.name}: {f.violation} ({f.place})" for f in findings}
    bad = [text for name, text in broken.items() if name not in set(allowed)]
    if bad:
        return False, "VIOLATED: " + "; ".join(bad)
    return True, f"by design: {', '.join(sorted(broken))}" if broken else "clean"


def median_step_ms(lines: list[dict[str, Any]], groups: int) -> float:
    """Median of the time from commit to commit of the whole job, on one rank, in one epoch."""
    mine = [r for r in lines if r.get("on") == "applied" and (r["group"], r["rank"]) == ("0", 0)]
    steps = [
        (b["wall"] - a["wall"]) * 1e3
        for a, b in pairwise(mine)
        if (a["epoch"], a["inc"]) == (b["epoch"], b["inc"]) and len(a["members"]) == groups
    ]
    return statistics.median(steps) if steps else float("nan")


def rows(layout: str, suite: Suite, done: list[Done], directory: Path) -> list[Row]:
    """A row for each case of a job that has ended."""
    _, audit = judged(directory, suite.allowed)
    lines = read_lines(directory)
    found = []
    for one in done:
        start = _start(lines, one)
        window = [line for line in lines if start <= line["wall"] < one.over]
        found.append(_row(layout, one.case, lines, window, start, audit))
    return found


def _start(lines: list[dict[str, Any]], one: Done) -> float:
    walls = [
        r["wall"] for r in lines if r.get("note") == "inject" and r["data"]["name"] in one.names
    ]
    return min(walls, default=one.began)


def _event(line: dict[str, Any]) -> dict[str, Any]:
    return line.get("event") or {}


def _who(line: dict[str, Any]) -> Who:
    return line["group"], line["rank"], line["inc"]


def _last(found: dict[Who, float], start: float) -> float | None:
    return (max(found.values()) - start) * 1e3 if found else None


def _of(found: dict[Who, float], commits: dict[Who, float]) -> dict[Who, float]:
    """Of those who lived on; of all, if nobody did."""
    return {who: wall for who, wall in found.items() if who in commits} or found


def _row(
    layout: str,
    case: Case,
    lines: list[dict[str, Any]],
    window: list[dict[str, Any]],
    start: float,
    audit: str,
) -> Row:
    before = max((r["epoch"] for r in lines if r["wall"] < start and "epoch" in r), default=0)
    inside = {_who(r) for r in lines if r.get("epoch") == before}
    records = {e["record"]["n"]: e["record"] for r in window if "record" in (e := _event(r))}
    ends = [
        record
        for _, record in sorted(records.items())
        if record["epoch"] >= before and (record["kind"] == "abort" or record["change"])
    ]
    end = ends[0] if ends else None
    heard: dict[Who, float] = {}
    restored: dict[Who, float] = {}
    commits: dict[Who, float] = {}
    step = end["step"] if end else max((r["step"] for r in window[:1] if "step" in r), default=0)
    for r in window:
        event, who = _event(r), _who(r)
        if who not in inside:
            continue
        if end and event.get("record", {}).get("n", -1) >= end["n"]:
            heard.setdefault(who, r["wall"])
        if end and event.get("type") == "restored" and event["token"] == [end["epoch"], end["txn"]]:
            restored.setdefault(who, r["wall"])
        if event.get("type") == "applied" and r["step"] > step:
            commits.setdefault(who, r["wall"])
    return Row(
        layout=layout,
        kind=case.kind,
        phase=case.phase,
        place=case.place,
        noticed=_noticed(end),
        heard_ms=_last(_of(heard, commits), start),
        rolled_back_ms=_last(_of(restored, commits), start),
        next_commit_ms=_last(commits, start),
        attempts_lost=sum(record["kind"] == "abort" for record in ends),
        bytes_healed=sum(_event(r)["bytes"] for r in window if _event(r).get("type") == "healed"),
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

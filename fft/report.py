"""What the faults of a run cost, out of its traces: one row a rollback or membership change.

Reads trace files only. Times are wall clock of one host, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from fft.audit import Trace, read_trace


@dataclass(frozen=True, slots=True)
class Incident:
    """One fault with its consequences."""

    fault: str
    noticed: str
    rolled_back_ms: float | None
    """Fault → the last survivor has its start of the step back."""
    next_commit_ms: float | None
    """Fault → next commit on the last survivor."""
    attempts_lost: int
    bytes_healed: int


@dataclass(frozen=True, slots=True)
class _Line:
    wall: float
    who: tuple[str, int, int]
    record: dict[str, Any]


def incidents(directory: str | Path) -> list[Incident]:
    """Every fault of a run: injected ones, and ends of epochs that nobody planned."""
    traces = [read_trace(path) for path in sorted(Path(directory).glob("*.jsonl"))]
    lines = sorted(_lines(traces), key=lambda x: x.wall)
    ends = _epoch_ends(lines)
    injected = _injected(lines)
    found = [_incident(lines, wall, name, ends) for wall, name in injected]
    explained = {e for wall, _ in injected for e in [_first_end(ends, wall)] if e is not None}
    found += [
        _incident(lines, end["wall"], end["cause"] or end["kind"], ends)
        for end in ends
        if end["n"] not in explained
    ]
    return found


def fault_table(directory: str | Path) -> Table:
    """The incidents as a table."""
    table = Table(title="faults and what they cost")
    table.add_column("fault", overflow="fold")
    table.add_column("noticed by", overflow="fold", max_width=44)
    for name in ("ms to rolled back", "ms to next commit", "attempts lost", "bytes healed"):
        table.add_column(name, justify="right")
    for i in incidents(directory):
        table.add_row(
            i.fault,
            i.noticed,
            _ms(i.rolled_back_ms),
            _ms(i.next_commit_ms),
            str(i.attempts_lost),
            str(i.bytes_healed),
        )
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _lines(traces: Iterable[Trace]) -> Iterable[_Line]:
    for trace in traces:
        for _, record in trace.lines:
            if record["kind"] in ("transition", "note"):
                who = (record["group"], record["rank"], record["inc"])
                yield _Line(record["wall"], who, record)


def _event(line: _Line) -> dict[str, Any]:
    return line.record.get("event") or {}


def _epoch_ends(lines: list[_Line]) -> list[dict[str, Any]]:
    """Records that closed an epoch, each when it was first known: aborts, and last commits."""
    seen: dict[int, dict[str, Any]] = {}
    for line in lines:
        record = _event(line).get("record")
        if not record or record["n"] in seen:
            continue
        if record["kind"] == "abort" or (record["kind"] == "commit" and record["change"]):
            why = f"leaves: {', '.join(record['leavers'])}" if record["leavers"] else "a group joins"
            cause = record["cause"] if record["kind"] == "abort" else why
            seen[record["n"]] = {**record, "wall": line.wall, "cause": cause}
    return sorted(seen.values(), key=lambda r: r["wall"])


def _injected(lines: list[_Line]) -> list[tuple[float, str]]:
    first: dict[str, float] = {}
    for line in lines:
        if line.record.get("note") == "inject":
            data = line.record["data"]
            name = f"{data['name']} ({data['kind']}, step {data['step']})"
            first.setdefault(name, line.wall)
    return [(wall, name) for name, wall in first.items()]


def _first_end(ends: list[dict[str, Any]], wall: float) -> int | None:
    return next((e["n"] for e in ends if e["wall"] >= wall), None)


def _incident(
    lines: list[_Line], wall: float, name: str, ends: list[dict[str, Any]]
) -> Incident:
    end = next((e for e in ends if e["wall"] >= wall), None)
    if end is None:
        return Incident(name, "nobody had to notice", None, None, 0, 0)
    following = next((e["wall"] for e in ends if e["n"] > end["n"]), float("inf"))
    later = [x for x in lines if end["wall"] <= x.wall]
    commits = [x for x in later if x.record.get("to") in ("NORMAL", "HEALING", "DRAIN_WAIT")]
    applied = [x for x in commits if _event(x).get("type") == "applied"]
    survivors = {x.who for x in applied}
    first_commit = {who: min(x.wall for x in applied if x.who == who) for who in survivors}
    if end["kind"] == "commit":  # the change itself was a commit; the next one is what was delayed
        first_commit = {
            who: w for who in survivors if (w := _second(applied, who, end["step"])) is not None
        }
    restored = [x for x in later if _event(x).get("type") == "restored" and x.wall < following]
    healed = [
        _event(x)["bytes"]
        for x in later
        if _event(x).get("type") == "healed" and x.wall < following
    ]
    lost = {
        tuple(x.record["event"]["record"][k] for k in ("epoch", "txn"))
        for x in later
        if x.wall <= following
        and (_event(x).get("record") or {}).get("kind") == "abort"
        and (_event(x).get("record") or {})["n"] == end["n"]
    }
    return Incident(
        name,
        end["cause"],
        (max(x.wall for x in restored) - wall) * 1e3 if restored else None,
        (max(first_commit.values()) - wall) * 1e3 if first_commit else None,
        len(lost),
        sum(healed),
    )


def _second(applied: list[_Line], who: tuple[str, int, int], step: int) -> float | None:
    times = [x.wall for x in applied if x.who == who and x.record["step"] > step]
    return min(times) if times else None

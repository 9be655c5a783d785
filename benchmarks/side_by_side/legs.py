"""The parts of FFT's own time of a step, from its traces: medians over the steps. Pure.

A line of a trace has the time at which the engine took an event, and the time at which it had
handled and traced it. The clock is the machine's, so lines of several processes are comparable.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

LEGS = {
    "spread": "first vote → last vote",
    "vote": "last vote handled",
    "ballot": "→ its caster has all votes",
    "ballot handled": "handled",
    "decide": "→ decided and announced",
    "heard": "→ heard by the last",
    "decision handled": "handled",
    "apply": "→ optimizer stepped, on the last",
    "applied handled": "handled",
}
"""The parts in order, with their names on the page."""
FIRST = next(iter(LEGS))
SKIPPED = 30
"""Steps at the start that are not measured."""
_MS = 1e3

Line = Mapping[str, Any]


def legs(lines: Iterable[Line]) -> dict[str, float]:
    """Return the milliseconds by part; empty without commits."""
    by_txn: dict[tuple[int, int], dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        event = line.get("event")
        is_of_one = line["kind"] == "transition" and event and line["on"] in _OF_A_TXN
        if is_of_one and (txn := _txn(event)) is not None:
            by_txn[txn][line["on"]].append(line)
    found = [of for txn in list(by_txn.values())[SKIPPED:] if (of := _of_txn(txn))]
    if not found:
        return {}
    return {name: round(statistics.median(of[name] for of in found), 4) for name in LEGS}


_OF_A_TXN = ("prepared", "ballot", "decision", "applied")


def _txn(event: Line) -> tuple[int, int] | None:
    """Return the event's txn, as the line may already be at the next one; None for no decision."""
    if event["type"] == "decision":
        record = event["record"]
        return (record["epoch"], record["txn"]) if record and record["kind"] == "commit" else None
    epoch, txn = event["token"]
    return epoch, txn


def _of_txn(txn: Mapping[str, list[Line]]) -> dict[str, float] | None:
    """Return the times of one txn, or None if it was not a plain commit."""
    votes, decisions, applied = txn["prepared"], txn["decision"], txn["applied"]
    won = [line for line in decisions if line["event"]["won"]]
    if len(txn["ballot"]) != 1 or len(won) != 1 or not len(votes) == len(decisions) == len(applied):
        return None
    (ballot,), (decided,) = txn["ballot"], won
    last, heard, end = (
        max(some, key=lambda line: line["at"]) for some in (votes, decisions, applied)
    )
    points = [
        min(line["at"] for line in votes),
        last["at"],
        last["mono"],
        ballot["at"],
        ballot["mono"],
        decided["at"],
        heard["at"],
        heard["mono"],
        end["at"],
        end["mono"],
    ]
    return {name: (b - a) * _MS for name, (a, b) in zip(LEGS, pairwise(points), strict=True)}

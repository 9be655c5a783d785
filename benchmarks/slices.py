"""The consumption of the data, slice by slice: by the register, and by the notes of each process.

The txn that uses a slice consumes it. With leases that is the txn that commits while a group of its
epoch holds the slice; slices that are held or returned at the end are neither consumed nor lost. A
process that is killed after its vote writes no note, but its slice is in the register.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Slices:
    """Counts of slices. ``granted`` is ``once`` + ``twice`` + ``never`` + ``held``."""

    granted: int
    once: int
    twice: int
    never: int
    held: int
    """Slices held at the end, or returned by a lost group and not yet granted again."""

    @property
    def exact(self) -> bool:
        """Whether each granted slice is consumed once, or is still held."""
        return self.twice == 0 and self.never == 0

    def __str__(self) -> str:
        return f"{self.once} / {self.twice} / {self.never}"


@dataclass
class _Claims:
    """The sources that list a slice as consumed."""

    txns: set[tuple[int, int]] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)


def slices(lines: Iterable[Mapping[str, Any]]) -> Slices:
    """Count the slices of a whole run from its trace.

    Raises ValueError if a record in between is missing.
    """
    records: dict[int, Mapping[str, Any]] = {}
    claims: dict[int, _Claims] = defaultdict(_Claims)
    for line in lines:
        if record := (line.get("event") or {}).get("record"):
            records[record["n"]] = record
        if line.get("note") == "consumed" and (number := line["data"]["slice"]) is not None:
            claims[number].txns.add(tuple(line["data"]["token"]))
            claims[number].groups.add(line["group"])
    if not records:
        return Slices(0, 0, 0, 0, 0)
    _add_registered(records, claims)
    last = records[max(records)]
    held = {lease[0] for lease in last.get("leases", ())} | set(last.get("returned", ()))
    granted = set(range(last["cursor"]))
    twice = {n for n, by in claims.items() if len(by.txns) > 1 or len(by.groups) > 1 or n in held}
    never = granted - claims.keys() - held
    count = len(claims.keys() | granted)
    return Slices(
        count, len(claims) - len(twice), len(twice), len(never), len(held - claims.keys())
    )


def _add_registered(records: Mapping[int, Mapping[str, Any]], claims: dict[int, _Claims]) -> None:
    """Add the slices that each commit consumed: those held before it, or those it moved over."""
    first = min(records)
    for n in range(first + 1, max(records) + 1):
        if n not in records or n - 1 not in records:
            raise ValueError(f"record {n} of the register, or the one before it, is in no trace")
        before, record = records[n - 1], records[n]
        if record["kind"] != "commit":
            continue
        token = (record["epoch"], record["txn"])
        if before.get("leases"):
            inside = {entry["group"] for entry in before.get("members", ())}
            for number, group, *_ in before["leases"]:
                if record.get("bound") and group not in inside:
                    continue  # the group is local, and keeps the slice
                claims[number].txns.add(token)
                claims[number].groups.add(group)
        else:
            for number in range(before["cursor"], record["cursor"]):
                claims[number].txns.add(token)

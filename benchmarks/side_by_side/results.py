"""The results of a run: ``results.jsonl`` in its folder, one line per repetition.

A line has the row, the system, the number of the repetition, and its figures or the reason why
there are none. Lines of kind ``machine`` describe the machine. Lines are never rewritten, so an
interrupted run continues where it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.events import Event, lines
from benchmarks.side_by_side.measure import Outcome, outcome
from benchmarks.side_by_side.rows import ROWS, Row, System


@dataclass(frozen=True)
class Task:
    """One repetition."""

    row: Row
    system: System
    number: int

    @property
    def name(self) -> str:
        """The name of its folder, also used in the output."""
        return f"{self.row.name}.{self.system.name}.{self.number}"


class Results:
    """A run's folder."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path = directory / "results.jsonl"
        self.records: list[dict[str, Any]] = list(lines(self._path))

    def add(self, record: dict[str, Any]) -> None:
        """Append a record, and sync it to disk."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.records.append(record)
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def add_outcome(self, task: Task, found: Outcome) -> None:
        """Add a repetition that was run."""
        self.add({"kind": "repetition", **_key(task), **found.plain()})

    def add_legs(self, task: Task, found: dict[str, float]) -> None:
        """Add the parts of the protocol's time in a repetition, in ms."""
        self.add({"kind": "legs", **_key(task), "legs": found})

    def legs_of(self, row: Row, system: System) -> list[dict[str, float]]:
        """Return the parts of all repetitions that have them."""
        return [
            r["legs"]
            for r in self.records
            if r["kind"] == "legs" and r["row"] == row.name and r["system"] == system.name
            if r["legs"]
        ]

    def add_absence(self, row: Row, system: System, why: str) -> None:
        """Record that a system cannot be measured here."""
        self.add({"kind": "absent", "row": row.name, "system": system.name, "why": why})

    def done(self, task: Task) -> bool:
        """Whether the repetition is complete."""
        key = _key(task)
        return any(
            r["kind"] == "repetition" and all(r[name] == key[name] for name in key)
            for r in self.records
        )

    def of(self, row: Row, system: System) -> list[Outcome]:
        """Return all repetitions."""
        fields = Outcome.__dataclass_fields__
        return [
            Outcome(**{name: r[name] for name in fields if name in r})
            for r in self.records
            if r["kind"] == "repetition" and r["row"] == row.name and r["system"] == system.name
        ]

    def in_vain(self, row: Row, system: System) -> int:
        """Return the number of repetitions if no survivor committed in any of them."""
        found = self.of(row, system)
        return len(found) if all(one.never for one in found) else 0

    def absence(self, row: Row, system: System) -> str | None:
        """Return the reason why a system has no results in a row, if it is known."""
        found = [
            str(r["why"])
            for r in self.records
            if r["kind"] == "absent" and r["row"] == row.name and r["system"] == system.name
        ]
        return found[-1] if found else None

    def machines(self) -> list[dict[str, Any]]:
        """Return the machines and times of the measurements, one for each session."""
        return [r["machine"] for r in self.records if r["kind"] == "machine"]

    # --- raw events ---

    def keep_events(self, task: Task, events: Iterable[Event]) -> None:
        """Keep all lines of a repetition, in order."""
        path = self._events_of(task.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(event) + "\n" for event in events))

    def _events_of(self, name: str) -> Path:
        return self.directory / "events" / f"{name}.jsonl"

    def measured_again(self, directory: Path) -> Results:
        """Return these results in another folder, with all figures recomputed from the events."""
        again = Results(directory)
        for record in self.records:
            if record["kind"] != "repetition":
                again.add(record)
                continue
            name = f"{record['row']}.{record['system']}.{record['rep']}"
            events = list(lines(self._events_of(name)))
            figures = outcome(ROWS[record["row"]], events).plain() if events else {}
            again.add({**record, **figures})
        return again


def _key(task: Task) -> dict[str, Any]:
    return {"row": task.row.name, "system": task.system.name, "rep": task.number}

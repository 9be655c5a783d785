"""``fft audit`` of a job that was started several times: each start, and what it goes on from.

A start that begins with steps behind it has the state of a checkpoint. That is one which an earlier
start has committed: same step, lineage and place in the data. What was committed after it there is
on no lineage any more. With what the audit of each start says, every slice of the data is consumed
once on the lineage that results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fft.protocol.invariants import Finding
from fft.trace.audit import AuditReport, audit_dir
from fft.trace.starts import start_folders

Stand = tuple[int, int, int]
"""Step, cursor and batches of a state."""


@dataclass
class _Start:
    """What the traces of one start say."""

    begins: dict[str, tuple[Stand, str]] = field(default_factory=dict)
    """Lineage of a state that a participant began with → where it stands, and the place."""
    commits: dict[str, Stand] = field(default_factory=dict)
    resharded: dict[str, str] = field(default_factory=dict)
    """Lineage that a state got as it was loaded for another number of ranks → that it had."""


@dataclass
class JobAudit:
    """Result of an audit of all starts of a job."""

    starts: list[AuditReport]
    resumed: Finding

    @property
    def ok(self) -> bool:
        """Whether nothing was found in any start, nor between them."""
        return self.resumed.violation is None and all(start.ok for start in self.starts)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; of one start, that of `AuditReport`."""
        if len(self.starts) == 1:
            return self.starts[0].to_json()
        found = self.resumed
        told = {"checks": found.checks, "violation": found.violation, "place": found.place}
        starts = [start.to_json() for start in self.starts]
        return {"ok": self.ok, "resumed": told, "starts": starts}

    def render(self) -> str:
        """The report as text."""
        if len(self.starts) == 1:
            return self.starts[0].render()
        lines = [start.render() for start in self.starts]
        verdict = "VIOLATED" if self.resumed.violation else "ok"
        if not self.resumed.checks:
            verdict = "not checked: no start goes on from a checkpoint"
        text = f"{len(self.starts)} starts: resumed {self.resumed.checks} checks  {verdict}"
        if self.resumed.violation:
            text += f"\n    {self.resumed.place}: {self.resumed.violation}"
        return "\n".join([*lines, text, f"verdict of all: {'ok' if self.ok else 'NOT OK'}"])


def audit_job(directory: str | Path) -> JobAudit:
    """Audit all starts of a job. Raises AuditError: there is no trace of it."""
    root = Path(directory)
    later = [folder for folder in start_folders(root)[1:] if any(folder.glob("*.jsonl"))]
    folders = [root, *later]
    return JobAudit([audit_dir(folder) for folder in folders], _judge(folders))


def _judge(folders: list[Path]) -> Finding:
    """1: each start but the first goes on where an earlier one has committed."""
    finding, known = Finding("resumed"), dict[str, Stand]()
    for number, folder in enumerate(folders):
        start = _read(folder) if len(folders) > 1 else _Start()
        for lineage, (stand, place) in start.begins.items() if number else ():
            source = start.resharded.get(lineage, lineage)
            was = known.get(source)
            if source != lineage and was is not None:  # counted in slices of another size
                was = (was[0], stand[1], was[2])
            finding.expect(
                was == stand,
                f"it begins at (step, cursor, batches) {stand} of lineage {source}, where no "
                f"earlier start has committed{'' if was is None else f'; that was at {was}'}",
                place,
            )
            known[lineage] = stand
        known |= start.commits
    return finding


def _read(folder: Path) -> _Start:
    found = _Start()
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in _lines(path):
            if line.get("kind") == "header":
                at = line["start"]
                if at["step"] > 0:
                    stand = (at["step"], at["cursor"], at["batches"])
                    found.begins[at["lineage"]] = stand, f"{path.parent.name}/{path.name}:{number}"
            elif line.get("note") == "resumed" and line["data"]["as"] != line["data"]["lineage"]:
                found.resharded[line["data"]["as"]] = line["data"]["lineage"]
                continue
            record = (line.get("event") or {}).get("record")
            if record is not None and record["kind"] == "commit":
                stand = (record["step"], record["cursor"], record["batches"])
                found.commits[record["lineage"]] = stand
    return found


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Those of a trace that say where a state stands; whether they are whole `audit_dir` tells."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not any(word in text for word in (b'"header"', b'"resumed"', b'"commit"')):
                continue
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield number, line

"""``fft audit`` of a job that was started several times: check each start and the checkpoint that
it resumed from.

A start that begins at a step after 0 has the state of a checkpoint. An earlier start must have
committed that state or begun with it: same step, lineage and place in the data. Groups with
another number of ranks, or another mesh, may count the data in slices of another size. Commits of
the earlier start after that state are no longer on a lineage. Where the traces have digests, the
state must have the same bits as before. Stages that step separately are judged one by one, and all
ranks of a start must begin with the same checkpoint. A file of a copy in memory must have the
SHA-256 with which a rank of an earlier start had written it. Together with the audit of each start,
this shows that every slice of the data is consumed once on the resulting lineage.

Starts are read from the last to the first, so that only states that later starts begin with are
kept.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fft.protocol.invariants import Finding
from fft.trace.audit import AuditReport, audit_dir
from fft.trace.format import scope_folder, scope_folders
from fft.trace.inputs import batches_of
from fft.trace.last_lines import judge_ends
from fft.trace.starts import start_folders


class Stand(NamedTuple):
    """The position of a state."""

    step: int
    cursor: int
    batches: int
    unused: tuple[int, ...]
    """Slices before the cursor that were not consumed."""

    def __str__(self) -> str:
        told = f"step {self.step}, cursor {self.cursor} and {self.batches} batches"
        return told + (f", without slices {list(self.unused)}" if self.unused else "")


class _File(NamedTuple):
    """A file of a copy in memory; those of all groups hold the same shard."""

    attempt: str
    rank: str
    kind: str


@dataclass
class _Start:
    """The states in the traces of one start that it, or a later start, begins with."""

    items: int = 1
    """Number of data items in a slice: how many the ranks of a group take in a step."""
    begins: dict[tuple[str, Stand], str] = field(default_factory=dict)
    """(lineage, position) of a state that a participant began with → the first place."""
    commits: dict[str, Stand] = field(default_factory=dict)
    digests: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    """(lineage, rank number) → the state's digest, and the first place that states it."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    """Checkpoints that participants began with → the first place that states it."""
    resharded: dict[str, str] = field(default_factory=dict)
    """Lineage that a state got when it was loaded for another number of ranks, or another mesh →
    its previous lineage."""
    loaded: dict[_File, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    """Digests of the files that were loaded from copies in memory → the first place."""
    copied: dict[_File, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Digests of the files of copies in memory, of all groups."""

    def stands(self) -> dict[str, tuple[Stand, int]]:
        """Return lineage → (position, items in a slice) of the states it began with or
        committed."""
        found = (*self.begins, *self.commits.items())
        return {lineage: (stand, self.items) for lineage, stand in found}


@dataclass
class JobAudit:
    """Result of an audit of all starts of a job."""

    starts: list[AuditReport]
    resumed: Finding
    ends: Finding
    """Whether the traces still have the lines with which they ended."""

    @property
    def ok(self) -> bool:
        """Whether a step was committed, and no start, nor the transitions between, have
        findings."""
        found = self._has_violation or not all(start.ok for start in self.starts)
        return self.has_commits and not found

    @property
    def _has_violation(self) -> bool:
        """Whether a guarantee is violated that concerns the job rather than one start."""
        return any(f.violation is not None for f in (self.resumed, self.ends))

    @property
    def has_commits(self) -> bool:
        """Whether any start has committed a step; if not, the audit shows nothing."""
        return any(start.commits for start in self.starts)

    @property
    def is_only_incomplete(self) -> bool:
        """Whether traces have gaps, and there is no other finding."""
        is_sound = not self._has_violation and all(start.is_sound for start in self.starts)
        return is_sound and not all(start.ok for start in self.starts)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data; for a single start, that of `AuditReport`."""
        ends = _plain(self.ends)
        if len(self.starts) == 1:
            return {**self.starts[0].to_json(), "ok": self.ok, "ends": ends}
        starts = [start.to_json() for start in self.starts]
        return {"ok": self.ok, "resumed": _plain(self.resumed), "ends": ends, "starts": starts}

    def render(self) -> str:
        """Return the report as text."""
        if len(self.starts) == 1 and not self._has_violation:
            return self.starts[0].render()
        lines = [start.render(is_only=False) for start in self.starts]
        verdict = "VIOLATED" if self.resumed.violation else "ok"
        text = f"{verdict}  resumed: each start began with a state that an earlier start had"
        text = f"{len(self.starts)} starts: {text} ({self.resumed.checks} checks)"
        if not self.resumed.checks:
            text = f"{len(self.starts)} starts: not checked: no start goes on from a checkpoint"
        if self.resumed.violation:
            text += f"\n    {self.resumed.place}: {self.resumed.violation}"
        if self.ends.violation:
            text += "\nVIOLATED  ends: each trace still has the line with which it ended "
            text += f"({self.ends.checks} checks)"
            text += f"\n    {self.ends.place}: {self.ends.violation}"
        verdict = "ok" if self.ok else "NOT OK" if self.has_commits else "NOTHING COMMITTED"
        if self.is_only_incomplete:
            verdict = "INCOMPLETE: no violation in what was written"
        return "\n".join([*lines, text, f"verdict of all: {verdict}"])


def audit_job(directory: str | Path) -> JobAudit:
    """Audit all starts of a job. Raises FftError if the job has no trace."""
    root = Path(directory)
    later = [folder for folder in start_folders(root)[1:] if any(folder.glob("*.jsonl"))]
    starts = [audit_dir(folder) for folder in (root, *later)]
    for start in starts[:-1]:
        _resolve_doubts(start)
    return JobAudit(starts, _judge(root, later), judge_ends(root))


def _resolve_doubts(start: AuditReport) -> None:
    """Forgive that participants left in doubt: the next start has replaced the state of all."""
    for finding in (each for each in start.findings if each.name == "decided" and each.violation):
        finding.name, finding.violation = "resolved", None
    for scope in (*start.inner, *start.stages):
        _resolve_doubts(scope)


def _plain(finding: Finding) -> dict[str, Any]:
    return {"checks": finding.checks, "violation": finding.violation, "place": finding.place}


def _judge(root: Path, later: list[Path]) -> Finding:
    """Check guarantee 1: each later start resumes from an earlier state, and no start is missing.

    A start that is followed by another has left traces, and it could have committed steps.
    """
    finding = Finding("resumed")
    if not later:
        return finding
    there, last = {folder.name for folder in later}, int(later[-1].name[5:])
    for name in (f"start{number}" for number in range(2, last)):
        text = f"{name} has no traces, and {later[-1].name} came after it: they were removed"
        finding.expect(name in there, text, name)
    folders, begun = (root, *later), [dict[str, str]() for _ in later]
    scopes = {path.name for folder in folders for path in scope_folders(folder)[1:]}
    for scope in ("", *sorted(scopes)):
        starts = _read(root, [scope_folder(folder, scope) for folder in folders])
        _judge_scope(finding, starts, begun)
        _judge_copies(finding, starts)
    for had in begun:
        (name, first), *others = [*had.items()] or [("", "")]
        for other, place in others:
            text = f"it begins with the checkpoint {other}, and {first} with {name}"
            finding.expect(False, text, place)
    return finding


def _judge_copies(finding: Finding, starts: Sequence[_Start]) -> None:
    """Check that each file of a copy in memory has the digest with which a rank had written it."""
    known = dict[_File, set[str]]()
    for start in starts:
        for file, digests in start.loaded.items():
            for digest, place in digests.items():
                text = f"a file of rank {file.rank} from a copy in memory has SHA-256 {digest}"
                is_known = file not in known or digest in known[file]
                finding.expect(is_known, f"{text}, with which no rank has written it", place)
        known |= start.copied


def _judge_scope(
    finding: Finding, all_starts: Sequence[_Start], begun: Sequence[dict[str, str]]
) -> None:
    """Judge one scope of the job; ``begun`` collects the checkpoints of each later start."""
    first, *starts = all_starts
    known = first.stands()
    digests = first.digests
    for start, begins in zip(starts, begun, strict=True):
        begins |= {name: place for name, place in start.checkpoints.items() if name not in begins}
        for (lineage, stand), place in start.begins.items():
            source = start.resharded.get(lineage, lineage)
            was, items = known.get(source, (None, start.items))
            said = "" if was is None else f"; that was at {was}, with {items} items in a slice"
            finding.expect(
                was is not None and _is_same(stand, start.items, was, items),
                f"groups begin at {stand} of lineage {source}, with {start.items} items in a "
                f"slice, where no earlier start has committed or begun{said}",
                place,
            )
        loaded = {lineage for lineage, _ in start.begins}
        for (lineage, rank), (digest, place) in start.digests.items():
            if lineage in loaded and (lineage, rank) in digests:
                had, then = digests[lineage, rank]
                text = f"rank {rank} begins with digest {digest} of lineage {lineage}; {then} has"
                finding.expect(digest == had, f"{text} {had}", place)
        digests |= start.digests  # A later start may reach a lineage again, with other groups.
        known |= start.stands()


def _is_same(now: Stand, items: int, was: Stand, had: int) -> bool:
    """Whether both are the same place in the data, by the number of items in a slice."""
    return now.cursor * items == was.cursor * had and now._replace(cursor=0) == was._replace(
        cursor=0
    )


_ODD = (LookupError, TypeError, AttributeError)
"""Exceptions for a line that lacks a required field; `audit_dir` reports such lines."""


def _read(root: Path, folders: list[Path]) -> list[_Start]:
    """Return the starts of one scope, in order. ``root``: directory of the traces of all starts."""
    found: list[_Start] = []
    asked: set[str] = set()
    for folder in reversed(folders):
        paths, start = sorted(folder.glob("*.jsonl")), _Start()
        names = {path: path.relative_to(root.parent) for path in paths}
        for path, name in names.items():
            _take_header(start, path, f"{name}:1")
        asked |= {lineage for lineage, _ in start.begins}
        for path, name in names.items():
            for number, line in _lines_of(path, asked):
                with suppress(*_ODD):
                    _take(start, line, f"{name}:{number}", asked)
        asked |= {*start.resharded.values(), *(file.attempt for file in start.loaded)}
        found.append(start)
    return found[::-1]


def _take_header(start: _Start, path: Path, place: str) -> None:
    with path.open("rb") as file:
        line = _loaded(file.readline())
    with suppress(*_ODD):
        at = line["start"]
        if at["step"] > 0:
            unused = tuple(sorted(at["returned"]))
            stand = Stand(at["step"], at["cursor"], at["batches"], unused)
            start.begins.setdefault((at["lineage"], stand), place)
        start.items = batches_of(line)[0]


def _take(start: _Start, line: dict[str, Any], place: str, asked: set[str]) -> None:
    """Take one line, if it concerns a checkpoint or one of the lineages in ``asked``."""
    if line.get("note") == "resumed":
        told = line["data"]
        attempt = told.get("attempt", told["lineage"])
        start.checkpoints.setdefault(attempt, place)
        for file, digest in _files_of(told):
            start.loaded[file].setdefault(digest, place)
        if told["as"] in asked and told["as"] != told["lineage"]:
            start.resharded[told["as"]] = told["lineage"]
        return
    if line.get("note") == "memory_copy":
        for file, digest in _files_of(line["data"]):
            start.copied[file].add(digest)
        return
    event = line.get("event") or {}
    if event.get("digest") and event["type"] in ("applied", "healed") and line["lineage"] in asked:
        start.digests.setdefault((line["lineage"], line["rank"]), (event["digest"], place))
    record = event.get("record")
    if record is not None and record["kind"] == "commit" and record["lineage"] in asked:
        held = (lease[0] for lease in record["leases"])
        unused = tuple(sorted((*record["returned"], *held)))
        stand = Stand(record["step"], record["cursor"], record["batches"], unused)
        start.commits[record["lineage"]] = stand


def _files_of(data: dict[str, Any]) -> Iterator[tuple[_File, str]]:
    """Yield the files of a copy in memory in a note, with their digests."""
    for name, digest in data.get("files", {}).items():
        stem, _, kind = name.rpartition(".")
        yield _File(data["attempt"], stem.rpartition("r")[2], kind), digest


def _lines_of(path: Path, lineages: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines that may concern a lineage or a loaded checkpoint, unchecked."""
    words = [b'"resumed"', *(json.dumps(lineage).encode() for lineage in lineages)]
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            for word in words:
                if word in text:
                    yield number, _loaded(text)
                    break


def _loaded(text: bytes) -> dict[str, Any]:
    """Parse a line; empty if it is not a JSON object."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}

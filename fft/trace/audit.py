"""``fft audit``: read all traces of a run, replay them through the shipped core, judge them.

Pure but for reading files. Three questions, in this order: are the files whole (each line is
linked to the one before), does the machine of the spec do what the trace says (every event is
handled again, state and rows must match), and do the guarantees hold (``core.invariants``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fft.messages.protocol import Peer, Record, Token, UnreadableMessage, event_from_json
from fft.protocol.flow import Elsewhere
from fft.protocol.invariants import Finding, History, Move, judge
from fft.protocol.participant import Participant
from fft.protocol.spec import FsmSpec
from fft.protocol.state import Config
from fft.protocol.table import Table
from fft.trace.ends import divergences, ended_by_divergence, without_state
from fft.trace.flow import Register, judge_flow
from fft.trace.format import FORMAT, INNER, SCOPES, chain, inner_folder
from fft.trace.inner_steps import judge_inner_steps
from fft.trace.live_sets import judge_live_sets
from fft.util.errors import FftError

_GAP = "gap"
"""A line in the place of lines that could not be written: what came after it is not audited."""
_HANDLED = {"transition", "fenced", "refused", "deferred"}


class AuditError(FftError):
    """There is nothing to audit at the given place."""


@dataclass(slots=True)
class Trace:
    """One file, as far as it can be read."""

    path: Path
    lines: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """(line number from 1, record)"""
    torn: bool = False
    """The last lines were cut off, as by SIGKILL; the event that they tell of is left out."""
    damage: str | None = None

    @property
    def gaps(self) -> list[str]:
        """Where lines could not be written, and how many."""
        lost = [(n, line.get("lost")) for n, line in self.lines if line["kind"] == _GAP]
        return [f"{self.path.name}:{n}: {count} lines are missing here" for n, count in lost]


def read_trace(path: Path) -> Trace:
    """Read a file and follow its chain until the end or the first damage."""
    trace, link = Trace(path), ""
    raw = path.read_bytes()
    pieces = raw.split(b"\n")
    if pieces[-1] == b"":
        pieces.pop()
    else:
        pieces.pop()
        trace.torn = True
    for number, piece in enumerate(pieces, 1):
        problem = _damage(piece, link, number)
        if isinstance(problem, str):
            trace.damage = f"{path.name}:{number}: {problem}"
            return trace
        link = problem["h"]
        trace.lines.append((number, problem))
    return trace


def _damage(piece: bytes, link: str, number: int) -> dict[str, Any] | str:
    """The record of a line, or what is wrong with the line."""
    try:
        text = piece.decode()
        record = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter: lists within lists, 1000 deep
        return f"not JSON ({error}); the line was changed after it was written"
    if not isinstance(record, dict) or not isinstance(record.get("h"), str):
        return "no chain digest; the line is not from a trace"
    body = text[: text.rindex(',"h":')] + "}"
    if chain(link, body) != record["h"]:
        return "the line does not follow from the one before: changed, removed or inserted here"
    if record.get("seq") != number:
        return f"sequence number {record.get('seq')} instead of {number}"
    return record


@dataclass(slots=True)
class AuditReport:
    """Result of an audit. ``ok``: every file whole, every replay equal, every guarantee held.

    And the job did not end because its replicas differed, which FFT noticed as it shall, but of
    which no state is known to be right. ``gaps``: where a process could not write its trace. What
    it did from there on nobody knows.
    """

    directory: Path
    files: int
    events: int
    findings: list[Finding]
    torn: list[str]
    commits: int
    epochs: int
    bytes_healed: int
    gaps: list[str] = field(default_factory=list)
    divergences: list[str] = field(default_factory=list)
    """Each time that the votes told that states of replicas differ."""
    diverged: bool = False
    """The job ended with the last of them."""
    no_state: str | None = None
    """What is to be said of an end with ``NoState``."""
    inner: list[AuditReport] = field(default_factory=list)
    """Of the scopes inside of replica groups, each a job of its own; by group and its store."""
    stages: list[AuditReport] = field(default_factory=list)
    """Of the scopes of further stages."""
    register: Register | None = None
    """What the scopes that this one is bound to are compared with."""

    @property
    def ok(self) -> bool:
        """Whether nothing was found, and nothing is missing."""
        scopes = (*self.inner, *self.stages)
        whole = not self.gaps and not self.diverged and all(scope.ok for scope in scopes)
        return whole and all(f.violation is None for f in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "ok": self.ok,
            "directory": str(self.directory),
            "files": self.files,
            "events": self.events,
            "commits": self.commits,
            "epochs": self.epochs,
            "bytes_healed": self.bytes_healed,
            "torn_last_lines": self.torn,
            "gaps": self.gaps,
            "divergences": self.divergences,
            "diverged": self.diverged,
            "no_state": self.no_state,
            "inner": [scope.to_json() for scope in self.inner],
            "stages": [scope.to_json() for scope in self.stages],
            "invariants": [
                {
                    "name": f.name,
                    "checks": f.checks,
                    "compared": f.compared,
                    "verdict": _verdict(f),
                    "violation": f.violation,
                    "place": f.place,
                }
                for f in self.findings
            ],
        }

    def render(self) -> str:
        """The report as text."""
        lines = [
            f"audit of {self.directory}: {self.files} traces, {self.events} events, "
            f"{self.commits} commits, {self.epochs} epochs, {self.bytes_healed} bytes healed"
        ]
        for name in self.torn:
            lines.append(f"  note: {name} ends in a torn line (killed while writing); accepted")
        for f in self.findings:
            lines.append(f"  {f.name:<16} {f.checks:>7} checks  {_verdict(f)}")
            if f.violation is not None:
                lines.append(f"      {f.place}: {f.violation}")
        lines += [f"  INCOMPLETE: {gap}; the rest of this trace is left out" for gap in self.gaps]
        lines += [f"  replicas differed: {text}" for text in self.divergences]
        lines += [f"  the end: {self.no_state}"] if self.no_state is not None else []
        for scope in self.inner:
            lines += scope._as_part(f"inside of group {scope.directory.name}")
        for scope in self.stages:
            lines += scope._as_part(f"scope {scope.directory.name}")
        lines.append(f"verdict: {self._verdict()}")
        return "\n".join(lines)

    def _as_part(self, name: str) -> list[str]:
        """Of a larger report; whole if something is odd."""
        told = f"  {name}: {self.commits} commits, {self.epochs} epochs: {self._verdict()}"
        return [told, *([] if self.ok else [f"    {line}" for line in self.render().splitlines()])]

    def _verdict(self) -> str:
        if any(f.violation is not None for f in self.findings):
            return "VIOLATION"
        if odd := [scope.directory.name for scope in self.inner if not scope.ok]:
            return f"VIOLATION or INCOMPLETE inside of group {', '.join(odd)}"
        if odd := [scope.directory.name for scope in self.stages if not scope.ok]:
            return f"VIOLATION or INCOMPLETE in scope {', '.join(odd)}"
        kept = "INCOMPLETE: no violation in what was written" if self.gaps else "no violation"
        if self.diverged:
            return f"DIVERGED: the job ended because its replicas differ; {kept} of the protocol"
        if self.no_state is not None:
            return f"{kept}; the job ended with NoState"
        return kept


def _verdict(finding: Finding) -> str:
    """What to say of a finding; that there was nothing to check is no "ok"."""
    if finding.violation is not None:
        return "VIOLATED"
    if not finding.checks:
        return "not checked: the run has nothing of the kind"
    if finding.name != "replicas_equal":
        return "ok"
    if finding.compared:
        return f"ok, {finding.compared} digests compared"
    return 'ok by lineage; bits not checked: no two digests of one state (digest="commit")'


def trace_files(directory: str | Path) -> list[Path]:
    """The trace files of a run, by name. Raises ``AuditError`` if there is none."""
    paths = sorted(Path(directory).glob("*.jsonl"))
    if not paths:
        raise AuditError(f"{directory}: no trace files (*.jsonl); pass the run's --trace-dir")
    return paths


def read_lines(
    directory: str | Path, keep: Callable[[dict[str, Any]], bool] = lambda line: True
) -> list[dict[str, Any]]:
    """All transitions and notes of a run, by wall clock; of a long one, those to ``keep``.

    Raises ``AuditError`` if there is no trace.
    """
    found = (line for path in trace_files(directory) for _, line in read_trace(path).lines)
    lines = [line for line in found if line["kind"] != "header" and keep(line)]
    return sorted(lines, key=lambda line: line["wall"])


def audit_dir(directory: str | Path) -> AuditReport:
    """Audit every ``*.jsonl`` of a directory, and the scopes inside of groups, in folders of it.

    Raises:
        AuditError: there is no trace in it.
    """
    root = Path(directory)
    paths = trace_files(root)
    whole, replayed, history = Finding("trace_whole"), Finding("replay"), History()
    traces = [read_trace(path) for path in paths]
    for trace in traces:
        whole.expect(trace.damage is None, trace.damage or "", trace.path.name)
        _replay(trace, replayed, history)
    findings = [whole, replayed, *judge(history), judge_live_sets(history)]
    findings.append(judge_inner_steps(_notes(trace) for trace in traces))
    inner = [audit_dir(folder) for folder in sorted((root / INNER).glob("*"))]
    findings.append(_judge_inner_scopes(root, traces, {scope.directory: scope for scope in inner}))
    records = [record for record, _ in history.records().values()]
    stages = [audit_dir(folder) for folder in sorted((root / SCOPES).glob("*"))]
    register = _register_of(traces, records)
    if register is not None and register.bounds and root.parent.name != SCOPES:
        others = [scope.register for scope in stages if scope.register is not None]
        findings.append(judge_flow([register, *others]))
    healed = (getattr(m.event, "bytes", 0) for m in history.all() if m.event.type == "healed")
    return AuditReport(
        directory=root,
        files=len(paths),
        events=sum(len(t.lines) for t in traces),
        findings=findings,
        torn=[t.path.name for t in traces if t.torn],
        commits=sum(r.kind == "commit" for r in records),
        epochs=sum(r.kind == "epoch" for r in records),
        bytes_healed=sum(healed),
        gaps=[gap for t in traces for gap in t.gaps],
        divergences=divergences(history),
        diverged=ended_by_divergence(history),
        no_state=without_state(history),
        inner=inner,
        stages=stages,
        register=register,
    )


def _register_of(traces: list[Trace], records: list[Record]) -> Register | None:
    """The records of the scope that the traces are of; None: no trace says which it is."""
    heads = (trace.lines[0][1] for trace in traces if trace.lines)
    head = next((head for head in heads if head.get("kind") == "header"), None)
    if head is None or head.get("format") != FORMAT:
        return None
    scope, bound_to = next(iter(head["spec"]["scopes"])), head["config"].get("flow", ())
    is_whole = not any(trace.gaps or trace.damage for trace in traces)
    return Register(scope, {o["scope"]: o["ahead"] for o in bound_to}, records, is_whole)


def _judge_inner_scopes(
    root: Path, traces: list[Trace], scopes: dict[Path, AuditReport]
) -> Finding:
    """1: what the ranks of a group say that they have committed together, their scope has."""
    finding = Finding("inner_scopes")
    for trace in traces:
        told = [place for place, line in _notes(trace) if line["note"] == "inner_commit"]
        head = trace.lines[0][1] if trace.lines else {}
        if not told or head.get("kind") != "header" or head["config"]["world"] == 1:
            continue
        folder = inner_folder(root, head["group"], head["config"]["store"])
        commits = scopes[folder].commits if folder in scopes else 0
        text = (
            f"{len(told)} inner steps of this rank, and {commits} commits in {INNER}/{folder.name}"
        )
        finding.expect(len(told) <= commits, text, told[-1])
    return finding


def _notes(trace: Trace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Notes of a trace with their places, up to where a part of it could not be written."""
    for number, line in trace.lines:
        if line["kind"] == _GAP:
            return
        if line["kind"] == "note":
            yield f"{trace.path.name}:{number}", line


# --- replay ---------------------------------------------------------------------------------------


def participant_of(head: dict[str, Any]) -> tuple[Participant, dict[str, Any]]:
    """The participant that a header line describes, and the fields of its start.

    Raises:
        ValueError, KeyError, TypeError: the header is not one of this format.
    """
    if head.get("kind") != "header" or head["format"] != FORMAT:
        raise ValueError(f"the first line is no header of trace format {FORMAT}")
    flow = tuple(_elsewhere(other) for other in head["config"].get("flow", ()))
    values = {**head["config"], "me": Peer(*head["config"]["me"]), "flow": flow}
    table = Table(FsmSpec.model_validate(head["spec"]))
    return Participant(table, Config(**values)), head["start"]


def _elsewhere(told: dict[str, Any]) -> Elsewhere:
    return Elsewhere(**{**told, "groups": tuple(told["groups"])})


def replay(trace: Trace) -> Iterator[tuple[Move, int, str | None]]:
    """Handle every event of a trace again: (move, line, how the trace differs from the core)."""
    participant, start = participant_of(trace.lines[0][1])
    peer, local = participant.config.me, participant.initial(**start)
    told: list[tuple[int, dict[str, Any]]] = []
    for number, line in [*trace.lines[1:], (0, {"kind": "end", "event": {}})]:
        if line["kind"] == "transition" and line["event"] is None:
            told.append((number, line))
            continue
        if told:
            first = told[0]
            event, at = event_from_json(first[1]["event"]), first[1]["at"]
            before, (local, out) = local, participant.handle(local, event, at)
            place = f"{trace.path.name}:{first[0]}"
            move = Move(peer, before, event, local, out, place, first[1]["wall"])
            lines = [t[1] for t in told]
            if line["kind"] == "end" and _is_cut_off(lines, move):
                trace.torn = True
                return
            yield move, first[0], _difference(lines, move)
            told = []
        if line["kind"] == _GAP:
            return
        if line["kind"] in _HANDLED:
            told = [(number, line)]


def _rows(lines: list[dict[str, Any]], move: Move) -> tuple[list[Any], list[Any]]:
    """The rows that an event took: as its lines tell, and as the table has them."""
    told = [
        (x.get("from"), x.get("to"), x.get("on"), x.get("guards"), x.get("effects")) for x in lines
    ]
    return told, [(s.source, s.dest, s.event, s.guards, s.effects) for s in move.out.steps]


def _is_cut_off(lines: list[dict[str, Any]], move: Move) -> bool:
    """Whether the process was killed as it wrote these lines; it had done nothing of them yet."""
    told, rows = _rows(lines, move)
    return len(told) < len(rows) and told == rows[: len(told)]


def _difference(lines: list[dict[str, Any]], move: Move) -> str | None:
    if move.out.verdict != "row":
        told = lines[0]["kind"]
        return (
            None
            if told == move.out.verdict
            else f"the trace has {told}, the core says {move.out.verdict}"
        )
    told_rows, is_rows = _rows(lines, move)
    if told_rows != is_rows:
        odd = next(i for i, (a, b) in enumerate(zip_longest(told_rows, is_rows)) if a != b)
        return f"the trace has {told_rows[odd:]}, the table takes {is_rows[odd:]}"
    after = (move.after.token.epoch, move.after.token.txn, move.after.step, move.after.lineage)
    told_after = tuple(lines[0][k] for k in ("epoch", "txn", "step", "lineage"))
    return None if told_after == after else f"the trace has state {told_after}, the core {after}"


def _replay(trace: Trace, finding: Finding, history: History) -> None:
    if not trace.lines:
        return
    first = trace.lines[0][1]
    if trace.gaps:
        history.cut.add(Peer(first["group"], first["rank"], first["inc"]))
    if first["kind"] == _GAP:
        return
    place = f"{trace.path.name}:1"
    try:
        peer = participant_of(trace.lines[0][1])[0].config.me
    except (ValueError, KeyError, TypeError) as error:
        finding.expect(False, f"the header cannot be used: {error}", place)
        return
    moves = history.moves.setdefault(peer, [])
    try:
        for move, number, difference in replay(trace):
            place = f"{trace.path.name}:{number}"
            finding.expect(difference is None, difference or "", place)
            if difference is not None:
                return
            moves.append(move)
    except (UnreadableMessage, KeyError, AssertionError) as error:
        finding.expect(False, f"the event after this line cannot be handled: {error!r}", place)
    for place, line in _notes(trace):
        data = line["data"]
        if line["note"] == "consumed" and data["slice"] is not None:
            history.consumed.append((peer, Token(*data["token"]), data["slice"], place))

"""``fft audit``: read all traces of a run, replay them through the shipped core, judge them.

Apart from reading files, this module is pure. It answers three questions, in this order:

- Are the files whole? Each line is linked to the line before it.
- Does the state machine of the spec do what the trace records? Every event is handled again, and
  the resulting states and rows must match.
- Do the guarantees hold (``fft.protocol.invariants``)?

The header of a trace states that each commit and each heal has a digest; the trace *owes* them.
Without a check of this, a group whose digests are all missing would pass: `replicas_equal` compares
only the digests that exist. Traces written before the header had ``owes`` owe none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from fft.errors import FftError
from fft.messages.protocol import Applied, Healed, Peer, Token
from fft.protocol.invariants import Finding, Judge, Move, Same
from fft.trace.barriers import Barriers
from fft.trace.ends import Ends
from fft.trace.flow import Flow, judge_entries, judge_flow
from fft.trace.format import DIGESTS, INNER, SCOPES, inner_folder
from fft.trace.inputs import CONSUMED, Given, Inputs, Owed, Weigh, judge_shards, told_of_ids
from fft.trace.read import GAP, TraceFile, has_gap, read_lines, trace_files
from fft.trace.replay import Note, Replay, participant_of

__all__ = [
    "AuditReport",
    "FftError",
    "audit_dir",
    "read_lines",
    "trace_files",
]

_WINDOW = 1024
"""Minimum number of register records whose facts are kept. Traces are read side by side, ordered by
the record that each participant has reached, so all traces mention a txn within a few records."""


@dataclass(slots=True)
class AuditReport:
    """Result of an audit.

    ``ok`` is true if every file is whole, every replay matches, every guarantee holds, and the job
    did not end because its replicas diverged. FFT handles a divergence correctly, but then no state
    is known to be right. ``gaps`` lists the places where a process could not write its trace; the
    actions of that process after such a place are unknown.
    """

    directory: Path
    files: int
    events: int
    findings: list[Finding]
    torn: list[str]
    empty: list[str]
    """Names of traces without a line."""
    commits: int
    epochs: int
    bytes_healed: int
    gaps: list[str] = field(default_factory=list)
    divergences: list[str] = field(default_factory=list)
    """Each time that the votes showed that the states of replicas differ."""
    tainted: tuple[int, int] | None = None
    """First and last of the committed steps that may be wrong, if the job ended with the last of
    these divergences. The range is empty (first > last) if a state changed without a step."""
    no_state: str | None = None
    """Description of an end with ``NoState``, or None if the job ended in another way."""
    ended: bool = True
    """At least one trace has a final record."""
    consumed: list[str] = field(default_factory=list)
    """The consumed slices of each shard of a sharded loader, and the samples by their ids."""
    inner: list[AuditReport] = field(default_factory=list)
    """Reports on the scopes inside replica groups, each audited as a separate job."""
    stages: list[AuditReport] = field(default_factory=list)
    """Reports on the scopes of the later stages."""
    flow: Flow | None = None
    """The part of this scope that is compared with the scopes that it is bound to."""

    @property
    def diverged(self) -> bool:
        """Whether the job ended because its replicas differ."""
        return self.tainted is not None

    @property
    def ok(self) -> bool:
        """Whether there is no violation and no gap."""
        scopes = (*self.inner, *self.stages)
        return self.is_sound and not self.gaps and all(scope.ok for scope in scopes)

    @property
    def is_sound(self) -> bool:
        """Whether there is no violation in the lines that exist; lines may be missing."""
        scopes = (*self.inner, *self.stages)
        is_good = not self.diverged and all(scope.is_sound for scope in scopes)
        return is_good and all(f.violation is None for f in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
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
            "tainted_steps": None if self.tainted is None else list(self.tainted),
            "no_state": self.no_state,
            "consumed": self.consumed,
            "ended": self.ended,
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

    def render(self, is_only: bool = True) -> str:
        """Return the report as text. ``is_only``: the job was started only once."""
        lines = [
            f"audit of {self.directory}: {self.files} traces, {self.events} events, "
            f"{self.commits} commits, {self.epochs} epochs, {self.bytes_healed} bytes healed"
        ]
        for name in self.empty:
            lines.append(
                f"  note: {name} is empty: its process ended before it joined, or found no room"
            )
        for name in self.torn:
            lines.append(f"  note: {name} ends in a torn line (killed while writing); accepted")
        for f in (f for f in self.findings if f.checks or f.violation is not None):
            lines.append(f"  {_verdict(f):<8} {f.name}: {_meaning(f)} ({f.checks} checks)")
            if f.violation is not None:
                lines.append(f"      {f.place}: {f.violation}")
        if idle := [f.name for f in self.findings if not f.checks and f.violation is None]:
            lines.append(
                f"  not checked, because the run has nothing of the kind: {', '.join(idle)}"
            )
        lines += [f"  INCOMPLETE: {gap}; the rest of this trace is left out" for gap in self.gaps]
        lines += [f"  replicas differed: {text}" for text in self.divergences]
        lines += [f"  data: {text}" for text in self.consumed]
        lines += [f"  the end: {self.no_state}"] if self.no_state is not None else []
        for scope in self.inner:
            lines += scope._as_part(f"inside of group {scope.directory.name}")
        for scope in self.stages:
            lines += scope._as_part(f"scope {scope.directory.name}")
        lines.append(f"verdict: {self._verdict(is_only)}{'' if self.ended else NO_END}")
        return "\n".join(lines)

    def _as_part(self, name: str) -> list[str]:
        """Return the lines for this scope in a larger report; the full report if not ``ok``."""
        told = f"  {name}: {self.commits} commits, {self.epochs} epochs: {self._verdict()}"
        return [told, *([] if self.ok else [f"    {line}" for line in self.render().splitlines()])]

    def _verdict(self, is_only: bool = True) -> str:
        if any(f.violation is not None for f in self.findings):
            return "VIOLATION"
        if odd := [scope.directory.name for scope in self.inner if not scope.ok]:
            return f"VIOLATION or INCOMPLETE inside of group {', '.join(odd)}"
        if odd := [scope.directory.name for scope in self.stages if not scope.ok]:
            return f"VIOLATION or INCOMPLETE in scope {', '.join(odd)}"
        kept = "INCOMPLETE: no violation in what was written" if self.gaps else "no violation"
        if not self.commits and self.gaps:
            kept = f"no step could be checked; {kept}"
        elif not self.commits:
            nothing = "NOTHING COMMITTED, so" if is_only else "this start committed nothing, and"
            kept = f"{nothing} no step was checked; {kept}"
        if self.diverged:
            return f"DIVERGED: the job ended because its replicas differ; {kept} of the protocol"
        if self.no_state is not None:
            return f"{kept}; the job ended with NoState"
        return kept


NO_END = (
    "; NO END: no trace has a final record, so either every process was killed, or the job still "
    "runs and this audit covers only what is written so far"
)


_MEANINGS = {
    "trace_whole": "no line of a trace was changed or removed",
    "replay": "every process did what the state machine prescribes",
    "agreement": "no transaction was decided in two ways",
    "validity": "every commit had the YES votes of all participants",
    "exactly_once": "each step was applied once",
    "samples_once": "each slice of the data was trained once",
    "shard_unity": "the ranks of a group began each step together",
    "replicas_equal": "all replicas were equal after each commit",
    "divergence": "nothing was committed on states that differ",
    "data_flow": "no stage was ahead of the stages that it follows",
    "skip": "skipped steps were skipped by all groups",
    "fencing": "nothing from an old epoch or process had an effect",
    "live_set": "all members of an epoch knew the same members",
    "drain": "groups that left as asked caused no rollback",
    "join": "groups that joined caused no rollback",
    "reform": "replaced ranks joined a waiting group",
    "bounded": "no group fell behind the bound, and each contribution counted once",
    "decided": "no participant left before it knew the decision on its vote",
    "resolved": "the next start replaced the states of participants that had left in doubt",
    "barriers": "all members of each epoch were in its barrier at one time",
    "inner_steps": "each synchronization contains the local steps of its slice",
    "inputs": "each rank trained the items that its transactions assign to it",
    "digests": "every digest that was due is in the traces",
    "inner_scopes": "the scopes inside groups agree with the job",
    "flow_order": "stages that are bound to each other declare the same order",
    "entries": "each stage trained on the outputs that the stage before gave",
}
"""Finding → the statement that holds if it has no violation."""


def _verdict(finding: Finding) -> str:
    """Return the verdict on a finding as text; a finding without checks is not reported as "ok"."""
    if finding.violation is not None:
        return "VIOLATED"
    if not finding.checks:
        return "not checked: the run has nothing of the kind"
    return "ok"


def _meaning(finding: Finding) -> str:
    text = _MEANINGS[finding.name]
    if finding.name != "replicas_equal" or finding.violation is not None:
        return text
    if finding.compared:
        return f"{text}, {finding.compared} digests compared"
    return f'{text} by lineage; bits not compared, because digest="commit" is not set'


class _Findings:
    """Findings that are collected trace by trace, and facts to compare between scopes."""

    def __init__(self) -> None:
        self.replay = Finding("replay")
        self.inner_steps = Finding("inner_steps")
        self.inputs = Finding("inputs")
        self.given = Given()


class _Line:
    """One trace of the run, and the position and results of reading it so far."""

    def __init__(self, path: Path, found: _Findings) -> None:
        self.file = TraceFile(path)
        self.at, self.epoch = 0, 0
        """Number and epoch of the register record that the trace has reached."""
        self.peer, self.has_moves = _writer(path)
        self.replay = Replay(self.file, found.replay)
        self._items = self.replay.run()
        self.next: Move | Note | None = None
        self.step()
        head, group = self.replay.head, self.peer.group if self.peer is not None else ""
        # The data of a scope inside a group are recorded in the notes of the job's own traces.
        owed = Owed(head) if head and not _is_inner(path.parent, head) else None
        self.inputs = Inputs(found.inputs, found.given, owed, group, path.name)
        self.digests = OwedDigests(head, path.name)
        self.inner = InnerSteps(found.inner_steps, owed, _has_inner_steps(path.parent, head))

    def step(self) -> None:
        """Advance to the next move or note."""
        self.next = next(self._items, None)
        if isinstance(self.next, Move):
            before = self.next.before
            self.at = max(self.at, before.head.n if before.head else 0)
            self.epoch = before.token.epoch

    def take(self, item: Move | Note, judge: Judge) -> None:
        """Judge the facts about steps and their data in one move or note of this trace."""
        if isinstance(item, Move):
            self.inputs.move(item, judge.weigh)
            self.digests.move(item)
            return
        try:
            self.inner.take(item.place, item.line, judge.weigh)
            self.inputs.note(item.place, item.line)
            data = item.line["data"]
            consumed = item.line["note"] == CONSUMED and data["slice"] is not None
            if consumed and self.peer is not None and not self.replay.differs:
                for number in data.get("slices", [data["slice"]]):
                    judge.consumed(self.peer, Token(*data["token"]), number, item.place)
                if (base := data.get("base")) is not None:
                    judge.contributed(self.peer, Token(*data["token"]), base, item.place)
        except (KeyError, TypeError) as error:
            text = f"the note {item.line.get('note')!r} lacks a field or has a wrong one: {error!r}"
            self.inputs.finding.expect(False, text, item.place)


def _writer(path: Path) -> tuple[Peer | None, bool]:
    """Return the participant that wrote the trace, if named, and whether the trace has moves."""
    first: dict[str, Any] = next(TraceFile(path).lines(), (0, {"kind": ""}))[1]
    try:
        if first["kind"] == GAP:
            return Peer(*(first[name] for name in ("group", "rank", "inc"))), False
        return participant_of(first).config.me, True
    except (ValueError, KeyError, TypeError):
        return None, False


def _side_by_side(
    lines: list[_Line], judge: Judge, barriers: Barriers
) -> Iterator[tuple[_Line, Move | Note]]:
    """Yield all moves and notes: each trace in its own order, the trace furthest behind first."""
    heap: list[tuple[int, int]] = []
    for number, line in enumerate(lines):
        heappush(heap, (line.at, number))
    while heap:
        _, number = heappop(heap)
        line = lines[number]
        at = line.at
        judge.reach(at, line.epoch)
        while (item := line.next) is not None and line.at == at:
            yield line, item
            line.step()
        if line.next is not None:
            heappush(heap, (line.at, number))
        elif line.peer is not None:
            judge.ended(line.peer)
            barriers.ended(line.peer)


def audit_dir(directory: str | Path) -> AuditReport:
    """Audit every ``*.jsonl`` of a directory and, in its subdirectories, the scopes inside groups
    and of later stages.

    Memory use is bounded by the window of records that are read side by side, plus some for each
    trace, regardless of the length of the run.

    Raises:
        FftError: The directory contains no trace.
    """
    root, found = Path(directory), _Findings()
    lines = [_Line(path, found) for path in trace_files(root)]
    traced = {line.peer for line in lines if line.peer is not None and line.has_moves}
    cut = {line.peer for line in lines if line.peer is not None and has_gap(line.file.path)}
    judge, barriers, ends = Judge(traced=traced, cut=cut, window=_WINDOW), Barriers(traced), Ends()
    _compare_headers(found.replay, [line for line in lines if line.replay.head])
    flow = _flow_of(lines)
    for line, item in _side_by_side(lines, judge, barriers):
        line.take(item, judge)
        if isinstance(item, Move):
            judge.feed(item)
            barriers.take(item)
            ends.take(item)
            if flow is not None:
                flow.move(item)
    judged = judge.finish()
    findings = [_wholeness(lines, judge), found.replay, *judged]
    findings += [barriers.finding(is_whole=not cut and not judge.truncated)]
    shards = judge_shards(found.inputs, found.given)
    findings += [found.inner_steps, found.inputs, judge_digests([line.digests for line in lines])]
    inner = [audit_dir(folder) for folder in sorted((root / INNER).glob("*"))]
    findings.append(_judge_inner_scopes(root, lines, {scope.directory: scope for scope in inner}))
    if flow is not None:
        flow.is_whole = not cut and not judge.truncated
        flow.given = found.given
    stages = [audit_dir(folder) for folder in sorted((root / SCOPES).glob("*"))]
    if flow is not None and (flow.bounds or stages) and root.parent.name != SCOPES:
        flows = [flow, *(scope.flow for scope in stages if scope.flow is not None)]
        findings += [judge_flow(flows), judge_entries(flows)]
    return AuditReport(
        directory=root,
        files=len(lines),
        events=sum(line.file.count for line in lines),
        findings=findings,
        torn=[line.file.path.name for line in lines if line.file.torn],
        empty=[path.name for path in (line.file.path for line in lines) if not path.stat().st_size],
        commits=ends.commits,
        epochs=ends.epochs,
        bytes_healed=ends.bytes_healed,
        gaps=[gap for line in lines for gap in line.file.gaps],
        divergences=ends.divergences(),
        tainted=ends.tainted,
        no_state=ends.without_state(),
        consumed=[*shards, *told_of_ids(found.given)],
        ended=ends.has_final_record,
        inner=inner,
        stages=stages,
        flow=flow,
    )


def _wholeness(lines: list[_Line], judge: Judge) -> Finding:
    """Report the files that are damaged, or cut off before the end that others know."""
    whole = Finding("trace_whole")
    for line in lines:
        said = line.file.damage or judge.truncated.get(line.peer) if line.peer else line.file.damage
        whole.expect(said is None, said or "", line.file.path.name)
    return whole


_ALIKE = ("world", "leases", "bound", "flow", "quorum", "min_groups", "on_divergence", "rules")
"""Fields that must be equal in the configurations of all ranks."""


def _compare_headers(finding: Finding, lines: list[_Line]) -> None:
    """Check that all ranks of a scope have the same spec and the same values derived from it."""
    for line in lines:
        head, first = line.replay.head, lines[0].replay.head
        for name in _ALIKE:
            mine, other = (each["config"].get(name) for each in (head, first))
            text = f"its header has {name} {mine}, and that of {lines[0].file.path.name} {other}"
            finding.expect(mine == other, text, f"{line.file.path.name}:1")
        text = f"its header has another spec than that of {lines[0].file.path.name}"
        finding.expect(head["spec"] == first["spec"], text, f"{line.file.path.name}:1")


def _is_inner(root: Path, head: Mapping[str, Any]) -> bool:
    """Whether ``root`` holds the traces of a scope inside a group, by the header of a rank."""
    place = root.resolve()
    job = place.parents[min(1, len(place.parents) - 1)]
    return place == inner_folder(job, head["group"], head["config"]["store"])


def _has_inner_steps(root: Path, head: Mapping[str, Any]) -> bool:
    """Whether the rank with this header commits inner steps, in a scope of its group or alone."""
    if not head or not head["config"]["leases"]:
        return False
    store = head["config"]["store"]
    return head["config"]["world"] == 1 or inner_folder(root, head["group"], store).is_dir()


def _flow_of(lines: list[_Line]) -> Flow | None:
    """Return the flow of the scope of the traces, or None if no trace names the scope."""
    head = next((line.replay.head for line in lines if line.replay.head), None)
    if head is None:
        return None
    config = participant_of(head).config
    return Flow(next(iter(head["spec"]["scopes"])), config.flow, config.takers)


def _judge_inner_scopes(
    root: Path, lines: list[_Line], scopes: Mapping[Path, AuditReport]
) -> Finding:
    """Check guarantee 1: the scope of a group committed every inner step that its ranks report."""
    finding = Finding("inner_scopes")
    for line in lines:
        head, told = line.replay.head, line.inner.told
        if not told or not head or head["config"]["world"] == 1:
            continue
        folder = inner_folder(root, head["group"], head["config"]["store"])
        commits = scopes[folder].commits if folder in scopes else 0
        text = f"{told} inner steps of this rank, and {commits} commits in {INNER}/{folder.name}"
        finding.expect(told <= commits, text, line.inner.last)
    return finding


# --- owed digests ---

_NAMED = 8
"""Maximum number of participants that a text names."""


class OwedDigests:
    """Count the digests that one trace owes, and those that it lacks.

    Args:
        head: The header of the trace; empty if it has none.
        file: Name of the trace, for places.
    """

    def __init__(self, head: Mapping[str, Any], file: str) -> None:
        self.file = file
        owes = head.get("owes", {}) if head else {}
        self.are_owed = bool(owes.get(DIGESTS, False))
        self.states_it = DIGESTS in owes
        self.name = f"group {head['group']} rank {head['rank']}" if head else ""
        self.owed = 0
        self.missing = 0
        self.place = ""
        """Place of the first missing digest."""

    def move(self, move: Move) -> None:
        """Take one move of the trace."""
        event = move.event
        if not (self.are_owed and isinstance(event, Applied | Healed)):
            return
        if move.out.verdict != "row":
            return
        self.owed += 1
        if event.digest is None:
            self.missing += 1
            self.place = self.place or move.place


def judge_digests(traces: Sequence[OwedDigests]) -> Finding:
    """Check guarantee 1: every commit and heal has the digest that its trace's header states."""
    finding = Finding("digests")
    is_owed = any(trace.are_owed for trace in traces)
    for trace in traces:
        if is_owed and trace.states_it and not trace.are_owed:
            text = f"{trace.name} states that it owes no digests, and others state that they do"
            finding.expect(False, f"{text}: give all groups the same digest=", f"{trace.file}:1")
    for trace in traces:
        for _ in range(trace.owed - trace.missing):
            finding.expect(True, "", "")
    lacking = [trace for trace in traces if trace.missing]
    names = [f"{t.name} lacks {t.missing} of {t.owed} digests" for t in lacking]
    more = f"; and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    text = "; ".join(names[:_NAMED]) + more
    text += ', though the header states one for each commit and heal (digest="commit")'
    for trace in lacking:
        for _ in range(trace.missing):
            finding.expect(False, text, trace.place)
    return finding


# --- inner steps ---
# Judge inner steps: each synchronization includes all inner steps of its slice, once and in order.
#
# Pure. Inner steps are recorded as notes of a trace, not as events of the protocol.


class InnerSteps:
    """Check of the inner steps in the notes of one process, in the order of its trace.

    Guarantee 3: the holder of a slice that a COMMIT consumed has computed it step by step, and each
    step was committed once. Steps that were discarded in between were started again. All slices
    have the same number of steps.

    Args:
        owed: As in `fft.trace.inputs.Inputs`.
        needed: Each COMMIT that consumes a slice follows inner steps.
    """

    def __init__(self, finding: Finding, owed: Owed | None, needed: bool) -> None:
        self._finding, self._owed, self._needed = finding, owed, needed
        self._slice: int | None = None
        self._done = 0
        self._first = 0
        """Data item that the first step of the slice was computed on."""
        self.told = 0
        """Total number of inner steps that the process has committed."""
        self.last = ""
        """Place of the note of the newest inner step."""

    def take(self, place: str, line: dict[str, Any], weigh: Weigh) -> None:
        """Take one note and its place. ``weigh`` gets facts that must be equal for all ranks."""
        data, finding = line["data"], self._finding
        match line["note"]:
            case "inner_void":
                self._slice, self._done = None, 0
            case "inner_commit":
                self.told, self.last = self.told + 1, place
                if data["slice"] != self._slice:
                    left = f"slice {self._slice} was left after {self._done} inner steps"
                    finding.expect(self._slice is None, f"{left}, and not given up", place)
                    self._slice, self._done = data["slice"], 0
                text = f"inner step {data['inner_step']} of slice {self._slice} follows "
                finding.expect(
                    data["inner_step"] == self._done, f"{text}{self._done} others", place
                )
                self._first = self._first if self._done else data["item"]
                self._expect_item(data["item"], self._first, self._done, place)
                self._done += 1
            case "consumed" if data["slice"] is not None and "inner_steps" in data:
                wanted, found = (data["slice"], data["inner_steps"]), (self._slice, self._done)
                text = f"(slice, inner steps) {wanted} were committed by the job, and here were "
                finding.expect(found == wanted, text + f"{found}", place)
                text = (
                    f"slice {data['slice']} has {data['inner_steps']} inner steps, another {{was}}"
                )
                weigh(finding, Same(("inner steps",), data["inner_steps"], text), place)
                if self._owed is not None and self._done:
                    due = self._owed.item(data["slice"] * data["inner_steps"])
                    text = f"slice {data['slice']} began here with item {self._first} of the data"
                    finding.expect(self._first == due, f"{text}, and not {due}", place)
                self._slice, self._done = None, 0
            case "consumed" if data["slice"] is not None and self._needed:
                text = f"slice {data['slice']} was consumed without a word of its inner steps"
                finding.expect(False, text, place)

    def _expect_item(self, item: int, first: int, done: int, place: str) -> None:
        if self._owed is not None:
            due = first + done * self._owed.items
            text = f"inner step {done} of slice {self._slice} has item {item} of the data"
            self._finding.expect(item == due, f"{text}, and not {due}", place)

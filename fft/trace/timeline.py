"""``fft report --html``: one offline page that shows a run, with a lane for each rank.

Traces are read twice, block by block, and merged by time. The size of the page is bounded. In a
long run, the steps of a rank are merged into longer spans. The page keeps the first events, and the
newest faults, epochs and changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fft.errors import FftError
from fft.messages.protocol import Healed, Record
from fft.trace.course import TimeLost, readable_cause
from fft.trace.display import cost
from fft.trace.format import scope_folders, scope_of
from fft.trace.happenings import ROLLBACK_ROLES, Happening, Happenings
from fft.trace.history import History
from fft.trace.lines import Line, Noted, Transition, record_of
from fft.trace.read import is_not_of_each_step, merged_lines
from fft.trace.report import summary, summary_lines
from fft.trace.starts import root_of, start_folders

_SPANS = 4000
"""Maximum number of spans of steps in a lane."""
_EVENTS = 2000
"""Maximum number of events with their trace lines on the page."""
_LONGEST = 4000
"""Maximum characters of a trace line on the page."""
_PAGE = Path(__file__).with_name("timeline.html")
_DATA = "/*DATA*/null"

_STEPS = frozenset({"compute", "wait", "update", "steps"})
"""Kinds of spans that may be merged to ``steps``."""
_KINDS = _STEPS | {"rollback", "form", "join"}
_NOTES = frozenset(
    {"inject", "fault", "checkpoint", "checkpoint_failed", "entry_made_anew", "drained", "notice"}
)
"""Notes that are events on the page."""


def name_of(line: Noted) -> str:
    """Return the name of the event, or an empty string if it is not shown."""
    note, data = line.note, line.data
    match note:
        case "inject":
            return f"injected fault: {data.get('name')} ({data.get('kind')})"
        case "fault":
            return f"error: {data.get('type')}: {data.get('message')}"
        case "checkpoint":
            return f"checkpoint of step {data.get('step')}" if data.get("published") else ""
        case "checkpoint_failed":
            return f"checkpoint of step {data.get('step')} failed: {data.get('error')}"
    return note.replace("_", " ") if note in _NOTES else ""


@dataclass(slots=True)
class Span:
    """A time during which a rank did one thing, or ran several steps."""

    start: float
    end: float
    kind: str
    step: int
    line: int
    commits: int = 0
    busy: float = 0.0
    """Seconds of the span in which the step function ran."""


@dataclass
class Lane:
    """The spans of one rank; those of steps are merged when they become too many."""

    name: str
    spans: list[Span] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    """The hosts of its processes, in order."""
    shortest: float = 0.0
    """Spans of steps are merged until they are this long, in seconds."""
    mergeable: frozenset[str] = _STEPS
    """Kinds that are merged; all kinds, if a lane has too many spans of other kinds as well."""

    def add(self, span: Span) -> None:
        """Append a span; the newest one is extended instead while it is too short."""
        if span.kind in _STEPS:
            span.busy = span.end - span.start if span.kind == "compute" else 0.0
            span.commits = int(span.kind == "update")
        self._push(self.spans, span)
        if len(self.spans) > _SPANS:
            self._compact()

    def _push(self, spans: list[Span], span: Span) -> None:
        last = spans[-1] if spans else None
        is_short = last is not None and span.end - last.start <= self.shortest
        if last is None or not is_short or not {last.kind, span.kind} <= self.mergeable:
            spans.append(span)
            return
        last.end, last.kind = span.end, "steps"
        last.commits += span.commits
        last.busy += span.busy

    def _compact(self) -> None:
        """Merge spans until at most half of the allowed number is left."""
        covered = self.spans[-1].end - self.spans[0].start
        while len(self.spans) > _SPANS // 2:
            if self.shortest >= covered:
                self.mergeable = _KINDS
                self.shortest = 0.0
            self.shortest = max(self.shortest * 2, covered / _SPANS)
            merged: list[Span] = []
            for span in self.spans:
                self._push(merged, span)
            self.spans = merged


class Timeline:
    """Everything on the page, collected from the lines of a run in the order of time."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self.events: list[dict[str, Any]] = []
        self.left_out = 0
        """Number of events beyond the maximum, which the page does not show."""
        self.history = History()

    def take(self, path: str, line: Line, at: float, text: bytes, scope: str) -> None:
        """Take one line of a trace, of a scope as in `History.add`."""
        name = ""
        self.history.add(line, at, scope)
        if (record := record_of(line)) is not None:
            self._take_hosts(record)
        match line:
            case Noted():
                name = name_of(line)
            case Transition(event=Healed(bytes=size, source=source)) if size:
                name = f"fetched {size:,} bytes from group {source}"
            case Transition(roles=(before, after), cause=str(cause)) if (
                cause and after in ROLLBACK_ROLES and before not in ROLLBACK_ROLES
            ):
                name = f"rollback: {readable_cause(cause)}"
        if name and len(self.events) >= _EVENTS:
            self.left_out += 1
        elif name:
            shown = text.decode(errors="replace")[:_LONGEST]
            place = {"lane": line.lane, "file": path, "line": line.seq, "text": shown}
            step = line.step if isinstance(line, Noted | Transition) else None
            self.events.append({"at": at, "what": name, "step": step, **place})

    def _take_hosts(self, record: Record) -> None:
        for (group, number), rank in record.entries.items():
            name = f"{group}/{number}"
            hosts = self.lanes.setdefault(name, Lane(name)).hosts
            if rank.host and rank.host not in hosts:
                hosts.append(rank.host)

    def draw(self, activities: Iterable[Happening]) -> None:
        """Add activities of ranks to their lanes."""
        for each in activities:
            if each.kind == "transfer":  # an event, since it is a part of forming an epoch
                continue
            lane = self.lanes.setdefault(each.rank, Lane(each.rank))
            kind = "compute" if each.kind == "local" else each.kind
            parts = each.parts or [(kind, each.start, each.line)]
            ends = [*(start for _, start, _ in parts[1:]), each.end]
            for (part, start, number), end in zip(parts, ends, strict=True):
                lane.add(Span(start, end, part, int(each.facts["step"]), number))


def timeline_of(directory: Path) -> Timeline:
    """Read a run. Raises FftError if there is no trace."""
    found = Timeline()
    for folder in scope_folders(directory):
        activities, scope = Happenings(), scope_of(directory, folder)
        for at, path, line, text in merged_lines(folder, is_not_of_each_step):
            found.take(str(path.relative_to(directory)), line, at, text, scope)
            found.draw(activities.take(path, line, at))
        found.draw(activities.end())
    found.history.waits.end()
    return found


def page(directory: Path) -> str:
    """Return an HTML page with all starts of a job; it opens with the start of ``directory``."""
    own = directory.resolve()
    folders = [f for f in start_folders(root_of(own)) if f == own or any(f.glob("*.jsonl"))]
    starts = [_plain(folder, timeline_of(folder)) for folder in folders]
    found = {"shown": folders.index(own), "starts": starts}
    data = json.dumps(found, separators=(",", ":"))
    return _PAGE.read_text().replace(_DATA, data.replace("<", "\\u003c"))


def write_page(directory: Path, out: Path) -> None:
    """Write the page of a run. Raises FftError if the file cannot be written."""
    text = page(directory)
    try:
        out.write_text(text)
    except OSError as error:
        raise FftError(
            f"{out} cannot be written: {error.strerror}; name another with -o"
        ) from error


def _plain(directory: Path, found: Timeline) -> dict[str, Any]:
    """Return the contents of the page; times are seconds since the first epoch, if there is one."""
    course = found.history.course
    times = [lane.spans[0].start for lane in found.lanes.values() if lane.spans]
    zero = course.began or min([*times, *(event["at"] for event in found.events)], default=0.0)
    lanes = [
        {"name": name, "hosts": lane.hosts, "spans": [_span(span, zero) for span in lane.spans]}
        for name, lane in sorted(found.lanes.items())
    ]
    phases = [
        [phase.formed - zero, phase.epoch, sorted(phase.members), phase.step]
        for phase in course.epochs
    ]
    lost = TimeLost(course)
    faults = [
        {
            "at": fault.at - zero,
            "end": (fault.committed or fault.at) - zero,
            "step": fault.step,
            "what": fault.cause,
            "cost": cost(fault, course, lost),
            "n": fault.n,
        }
        for fault in course.faults[-_EVENTS:]
    ]
    events = [{**event, "at": event["at"] - zero} for event in found.events]
    changes = [(each.at, each.step, each.text) for each in course.changes]
    changes += [
        (each.at, each.step, f"group {each.group} was lost by a fault")
        for each in course.absences
        if not each.planned
    ]
    waits = sorted(found.history.waits.caused.items(), key=lambda item: -item[1][1])[:20]
    return {
        "directory": str(directory),
        "summary": summary_lines(course),
        "figures": summary(course),
        "lanes": lanes,
        "phases": phases[-_EVENTS:],
        "faults": faults,
        "changes": [[at - zero, step, text] for at, step, text in sorted(changes)[-_EVENTS:]],
        "events": events,
        "left_out": found.left_out,
        "waits": [["/".join(rank), count, seconds] for rank, (count, seconds) in waits],
    }


def _span(span: Span, zero: float) -> list[Any]:
    """Return a span in the short form of the page."""
    start, end = round(span.start - zero, 6), round(span.end - zero, 6)
    return [start, end, span.kind, span.step, span.line, span.commits, round(span.busy, 4)]

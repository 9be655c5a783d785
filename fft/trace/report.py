"""Report the cost of the faults of a run, one row per rollback or membership change, and the origin
of each rank's own errors.

This module reads only trace files. Times are in milliseconds, on one clock for all hosts
(`fft.trace.read`).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from fft.messages.causes import CauseCode
from fft.messages.fault_plans import AnyFault, FaultPlan, in_words, load_plan
from fft.messages.protocol import Applied, Decision, Healed, Record, Restored, Token
from fft.trace.course import Course, Fault, TimeLost, readable_cause
from fft.trace.display import duration
from fft.trace.figures import plain
from fft.trace.format import RESULT_REFUSED, scope_folders, scope_of
from fft.trace.history import History
from fft.trace.inputs import CONSUMED
from fft.trace.lines import Header, Line, Noted, Transition, Who, parsed, record_of
from fft.trace.read import TraceFile, merged_lines, trace_files
from fft.trace.starts import start_after

_PLAN = "faults.json"
_NOT_INJECTED = "not injected"
_MOST_REFUSALS = 20
"""Maximum number of lines about refused results."""
_MOST_SIZES = 3
"""Maximum number of sizes of steps that the summary lists one by one."""
_ALONE = ("inner_abort", "inner_torn")
"""Notes of a group that repeats a local step."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One fault with its consequences."""

    fault: str
    noticed: str
    rolled_back_ms: float | None
    """Time from the fault until all members of the next epoch have restored the state at the start
    of the step."""
    next_commit_ms: float | None
    """Time from the fault until all these members have committed the next step."""
    attempts_lost: int
    bytes_healed: int
    n: int = 0
    """Number of the record that ended the epoch, or 0."""
    is_planned: bool = False
    """Groups joined, or left on purpose, and no fault was injected."""


@dataclass(frozen=True, slots=True)
class _EpochEnd:
    """A register record that closed an epoch, at the time when it was first traced."""

    wall: float
    record: Record
    following: Record | None
    """Record of the next epoch."""

    @property
    def is_join(self) -> bool:
        """Whether the epoch ended because groups joined, and none left."""
        return self.record.kind == "commit" and not self.record.leavers

    @property
    def what(self) -> str:
        """Short reason for the end of the epoch."""
        if self.record.kind == "abort":
            return self.record.cause
        if self.record.leavers:
            return f"leaves after a commit: group {', '.join(self.record.leavers)}"
        return "a group asked to join"


class _Scope:
    """The lines of one scope, as far as its incidents need them."""

    def __init__(self) -> None:
        self._records: dict[int, tuple[float, Record]] = {}
        self._applied: list[tuple[float, Who, int]] = []
        """Time, process and step of each update, in order."""
        self._restored: dict[Token, list[tuple[float, Who]]] = defaultdict(list)
        self._healed: Counter[int] = Counter()
        """Epoch → bytes that were fetched for it."""
        self._inside: dict[int, set[Who]] = defaultdict(set)
        """Epoch → processes with a line in it."""
        self._last: dict[Who, tuple[float, Transition]] = {}
        self._injected: dict[str, tuple[float, Who, set[str]]] = {}
        self._after: dict[Who, list[tuple[float, Transition | Noted]]] = {}
        """The lines of processes with an injected fault, from there on."""

    def take(self, line: Line, at: float) -> None:
        """Take the next line in the order of time."""
        if not isinstance(line, Transition | Noted):
            return
        who = line.who
        if line.epoch is not None:
            self._inside[line.epoch].add(who)
        if who in self._after:
            self._after[who].append((at, line))
        match line:
            case Noted(note="inject", data=data):
                name = f"{data['name']} ({data['kind']}, step {data['step']}"
                self._injected.setdefault(name, (at, who, set()))[2].add(line.lane)
                self._after.setdefault(who, [])
            case Transition():
                self._last[who] = at, line
                self._take_event(line, at)

    def _take_event(self, line: Transition, at: float) -> None:
        match line.event:
            case Applied():
                self._applied.append((at, line.who, line.step))
            case Restored(token=token):
                self._restored[token].append((at, line.who))
            case Healed(epoch=epoch, bytes=size):
                self._healed[epoch] += size
            case Decision(record=Record() as record):
                self._records.setdefault(record.n, (at, record))

    def incidents(self) -> Iterator[tuple[float, Incident]]:
        """Yield the incidents with their times."""
        ends, explained = self._ends(), set[int]()
        for begin, (wall, who, ranks) in self._injected.items():
            name = f"{begin}, rank {', '.join(sorted(ranks))})"
            end = next((e for e in ends if e.wall >= wall and not e.is_join), None)
            own = self._alone(name, wall, who) or self._while_apart(name, wall, who, end)
            if own is None and end is not None:
                explained.add(end.record.n)
            yield wall, own or self._incident(name, wall, end)
        for end in ends:
            if end.record.n not in explained and not self._is_end_of_loop(end):
                is_planned = end.record.kind == "commit"
                name = end.what if is_planned else _NOT_INJECTED
                yield end.wall, replace(self._incident(name, end.wall, end), is_planned=is_planned)

    def _ends(self) -> list[_EpochEnd]:
        ends = []
        for n, (wall, record) in sorted(self._records.items()):
            # in an asynchronous job each epoch ends with its commit
            apart = record.bound and not record.leavers
            if record.kind == "abort" or (record.change and not apart):
                following = self._records.get(n + 1)
                ends.append(_EpochEnd(wall, record, following and following[1]))
        return ends

    def _is_end_of_loop(self, end: _EpochEnd) -> bool:
        """Return whether the rollback happened because a loop ended regularly on all ranks.

        A loop of torchft has no last commit, so the ranks shut down one after the other. A rank
        whose engine has begun another txn rolls it back when the first rank leaves.
        """
        if end.record.kind != "abort" or end.record.code != CauseCode.LEFT:
            return False
        if self._applied and self._applied[-1][0] > end.wall:
            return False
        later = (found for epoch, found in self._inside.items() if epoch >= end.record.epoch)
        moves = (self._last[who][1] for who in set[Who]().union(*later) & self._last.keys())
        return all(move.roles[1] == "terminal" and "finish" in move.effects for move in moves)

    def _alone(self, name: str, wall: float, who: Who) -> Incident | None:
        """Return a fault after which a group repeated a local step, or None if the job noticed
        it."""
        own = [(at, line) for at, line in self._after[who] if at >= wall]
        notes = [(at, line) for at, line in own if isinstance(line, Noted)]
        at, note = next((each for each in notes if each[1].note in _ALONE), (math.inf, None))
        moves = (at for at, line in own if isinstance(line, Transition) and line.event)
        if note is None or at > next(moves, math.inf):
            return None
        done = (time for time, x in notes if x.note == "inner_commit" and time >= at)
        commit = next(done, None)
        return Incident(
            fault=name,
            noticed=f"group {who[0]} alone: {note.data['cause']}",
            rolled_back_ms=(at - wall) * 1e3,
            next_commit_ms=None if commit is None else (commit - wall) * 1e3,
            attempts_lost=1,
            bytes_healed=0,
        )

    def _while_apart(
        self, name: str, wall: float, who: Who, end: _EpochEnd | None
    ) -> Incident | None:
        """Return a fault that ended a process of an asynchronous job between two synchronizations.

        The other groups then commit and roll nothing back. Returns None for any other fault.
        """
        at, move = self._last.get(who, (math.inf, None))
        if move is None or at > wall or move.roles[1] != "apart":
            return None
        commits = (at for at, other, _ in self._applied if at >= wall and other != who)
        commit = next(commits, None)
        if commit is None or (end is not None and end.wall < commit):
            return None
        told = f"group {who[0]} is left out of the next synchronisation"
        return Incident(name, told, None, (commit - wall) * 1e3, 0, 0)

    def _incident(self, name: str, wall: float, end: _EpochEnd | None) -> Incident:
        if end is None:
            return Incident(name, "no epoch ended because of it", None, None, 0, 0)
        record, following = end.record, end.following
        # Participants of the ended epoch that are in the next one and committed a later step.
        inside = set(self._inside[record.epoch])
        if following is not None and following.members:
            inside &= following.peer_set
        commits: dict[Who, float] = {}
        for at, who, step in self._applied:
            if at >= wall and who in inside and step > record.step:
                commits.setdefault(who, at)
        restored = [at for at, who in self._restored[record.token] if who in inside]
        return Incident(
            fault=name,
            noticed=end.what,
            rolled_back_ms=(max(restored) - wall) * 1e3 if restored else None,
            next_commit_ms=(max(commits.values()) - wall) * 1e3 if commits else None,
            attempts_lost=int(record.kind == "abort"),
            bytes_healed=self._healed[following.epoch] if following is not None else 0,
            n=record.n,
        )


@dataclass(frozen=True, slots=True)
class OwnError:
    """Errors of one rank with the same class, place and step."""

    group: str
    rank: int
    step: int
    error: str
    where: str
    operation: str
    times: int


class RunReport:
    """Everything that ``fft report`` shows of one start of a job, collected in one pass.

    Attributes:
        history: The history of the job.
        incidents: Every fault: injected faults, and ends of epochs without an injected fault. If
            stages have their own scopes, the incidents of each scope are determined separately.
            Those of later stages have the number 0, because each scope numbers its own records.
        damages: The parts of the traces that are unreadable or missing, and so not in the report.

    Raises:
        FftError: There is no trace.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.history = History()
        self._errors: Counter[tuple[str, int, int, str, str, str]] = Counter()
        self._waits: dict[tuple[str, int], list[float]] = {}
        self._skips: set[tuple[str, str, int, int]] = set()
        self._refused: dict[tuple[int, str, str, str], list[str]] = {}
        self._copied: dict[tuple[str, int], dict[int, float]] = {}
        self._published: dict[int, float] = {}
        files: list[TraceFile] = []
        scopes: dict[str, _Scope] = {}
        for at, name, line in history_lines(self.directory, files):
            self.history.add(line, at, name)
            self._take(line, name)
            scopes.setdefault(name, _Scope()).take(line, at)
        self.history.waits.end()
        found = [
            (at, replace(each, n=0) if name else each)
            for name, scope in scopes.items()
            for at, each in scope.incidents()
        ]
        self.incidents = [each for _, each in sorted(found, key=lambda timed: timed[0])]
        self.damages: list[str] = []
        for file in files:
            if file.damage is not None:
                text = f"{file.damage}; the report leaves out this line and those after it"
                self.damages.append(text)
            self.damages += file.gaps

    @property
    def course(self) -> Course:
        """Steps, memberships and faults; if stages step independently, of the first stage."""
        return self.history.course

    def _take(self, line: Line, scope: str) -> None:
        record = record_of(line)
        if record is not None and record.kind == "commit" and record.skip and not record.live:
            self._skips.add((scope, "", record.n, 0))
        if not isinstance(line, Noted):
            return
        data, rank = line.data, (line.group, line.rank)
        match line.note:
            case "fault":
                error = f"{data['type']}: {data['message']}"
                place = error, data["where"], data["operation"]
                self._errors[*rank, line.step or 0, *place] += 1
            case "inner_commit" if data.get("skipped"):
                self._skips.add((scope, line.group, data["slice"], data["inner_step"]))
            case "memory_copy":
                self._copied.setdefault(rank, {})[data["step"]] = line.wall
            case "checkpoint" if data.get("published"):
                self._published[data["step"]] = line.wall
            case note if note == CONSUMED and "input_ms" in data:
                self._waits.setdefault(rank, []).append(data["input_ms"])
            case note if note == RESULT_REFUSED:
                norm = f"norm {data['grad_norm']:.3g}"
                values = ", ".join([norm, *(f"{k} {v:.3g}" for k, v in data["metrics"].items())])
                key = line.step or 0, str(data["token"]), data["reaction"], data["why"]
                self._refused.setdefault(key, []).append(f"{line.lane} ({values})")

    def to_json(self) -> dict[str, Any]:
        """Return everything that ``fft report`` shows as plain data."""
        course = self.course
        by_number, times = {fault.n: fault for fault in course.faults}, TimeLost(course)
        faults = []
        for incident in self.incidents:
            fault = by_number.get(incident.n)
            told = asdict(incident)
            if fault is not None:
                speeds = (fault.before, fault.after)
                before, after = (course.samples(phase.rate if phase else None) for phase in speeds)
                told |= {"step": fault.step, "code": fault.code, "groups_lost": list(fault.lost)}
                told |= {"samples_per_s_before": before, "samples_per_s_after": after}
                told |= {"at_s": fault.at - course.began, "lost_s": times.by(fault)}
            faults.append(told)
        asked, missing = self.requested_faults()
        return {
            "directory": str(self.directory),
            **summary(course),
            "figures": plain(self.history),
            "goal": asdict(course.goal),
            "incidents": faults,
            "changes": [
                {
                    "step": change.step,
                    "at_s": change.at - course.began,
                    "text": change.text,
                    "lost_s": times.around(change),
                }
                for change in course.changes
            ],
            "errors": [asdict(error) for error in self.errors()],
            "faults_requested": asked,
            "faults_not_fired": [fault.name for fault in missing],
            "input": self.input_wait(),
            "refusals": self.refusals(),
            "taint": self.taint(),
            "checkpoints": self.checkpoints(),
            "damage": self.damages,
        }

    def parts(self) -> Iterator[str | Table | None]:
        """Yield the parts of ``fft report`` as lines and tables, in order; None shows nothing."""
        yield f"{self.directory}:"
        yield from summary_lines(self.course)
        yield fault_table(self.incidents, self.course) or "no fault was noticed in these traces"
        if self.damages:
            yield "these traces have gaps: faults and their costs may be missing above"
        yield from change_lines(self.incidents, self.course)
        yield from (self.taint(), self.refusals(), self.fired(), self._place_table())
        yield from (self.input_wait(), self.checkpoints(), self.went_on())

    def errors(self) -> list[OwnError]:
        """Return the origins of the ranks' errors, in the order of their occurrence."""
        return [OwnError(*key, times) for key, times in self._errors.items()]

    def _place_table(self) -> Table | None:
        """Return the errors as a table, or None if there were none."""
        table = Table(title="exceptions in ranks, and where they were raised")
        for name in ("rank", "step", "times"):
            table.add_column(name, justify="right")
        for name in ("error", "where"):
            table.add_column(name, overflow="fold")
        for e in self.errors():
            where = f"{e.where}\n{e.operation}" if e.operation else e.where
            rank = f"{e.group}/{e.rank}"
            table.add_row(rank, str(e.step), str(e.times), Text(e.error), Text(where))
        return table if table.rows else None

    def requested_faults(self) -> tuple[int, list[AnyFault]]:
        """Return the number of planned or commanded faults, and those that did not happen.

        Raises ConfigError if the plan in the trace directory cannot be read.
        """
        path = self.directory / _PLAN
        plan = load_plan(path) if path.exists() else FaultPlan(faults=[])
        asked = {fault.name for fault in plan.faults} | self.history.commanded.keys()
        return len(asked), self.history.unfired(plan)

    def fired(self) -> str | None:
        """Report requested faults that did not happen; None if no fault was requested.

        Faults are requested by a fault plan, or with ``fft fault``.

        Raises ConfigError if the plan in the trace directory cannot be read.
        """
        asked, missing = self.requested_faults()
        if not asked:
            return None
        if missing:
            names = "".join(f"\n  {in_words(fault)}" for fault in missing)
            count = f"{len(missing)} of {asked} faults"
            return f"{count} did not fire, so this run does not test them:{names}"
        return f"all {asked} requested faults have fired"

    def input_wait(self) -> str:
        """Report how long committed steps waited for input, over all ranks, and the slowest
        rank."""
        if not self._waits:
            return "wait for batches: no step has measured it"
        ranked = sorted((_share(found, 0.99), who) for who, found in self._waits.items())
        slowest, (group, rank) = ranked[-1]
        every = [ms for found in self._waits.values() for ms in found]
        return (
            f"wait for batches: p50 {_share(every, 0.5):.1f} ms, p99 {_share(every, 0.99):.1f} ms; "
            f"longest on group {group} rank {rank}: p99 {slowest:.1f} ms"
        )

    def went_on(self) -> str | None:
        """Report where the next start of the job resumed, and how far this one had come; None if
        this was the last start."""
        after = start_after(self.directory.resolve())
        if after is None:
            return None
        begun: list[int] = []
        for path in after.glob("*.jsonl"):
            with path.open("rb") as file:
                if isinstance(head := parsed(file.readline()), Header):
                    begun.append(head.start.get("step", 0))
        where = f"from the checkpoint of step {max(begun, default=0)}"
        if not any(begun):
            where = "at its beginning" if begun else "at a step that its traces do not tell"
        pieces = (piece for path in trace_files(after) for piece in TraceFile(path).pieces())
        lines = map(parsed, (piece for piece in pieces if b'"note":"resumed"' in piece))
        notes = [x.data for x in lines if isinstance(x, Noted) and x.note == "resumed"]
        data = notes[0] if any(begun) and notes else {}
        if data.get("tier") in ("memory", "peer"):
            where = f"{where} in memory"
        if hosts := {host for each in notes for host in each.get("from", ())}:
            count = sum(each["tier"] == "peer" for each in notes)
            where += f" ({count} ranks from other hosts: {', '.join(sorted(hosts))})"
        unused = data.get("unused", ())
        unused = "".join(f"\n  a copy in memory was not used: {why}" for why in unused)
        least = " at least" if self.damages else ""
        return (
            f"this start had come to step {self.history.step}{least} when it ended; the job was "
            f"started again {where}: fft report {after}{unused}{self._saved()}"
        )

    def _saved(self) -> str:
        """Return a line about the work that copies in memory save a start, or ``""``."""
        copied, published = self._copied, self._published
        if not (steps := set.intersection(*(set(each) for each in copied.values() or ({},)))):
            return ""
        copy, kept = max(steps), max(published, default=0)
        text = f"\n  the newest copy in memory that all ranks completed is of step {copy}, "
        if not published:
            return f"{text}and there is no checkpoint"
        passed = max(each[copy] for each in copied.values()) - published[kept]
        return f"{text}the newest checkpoint of step {kept}" + (
            f": {copy - kept} steps, {duration(passed)}, are saved" if copy > kept else ""
        )

    def checkpoints(self) -> str | None:
        """Report which durable checkpoints were taken, and why others were not; None if the job
        took none."""
        return "\n".join(self.history.checkpoints.lines(bool(self.damages))) or None

    def refusals(self) -> str | None:
        """Report the steps that were skipped, and the results that ranks refused; None without any.

        A skip by a scaler is counted, too; it has no refusal.
        """
        if not self._skips and not self._refused:
            return None
        count = len(self._skips)
        found = [f"refused results; steps skipped, whose batches had no update: {count}"]
        for (step, _, reaction, why), ranks in self._refused.items():
            found.append(f"  step {step}, {reaction}: {why}, on {'; '.join(ranks)}")
        more = len(found) - _MOST_REFUSALS
        return "\n".join(found if more < 1 else [*found[:_MOST_REFUSALS], f"  and {more} more"])

    def taint(self) -> str | None:
        """Report the steps that may be wrong, because the replicas differed without a majority."""
        taint = self.history.comparisons.taint
        return None if taint is None else f"the job ended because its replicas differed: {taint}"


def history_lines(
    directory: Path, checked: list[TraceFile] | None = None
) -> Iterator[tuple[float, str, Line]]:
    """Yield time, scope and value of each line of a start of a job, in the order of time.

    The scope is that of a later stage, or empty. ``checked`` is that of `merged_lines`.

    Raises:
        FftError: There is no trace.
    """

    def lines(folder: Path) -> Iterator[tuple[float, str, Line]]:
        scope = scope_of(directory, folder)
        merged = merged_lines(folder, checked=checked)
        return ((at, scope, line) for at, _, line, _ in merged)

    folders = scope_folders(directory)
    return heapq.merge(*map(lines, folders), key=lambda timed: timed[0])


def history_of(directory: str | Path) -> History:
    """Return the history of one start of a job. Raises FftError if there is no trace."""
    found = History()
    for at, scope, line in history_lines(Path(directory)):
        found.add(line, at, scope)
    found.waits.end()
    return found


def summary(course: Course) -> dict[str, Any]:
    """Return the figures of a run as plain data; what cannot be known is None."""
    steps, slices = course.mean_rates or (None, None)
    lost = TimeLost(course)
    return {
        "steps": course.steps,
        "last_step": course.step,
        "elapsed_s": course.elapsed,
        "samples": course.samples(course.slices),
        "steps_by_samples": [
            {"samples": course.samples(size), "slices": size, "steps": count}
            for size, count in sorted(course.sizes.items(), reverse=True)
        ],
        "steps_with_smaller_batch": course.smaller,
        "steps_per_s": steps,
        "samples_per_s": course.samples(slices),
        "undisturbed_samples_per_s": course.samples(lost.undisturbed_rate),
        "goodput": course.goodput,
        "lost_s": lost.causes(),
        "attempts_lost": len(course.faults),
        "samples_lost": course.samples(course.unused),
        "samples_repeated": course.samples(course.repeated),
        "absences": [
            {
                "group": absence.group,
                "from_step": absence.step,
                "steps": absence.steps,
                "planned": absence.planned,
                "returned": absence.back is not None,
                "seconds": absence.seconds(course.last),
            }
            for absence in course.absences
        ],
    }


def summary_lines(course: Course) -> list[str]:
    """Return the figures of a run as lines of at most 80 columns."""
    if course.mean_rates is None:
        return [f"{course.steps} steps were committed, too few for a speed"]
    found, unit = summary(course), "samples"
    total, speed = found["samples"], found["samples_per_s"]
    if total is None:  # the size of a batch is not in the trace
        unit, total, speed = "slices", course.slices, course.mean_rates[1]
    lines = [
        f"{course.steps} steps, {total:,.0f} {unit} in {course.elapsed:.1f} s: "
        f"{found['steps_per_s']:.2f} steps/s, {speed:,.1f} {unit}/s"
    ]
    if course.sizes:
        lines.append(_step_sizes(course, unit))
    if course.goodput is not None:
        rate = TimeLost(course).undisturbed_rate or 0.0
        whole = f"{course.samples(rate) or rate:,.1f} {unit}/s"
        lines.append(f"goodput {course.goodput:.1%}: {whole} with all groups and without faults")
    costs = (f"{name} {seconds:.1f} s" for name, seconds in found["lost_s"].items() if seconds)
    lines.append(f"time lost: {', '.join(costs) or 'none'}")
    lost, again = found["samples_lost"] or course.unused, found["samples_repeated"]
    again = course.repeated if again is None else again
    lines.append(f"{unit} never trained: {lost:,.0f}, trained more than once: {again:,.0f}")
    for absence in course.absences:
        if absence.steps and course.steps:  # a job of live blocks alone has no steps
            until = "" if absence.back is None else f" to {absence.step + absence.steps}"
            why = " as asked" if absence.planned else ""
            time = duration(absence.seconds(course.last))
            lines.append(
                f"group {absence.group} was away{why} for {time}, {absence.steps} of "
                f"{course.steps} steps (from step {absence.step}{until})"
            )
    return lines


def _step_sizes(course: Course, unit: str) -> str:
    """Return a line on the samples in each step."""
    found = {
        f"{size if (samples := course.samples(size)) is None else samples:,.0f}": steps
        for size, steps in sorted(course.sizes.items(), reverse=True)
    }
    if len(found) == 1:
        return f"{unit} per step: {next(iter(found))} in all steps"
    each = ", ".join(f"{size} in {steps}" for size, steps in found.items())
    if len(found) > _MOST_SIZES:
        each = f"{list(found)[-1]} to {next(iter(found))}"
    return f"{unit} per step: {each}; {course.smaller} steps ran with a smaller batch"


def fault_table(found: Iterable[Incident], course: Course) -> Table | None:
    """Return the faults as a table that fits 80 columns, or None if there was no fault."""
    title = "faults (at: seconds since the first epoch)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("at", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fault", overflow="fold", ratio=1)
    for name in (
        "time\nlost",
        "steps\nwithout\na group",
        "samples/s\nbefore,\nafter",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    by_number, times = {fault.n: fault for fault in course.faults}, TimeLost(course)
    rows: dict[int, list[Incident]] = {}
    hidden = {each.n for each in course.rollbacks if each.is_recomputation}
    for incident in (each for each in found if not each.is_planned and each.n not in hidden):
        rows.setdefault(incident.n or id(incident), []).append(incident)
    for incident, *others in rows.values():  # several injected faults may cause one rollback
        fault = by_number.get(incident.n)
        named = ", ".join(each.fault for each in (incident, *others) if each.fault != _NOT_INJECTED)
        cause = fault.cause if fault and fault.lost else readable_cause(incident.noticed)
        what = ": ".join(filter(None, (named, cause)))
        place, lost = ("-", "-"), None
        if fault is not None:
            place, lost = (f"{fault.at - course.began:.2f}", str(fault.step)), times.by(fault)
        elif incident.next_commit_ms is not None:  # it has no rollback of the job in `course`
            what += f"; next commit after {duration(incident.next_commit_ms / 1e3)}"
        time = "-" if lost is None else duration(lost)
        gone = (each for each in course.absences if each.n == incident.n)
        steps = "\n".join(str(each.steps) for each in gone if fault is None or not each.planned)
        table.add_row(*place, Text(what), time, steps or "0", _speeds(fault, course))
    return table if table.rows else None


def _speeds(fault: Fault | None, course: Course) -> str:
    """Return the samples per second of the last epoch before the fault and the first after it."""
    if fault is None:
        return "-"
    rates = (None if phase is None else phase.rate for phase in (fault.before, fault.after))
    known = [rate if (each := course.samples(rate)) is None else each for rate in rates]
    return ", ".join("-" if rate is None else f"{rate:,.0f}" for rate in known)


def change_lines(found: Iterable[Incident], course: Course) -> list[str]:
    """Return a line for each change of the membership that is no fault: joins, planned leaves."""
    healed = {incident.n: incident.bytes_healed for incident in found}
    times, lines = TimeLost(course), []
    for change in course.changes:
        amount, lost = healed.get(change.n - 1, 0), times.around(change)
        text = f"{change.at - course.began:.2f} s, step {change.step}: {change.text}"
        text += f", fetched {decimal(amount)}" if change.joined and amount else ""
        lines.append(text + (f"; {duration(lost)} lost" if lost else ""))
    return lines


def save_plan(directory: Path, plan: FaultPlan) -> Path | None:
    """Save the fault plan of a run beside its traces, for `fired`.

    Returns:
        The path of the file, or None if the plan is empty.
    """
    path = directory / _PLAN
    path.unlink(missing_ok=True)
    if not plan.faults:
        return None
    path.write_text(plan.model_dump_json(exclude_none=True, indent=1))
    return path


def _share(values: list[float], share: float) -> float:
    """Return the value that ``share`` of ``values`` do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]

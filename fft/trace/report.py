"""Report the cost of the faults of a run, one row per rollback or membership change, and the origin
of each rank's own errors.

This module reads only trace files. Times are in milliseconds, on one clock for all hosts
(`fft.trace.read`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from fft.messages.causes import CauseCode
from fft.messages.fault_plans import AnyFault, FaultPlan, in_words, load_plan
from fft.messages.progress import Goal
from fft.trace.checkpoint_notes import CheckpointNotes
from fft.trace.course import Course, Fault, TimeLost, readable_cause
from fft.trace.display import duration
from fft.trace.ends import Comparisons
from fft.trace.figures import Figures, plain
from fft.trace.format import RESULT_REFUSED, scope_folders
from fft.trace.read import (
    idle_times,
    merged_lines,
    read_lines,
    read_trace,
    register_records,
    trace_files,
    who_of,
)
from fft.trace.starts import start_after
from fft.trace.tail import TraceTail, goal_in

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
class _Line:
    wall: float
    who: tuple[str, int, int]
    record: dict[str, Any]

    @property
    def event(self) -> dict[str, Any]:
        """The event of a transition; empty for anything else."""
        return self.record.get("event") or {}


@dataclass(frozen=True, slots=True)
class _End:
    """A register record that closed an epoch, at the time when it was first traced."""

    wall: float
    record: dict[str, Any]
    following: dict[str, Any] | None
    """Record of the next epoch."""

    @property
    def is_join(self) -> bool:
        """Whether the epoch ended because groups joined, and none left."""
        return self.record["kind"] == "commit" and not self.record["leavers"]

    @property
    def what(self) -> str:
        """Short reason for the end of the epoch."""
        if self.record["kind"] == "abort":
            return str(self.record["cause"])
        if self.record["leavers"]:
            return f"leaves after a commit: group {', '.join(self.record['leavers'])}"
        return "a group asked to join"


def incidents(directory: str | Path) -> list[Incident]:
    """Return every fault of a run: injected faults, and ends of epochs without an injected fault.

    If stages have their own scopes, the incidents of each scope are determined separately. Those of
    later stages have the number 0, because each scope numbers its own records.
    """
    first, *others = scope_folders(Path(directory))
    found = _incidents(first)
    found += [(at, replace(each, n=0)) for other in others for at, each in _incidents(other)]
    return [incident for _, incident in sorted(found, key=lambda timed: timed[0])]


def _incidents(directory: Path) -> list[tuple[float, Incident]]:
    """Return the incidents of one scope with their times."""
    read = read_lines(directory, lambda line: line["kind"] in ("transition", "note"))
    lines = [_Line(line["wall"], who_of(line), line) for line in read]
    ends = _ends(lines)
    found: list[tuple[float, Incident]] = []
    explained = set()
    for wall, name, who in _injected(lines):
        end = next((e for e in ends if e.wall >= wall and not e.is_join), None)
        if (alone := _alone(lines, name, wall, who)) is not None:
            found.append((wall, alone))
            continue
        if (apart := _while_apart(lines, name, wall, who, end)) is not None:
            found.append((wall, apart))
            continue
        if end is not None:
            explained.add(end.record["n"])
        found.append((wall, _incident(lines, name, wall, end)))
    for end in ends:
        if end.record["n"] not in explained and not _is_end_of_loop(lines, end):
            is_planned = end.record["kind"] == "commit"
            name = end.what if is_planned else _NOT_INJECTED
            incident = _incident(lines, name, end.wall, end)
            found.append((end.wall, replace(incident, is_planned=is_planned)))
    return found


def damages(directory: str | Path) -> list[str]:
    """Return the parts of the traces that are unreadable or missing, and so not in the report."""
    found = []
    for path in (p for folder in scope_folders(Path(directory)) for p in trace_files(folder)):
        trace = read_trace(path)
        if trace.damage is not None:
            found.append(f"{trace.damage}; the report leaves out this line and those after it")
        found += trace.gaps
    return found


def course_of(directory: str | Path) -> Course:
    """Return the course of one start of a job; if stages step independently, of the first stage."""
    course = Course(idle=idle_times(directory))
    for record, at in register_records(directory):
        course.take(record, at)
    for path in trace_files(directory):
        if (goal := _first_goal(path)) is not None:
            course.goal = goal
            break
    return course


def figures_of(directory: str | Path) -> Figures:
    """Return the figures of one start of a job (`fft.trace.figures`)."""
    found = Figures(course_of(directory))
    for folder in scope_folders(Path(directory)):
        for at, _, line, _ in merged_lines(folder):
            found.take(line, at, folder.name)
            if "note" in line:
                rank = f"{line['group']}/{line['rank']}"
                found.checkpoints.take(rank, line["note"], line["data"])
    found.end()
    return found


def _first_goal(path: Path) -> Goal | None:
    """Return the planned end in the first note of FFT's own loop."""
    with path.open("rb") as file:
        for text in file:
            if b'"note":"loop"' in text:
                with suppress(ValueError, RecursionError):
                    return goal_in(json.loads(text))
    return None


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


def full_report(directory: str | Path) -> dict[str, Any]:
    """Return everything that ``fft report`` shows as plain data."""
    figures, found = figures_of(directory), incidents(directory)
    course = figures.course
    by_number, times = {fault.n: fault for fault in course.faults}, TimeLost(course)
    faults = []
    for incident in found:
        fault = by_number.get(incident.n)
        told = asdict(incident)
        if fault is not None:
            speeds = (fault.before, fault.after)
            before, after = (course.samples(phase.rate if phase else None) for phase in speeds)
            told |= {"step": fault.step, "code": fault.code, "groups_lost": list(fault.lost)}
            told |= {"samples_per_s_before": before, "samples_per_s_after": after}
            told |= {"at_s": fault.at - course.began, "lost_s": times.by(fault)}
        faults.append(told)
    asked, missing = requested_faults(directory)
    return {
        "directory": str(directory),
        **summary(course),
        "figures": plain(figures),
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
        "errors": [asdict(error) for error in own_errors(directory)],
        "faults_requested": asked,
        "faults_not_fired": [fault.name for fault in missing],
        "input": input_wait(directory),
        "refusals": refusals(directory),
        "taint": taint(directory),
        "checkpoints": checkpoints(directory),
        "damage": damages(directory),
    }


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


def own_errors(directory: str | Path) -> list[OwnError]:
    """Return the origins of the ranks' errors, in the order of their occurrence."""
    found: Counter[tuple[str, int, int, str, str, str]] = Counter()
    for line in _notes(directory, "fault"):
        data = line["data"]
        error = f"{data['type']}: {data['message']}"
        place = (error, data["where"], data["operation"])
        found[(line["group"], line["rank"], line["step"], *place)] += 1
    return [OwnError(*key, times) for key, times in found.items()]


def place_table(directory: str | Path) -> Table | None:
    """Return the errors as a table, or None if there were none."""
    table = Table(title="exceptions in ranks, and where they were raised")
    for name in ("rank", "step", "times"):
        table.add_column(name, justify="right")
    for name in ("error", "where"):
        table.add_column(name, overflow="fold")
    for e in own_errors(directory):
        where = f"{e.where}\n{e.operation}" if e.operation else e.where
        rank = f"{e.group}/{e.rank}"
        table.add_row(rank, str(e.step), str(e.times), Text(e.error), Text(where))
    return table if table.rows else None


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


def fired(directory: str | Path) -> str | None:
    """Report requested faults that did not happen; None if no fault was requested.

    Faults are requested by a fault plan, or with ``fft fault``.

    Raises ConfigError if the plan in the trace directory cannot be read.
    """
    asked, missing = requested_faults(directory)
    if not asked:
        return None
    if missing:
        names = "".join(f"\n  {in_words(fault)}" for fault in missing)
        count = f"{len(missing)} of {asked} faults"
        return f"{count} did not fire, so this run does not test them:{names}"
    return f"all {asked} requested faults have fired"


def requested_faults(directory: str | Path) -> tuple[int, list[AnyFault]]:
    """Return the number of planned or commanded faults, and those that did not happen.

    Raises ConfigError if the plan in the trace directory cannot be read.
    """
    path = Path(directory, _PLAN)
    plan = load_plan(path) if path.exists() else FaultPlan(faults=[])
    with closing(TraceTail(Path(directory))) as tail:
        view = tail.poll()
    asked = {fault.name for fault in plan.faults} | view.commanded.keys()
    return len(asked), view.unfired(plan)


def input_wait(directory: str | Path) -> str:
    """Report how long committed steps waited for input, over all ranks, and the slowest rank."""
    waits: dict[tuple[str, int], list[float]] = {}
    for line in _notes(directory, "consumed"):
        if "input_ms" in line["data"]:
            waits.setdefault((line["group"], line["rank"]), []).append(line["data"]["input_ms"])
    if not waits:
        return "wait for batches: no step has measured it"
    ranked = sorted((_share(found, 0.99), who) for who, found in waits.items())
    slowest, (group, rank) = ranked[-1]
    every = [ms for found in waits.values() for ms in found]
    return (
        f"wait for batches: p50 {_share(every, 0.5):.1f} ms, p99 {_share(every, 0.99):.1f} ms; "
        f"longest on group {group} rank {rank}: p99 {slowest:.1f} ms"
    )


def went_on(directory: str | Path, has_gaps: bool = False) -> str | None:
    """Report where the next start of the job resumed, and how far this one had come.

    Args:
        has_gaps: The traces of this start have gaps or damage.

    Returns:
        The text, or None if this was the last start.
    """
    after = start_after(Path(directory).resolve())
    if after is None:
        return None
    with closing(TraceTail(Path(directory))) as tail:
        reached = tail.poll().step
    begun: list[int] = []
    for path in after.glob("*.jsonl"):
        with path.open("rb") as file, suppress(ValueError, LookupError, TypeError):
            begun.append(json.loads(file.readline())["start"]["step"])
    where = f"from the checkpoint of step {max(begun, default=0)}"
    if not any(begun):
        where = "at its beginning" if begun else "at a step that its traces do not tell"
    lines = read_lines(after, lambda line: line.get("note") == "resumed") if begun else ()
    data: dict[str, Any] = next((line["data"] for line in lines), {})
    if data.get("tier") == "memory":
        where = f"{where} in memory"
    unused = "".join(f"\n  a copy in memory was not used: {why}" for why in data.get("unused", ()))
    least = " at least" if has_gaps else ""
    return (
        f"this start had come to step {reached}{least} when it ended; the job was started again "
        f"{where}: fft report {after}{unused}{_saved(directory)}"
    )


def _saved(directory: str | Path) -> str:
    """Return a line about the work that copies in memory save a start that has ended, or ``""``."""
    lines = read_lines(directory, lambda line: line.get("note") in ("memory_copy", "checkpoint"))
    copied: dict[str, dict[int, float]] = {}
    published: dict[int, float] = {}
    for line in lines:
        place, step = f"{line['group']}/{line['rank']}", line["data"]["step"]
        if line["note"] == "memory_copy":
            copied.setdefault(place, {})[step] = line["wall"]
        elif line["data"].get("published"):
            published[step] = line["wall"]
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


def checkpoints(directory: str | Path, has_gaps: bool = False) -> str | None:
    """Report which durable checkpoints were taken, and why others were not; None if the job took
    none.

    Args:
        has_gaps: The traces have gaps or damage.
    """
    found = CheckpointNotes()
    for folder in scope_folders(Path(directory)):
        for line in read_lines(folder, lambda line: "note" in line):
            found.take(f"{line['group']}/{line['rank']}", line["note"], line["data"])
    return "\n".join(found.lines(has_gaps)) or None


def refusals(directory: str | Path) -> str | None:
    """Report the steps that were skipped, and the results that ranks refused; None without any.

    A skip by a scaler is counted, too; it has no refusal.
    """
    folders = scope_folders(Path(directory))
    skips = {
        (folder, _skip_in(line))
        for folder in folders
        for line in read_lines(folder, lambda line: _skip_in(line) is not None)
    }
    by_attempt: dict[tuple[int, str, str, str], list[str]] = {}
    for line in _notes(directory, RESULT_REFUSED):
        data = line["data"]
        norm = f"norm {data['grad_norm']:.3g}"
        values = ", ".join([norm, *(f"{k} {v:.3g}" for k, v in data["metrics"].items())])
        key = (line["step"], str(data["token"]), data["reaction"], data["why"])
        by_attempt.setdefault(key, []).append(f"{line['group']}/{line['rank']} ({values})")
    if not skips and not by_attempt:
        return None
    found = [f"refused results; steps skipped, whose batches had no update: {len(skips)}"]
    for (step, _, reaction, why), ranks in by_attempt.items():
        found.append(f"  step {step}, {reaction}: {why}, on {'; '.join(ranks)}")
    more = len(found) - _MOST_REFUSALS
    return "\n".join(found if more < 1 else [*found[:_MOST_REFUSALS], f"  and {more} more"])


def taint(directory: str | Path) -> str | None:
    """Report the steps that may be wrong, because the replicas differed without a majority."""
    found = Comparisons()
    for line in read_lines(Path(directory), lambda line: "event" in line):
        found.take(line)
    if found.taint is None:
        return None
    return f"the job ended because its replicas differed: {found.taint}"


def _skip_in(line: Mapping[str, Any]) -> tuple[str, int, int] | None:
    """Return an identity of the skipped step, or local step, that a trace line shows, or None."""
    record = (line.get("event") or {}).get("record") or {}
    if record.get("kind") == "commit" and record.get("skip") and not record.get("live"):
        return "", record["n"], 0
    if line.get("note") == "inner_commit" and line["data"].get("skipped"):
        return line["group"], line["data"]["slice"], line["data"]["inner_step"]
    return None


def _notes(directory: str | Path, name: str) -> list[dict[str, Any]]:
    """Return the notes with that name, of all scopes, in the order of time."""
    folders = scope_folders(Path(directory))
    found = [n for f in folders for n in read_lines(f, lambda line: line.get("note") == name)]
    return sorted(found, key=lambda line: line["wall"])


def _share(values: list[float], share: float) -> float:
    """Return the value that ``share`` of ``values`` do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _ends(lines: list[_Line]) -> list[_End]:
    known: dict[int, tuple[float, dict[str, Any]]] = {}
    for line in lines:
        if record := line.event.get("record"):
            known.setdefault(record["n"], (line.wall, record))
    ends = []
    for n, (wall, record) in sorted(known.items()):
        # in an asynchronous job each epoch ends with its commit
        apart = record.get("bound") and not record["leavers"]
        if record["kind"] == "abort" or (record["change"] and not apart):
            following = known.get(n + 1, (0.0, None))[1]
            ends.append(_End(wall, record, following))
    return ends


def _is_end_of_loop(lines: list[_Line], end: _End) -> bool:
    """Return whether the rollback happened because a loop ended regularly on all ranks.

    A loop of torchft has no last commit, so the ranks shut down one after the other. A rank whose
    engine has begun another txn rolls it back when the first rank leaves.
    """
    if end.record["kind"] != "abort" or end.record.get("code") != CauseCode.LEFT:
        return False
    if any(x.event.get("type") == "applied" and x.wall > end.wall for x in lines):
        return False
    last = {x.who: x.record for x in lines if "roles" in x.record}
    there = {x.who for x in lines if x.record.get("epoch", 0) >= end.record["epoch"]}
    return all(
        last[who]["roles"][1] == "terminal" and "finish" in last[who]["effects"]
        for who in there & last.keys()
    )


def _injected(lines: list[_Line]) -> list[tuple[float, str, tuple[str, int, int]]]:
    fired: dict[str, tuple[float, tuple[str, int, int], set[str]]] = {}
    for line in (line for line in lines if line.record.get("note") == "inject"):
        data, who = line.record["data"], line.who
        name = f"{data['name']} ({data['kind']}, step {data['step']}"
        fired.setdefault(name, (line.wall, who, set()))[2].add(f"{who[0]}/{who[1]}")
    return [
        (wall, f"{name}, rank {', '.join(sorted(ranks))})", who)
        for name, (wall, who, ranks) in fired.items()
    ]


def _alone(
    lines: list[_Line], name: str, wall: float, who: tuple[str, int, int]
) -> Incident | None:
    """Return a fault after which a group repeated a local step, or None if the job noticed it."""
    own = [x for x in lines if x.who == who and x.wall >= wall]
    said = next((x for x in own if x.record.get("note") in _ALONE or x.event), None)
    if said is None or said.event:
        return None
    done = (x.wall for x in own if x.record.get("note") == "inner_commit" and x.wall >= said.wall)
    commit = next(done, None)
    return Incident(
        fault=name,
        noticed=f"group {who[0]} alone: {said.record['data']['cause']}",
        rolled_back_ms=(said.wall - wall) * 1e3,
        next_commit_ms=None if commit is None else (commit - wall) * 1e3,
        attempts_lost=1,
        bytes_healed=0,
    )


def _while_apart(
    lines: list[_Line], name: str, wall: float, who: tuple[str, int, int], end: _End | None
) -> Incident | None:
    """Return a fault that ended a process of an asynchronous job between two synchronizations.

    The other groups then commit and roll nothing back. Returns None for any other fault.
    """
    moves = [x for x in lines if x.who == who and "roles" in x.record]
    if not moves or moves[-1].wall > wall or moves[-1].record["roles"][1] != "apart":
        return None
    commits = (
        x.wall
        for x in lines
        if x.wall >= wall and x.event.get("type") == "applied" and x.who != who
    )
    commit = next(commits, None)
    if commit is None or (end is not None and end.wall < commit):
        return None
    told = f"group {who[0]} is left out of the next synchronisation"
    return Incident(name, told, None, (commit - wall) * 1e3, 0, 0)


def _incident(lines: list[_Line], name: str, wall: float, end: _End | None) -> Incident:
    if end is None:
        return Incident(name, "no epoch ended because of it", None, None, 0, 0)
    record = end.record
    epoch = end.following["epoch"] if end.following else None
    # Participants of the ended epoch that are in the next one and committed a later step.
    inside = {x.who for x in lines if x.record.get("epoch") == record["epoch"]}
    if end.following and end.following["members"]:
        inside &= {
            (group["group"], rank["rank"], rank["inc"])
            for group in end.following["members"]
            for rank in group["ranks"]
        }
    commits: dict[tuple[str, int, int], float] = {}
    for x in lines:
        later = x.wall >= wall and x.event.get("type") == "applied"
        if later and x.who in inside and x.record["step"] > record["step"]:
            commits.setdefault(x.who, x.wall)
    restored = [
        x.wall
        for x in lines
        if x.event.get("type") == "restored"
        and x.who in inside
        and x.event["token"] == [record["epoch"], record["txn"]]
    ]
    healed = [
        x.event["bytes"]
        for x in lines
        if x.event.get("type") == "healed" and x.event["epoch"] == epoch
    ]
    return Incident(
        fault=name,
        noticed=end.what,
        rolled_back_ms=(max(restored) - wall) * 1e3 if restored else None,
        next_commit_ms=(max(commits.values()) - wall) * 1e3 if commits else None,
        attempts_lost=int(record["kind"] == "abort"),
        bytes_healed=sum(healed),
        n=record["n"],
    )

"""The history of a job: one fold over the lines of its traces, or over the messages of its bus.

Pure. `History.add` takes a line of a trace, `History.take_record` and `History.hear` take what is
on the bus. Ranks may be read one after the other or in any interleaving that keeps the order of
each rank: the result is the same. Reports, pages, metrics, ``fft watch`` and the supervisor are
views of it. Lines are skipped, not judged: that is the task of the audit.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from fft.messages.causes import CauseCode
from fft.messages.commands import BY_SUPERVISOR
from fft.messages.fault_plans import AnyFault, FaultPlan, ServiceFault
from fft.messages.progress import (
    CheckpointReport,
    FetchReport,
    Goal,
    IdleReport,
    Report,
    SpeedReport,
    TraceReport,
)
from fft.messages.protocol import Decision, Healed, Prepared, Record
from fft.protocol.roles import COMMITTING, Role
from fft.trace.checkpoint_notes import CheckpointNotes
from fft.trace.course import Course
from fft.trace.ends import Comparisons
from fft.trace.format import FETCHING, IDLE, NO_REFORM, UNREACHABLE, WARNING
from fft.trace.inputs import LOOP
from fft.trace.lines import Header, Line, Noted, Transition, record_of

_WINDOW = 1024
"""Minimum number of records that may still be received earlier than by those read so far."""


_MAX_PENDING_TXNS = 64
"""Maximum number of transactions whose votes are kept; beyond it, the oldest one is counted."""


@dataclass
class RankView:
    """The newest incarnation of one rank, as its trace shows it."""

    inc: int
    pid: int = 0
    state: str = "-"
    epoch: int = 0
    step: int = 0
    members: tuple[str, ...] = ()
    loss: float | None = None
    commits: int = 0
    fault: str = ""
    is_injected: bool = False
    """``fault`` is an injected one."""
    waits: str = ""
    """The newest message on which participants it waits for, and why."""
    role: Role = "joining"
    """Role of the state."""
    reforms: bool = False
    """Its group may lose other ranks and go on with replacements in their places."""

    def take(self, line: Line) -> None:
        """Take a line of this incarnation."""
        match line:
            case Header():
                self.state, self.pid = line.spec.initial, line.config.pid
                self.reforms = line.reforms
            case Noted():
                self.epoch = self.epoch if line.epoch is None else line.epoch
                self.step = self.step if line.step is None else line.step
                self._take_note(line.note, line.data)
            case Transition():
                self.epoch, self.step = line.epoch, line.step
                self._move(line)

    def _move(self, line: Transition) -> None:
        was, self.role, self.state = self.role, line.roles[1], line.to
        self.commits += self.role in COMMITTING and self.role != was
        self.members = tuple(sorted(line.members))
        # Keep the last fault, but drop the cause of a wait of an asynchronous job once it goes on.
        cause = (line.cause or "").partition("\n")[0]
        is_wait = line.code == CauseCode.AWAITED
        if self.fault == self.waits and (is_wait or not cause):
            self.fault = ""
        if is_wait:
            self.waits = cause
        if cause:
            self.fault, self.is_injected = cause, False

    def _take_note(self, note: str, data: Mapping[str, Any]) -> None:
        match note, data:
            case "metrics", {"loss": int() | float() as loss}:
                self.loss = float(loss)
            case _ if note == NO_REFORM:
                self.reforms = False
            case _ if note == UNREACHABLE:
                self.fault, self.is_injected = str(data.get("why")), False
            case "inject", _:
                self.fault, self.is_injected = f"planned: {data.get('name')}", True


@dataclass(slots=True)
class _Votes:
    """The votes for one transaction, and when their authors knew its COMMIT."""

    cast: dict[tuple[str, str], float] = field(default_factory=dict)
    committed: dict[tuple[str, str], float] = field(default_factory=dict)


@dataclass
class VoteWaits:
    """The waits of ranks for each other, and what they have fetched. Votes for a transaction are
    compared as soon as all ranks have its COMMIT."""

    checkpoint: tuple[int, float] | None = None
    """Step and time of the newest published checkpoint."""
    healed: Counter[str] = field(default_factory=Counter)
    """Group → bytes of state that it has fetched."""
    waited: dict[tuple[str, str], float] = field(default_factory=dict)
    """Group and rank → seconds from its votes to the last votes, over committed transactions."""
    caused: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    """Group and rank → the number of committed transactions in which it voted last, and the seconds
    that all other ranks waited for it."""
    protocol: dict[tuple[str, str], float] = field(default_factory=dict)
    """Group and rank → seconds from the last votes until it knew the decisions."""
    _sizes: OrderedDict[tuple[str, int], int] = field(default_factory=OrderedDict)
    """Scope and epoch → number of its ranks."""
    _votes: OrderedDict[tuple[str, int, int], _Votes] = field(default_factory=OrderedDict)

    def take(self, line: Line, at: float, scope: str = "") -> None:
        """Take a line of a trace. ``scope``: a name for the directory of its trace."""
        who = line.group, str(line.rank)
        match line:
            case Noted(note="checkpoint", data={"published": True, "step": int(step)}):
                self.checkpoint = max(self.checkpoint or (-1, 0.0), (step, at))
            case Transition(event=Healed(bytes=size)):
                self.healed[line.group] += size
            case Transition(event=Prepared(yes=True, token=token)):
                self._open(scope, *token).cast[who] = at
            case Transition(event=Decision(record=Record(kind="epoch") as record)):
                self._sizes[scope, record.epoch] = len(record.peers)
                if len(self._sizes) > _MAX_PENDING_TXNS:
                    self._sizes.popitem(last=False)
            case Transition(event=Decision()) if line.roles[1] in COMMITTING:
                place = scope, line.epoch, line.txn
                votes = self._open(*place)
                votes.committed[who] = at
                if len(votes.committed) == self._sizes.get(place[:2]):
                    self._judge(place, self._votes.pop(place))

    def end(self) -> None:
        """Take the transactions into account whose votes are not all in the traces."""
        while self._votes:
            self._judge(*self._votes.popitem(last=False))

    def _open(self, scope: str, epoch: int, txn: int) -> _Votes:
        votes = self._votes.setdefault((scope, epoch, txn), _Votes())
        if len(self._votes) > _MAX_PENDING_TXNS:
            self._judge(*self._votes.popitem(last=False))
        return votes

    def _judge(self, place: tuple[str, int, int], votes: _Votes) -> None:
        """Add up what a transaction has cost. Without all votes, its last vote is not known."""
        if not votes.committed or not votes.cast:
            return
        last, slowest = max((at, who) for who, at in votes.cast.items())
        waits = {who: last - at for who, at in votes.cast.items()}
        for who, seconds in waits.items():
            self.waited[who] = self.waited.get(who, 0.0) + seconds
        if len(waits) > 1:
            times, seconds = self.caused.get(slowest, (0, 0.0))
            self.caused[slowest] = times + 1, seconds + sum(waits.values())
        if len(votes.cast) == self._sizes.get(place[:2]):
            for who, at in votes.committed.items():
                self.protocol[who] = self.protocol.get(who, 0.0) + max(0.0, at - last)


@dataclass(frozen=True)
class Injected:
    """A planned fault that fired, with the job's position at that time."""

    name: str
    kind: str
    group: str
    step: int
    epoch: int
    rank: int = 0
    """Rank whose trace contains the fault."""


@dataclass
class History:
    """The job so far."""

    ranks: dict[tuple[str, int], RankView] = field(default_factory=dict)
    """The newest incarnation of each rank with a trace."""
    injected: dict[str, Injected] = field(default_factory=dict)
    """The planned faults that have fired, by name."""
    commanded: dict[str, AnyFault] = field(default_factory=dict)
    """Faults that processes have accepted from an operator (`fft dev inject`), by name."""
    committed: bool = False
    """Whether any process has committed a step."""
    gone: int = 0
    """The highest step of an incarnation that a newer one has replaced."""
    checkpoints: CheckpointNotes = field(default_factory=CheckpointNotes)
    gaps: dict[tuple[str, int], TraceReport] = field(default_factory=dict)
    """Ranks that cannot write their traces → the newest report of that."""
    fetching: dict[tuple[str, int], FetchReport] = field(default_factory=dict)
    """Ranks whose fetch of the state takes long → the newest report of its progress."""
    comparisons: Comparisons = field(default_factory=Comparisons)
    """Comparisons of the replicas, and whether one of them ended the job."""
    warnings: dict[str, str] = field(default_factory=dict)
    """Warnings of ranks about their script, by the name of the note; empty once shown."""
    min_groups: int = 1
    """Minimum number of groups for a commit: ``min_replica_size`` of the script."""
    has_stages: bool = False
    """Whether each rank number steps by itself."""

    def __post_init__(self) -> None:
        self._course, self._base = Course(), Course()
        self._records: dict[int, tuple[float, Record]] = {}
        """The newest records, each with the earliest time at which a rank received it; those before
        them are in ``_base``."""
        self._is_stale = False
        self._goal_of: tuple[str, int] | None = None
        """The rank that has reported ``goal``: the first one of those that have."""
        self.waits = VoteWaits()

    # --- results ---

    @property
    def course(self) -> Course:
        """Steps, memberships and faults, by the records of the job; if stages step independently,
        of the first stage."""
        if self._is_stale:
            known, self._course, self._is_stale = self._course, deepcopy(self._base), False
            self._course.goal, self._course.idle = known.goal, known.idle
            for _, (at, record) in sorted(self._records.items()):
                self._course.take(record, at)
        return self._course

    @property
    def step(self) -> int:
        """The number of steps that the job has committed."""
        return max([self.gone, *(view.step for view in self.ranks.values())])

    def unfired(self, plan: FaultPlan) -> list[AnyFault]:
        """Return the faults of the plan, and commanded ones, that have not happened."""
        asked = {fault.name: fault for fault in plan.faults} | self.commanded
        return [fault for name, fault in asked.items() if name not in self.injected]

    # --- lines of traces ---

    def add(self, line: Line, at: float, scope: str = "") -> None:
        """Take the next line of a rank.

        Args:
            line: The line.
            at: Its time in seconds, on one clock for all ranks.
            scope: Name of the scope of a later stage, which has registers of its own.
        """
        self.has_stages |= bool(scope)
        self.waits.take(line, at, scope)
        record = record_of(line)
        if not scope:
            self.comparisons.take(line)
            if record is not None:
                self.take_record(record, at)
        match line:
            case Header():
                self.min_groups = max(self.min_groups, line.config.min_groups)
            case Transition():
                self.committed |= line.roles[1] in COMMITTING
                self.fetching.pop((line.group, line.rank), None)
            case Noted():
                self._take_note(line, at, scope)
        self._take_rank(line)

    def _take_rank(self, line: Line) -> None:
        place = line.group, line.rank
        known = self.ranks.get(place)
        if known is None or line.inc > known.inc:
            gone, known = known or RankView(0), RankView(line.inc)
            self.gone = max(self.gone, gone.step)
            known.fault, known.is_injected = gone.fault, gone.is_injected
            self.ranks[place] = known
        if line.inc == known.inc:
            known.take(line)

    def _take_note(self, line: Noted, at: float, scope: str) -> None:
        data = line.data
        match line.note, data:
            case "inject", {"name": str(name), "kind": str(kind)}:
                self._take_injection(line, name, kind, line.group)
            case "command", {"type": "inject", "fault": fault} if data.get("refused") is None:
                self._take_command(line, fault)
            case name, {"seconds": int() | float() as seconds} if name == IDLE and not scope:
                self._course.take_idle(seconds, at)
            case name, {"goal": goal} if name == LOOP and not scope:
                with suppress(ValidationError, TypeError):
                    self._take_goal(Goal(**goal), (line.group, line.rank))
            case name, {"bytes": got, "total": total, "left_s": left} if name == FETCHING:
                with suppress(ValidationError):
                    self.hear(FetchReport(*line.who, got, total, left), at)
        self.checkpoints.take(line.lane, line.note, data)
        if isinstance(text := data.get(WARNING), str):
            text = f"rank {line.lane}: {text}"
            self.warnings[line.note] = min(self.warnings.get(line.note, text), text)

    def _take_command(self, line: Noted, told: object) -> None:
        """Take a commanded fault; the supervisor reports its own faults when they happen."""
        try:
            (fault,) = FaultPlan.model_validate({"faults": [told]}).faults
        except ValidationError:
            return
        if isinstance(fault, ServiceFault) and line.data.get("by") == BY_SUPERVISOR:
            self._take_injection(line, fault.name, fault.kind, "")
        else:
            self.commanded.setdefault(fault.name, fault)

    def _take_injection(self, line: Noted, name: str, kind: str, group: str) -> None:
        found = Injected(name, kind, group, line.step or 0, line.epoch or 0, line.rank)
        known = self.injected.setdefault(name, found)
        if (group, line.rank) < (known.group, known.rank):
            self.injected[name] = found

    # --- records and reports ---

    def take_record(self, record: Record, at: float) -> None:
        """Take a record of the head register, which a rank has received at time ``at``."""
        known = self._records.get(record.n)
        if record.n <= self._base.n or (known is not None and known[0] <= at):
            return
        self._records[record.n] = at, record
        if record.n > self._course.n and not self._is_stale:
            self._course.take(record, at)
        else:
            self._is_stale = True
        if len(self._records) > 2 * _WINDOW:
            for n in sorted(self._records)[:_WINDOW]:
                time, old = self._records.pop(n)
                self._base.take(old, time)

    def hear(self, report: Report, at: float) -> None:
        """Take a report that a rank has sent on the bus."""
        match report:
            case CheckpointReport():
                self.checkpoints.hear(report)
            case TraceReport():
                self.gaps[report.group, report.rank] = report
            case FetchReport():
                self.fetching[report.group, report.rank] = report
            case IdleReport():
                self._course.take_idle(report.seconds, at)
            case SpeedReport():
                self.fetching.pop((report.group, report.rank), None)
                if report.goal is not None:
                    self._take_goal(report.goal, (report.group, report.rank))

    def _take_goal(self, goal: Goal, by: tuple[str, int]) -> None:
        if self._goal_of is None or by <= self._goal_of:
            self._course.goal, self._goal_of = goal, by

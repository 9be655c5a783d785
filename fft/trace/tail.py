"""Read the state of a running job, by tailing its trace files.

The files are ``<dir>/g<group>r<rank>i<incarnation>.jsonl``. This module judges nothing, and skips
records and lines that it cannot read (the audit reports them).
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from fft.messages.causes import CauseCode
from fft.messages.commands import BY_SUPERVISOR
from fft.messages.fault_plans import AnyFault, FaultPlan, ServiceFault
from fft.messages.progress import Goal
from fft.messages.protocol import Peer
from fft.protocol.roles import COMMITTING, Role
from fft.trace.blame import History
from fft.trace.checkpoint_notes import CheckpointNotes
from fft.trace.course import Course
from fft.trace.ends import Comparisons
from fft.trace.figures import Figures
from fft.trace.format import (
    FETCHING,
    IDLE,
    NO_REFORM,
    UNREACHABLE,
    WARNING,
    progress_in_words,
    scope_folders,
)
from fft.trace.inputs import LOOP

_FILE = re.compile(r"g(?P<group>.+)r(?P<rank>\d+)i(?P<inc>\d+)\.jsonl")


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
    fetches: str = ""
    """How much of the state it has fetched, if the fetch takes long."""
    waits: str = ""
    """The newest message on which participants it waits for, and why."""
    role: Role = "joining"
    """Role of the state."""
    reforms: bool = False
    """Its group may lose other ranks and go on with replacements in their places."""


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
class JobView:
    """The whole job: each rank's newest incarnation, and the faults so far."""

    ranks: dict[tuple[str, int], RankView] = field(default_factory=dict)
    injected: dict[str, Injected] = field(default_factory=dict)
    commanded: dict[str, AnyFault] = field(default_factory=dict)
    """Faults that processes have accepted from an operator (`fft dev inject`), by name."""
    history: History = field(default_factory=History)
    course: Course = field(default_factory=Course)
    """Steps, memberships and faults, by the records in the traces."""
    committed: bool = False
    """Whether any process has committed a step."""
    gone: int = 0
    """The highest step of an incarnation that a newer one has replaced."""
    checkpoints: CheckpointNotes = field(default_factory=CheckpointNotes)
    gaps: dict[tuple[str, int], int] = field(default_factory=dict)
    """Ranks that reported that they cannot write their traces → the newest such incarnation."""
    comparisons: Comparisons = field(default_factory=Comparisons)
    """Comparisons of the replicas, and whether one of them ended the job."""
    warnings: dict[str, str] = field(default_factory=dict)
    """Warnings of ranks about their script, by the name of the note; empty once shown."""
    begun: int = 0
    """Step of the checkpoint that the job has begun with."""
    is_stale: bool = False
    """There are gaps, and the registers, which have the job's progress, could not be read."""
    cursor: int = 0
    """The position in the data of the newest record, in items."""
    block: int = 0
    """Number of the newest record that ends a live block."""
    min_groups: int = 1
    """Minimum number of groups for a commit: ``min_replica_size`` of the script."""
    has_stages: bool = False
    """Whether each rank number steps by itself."""

    def of(self, group: str) -> list[RankView]:
        """Return the ranks of ``group`` seen so far, in order."""
        return [view for (name, _), view in sorted(self.ranks.items()) if name == group]

    def incs(self, group: str) -> dict[int, int]:
        """Return the newest incarnation seen of each rank of ``group``."""
        return {rank: view.inc for (name, rank), view in self.ranks.items() if name == group}

    def committed_since(self, group: str, incs: dict[int, int]) -> bool:
        """Whether an incarnation newer than ``incs`` has committed a step."""
        return any(view.commits > 0 for view in self.since(group, incs).values())

    def joined_since(self, group: str, incs: dict[int, int]) -> bool:
        """Whether an incarnation newer than ``incs`` has joined an epoch."""
        return any(view.role != "joining" for view in self.since(group, incs).values())

    def since(self, group: str, incs: dict[int, int]) -> dict[int, RankView]:
        """Return the ranks of ``group`` whose incarnation differs from that in ``incs``."""
        ranks = {rank: view for (name, rank), view in self.ranks.items() if name == group}
        return {rank: view for rank, view in ranks.items() if view.inc != incs.get(rank)}

    def see_member(self, peer: Peer, step: int, has_committed: bool) -> None:
        """Take from the registers that ``peer`` is in the newest epoch of its scope.

        Args:
            step: The step that the scope has reached.
            has_committed: The scope has committed in that epoch.
        """
        known = self.ranks.get((peer.group, peer.rank))
        if known is None or known.inc < peer.inc:
            known = self.ranks[peer.group, peer.rank] = RankView(peer.inc)
        self.committed |= step > self.begun
        if known.inc == peer.inc:
            known.step, known.commits = max(known.step, step), max(known.commits, has_committed)
            known.role = "training" if known.role == "joining" else known.role

    def unfired(self, plan: FaultPlan) -> list[AnyFault]:
        """Return the faults of the plan, and commanded ones, that have not happened."""
        asked = {fault.name: fault for fault in plan.faults} | self.commanded
        return [fault for name, fault in asked.items() if name not in self.injected]

    def note_service_fault(self, name: str, kind: str) -> None:
        """Record that a fault of a service, which concerns no rank, is being carried out now."""
        epoch = max((rank.epoch for rank in self.ranks.values()), default=0)
        self.injected[name] = Injected(name, kind, "", self.step, epoch)

    @property
    def step(self) -> int:
        """The number of steps that the job has committed."""
        return max([self.gone, *(view.step for view in self.ranks.values())])

    @property
    def progress(self) -> tuple[int, int]:
        """The step, and a number that rises with each live block that the job has finished."""
        return self.step, self.block

    def reached(self, number: int) -> int:
        """Return the step of the ranks with that number, which may have their own scope."""
        own = [view.step for (_, rank), view in self.ranks.items() if rank == number]
        return max(own, default=0) if self.has_stages else self.step


class TraceTail:
    """A reader that follows all trace files of a directory; `poll` reads the appended lines."""

    def __init__(self, directory: Path, begun: int = 0, with_figures: bool = False) -> None:
        """Open no file yet.

        Args:
            begun: As in `JobView`.
            with_figures: Keep `figures`, too.
        """
        self.view = JobView(begun=begun)
        self.figures: Figures | None = None
        """The figures of the job, from its beginning."""
        if with_figures:
            self.figures = Figures(self.view.course, self.view.checkpoints)
        self._lines: list[tuple[float, str, dict[str, Any]]] = []
        """Time, scope and record of each line that was read in this poll, for the figures."""
        self._directory = directory
        self._files: dict[str, tuple[IO[bytes], re.Match[str]]] = {}
        self._rest: dict[str, bytes] = {}
        self._of_stages: set[str] = set()
        """Files of the later stages' scopes."""
        self._records: dict[int, tuple[float, dict[str, Any]]] = {}
        """Records that were read in this poll, with the earliest time of each."""
        self._through: set[str] = set()
        """Files of processes that have been replaced: read to the end, and closed."""

    def poll(self) -> JobView:
        """Read every line completed since the last call and return the updated view."""
        found = (p for folder in scope_folders(self._directory) for p in folder.glob("*.jsonl"))
        for path in sorted(found):
            name = path.name  # each rank number is in one scope
            is_new = name not in self._files and name not in self._through
            if is_new and (match := _FILE.fullmatch(name)):
                self._files[name] = (path.open("rb"), match)
                if path.parent != self._directory:
                    self._of_stages.add(name)
                    self.view.has_stages = True
                self._rest[name] = b""
        for name, (file, match) in list(self._files.items()):
            key, inc = (match["group"], int(match["rank"])), int(match["inc"])
            is_over = (newest := self.view.ranks.get(key)) is not None and newest.inc > inc
            *lines, self._rest[name] = (self._rest[name] + file.read()).split(b"\n")
            for line in lines:
                self._take(name, key, inc, line)
            if is_over:  # otherwise a job that starts many processes holds a descriptor for each
                self._let_go(name)
        for _, (at, record) in sorted(self._records.items()):
            with suppress(LookupError, TypeError):  # a record that cannot be read is skipped
                self.view.course.take(record, at)
        self._records.clear()
        for at, scope, each in sorted(self._lines, key=lambda timed: timed[0]):
            with suppress(LookupError, TypeError, AttributeError):  # a line that cannot be read
                assert self.figures is not None
                self.figures.take(each, at, scope)
        self._lines.clear()
        return self.view

    def _let_go(self, name: str) -> None:
        file, _ = self._files.pop(name)
        file.close()
        del self._rest[name]
        self._through.add(name)

    def close(self) -> None:
        """Close all files."""
        for file, _ in self._files.values():
            file.close()
        self._files.clear()

    def _take(self, name: str, key: tuple[str, int], inc: int, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(record, dict):
            return
        if self.figures is not None and isinstance(wall := record.get("wall"), int | float):
            scope = str(key[1]) if name in self._of_stages else ""
            self._lines.append((wall, scope, record))
        if name not in self._of_stages:  # The history is that of one register.
            newest = _mapping(_mapping(record.get("event")).get("record"))
            with suppress(LookupError, TypeError, AttributeError):
                self.view.comparisons.take(record)
            self.view.history.take(newest)
            self.view.cursor = max(self.view.cursor, _number(newest.get("cursor")))
            if newest.get("live") == "end":
                self.view.block = max(self.view.block, _number(newest.get("n")))
            if (n := _number(newest.get("n"))) > self.view.course.n:
                at = float(record["wall"]) if isinstance(record.get("wall"), int | float) else 0.0
                self._records[n] = min(self._records.get(n, (at, newest)), (at, newest), key=_time)
            data, wall = _mapping(record.get("data")), record.get("wall")
            if record.get("note") == IDLE and isinstance(wall, int | float):
                with suppress(LookupError, TypeError):
                    self.view.course.take_idle(data["seconds"], wall)
        if record.get("note") == LOOP and name not in self._of_stages:
            self.view.course.goal = goal_in(record) or self.view.course.goal
        if record.get("note") == "inject":
            self._take_injection(key[0], record, _mapping(record.get("data")))
        elif record.get("note") == "command":
            self._take_command(record)
        elif "note" in record:
            data, rank = _mapping(record.get("data")), f"{key[0]}/{key[1]}"
            self.view.checkpoints.take(rank, record["note"], data)
            if isinstance(text := data.get(WARNING), str):
                self.view.warnings.setdefault(str(record["note"]), f"rank {rank}: {text}")
        self.view.committed |= _role(record) in COMMITTING
        if record.get("kind") == "header":
            needed = _number(_mapping(record.get("config")).get("min_groups"))
            self.view.min_groups = max(self.view.min_groups, needed)
        known = self.view.ranks.get(key)
        if known is None or inc > known.inc:
            gone, known = known or RankView(0), RankView(inc)
            self.view.gone = max(self.view.gone, gone.step)
            known.fault, known.is_injected = gone.fault, gone.is_injected
            self.view.ranks[key] = known
        if inc == known.inc:
            _update(known, record)

    def _take_command(self, record: dict[str, Any]) -> None:
        """Take a commanded fault; the supervisor reports its own faults when they happen."""
        data = _mapping(record.get("data"))
        if data.get("type") != "inject" or data.get("refused") is not None:
            return
        try:
            (fault,) = FaultPlan.model_validate({"faults": [data.get("fault")]}).faults
        except ValidationError:
            return
        if isinstance(fault, ServiceFault) and data.get("by") == BY_SUPERVISOR:
            self._take_injection("", record, {"name": fault.name, "kind": fault.kind})
        else:
            self.view.commanded.setdefault(fault.name, fault)

    def _take_injection(self, group: str, record: dict[str, Any], data: dict[str, Any]) -> None:
        name, kind = data.get("name"), data.get("kind")
        if isinstance(name, str) and isinstance(kind, str):
            step, epoch = _number(record.get("step")), _number(record.get("epoch"))
            injected = Injected(name, kind, group, step, epoch, _number(record.get("rank")))
            self.view.injected.setdefault(name, injected)


def goal_in(record: dict[str, Any]) -> Goal | None:
    """Return the planned end of the loop in a note of that loop, or None."""
    try:
        return Goal(**_mapping(record.get("data"))["goal"])
    except (LookupError, TypeError, ValidationError):
        return None


def _time(timed: tuple[float, dict[str, Any]]) -> float:
    return timed[0]


def _update(view: RankView, record: dict[str, Any]) -> None:
    """Apply one record of the newest incarnation to its view."""
    view.epoch = _number(record.get("epoch"), view.epoch)
    view.step = _number(record.get("step"), view.step)
    data = _mapping(record.get("data"))
    if record.get("kind") == "header":
        view.state = str(_mapping(record.get("spec")).get("initial", view.state))
        view.reforms = record.get("reforms") is True
        view.pid = _number(_mapping(record.get("config")).get("pid"))
    elif record.get("kind") == "transition":
        state, role = record.get("to"), _role(record)
        if isinstance(state, str) and role is not None:
            view.commits += role in COMMITTING and role != view.role
            view.state, view.role, view.fetches = state, role, ""
        members = record.get("members")
        if isinstance(members, list):
            view.members = tuple(sorted(str(member) for member in members))
        _take_cause(view, record)
    elif record.get("note") == "metrics" and isinstance(data.get("loss"), (int, float)):
        view.loss = float(data["loss"])
    elif record.get("note") == NO_REFORM:
        view.reforms = False
    elif record.get("note") == UNREACHABLE:
        view.fault, view.is_injected = str(data.get("why")), False
    elif record.get("note") == FETCHING and isinstance(left := data.get("left_s"), int | float):
        got, total = _number(data.get("bytes")), _number(data.get("total"))
        view.fetches = progress_in_words(got, total, left)
    elif record.get("note") == "inject":
        view.fault, view.is_injected = f"planned: {data.get('name')}", True


def _take_cause(view: RankView, record: dict[str, Any]) -> None:
    """Keep the last fault, but drop the cause of a wait of an asynchronous job once it goes on."""
    cause = str(record.get("cause") or "").partition("\n")[0]
    is_wait = record.get("code") == CauseCode.AWAITED
    if view.fault == view.waits and (is_wait or not cause):
        view.fault = ""
    if is_wait:
        view.waits = cause
    if cause:
        view.fault, view.is_injected = cause, False


def _role(record: dict[str, Any]) -> Role | None:
    """Return the role of the state that a transition leads to."""
    roles = record.get("roles")
    return roles[1] if isinstance(roles, list) and len(roles) == 2 else None


def _number(value: object, otherwise: int = 0) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}

"""The figures of a run, one source for ``fft report --json``, ``--otlp`` and ``fft run --metrics``.

Pure. `FIGURES` lists them with their meanings. Those of steps, rollbacks and goodput come from the
records of the job (`fft.trace.course`), the others from the lines of its traces.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fft.protocol.roles import COMMITTING
from fft.trace.checkpoint_notes import CheckpointNotes
from fft.trace.course import Course, TimeLost

_MAX_PENDING_TXNS = 64
"""Maximum number of transactions whose votes are kept; beyond it, the oldest one is counted."""

Values = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and the value of the figure."""


@dataclass(slots=True)
class _Votes:
    """The votes for one transaction, and when their authors knew its COMMIT."""

    cast: dict[tuple[str, str], float] = field(default_factory=dict)
    committed: dict[tuple[str, str], float] = field(default_factory=dict)


@dataclass
class Figures:
    """The figures so far. Call `take` with the lines of all traces, in the order of time."""

    course: Course = field(default_factory=Course)
    """Kept current by the caller."""
    checkpoints: CheckpointNotes = field(default_factory=CheckpointNotes)
    """Kept current by the caller."""
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

    def take(self, line: Mapping[str, Any], at: float, scope: str = "") -> None:
        """Take a line of a trace. ``scope``: a name for the directory of its trace."""
        event, who = line.get("event") or {}, (str(line.get("group")), str(line.get("rank")))
        kind, record = event.get("type"), event.get("record") or {}
        if line.get("note") == "checkpoint" and line["data"].get("published") is True:
            self.checkpoint = max(self.checkpoint or (-1, 0.0), (line["data"]["step"], at))
        elif kind == "healed":
            self.healed[who[0]] += event["bytes"]
        elif kind == "prepared" and event["yes"]:
            self._open(scope, *event["token"]).cast[who] = at
        elif kind == "decision" and record.get("kind") == "epoch":
            size = sum(len(group["ranks"]) for group in record["members"])
            self._sizes[scope, record["epoch"]] = size
            if len(self._sizes) > _MAX_PENDING_TXNS:
                self._sizes.popitem(last=False)
        elif kind == "decision" and line["roles"][1] in COMMITTING:
            place = scope, line["epoch"], line["txn"]
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


# --- the list of the figures ---


@dataclass(frozen=True)
class Figure:
    """One figure: its name without a prefix, and how it is read from `Figures`."""

    name: str
    kind: Literal["counter", "gauge"]
    """A counter never decreases in one start of a job."""
    text: str
    labels: tuple[str, ...]
    values: Callable[[Figures], Values]


def _one(value: float | None) -> Values:
    return [] if value is None else [((), value)]


def _rollbacks(of: Figures) -> Values:
    counts = Counter(fault.code for fault in of.course.faults)
    return [((code,), count) for code, count in counts.items()]


def _rollback_seconds(of: Figures) -> Values:
    costs: dict[str, float] = {}
    for fault in of.course.faults:
        costs[fault.code] = costs.get(fault.code, 0.0) + (fault.cost_s or 0.0)
    return [((code,), seconds) for code, seconds in costs.items()]


def _present(of: Figures) -> Values:
    seen = frozenset[str]().union(*(stats.members for stats in of.course.epochs))
    return [((group,), int(group in of.course.members)) for group in sorted(seen)]


def _checkpoints(of: Figures) -> Values:
    notes = of.checkpoints
    failed = notes.failed.keys() - notes.taken
    left_out = (notes.left_out.keys() | notes.too_often) - notes.taken - failed
    counts = {"published": notes.taken, "failed": failed, "left_out": left_out}
    return [((outcome,), len(steps)) for outcome, steps in counts.items()]


_RANK = ("group", "rank")
FIGURES = (
    Figure("step", "gauge", "Step that the job has reached.", (), lambda f: _one(f.course.step)),
    Figure(
        *("steps", "counter", "Optimizer steps that this start of the job has committed.", ()),
        lambda f: _one(f.course.steps),
    ),
    Figure(
        *("commits", "counter", "Committed transactions, with those that skip a batch.", ()),
        lambda f: _one(sum(stats.commits for stats in f.course.epochs)),
    ),
    Figure(
        *("commit_timestamp_seconds", "gauge", "Time of the newest commit (Unix time).", ()),
        lambda f: _one(f.course.last),
    ),
    Figure(
        *("samples", "counter", "Samples that committed steps have trained.", ()),
        lambda f: _one(f.course.samples(f.course.slices)),
    ),
    Figure("rollbacks", "counter", "Rollbacks, by code of the cause.", ("cause",), _rollbacks),
    Figure(
        *("rollback_seconds", "counter", "Seconds from rollbacks to the next commits, by cause."),
        *(("cause",), _rollback_seconds),
    ),
    Figure(
        *("lost_seconds", "gauge", "Seconds lost compared with an undisturbed run."),
        *(("reason",), lambda f: [((name,), s) for name, s in TimeLost(f.course).causes().items()]),
    ),
    Figure(
        *("goodput_ratio", "gauge", "Trained samples, divided by those of an undisturbed run.", ()),
        lambda f: _one(f.course.goodput),
    ),
    Figure(
        *("group_present", "gauge", "1 if the group is in the job, 0 if it is away."),
        *(("group",), _present),
    ),
    Figure(
        *("healed_bytes", "counter", "Bytes of state that groups have fetched.", ("group",)),
        lambda f: [((group,), size) for group, size in f.healed.items()],
    ),
    Figure(
        *("wait_seconds", "counter", "Seconds that a rank waited for the slowest rank.", _RANK),
        lambda f: f.waited.items(),
    ),
    Figure(
        *("slowest_seconds", "counter", "Seconds that others waited for this rank.", _RANK),
        lambda f: [(who, seconds) for who, (_, seconds) in f.caused.items()],
    ),
    Figure(
        *("protocol_seconds", "counter", "Seconds from the last vote to the decision.", _RANK),
        lambda f: f.protocol.items(),
    ),
    Figure(
        *("checkpoints", "counter", "Durable checkpoints, by outcome.", ("outcome",)),
        _checkpoints,
    ),
    Figure(
        *("checkpoint_step", "gauge", "Step of the newest durable checkpoint.", ()),
        lambda f: _one(f.checkpoint[0] if f.checkpoint else None),
    ),
    Figure(
        *("checkpoint_timestamp_seconds", "gauge", "Time of the newest checkpoint (Unix time)."),
        *((), lambda f: _one(f.checkpoint[1] if f.checkpoint else None)),
    ),
)


def plain(figures: Figures) -> dict[str, Any]:
    """Return all figures as plain data: name → value, or → labels → value."""
    found: dict[str, Any] = {}
    for figure in FIGURES:
        values = {"/".join(labels): value for labels, value in figure.values(figures)}
        found[figure.name] = values if figure.labels else values.get("")
    return found

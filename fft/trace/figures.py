"""The figures of a run, one source for ``fft report --json``, ``--otlp`` and ``fft run --metrics``.

Pure. `FIGURES` lists them with their meanings, as values of a `History`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fft.trace.course import TimeLost
from fft.trace.history import History

Values = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and the value of the figure."""


@dataclass(frozen=True)
class Figure:
    """One figure: its name without a prefix, and how it is read from a history."""

    name: str
    kind: Literal["counter", "gauge"]
    """A counter never decreases in one start of a job."""
    text: str
    labels: tuple[str, ...]
    values: Callable[[History], Values]


def _one(value: float | None) -> Values:
    return [] if value is None else [((), value)]


def _rollbacks(of: History) -> Values:
    counts = Counter(fault.code for fault in of.course.faults)
    return [((code,), count) for code, count in counts.items()]


def _rollback_seconds(of: History) -> Values:
    costs: dict[str, float] = {}
    for fault in of.course.faults:
        costs[fault.code] = costs.get(fault.code, 0.0) + (fault.cost_s or 0.0)
    return [((code,), seconds) for code, seconds in costs.items()]


def _present(of: History) -> Values:
    seen = frozenset[str]().union(*(stats.members for stats in of.course.epochs))
    return [((group,), int(group in of.course.members)) for group in sorted(seen)]


def _checkpoints(of: History) -> Values:
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
        lambda f: [((group,), size) for group, size in f.waits.healed.items()],
    ),
    Figure(
        *("wait_seconds", "counter", "Seconds that a rank waited for the slowest rank.", _RANK),
        lambda f: f.waits.waited.items(),
    ),
    Figure(
        *("slowest_seconds", "counter", "Seconds that others waited for this rank.", _RANK),
        lambda f: [(who, seconds) for who, (_, seconds) in f.waits.caused.items()],
    ),
    Figure(
        *("protocol_seconds", "counter", "Seconds from the last vote to the decision.", _RANK),
        lambda f: f.waits.protocol.items(),
    ),
    Figure(
        *("checkpoints", "counter", "Durable checkpoints, by outcome.", ("outcome",)),
        _checkpoints,
    ),
    Figure(
        *("checkpoint_step", "gauge", "Step of the newest durable checkpoint.", ()),
        lambda f: _one(f.waits.checkpoint[0] if f.waits.checkpoint else None),
    ),
    Figure(
        *("checkpoint_timestamp_seconds", "gauge", "Time of the newest checkpoint (Unix time)."),
        *((), lambda f: _one(f.waits.checkpoint[1] if f.waits.checkpoint else None)),
    ),
)


def plain(history: History) -> dict[str, Any]:
    """Return all figures as plain data: name → value, or → labels → value."""
    found: dict[str, Any] = {}
    for figure in FIGURES:
        values = {"/".join(labels): value for labels, value in figure.values(history)}
        found[figure.name] = values if figure.labels else values.get("")
    return found

"""The costs of faults, computed from the events of a job. Pure.

Events of a group: ``begin`` an inner step (with the numbers of its samples), ``failed`` it,
``dropped`` all since the last synchronization, ``sync``: the job's parameters have taken a step
(with the samples that this group's parameters had in them, and a checksum), ``fault``, ``fetched``
another group's state (bytes), ``exit``. An inner step is *lost* if no synchronization of the group
that computed it has it. An event is attributed to the last fault before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.diloco.plan import KINDS, UNCOMMITTED
from benchmarks.side_by_side.events import Event

BEFORE = "before the first"
_NS = 1e9


@dataclass
class Cost:
    """The costs of all faults of one kind."""

    kind: str
    faults: int = 0
    lost_steps: int = 0
    """Lost inner steps of all groups."""
    twice: int = 0
    """Samples in a synchronization for the second time."""
    never: int = 0
    """Samples of lost inner steps that are in no synchronization."""
    transfers: int = 0
    transfer_bytes: int = 0
    splits: int = 0
    """Synchronizations that one group committed and another one of the same attempt did not."""
    unequal: int = 0
    """Synchronizations after which the groups' global parameters differ."""

    def plain(self) -> dict[str, Any]:
        """Return the costs for JSON."""
        return asdict(self)


class _Faults:
    """The attribution of times to faults."""

    def __init__(self, events: Iterable[Event]) -> None:
        faults = [e for e in events if e["e"] == "fault"]
        self._at, self._kinds = [e["m"] for e in faults], [e["kind"] for e in faults]
        self.costs = {kind: Cost(kind) for kind in (BEFORE, *KINDS)}
        for kind in self._kinds:
            self.costs[kind].faults += 1

    def cost(self, at: int) -> Cost:
        """Return the costs of the last fault at or before ``at``, in ns."""
        number = bisect_right(self._at, at)
        return self.costs[self._kinds[number - 1] if number else BEFORE]


def costs(events: Sequence[Event], heals: Iterable[tuple[float, int]] = ()) -> list[Cost]:
    """Return the costs by kind.

    ``heals``: transfers of state in a trace as (wall clock in s, bytes).
    """
    faults = _Faults(events)
    lost = list(_lost(events))
    for at, _ in lost:
        faults.cost(at).lost_steps += 1
    had: set[int] = set()
    for event in events:
        if event["e"] == "sync":
            again = had.intersection(event["samples"])
            faults.cost(event["m"]).twice += len(again)
            had.update(event["samples"])
        elif event["e"] == "fetched":
            _transferred(faults.cost(event["m"]), event["bytes"])
    told: set[int] = set()
    for at, samples in lost:
        missing = set(samples) - had - told
        faults.cost(at).never += len(missing)
        told |= missing
    offset = events[0]["m"] - events[0]["t"] if events else 0
    for wall_s, size in heals:
        _transferred(faults.cost(round(wall_s * _NS) + offset), size)
    for at in _splits(events):
        faults.cost(at).splits += 1
    for at in _unequal(events):
        faults.cost(at).unequal += 1
    return [cost for cost in faults.costs.values() if cost.kind != BEFORE or _is_any(cost)]


def curve(events: Iterable[Event]) -> list[tuple[int, float]]:
    """Return (synchronization, loss of the job's parameters on a separate text)."""
    return [(e["step"], e["loss"]) for e in events if e["e"] == "sync" and e["loss"] is not None]


def _is_any(cost: Cost) -> bool:
    return any(value for name, value in cost.plain().items() if name != "kind")


def _transferred(cost: Cost, size: int) -> None:
    cost.transfers += 1
    cost.transfer_bytes += size


def _lost(events: Sequence[Event]) -> Iterator[tuple[int, list[int]]]:
    """Return when inner steps were lost, and with which samples."""
    open_: dict[int, list[list[int]]] = defaultdict(list)
    last: dict[int, int] = {}
    for event in events:
        what, pid, at = event["e"], event["pid"], event["m"]
        mine, last[pid] = open_[pid], at
        if what == "begin":
            mine.append(event["samples"])
        elif what == "failed":
            yield at, mine.pop()
        elif what in ("sync", "exit"):
            mine.clear()
        elif what == "dropped":
            yield from ((at, samples) for samples in mine)
            mine.clear()
    for pid, mine in open_.items():  # these processes were killed
        yield from ((last[pid], samples) for samples in mine)


def _splits(events: Iterable[Event]) -> Iterator[int]:
    """Return when a group did not commit a step that another one committed at its first try."""
    refused: dict[int, dict[int, int]] = defaultdict(dict)
    synced: dict[int, set[int]] = defaultdict(set)
    for e in events:
        if e["e"] == "dropped" and e["why"] == UNCOMMITTED:
            refused[e["step"]].setdefault(e["g"], e["m"])
        elif e["e"] == "sync":
            synced[e["step"] - 1].add(e["g"])
    for step, by in refused.items():
        if synced[step] - by.keys():
            yield min(by.values())


def _unequal(events: Iterable[Event]) -> Iterator[int]:
    """Return when the second of two groups had other bits than the first after the same step."""
    sums: dict[int, set[int]] = defaultdict(set)
    for event in events:
        if event["e"] == "sync":
            sums[event["step"]].add(event["sum"])
            if len(sums[event["step"]]) == 2:
                yield event["m"]

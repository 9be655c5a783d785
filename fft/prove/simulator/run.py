"""One seed: its worlds, the whole run, and the findings.

A job has one world. If stages have scopes of their own, each stage has a world, on a shared clock,
and each receives the commits of the scopes that it is bound to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fft.protocol.invariants import judge
from fft.protocol.load import load_spec
from fft.protocol.participant import Participant
from fft.protocol.spec import FsmSpec, Row
from fft.protocol.table import EXIT_ROWS, Table
from fft.prove.clock import Clock
from fft.prove.simulator.ending import ask_all_to_leave, see_all_leave, settle
from fft.prove.simulator.faults import Weather, weather_of
from fft.prove.simulator.job import RunEnds, Violation, World
from fft.trace.barriers import judge_live_sets
from fft.trace.flow import Flow, judge_flow
from fft.trace.format import scope_folder


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one seed. Seconds are virtual."""

    seed: int
    groups: int
    ranks: int
    violations: tuple[Violation, ...]
    faults: Mapping[str, int]
    events: int
    commits: int
    aborts: int
    epochs: int
    seconds: float
    settled_in: float | None
    """Time from the calm until all processes were in one epoch and had committed again; None if no
    state is left and the job has stopped as it must."""
    checks: int
    rows: frozenset[str]
    """Rows of the table that were taken."""


def run_seed(
    seed: int,
    spec: FsmSpec | str = "hsdp",
    weather: Weather | None = None,
    trace_dir: Path | None = None,
    participant: type[Participant] = Participant,
) -> Result:
    """Run one seed and judge it.

    Args:
        seed: The seed.
        spec: The table that all participants run, or its name or path.
        weather: The faults; None: the mix for the spec.
        trace_dir: Directory for the traces of all participants; None: no traces are written.
        participant: The core; another class plants a bug.

    Raises:
        ConfigError: The spec cannot be used.
    """
    loaded = load_spec(spec) if isinstance(spec, str) else spec
    clock, table = Clock(), _table(loaded)
    weather = weather or weather_of(bool(loaded.bound))
    worlds = [
        World(seed, loaded, partial(participant, table), weather, place, stage, clock)
        for stage, place in _places(trace_dir, loaded.stages or [""])
    ]
    for world in worlds:
        world.beside = {other.name: other for other in worlds if other is not world}
    settled = live(worlds, clock)
    return _judged(seed, loaded, worlds, settled)


def _places(root: Path | None, stages: list[str]) -> list[tuple[str, Path | None]]:
    """Return the stages with the trace directories of their processes, as in a real job."""
    folders = [root and scope_folder(root, name if i else "") for i, name in enumerate(stages)]
    return list(zip(stages, folders, strict=True))


def live(worlds: list[World], clock: Clock) -> float | None:
    """Run the whole life of a job.

    Returns:
        The time that it took to settle when it was calm, or None if it is lost, as it must be.
    """
    settled: float | None = None
    try:
        for world in worlds:
            world.begin()
        begun, target = clock.now, worlds[0].setting.target
        while not all(w.is_due(begun, target) for w in worlds) and not any(
            w.hopeless for w in worlds
        ):
            if not clock.turn():
                return None
        for world in worlds:
            world.calm_down()
        for world in worlds:
            if (took := settle(world)) is None:
                return None
            settled = max(settled or 0.0, took)
        for world in worlds:
            ask_all_to_leave(world)
        for world in worlds:
            see_all_leave(world)
    except RunEnds:
        pass
    finally:
        for world in worlds:
            world.log.close()
    return settled


def _flow_of(world: World) -> Flow:
    flow = Flow(world.name, world.spec.bound_to(world.name))
    for record in world.bus.history:
        flow.take(record)
    for move in world.log.history.all():
        flow.note(move)
    return flow


def _judged(seed: int, spec: FsmSpec, worlds: list[World], settled: float | None) -> Result:
    """Judge the worlds of a seed and return its result."""
    first, told, checks = worlds[0], list[Violation](), 0
    kinds: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    rows: frozenset[str] = frozenset()
    for world in worlds:
        history = world.log.told()
        findings = [*judge(history), judge_live_sets(history)]
        told += [Violation(f.name, f.violation, f.place) for f in findings if f.violation]
        checks += sum(f.checks for f in findings)
        kinds += Counter(record.kind for record in world.bus.history)
        faults += world.log.faults
        rows |= _names(spec, world.log.rows)
        told += world.log.violations
    flow = judge_flow(map(_flow_of, worlds))
    told += [Violation(flow.name, flow.violation, flow.place)] if flow.violation else []
    return Result(
        seed=seed,
        groups=first.setting.groups,
        ranks=first.setting.ranks,
        violations=tuple(told),
        faults=dict(faults),
        events=sum(world.log.events for world in worlds),
        commits=kinds["commit"],
        aborts=kinds["abort"],
        epochs=kinds["epoch"],
        seconds=first.clock.now,
        settled_in=settled,
        checks=checks + flow.checks,
        rows=rows,
    )


_tables: list[tuple[FsmSpec, Table]] = []


def _table(spec: FsmSpec) -> Table:
    """Return the table of a spec. Tables are costly to build, so the newest one is cached."""
    if not _tables or _tables[0][0] is not spec:
        _tables[:] = [(spec, Table(spec))]
    return _tables[0][1]


def row_names(spec: FsmSpec) -> dict[tuple[str, int], str]:
    """Name every row, by state and identity of the row: ``STATE event 1`` is the first row."""
    names: dict[tuple[str, int], str] = {}
    for state, leaf in spec.leaves.items():
        for event, rows in {**leaf.on, EXIT_ROWS: leaf.exit}.items():
            for number, row in enumerate(rows, 1):
                names[(state, id(row))] = f"{state} {event} {number}"
    return names


@dataclass(frozen=True, slots=True)
class RowUse:
    """One row of a table, which several states may share."""

    name: str
    """The row's place, its event, and its guards."""
    taken_in: int
    """Number of states in which seeds have taken it."""
    states: int
    elsewhere: str
    """The test that covers the row, by the spec; empty if only searches and seeds do."""


def row_uses(spec: FsmSpec, taken: Collection[str]) -> list[RowUse]:
    """Return every row of the table, and where it was taken.

    Args:
        spec: The table.
        taken: Names as of `row_names`.
    """
    places: dict[int, list[tuple[str, str, str, Row]]] = {}
    for state, leaf in spec.leaves.items():
        for event, rows in {**leaf.on, EXIT_ROWS: leaf.exit}.items():
            for number, row in enumerate(rows, 1):
                name = f"{state} {event} {number}"
                places.setdefault(id(row), []).append((name, state, event, row))
    uses = []
    for found in places.values():
        (_, state, event, row), states = found[0], [state for _, state, _, _ in found]
        parents = {state.partition(".")[0] for state in states}
        where = state if len(states) == 1 else "any" if len(parents) > 1 else parents.pop()
        guards = f" [{' & '.join(row.guard)}]" if row.guard else ""
        count = sum(name in taken for name, _, _, _ in found)
        uses.append(RowUse(f"{where} {event}{guards}", count, len(states), row.elsewhere))
    return uses


def never_taken(spec: FsmSpec, taken: Collection[str]) -> list[str]:
    """Return the rows that no seed has taken in any state and that no named test covers."""
    uses = row_uses(spec, taken)
    return sorted(use.name for use in uses if not use.taken_in and not use.elsewhere)


def _names(spec: FsmSpec, taken: set[tuple[str, int]]) -> frozenset[str]:
    names = row_names(spec)
    return frozenset(names[key] for key in taken)

"""The judges of a mutant of the operators: the checks of a spec, a scenario, a search, a seed.

They are asked from cheap to dear, up to the first that finds it. A search is asked only within
bounds in which some moment of the sound search ends differently: a mutant that changes no moment
of a complete search has the same search.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fft.errors import FftError
from fft.messages.effects import ClearTimers, SetTimer
from fft.protocol.load import load_spec
from fft.protocol.participant import Outcome
from fft.protocol.spec import FsmSpec, Part, outermost
from fft.protocol.table import EXIT_ROWS
from fft.prove.bounds import Bounds
from fft.prove.checker import Search, search
from fft.prove.model import Handled, Model, Moment
from fft.prove.operators import Mutation
from fft.prove.planting import small
from fft.prove.scenario import Run, check_scenario, read_scenario
from fft.prove.sets_of_bounds import sets_for
from fft.prove.simulator.run import run_seed
from fft.prove.survivors import reason_for

SCENARIOS = Path(__file__).resolve().parents[2] / "tests" / "scenarios"
"""Absent where FFT is installed from a wheel; then no scenario judges."""
_OFTEN = ("no", "fault", "crash", "drain", "torn", "early")
_SELDOM = ("skip", "lose", "lapse", "hang", "heal", "quit")
TINY = (
    *(replace(small(), faults=1, budget=((kind, 1),)) for kind in (*_OFTEN, *_SELDOM)),
    small(commits=2),
    small(formed=False),
)
"""Bounds that judge first: one fault each, some hundred states."""
SMALL = frozenset(
    {"storm", "lost", "live blocks, joining", "skips, unlike", "flipped, three", "healed"}
    | {"re-forming", "deaf", "overrun", "twin", "too few, at start", "mates", "ended"}
)
"""Sets of bounds of ``fft dev check`` that judge last: some thousand states."""
MOST = 60_000
"""Number of states after which the search of a mutant ends without a verdict."""
ENOUGH = 20
"""Number of moments with the same answer after which another order is taken for equivalent."""
SEEDS = 8
"""Number of simulated jobs that judge a mutant."""

Key = tuple[str, str]
"""A state and an event, or ``sequences`` and the name of a sequence."""


@dataclass(frozen=True)
class Searched:
    """A sound search, and its moments by what they ask the table for."""

    bounds: Bounds
    model: Model
    moments: dict[Key, list[Moment]]

    def compared(self, changed: FsmSpec, mutation: Mutation) -> tuple[int, bool]:
        """Compare its moments with a changed table, up to the first that ends differently.

        Returns:
            The number of moments that took the changed row, and whether one ends differently.
        """
        other = Model(changed, self.bounds)
        for name in ("locals", "events", "effects"):
            setattr(other, name, getattr(self.model, name))
        met, row = 0, _row_of(self.model.spec, mutation)
        for key in keys_of(self.model.spec, mutation):
            for moment in self.moments.get(key, ()):
                was = self.model.handled(moment)
                if _seen(other.handled(moment)) != _seen(was):
                    return met, True
                parts = [part for step in was.outcome.steps for part in (step.row, *step.parts)]
                met += row is None or any(part is row for part in parts)
        return met, False


def _row_of(spec: FsmSpec, mutation: Mutation) -> Part | None:
    """Return the row, or part of a sequence, whose guards or effects are changed."""
    at: Any = spec
    for key in mutation.path[:-1]:
        at = getattr(at, key) if isinstance(key, str) and hasattr(at, key) else at[key]
    return at if isinstance(at, Part) else None


@dataclass(frozen=True)
class Fate:
    """The fate of a mutant. ``judge`` is empty if it survived."""

    name: str
    judge: str
    detail: str

    @property
    def is_known(self) -> bool:
        """Whether it was found, or is listed as equivalent and was not."""
        return self.judge == "same" or bool(self.judge) != bool(reason_for(self.name))

    def __str__(self) -> str:
        why = reason_for(self.name)
        if not self.judge:
            return f"{'equivalent' if why else 'SURVIVES'} {self.name}: {why or self.detail}"
        listed = "" if self.is_known else f"; LISTED as equivalent: {why}"
        return f"{self.judge} {self.name}: {self.detail}{listed}"


def _seen(handled: Handled) -> tuple[object, ...]:
    """Return what a search sees of an answer; the claims of invariants follow from it."""
    told = frozenset(
        e for e in handled.outcome.effects if not isinstance(e, SetTimer | ClearTimers)
    )
    return handled.local, handled.effects, told, bool(handled.refused), handled.kept


def _keys(model: Model) -> dict[Key, list[Moment]]:
    """Return all moments of a search by what they asked the table for."""
    found: dict[Key, list[Moment]] = defaultdict(list)
    for moment, handled in model.moments().items():
        for key in set(_asked(model.spec, handled.outcome)):
            found[key].append(moment)
    return found


def _asked(spec: FsmSpec, outcome: Outcome) -> Iterator[Key]:
    for step in outcome.steps:
        yield from ((step.source, step.event), (step.dest, EXIT_ROWS), (step.dest, "timers"))
        yield from (
            ("sequences", effect) for effect in step.row.effects if effect in spec.sequences
        )


def keys_of(spec: FsmSpec, mutation: Mutation) -> list[Key]:
    """Return what a moment must ask the table for to meet the change."""
    if mutation.owner == "sequences":
        return [("sequences", mutation.event)]
    return [
        (name, mutation.event)
        for name, leaf in spec.names.items()
        if mutation.owner in ("common", leaf.name, outermost(leaf.name))
    ]


@cache
def sound(name: str, bounds: Bounds) -> Searched:
    """Return a sound search that judges."""
    made = Search(Model(load_spec(name), bounds))
    assert made.run().violation is None, f"{name} is not sound within {bounds.describe()}"
    return Searched(bounds, made.model, _keys(made.model))


@cache
def scenarios(name: str) -> tuple[tuple[Path, frozenset[Key]], ...]:
    """Return the scenario files of a spec, each with what it asks the table for."""
    found = []
    for path in sorted(SCENARIOS.glob("*.txt")):
        scenario = read_scenario(path)
        if scenario.header["spec"] == name and not scenario.header["mutant"]:
            run = Run(scenario.header, path.parent)
            for block in scenario.blocks:
                for command in block.commands:
                    run.command(command)
            found.append((path, frozenset(_keys(run.model))))
    return tuple(found)


def judged(name: str, mutation: Mutation) -> Fate:
    """Return what becomes of a mutant of a spec."""
    spec = load_spec(name)
    try:
        changed = mutation.of(spec)
    except FftError as error:
        return Fate(mutation.name, "spec", str(error).partition(": ")[2].splitlines()[0])
    keys = keys_of(spec, mutation)
    for path, asked in scenarios(name):
        if not asked.isdisjoint(keys):
            try:
                check_scenario(path, changed)
            except (FftError, AssertionError, StopIteration):
                return Fate(mutation.name, "scenario", path.stem)
    met, differing, found = _searched(name, changed, mutation, TINY)
    if found:
        return Fate(mutation.name, "search", found)
    if mutation.reorders and met >= ENOUGH and not differing:
        return Fate(mutation.name, "same", f"it changes no answer in {met} moments")
    if found := _in_seeds(changed):
        return Fate(mutation.name, "seed", found)
    small = [each for each in sets_for(spec, deep=False) if each.name in SMALL]
    more, too, found = _searched(name, changed, mutation, small)
    if found:
        return Fate(mutation.name, "search", found)
    return Fate(mutation.name, "", f"{differing + too} searches differ, {met + more} moments")


def _searched(
    name: str, changed: FsmSpec, mutation: Mutation, among: Iterable[Bounds]
) -> tuple[int, int, str]:
    """Return the numbers of moments and of differing searches, and the violation that is found."""
    moments = differing = 0
    for bounds in among:
        met, differs = sound(name, bounds).compared(changed, mutation)
        moments, differing = moments + met, differing + differs
        if differs and (found := _violated(changed, bounds)):
            return moments, differing, f"{found}, {bounds.describe()}"
    return moments, differing, ""


def _violated(changed: FsmSpec, bounds: Bounds) -> str:
    try:
        violation = search(changed, bounds, limit=MOST)[1].violation
    except AssertionError as error:  # the job does not come to the first state of the search
        return str(error)
    return "" if violation is None else violation.name


def _in_seeds(changed: FsmSpec) -> str:
    for seed in range(SEEDS):
        if violations := run_seed(seed, changed).violations:
            return f"{violations[0].name}, seed {seed}"
    return ""

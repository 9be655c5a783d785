"""Mutants of a table that operators make: one changed row, guard, effect or timer each. Pure.

The operators: drop a row, swap two neighbouring rows, take a guard as true, negate it, skip an
effect, swap two neighbouring effects, and leave a timer of a state unarmed. A guard that is never
true is a dropped row. A mutant is named by what is changed and where.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fft.errors import ConfigError
from fft.protocol.spec import FsmSpec, without_not
from fft.protocol.spec_checks import check_spec
from fft.protocol.table import EXIT_ROWS
from fft.prove.planting import Raw, owners

Path = tuple[str | int, ...]
"""Keys and numbers that lead from a spec to one of its lists."""
Edit = Callable[[list[Any]], object]
"""A change of a list of rows, guards, effects or timers."""


@dataclass(frozen=True)
class Mutation:
    """One mutant. ``owner``: the state, ``STATE.sub``, ``common`` or ``sequences`` that has it.

    ``event``: the event of the changed row, or the sequence; ``timers`` for an unarmed timer.
    """

    name: str
    owner: str
    event: str
    path: Path
    edit: Edit
    reorders: bool = False
    """It changes only the order of two effects or rows."""

    def of(self, spec: FsmSpec) -> FsmSpec:
        """Return the changed table.

        Raises:
            FftError: The checks of a spec refuse it.
        """
        raw = spec.model_dump()
        at: Any = raw
        for key in self.path:
            at = at[key]
        self.edit(at)
        _tidy(raw)
        try:
            found = FsmSpec.model_validate(raw)
        except ValueError as error:
            raise ConfigError(f"{self.name}: {error}") from None
        if problems := check_spec(found):
            raise ConfigError(f"{self.name}: {problems[0][1]}")
        return found


def _tidy(raw: Raw) -> None:
    """Remove what the change has left without a row or a use; nothing else does that by itself."""
    used: set[str] = set()
    for owner in owners(raw):
        owner["on"] = {event: rows for event, rows in owner["on"].items() if rows}
        for rows in (*owner["on"].values(), owner.get("exit", [])):
            used |= {name for row in rows for name in row["effects"]}
    raw["sequences"] = {name: parts for name, parts in raw["sequences"].items() if name in used}


def mutations(spec: FsmSpec) -> list[Mutation]:
    """Return the mutants of a table, in the order of its file."""
    raw = spec.model_dump()
    found: list[Mutation] = []
    for path, owner in spec.row_owners():
        at, where = _at(raw, path), ".".join(path[1::2]) or "common"
        for event, rows in at["on"].items():
            found += _of_rows(rows, where, event, (*path, "on", event))
        found += _of_rows(at.get("exit", []), where, EXIT_ROWS, (*path, "exit"))
        for timer in getattr(owner, "timers", ()):
            change = _removes(timer)
            found.append(
                Mutation(f"{where}: unarmed {timer}", where, "timers", (*path, "timers"), change)
            )
    for name, parts in raw["sequences"].items():
        here = ("sequences", name)
        bare = [part if isinstance(part, str) else "|".join(part["effects"]) for part in parts]
        found += _of_effects(bare, "sequences", name, here, name)
        for i, part in enumerate(parts):
            if isinstance(part, dict):
                found += _of_part(part, "sequences", name, (*here, i), f"{name} {i}")
    return found


def _at(raw: Raw, path: tuple[str, ...]) -> Raw:
    for key in path:
        raw = raw[key]
    return raw


def _removes(value: str) -> Edit:
    return lambda rows: rows.remove(value)


def _pops(i: int) -> Edit:
    return lambda rows: rows.pop(i)


def _swaps(i: int) -> Edit:
    return lambda rows: rows.insert(i, rows.pop(i + 1))


def _negates(i: int) -> Edit:
    def edit(guards: list[str]) -> None:
        asked, is_expected = without_not(guards[i])
        guards[i] = f"not {asked}" if is_expected else asked

    return edit


def _of_rows(rows: list[Raw], owner: str, event: str, path: Path) -> Iterator[Mutation]:
    for i, row in enumerate(rows):
        place = f"{owner} {event} {i}"
        yield Mutation(f"{place}: row dropped", owner, event, path, _pops(i))
        if i + 1 < len(rows):
            yield Mutation(
                f"{place}: swapped with the next row", owner, event, path, _swaps(i), True
            )
        yield from _of_part(row, owner, event, (*path, i), place)


def _of_part(part: Raw, owner: str, event: str, path: Path, place: str) -> Iterator[Mutation]:
    for i, name in enumerate(part["guard"]):
        here = (*path, "guard")
        yield Mutation(f"{place}: {name} taken as true", owner, event, here, _pops(i))
        yield Mutation(f"{place}: {name} negated", owner, event, here, _negates(i))
    yield from _of_effects(part["effects"], owner, event, (*path, "effects"), place)


def _of_effects(
    names: list[str], owner: str, event: str, path: Path, place: str
) -> Iterator[Mutation]:
    for i, name in enumerate(names):
        yield Mutation(f"{place}: {name} skipped", owner, event, path, _pops(i))
    for i, (name, after) in enumerate(itertools.pairwise(names)):
        yield Mutation(f"{place}: {name} after {after}", owner, event, path, _swaps(i), True)

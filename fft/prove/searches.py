"""``fft check`` and ``fft mutants``: searches within bounds, told in a form that people can read.

Writes to a console, and counterexamples to a folder; what is searched is pure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from fft.protocol.invariants import INVARIANTS
from fft.protocol.load import load_spec
from fft.protocol.spec import FsmSpec, Part
from fft.prove.bounds import Bounds
from fft.prove.checker import Result, Search, all_rows, narrate
from fft.prove.model import Model
from fft.prove.mutant import NotCaught, caught
from fft.prove.mutants import MUTANTS
from fft.prove.mutants_page import write_table
from fft.prove.scenario import save_counterexample
from fft.prove.sets_of_bounds import sets_for
from fft.util.errors import FftError


class CheckError(FftError):
    """Arguments of ``fft check`` that cannot be used; the message names the mend."""


@dataclass(frozen=True)
class Choice:
    """What ``fft check`` is asked for."""

    deep: bool = False
    bounds: tuple[str, ...] = ()
    """Names of sets of bounds; empty: all. Rows of the table that no run took count against it only
    then."""
    properties: tuple[str, ...] = ()
    """Invariants; empty: all."""
    limit: int | None = None
    """States for each set of bounds."""
    save: Path = Path("runs/check")
    """Folder for counterexamples, as scenario files."""


def check(spec_name: str, choice: Choice, console: Console) -> bool:
    """Search within every set of bounds and tell what was found; whether all properties hold.

    Raises:
        SpecError, CheckError: the spec or a name cannot be used.
    """
    spec = load_spec(spec_name)
    sets = _chosen(sets_for(spec, choice.deep), choice.bounds)
    if unknown := sorted(set(choice.properties) - set(INVARIANTS)):
        raise CheckError(f"no property named {unknown[0]!r}; there are: {', '.join(INVARIANTS)}")
    for bounds in sets:
        console.print(f"  {bounds.name}: {bounds.describe()}", markup=False, soft_wrap=True)
    results = [_search(spec, spec_name, bounds, choice, console) for bounds in sets]
    console.print(_bounds_table(spec, results))
    console.print(_checks_table(results))
    broken = [r for r in results if r.violation is not None]
    partial = [r for r in results if r.violation is None and not r.complete]
    for result in partial:
        console.print(f"{result.bounds.name}: not complete, the limit of states was reached")
    missed = _missed(spec, results)
    taken = sum(1 for _ in all_rows(spec)) - len(missed)
    console.print(f"sometimes: {taken} of {taken + len(missed)} rows of the table were taken")
    for place, row in missed.items():
        if row.elsewhere:
            console.print(f"  {place}: {row.elsewhere}", markup=False)
    missed = {place: row for place, row in missed.items() if not row.elsewhere}
    good = not broken and not partial
    if not choice.bounds and good and missed:
        console.print(f"VIOLATED sometimes: never taken: {', '.join(missed)}", markup=False)
        good = False
    console.print("verdict: " + ("no violation" if good else "VIOLATION"))
    return good


def _chosen(sets: tuple[Bounds, ...], only: tuple[str, ...]) -> list[Bounds]:
    unknown = set(only) - {bounds.name for bounds in sets}
    if unknown:
        names = ", ".join(repr(bounds.name) for bounds in sets)
        raise CheckError(f"no bounds named {sorted(unknown)[0]!r}; there are: {names}")
    return [bounds for bounds in sets if not only or bounds.name in only]


def _search(
    spec: FsmSpec, spec_name: str, bounds: Bounds, choice: Choice, console: Console
) -> Result:
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    hidden = not console.is_terminal
    search = Search(Model(spec, bounds, only=choice.properties), choice.limit)
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(bounds.name)

        def show(states: int, expanded: int, depth: int) -> None:
            told = f"{bounds.name}: {states:,} states, {expanded:,} expanded, depth {depth}"
            progress.update(task, description=told)

        result = search.run(show)
    if result.violation is not None:
        _tell(search, result, spec_name, choice.save, console)
    return result


def _tell(search: Search, result: Result, spec_name: str, save: Path, console: Console) -> None:
    found = result.violation
    assert found is not None
    console.print(f"{result.bounds.name}: VIOLATED {found.name}: {found.text}", markup=False,
                  soft_wrap=True)  # fmt: skip
    for line in narrate(search.model, found.path):
        console.print(line, markup=False, soft_wrap=True, highlight=False)
    save.mkdir(parents=True, exist_ok=True)
    path = save / f"{Path(spec_name).stem}-{result.bounds.name.replace(', ', '-')}.txt"
    path = path.with_name(path.name.replace(" ", "-"))
    save_counterexample(search, found, path, spec=spec_name)
    console.print(f"  saved as {path}", markup=False, soft_wrap=True)


def _bounds_table(spec: FsmSpec, results: list[Result]) -> Table:
    shown = Table(title=f"{spec.name}: every state within the bounds")
    for name in ("bounds", "states", "steps", "depth", "settled", "seconds", "result"):
        shown.add_column(name, justify="left" if name in ("bounds", "result") else "right")
    for r in results:
        verdict = r.violation.name if r.violation else "ok" if r.complete else "not complete"
        cells = (f"{r.states:,}", f"{r.steps:,}", str(r.depth), f"{r.settled:,}")
        shown.add_row(r.bounds.name, *cells, f"{r.seconds:.1f}", verdict)
    total = (f"{sum(r.states for r in results):,}", f"{sum(r.steps for r in results):,}")
    shown.add_section()
    shown.add_row("all", *total, "", "", f"{sum(r.seconds for r in results):.1f}", "")
    return shown


def _checks_table(results: list[Result]) -> Table:
    shown = Table(title="properties")
    for name in ("kind", "property", "checks", "result"):
        shown.add_column(name, justify="right" if name == "checks" else "left")
    checks: Counter[str] = sum((r.checks for r in results), Counter())
    broken = {r.violation.name for r in results if r.violation}
    for name in [*checks, *(n for n in ("protocol", "eventually") if n in broken)]:
        kind = "eventually" if name == "eventually" else "always"
        shown.add_row(kind, name, f"{checks[name]:,}", "VIOLATED" if name in broken else "ok")
    if not broken:
        steps, states = sum(r.steps for r in results), sum(r.states for r in results)
        shown.add_row("always", "no event is refused", f"{steps:,}", "ok")
        shown.add_row("eventually", "everyone decides, the job goes on", f"{states:,}", "ok")
    return shown


def _missed(spec: FsmSpec, results: list[Result]) -> dict[str, Part]:
    taken: set[int] = set().union(*(r.rows for r in results))
    return {place: row for place, row in all_rows(spec) if id(row) not in taken}


def mutants(write: Path | None, console: Console) -> bool:
    """Run every planted bug and tell which property caught it; whether all were caught."""
    good = True
    for mutant in MUTANTS:
        try:
            _, result = caught(mutant)
        except NotCaught as error:
            console.print(f"SURVIVES {mutant.name}: {error}", markup=False, soft_wrap=True)
            good = False
            continue
        found = result.violation
        assert found is not None
        console.print(
            f"caught {mutant.name}: {found.name}, "
            f"{len(found.path)} steps, {result.states:,} states",
            markup=False,
            highlight=False,
        )
    console.print(f"{len(MUTANTS)} planted bugs, " + ("all caught" if good else "NOT all caught"))
    if write is not None and good:
        write_table(write)
        console.print(f"table written to {write}")
    return good

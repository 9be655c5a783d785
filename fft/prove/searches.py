"""``fft dev check`` and ``fft dev mutants``: run searches within bounds and print readable results.

Writes to a console, and counterexamples to a directory; the searches themselves are pure. Each
search runs in its own process, so that several run at once and none keeps the memory of another.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Table

from fft.errors import FftError
from fft.protocol.invariants import INVARIANTS
from fft.protocol.load import load_spec
from fft.protocol.spec import FsmSpec, Part
from fft.prove.bounds import Bounds
from fft.prove.checker import Result, Search, all_rows, narrate
from fft.prove.judges import Fate, judged
from fft.prove.model import Model
from fft.prove.mutant import NotCaught, caught
from fft.prove.mutants import MUTANTS
from fft.prove.mutants_page import write_table
from fft.prove.operators import mutations
from fft.prove.scenario import save_counterexample
from fft.prove.sets_of_bounds import longest_first, sets_for
from fft.prove.workers import Tell, in_order, processes, spread

_EACH_MIB, _DEEP_MIB, _MUTANT_MIB = 1024, 4096, 512
"""Memory of a process that searches the largest of the sets of bounds, with a margin."""

ONE_IN = 50
"""The operators make this many mutants for each one that is judged, unless all are."""


@dataclass(frozen=True)
class Choice:
    """The options of ``fft dev check``."""

    deep: bool = False
    bounds: tuple[str, ...] = ()
    """Names of sets of bounds; empty: all sets. Only then do table rows that no run took count as a
    violation."""
    properties: tuple[str, ...] = ()
    """Names of invariants; empty: all invariants."""
    limit: int | None = None
    """Maximum number of states for each set of bounds."""
    save: Path = Path("runs/check")
    """Directory for counterexamples, as scenario files."""
    jobs: int | None = None
    """Number of simultaneous processes; None: one per core, as far as memory allows."""


@dataclass(frozen=True)
class Report:
    """The result of one search, and the text to print about it."""

    result: Result
    told: list[str]
    mib: int
    """Peak memory of its process."""


Show = Callable[[int, tuple[int, int, int] | None], None]
"""Callback for the progress of a search; None means that it has ended."""


def check(spec_name: str, choice: Choice, console: Console) -> bool:
    """Search within every set of bounds and print the results.

    Returns:
        Whether all properties hold.

    Raises:
        ConfigError, FftError: The spec or a name cannot be used.
    """
    spec = load_spec(spec_name)
    sets = _chosen(sets_for(spec, choice.deep), choice.bounds)
    if unknown := sorted(set(choice.properties) - set(INVARIANTS)):
        raise FftError(f"no property named {unknown[0]!r}; there are: {', '.join(INVARIANTS)}")
    jobs = processes(choice.jobs, _DEEP_MIB if choice.deep else _EACH_MIB)
    for bounds in sets:
        console.print(f"  {bounds.name}: {bounds.describe()}", markup=False, soft_wrap=True)
    began = time.monotonic()
    reports = _search_all(spec, spec_name, sets, choice, jobs, console)
    results = [report.result for report in reports]
    console.print(_bounds_table(spec, reports))
    console.print(_checks_table(results))
    took, many = time.monotonic() - began, min(jobs, len(sets))
    console.print(f"{took:.0f} s, in {many} process{'es' if many > 1 else ''} at once")
    broken = [r for r in results if r.violation is not None]
    partial = [r for r in results if r.violation is None and not r.complete]
    for result in partial:
        console.print(f"{result.bounds.name}: not complete, the limit of states was reached")
    missed = _missed(spec, results)
    taken = sum(1 for _ in all_rows(spec)) - len(missed)
    console.print(f"sometimes: {taken} of {taken + len(missed)} rows of the table were taken")
    same = _hsdps(missed) if spec.stages else set()
    if same:
        console.print(f"  {len(same)} more are hsdp's, row by row: its own search takes them")
    missed = {place: row for place, row in missed.items() if place not in same}
    for place, row in missed.items():
        if row.elsewhere:
            console.print(f"  {place}: {row.elsewhere}", markup=False)
    missed = {place: row for place, row in missed.items() if not row.elsewhere}
    if not choice.bounds and not broken and not partial and missed:
        console.print(f"VIOLATED sometimes: never taken: {', '.join(missed)}", markup=False)
        verdict = "VIOLATION"
    elif partial and not broken:
        verdict = "NOT COMPLETE: no violation in the states that were searched"
    else:
        verdict = "VIOLATION" if broken else "no violation"
    console.print(f"verdict: {verdict}")
    return verdict == "no violation"


def _chosen(sets: tuple[Bounds, ...], only: tuple[str, ...]) -> list[Bounds]:
    unknown = set(only) - {bounds.name for bounds in sets}
    if unknown:
        names = ", ".join(repr(bounds.name) for bounds in sets)
        raise FftError(f"no bounds named {sorted(unknown)[0]!r}; there are: {names}")
    return [bounds for bounds in sets if not only or bounds.name in only]


def _search_all(
    spec: FsmSpec,
    spec_name: str,
    sets: Sequence[Bounds],
    choice: Choice,
    jobs: int,
    console: Console,
) -> list[Report]:
    """Return the reports in the order of the sets; each is printed after those before it."""
    order = longest_first(sets)
    tasks = [(f"the search within {sets[i].name!r}", sets[i]) for i in order]
    with _progress(console, [bounds.name for _, bounds in tasks]) as show:

        def in_places() -> Generator[tuple[int, Report], None, None]:
            work = partial(_search, spec, spec_name, choice)
            with closing(spread(work, tasks, jobs, show, fresh=True)) as found:
                for number, report in found:
                    show(number, None)
                    yield order[number], report

        reports: list[Report] = []
        for _, report in in_order(in_places()):
            for line in report.told:
                console.print(line, markup=False, soft_wrap=True, highlight=False)
            reports.append(report)
    return reports


@contextmanager
def _progress(console: Console, names: Sequence[str]) -> Iterator[Show]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    lines: dict[int, TaskID] = {}
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:

        def show(number: int, at: tuple[int, int, int] | None) -> None:
            if at is None:
                progress.update(lines[number], visible=False)
                return
            states, expanded, depth = at
            told = f"{names[number]}: {states:,} states, {expanded:,} expanded, depth {depth}"
            if number not in lines:
                lines[number] = progress.add_task(told)
            progress.update(lines[number], description=told)

        yield show


def _search(spec: FsmSpec, spec_name: str, choice: Choice, bounds: Bounds, tell: Tell) -> Report:
    """Run one search, in its own process."""
    search = Search(Model(spec, bounds, only=choice.properties), choice.limit)
    result = search.run(lambda *at: tell(at))
    told = [] if result.violation is None else list(_tell(search, result, spec_name, choice.save))
    return Report(result, told, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)


def _tell(search: Search, result: Result, spec_name: str, save: Path) -> Iterator[str]:
    found = result.violation
    assert found is not None
    yield f"{result.bounds.name}: VIOLATED {found.name}: {found.text}"
    yield from narrate(search.model, found.path)
    save.mkdir(parents=True, exist_ok=True)
    path = save / f"{Path(spec_name).stem}-{result.bounds.name.replace(', ', '-')}.txt"
    path = path.with_name(path.name.replace(" ", "-"))
    save_counterexample(search, found, path, spec=spec_name)
    yield f"  saved as {path}"


def _bounds_table(spec: FsmSpec, reports: list[Report]) -> Table:
    shown = Table(title=f"{spec.name}: every state within the bounds")
    for name in ("bounds", "states", "steps", "depth", "settled", "seconds", "MiB", "result"):
        shown.add_column(name, justify="left" if name in ("bounds", "result") else "right")
    results = [report.result for report in reports]
    for r, mib in ((report.result, report.mib) for report in reports):
        verdict = r.violation.name if r.violation else "ok" if r.complete else "not complete"
        cells = (f"{r.states:,}", f"{r.steps:,}", str(r.depth), f"{r.settled:,}")
        shown.add_row(r.bounds.name, *cells, f"{r.seconds:.1f}", f"{mib:,}", verdict)
    total = (f"{sum(r.states for r in results):,}", f"{sum(r.steps for r in results):,}")
    shown.add_section()
    seconds, most = f"{sum(r.seconds for r in results):.1f}", max(r.mib for r in reports)
    shown.add_row("all", *total, "", "", seconds, f"{most:,}", "")
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
    taken: set[str] = set().union(*(r.rows for r in results))
    return {place: row for place, row in all_rows(spec) if place not in taken}


def _hsdps(missed: dict[str, Part]) -> set[str]:
    """Return places at which hsdp has the same row, except rows with their own reason."""
    rows = dict(all_rows(load_spec("hsdp")))
    return {at for at, row in missed.items() if not row.elsewhere and rows.get(at) == row}


def mutants(spec: str, every: bool, write: Path | None, jobs: int | None, console: Console) -> bool:
    """Run the planted bugs, then those that operators make of a spec, and print what found each.

    Returns:
        Whether all were found, or are listed as equivalent.
    """
    return _mutants_by_hand(write, jobs, console) & _mutants_of(spec, every, jobs, console)


def _mutants_of(spec: str, every: bool, jobs: int | None, console: Console) -> bool:
    made = mutations(load_spec(spec))[:: 1 if every else ONE_IN]
    tasks = [(f"the mutant {mutation.name!r}", mutation.name) for mutation in made]
    found: list[Fate] = []
    work = partial(_judge, spec)
    for _, fate in in_order(spread(work, tasks, processes(jobs, _MUTANT_MIB))):
        console.print(str(fate), markup=False, soft_wrap=True, highlight=False)
        found.append(fate)
    fallen = Counter(fate.judge or "equivalent" for fate in found if fate.is_known)
    told = ", ".join(f"{n} by {judge}" for judge, n in fallen.items())
    unknown = [fate for fate in found if not fate.is_known]
    console.print(f"{len(found)} mutants of {spec}: {told}; {len(unknown)} without an explanation")
    return not unknown


def _judge(spec: str, name: str, _: Tell) -> Fate:
    return judged(spec, next(m for m in mutations(load_spec(spec)) if m.name == name))


def _mutants_by_hand(write: Path | None, jobs: int | None, console: Console) -> bool:
    tasks = [(f"the search for mutant {mutant.name}", n) for n, mutant in enumerate(MUTANTS)]
    found: list[Planted] = []
    for _, one in in_order(spread(_plant, tasks, processes(jobs, _MUTANT_MIB))):
        console.print(one.line, markup=False, soft_wrap=True, highlight=False)
        found.append(one)
    good = all(one.states for one in found)
    console.print(f"{len(MUTANTS)} planted bugs, " + ("all caught" if good else "NOT all caught"))
    if write is not None and good:
        write_table(write, [(m, f.states, f.steps) for m, f in zip(MUTANTS, found, strict=True)])
        console.print(f"table written to {write}")
    return good


@dataclass(frozen=True)
class Planted:
    """Result for a planted bug; without states it survived."""

    line: str
    states: int = 0
    steps: int = 0


def _plant(number: int, _: Tell) -> Planted:
    mutant = MUTANTS[number]
    try:
        result = caught(mutant)[1]
    except NotCaught as error:
        return Planted(f"SURVIVES {mutant.name}: {error}")
    found = result.violation
    assert found is not None
    line = f"caught {mutant.name}: {found.name}, {len(found.path)} steps, {result.states:,} states"
    return Planted(line, result.states, len(found.path))

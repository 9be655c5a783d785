"""Run many seeds in parallel processes, sum up the results, and replay failed seeds.

Uses processes, the wall clock (for seeds per second) and rich; the simulated jobs use none of
these. A seed produces the same run wherever and whenever it is run.
"""

from __future__ import annotations

import gc
import shlex
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fft.errors import FftError
from fft.protocol.load import load_spec
from fft.protocol.spec import FsmSpec
from fft.prove.simulator.faults import CHANCES, RATES, Weather
from fft.prove.simulator.run import Result, never_taken, row_uses, run_seed
from fft.prove.workers import Tell, processes, spread

_CHUNK = 25
"""Number of seeds that a worker runs between reports."""
_EACH_MIB = 256
"""Memory of a worker, with a margin."""
_KEPT = 5
"""Number of failures that are kept complete, and whose traces are written."""


@dataclass(slots=True)
class Batch:
    """Totals over seeds. ``seconds`` is virtual time; ``wall`` is real time."""

    seeds: int = 0
    events: int = 0
    commits: int = 0
    aborts: int = 0
    epochs: int = 0
    checks: int = 0
    seconds: float = 0.0
    wall: float = 0.0
    stateless: int = 0
    """Number of jobs that stopped because no live process had the state any more, as they must."""
    slowest: float = 0.0
    """Longest time from the end of the faults until a job was well."""
    faults: Counter[str] = field(default_factory=Counter)
    rows: set[str] = field(default_factory=set)
    failed: int = 0
    failures: list[Result] = field(default_factory=list)
    """The failing seeds with the lowest numbers."""

    def add(self, result: Result) -> None:
        """Count one seed."""
        self.seeds += 1
        self.events += result.events
        self.commits += result.commits
        self.aborts += result.aborts
        self.epochs += result.epochs
        self.checks += result.checks
        self.seconds += result.seconds
        self.faults.update(result.faults)
        self.rows |= result.rows
        if result.violations:
            self.failed += 1
            self._keep([result])
        elif result.settled_in is None:
            self.stateless += 1
        else:
            self.slowest = max(self.slowest, result.settled_in)

    def merge(self, other: Batch) -> None:
        """Add the totals of another batch."""
        for name in ("seeds", "events", "commits", "aborts", "epochs", "checks", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.stateless += other.stateless
        self.failed += other.failed
        self.slowest = max(self.slowest, other.slowest)
        self.faults.update(other.faults)
        self.rows |= other.rows
        self._keep(other.failures)

    def _keep(self, failures: list[Result]) -> None:
        self.failures = sorted([*self.failures, *failures], key=lambda r: r.seed)[:_KEPT]


# --- running --------------------------------------------------------------------------------------


def run_batch(
    first: int,
    count: int,
    spec: FsmSpec,
    weather: Weather | None = None,
    jobs: int = 1,
    told: Callable[[Batch], None] = lambda _: None,
) -> Batch:
    """Run the seeds from ``first`` on.

    Args:
        first: First seed.
        count: Number of seeds.
        spec: The table.
        weather: Faults and their rates.
        jobs: Number of processes to start; they have ended when this returns or raises. With 1, no
            process is started.
        told: Called from time to time with the totals so far.
    """
    total, began = Batch(), time.monotonic()
    chunks = [
        (start, min(_CHUNK, first + count - start)) for start in range(first, first + count, _CHUNK)
    ]

    def take(part: Batch) -> None:
        total.merge(part)
        total.wall = time.monotonic() - began
        told(total)

    if jobs == 1 or len(chunks) == 1:
        for start, size in chunks:
            take(_chunk(start, size, spec, weather))
        return total
    tasks = [(f"seeds {start} to {start + size - 1}", (start, size)) for start, size in chunks]
    with closing(spread(partial(_work, spec, weather), tasks, jobs)) as parts:
        for _, part in parts:
            take(part)
    return total


def _work(spec: FsmSpec, weather: Weather | None, seeds: tuple[int, int], _: Tell) -> Batch:
    return _chunk(*seeds, spec, weather)


def _chunk(first: int, count: int, spec: FsmSpec, weather: Weather | None) -> Batch:
    batch = Batch()
    # A run makes few reference cycles, and searching for them costs a tenth of the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        for seed in range(first, first + count):
            batch.add(run_seed(seed, spec, weather))
    finally:
        if collecting:
            gc.enable()
        gc.collect()
    return batch


# --- the command ----------------------------------------------------------------------------------


def simulate(
    spec_name: str,
    seeds: int | None,
    first: int,
    jobs: int | None,
    seed: int | None,
    trace_dir: Path | None,
    console: Console,
) -> bool:
    """Run ``fft dev simulate`` and print the results to ``console``. Returns whether there was no
    violation.

    Raises:
        FftError, ConfigError: The arguments or the spec cannot be used.
    """
    _check(seeds, first, seed)
    spec = load_spec(spec_name)
    if seed is not None:
        result = replay(seed, spec, trace_dir)
        _tell_seed(result, trace_dir, console)
        return not result.violations
    count, workers = seeds or 1000, processes(jobs, _EACH_MIB)
    batch = _with_progress(first, count, spec, workers, console)
    console.print(table_of(batch, f"{spec.name}, seeds {first} to {first + count - 1}"))
    _tell_rows(spec, batch, console)
    for failure in batch.failures:
        _tell_failure(failure, spec, spec_name, trace_dir or Path("runs", "simulate"), console)
    return not batch.failed


def _check(seeds: int | None, first: int, seed: int | None) -> None:
    if seed is not None and (seeds is not None or first):
        raise FftError("--seed runs one seed; leave out --seeds and --first, or --seed")
    if seeds is not None and seeds < 1:
        raise FftError(f"--seeds {seeds}: give the number of seeds to run, 1 or more")
    if first < 0 or (seed is not None and seed < 0):
        raise FftError("a seed is a whole number from 0 on; give --first or --seed as one")


def replay(seed: int, spec: FsmSpec, trace_dir: Path | None) -> Result:
    """Run one seed, with traces in ``trace_dir/seed-<seed>``; older ones there are replaced."""
    directory = None if trace_dir is None else trace_dir / f"seed-{seed}"
    if directory is not None and directory.is_dir():
        for old in directory.glob("*.jsonl"):
            old.unlink()
    return run_seed(seed, spec, trace_dir=directory)


def replay_command(seed: int, spec_name: str, trace_dir: Path) -> str:
    """Return the command that runs a seed again and writes its traces."""
    name = "" if spec_name == "hsdp" else f"{shlex.quote(spec_name)} "
    return f"fft dev simulate {name}--seed {seed} --trace-dir {shlex.quote(str(trace_dir))}"


def _with_progress(first: int, count: int, spec: FsmSpec, jobs: int, console: Console) -> Batch:
    columns = (
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} seeds/s, {task.fields[failed]} failed"),
        TimeRemainingColumn(),
    )
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("seeds", total=count, rate=0.0, failed=0)

        def show(batch: Batch) -> None:
            rate = batch.seeds / max(batch.wall, 1e-9)
            progress.update(task, completed=batch.seeds, rate=rate, failed=batch.failed)

        return run_batch(first, count, spec, jobs=jobs, told=show)


# --- output ---------------------------------------------------------------------------------------


def table_of(batch: Batch, title: str) -> Table:
    """Return the totals of a batch as a table."""
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    figures = {
        "seeds": f"{batch.seeds:,}",
        "events handled by the core": f"{batch.events:,}",
        "commits": f"{batch.commits:,}",
        "aborts": f"{batch.aborts:,}",
        "epochs": f"{batch.epochs:,}",
        "checks of invariants": f"{batch.checks:,}",
        "jobs that lost all state, and stopped": f"{batch.stateless:,}",
        "slowest return to calm (virtual s)": f"{batch.slowest:.1f}",
        "virtual seconds": f"{batch.seconds:,.0f}",
        "seconds": f"{batch.wall:.1f}",
        "seeds/s": f"{batch.seeds / max(batch.wall, 1e-9):.1f}",
        "violations (seeds)": f"{batch.failed:,}",
    }
    for name, value in figures.items():
        table.add_row(name, value, end_section=name == "violations (seeds)")
    for kind, words in {**RATES, **CHANCES}.items():
        table.add_row(f"{kind}: {words}", f"{batch.faults[kind]:,}")
    return table


def _tell_rows(spec: FsmSpec, batch: Batch, console: Console) -> None:
    """Print how many rows the seeds took, and warn about rows that they never took."""
    uses = row_uses(spec, batch.rows)
    taken = sum(use.taken_in > 0 for use in uses)
    places, of_places = sum(use.taken_in for use in uses), sum(use.states for use in uses)
    console.print(
        f"rows of the table taken: {taken} of {len(uses)}; in all their states: {places} of "
        f"{of_places}"
    )
    missed = never_taken(spec, batch.rows)
    if missed:
        console.print(f"warning: never taken in {batch.seeds} seeds, and shown by no named test:")
    for name in missed:
        console.print(f"  {name}", markup=False, soft_wrap=True)


def _tell_failure(
    failure: Result, spec: FsmSpec, spec_name: str, trace_dir: Path, console: Console
) -> None:
    for violation in failure.violations:
        console.print(
            f"seed {failure.seed}: {violation.name}: {violation.text}", markup=False, soft_wrap=True
        )
    replay(failure.seed, spec, trace_dir)
    command = replay_command(failure.seed, spec_name, trace_dir)
    console.print(f"  replay: {command}", markup=False, soft_wrap=True)
    traces = shlex.quote(str(trace_dir / f"seed-{failure.seed}"))
    console.print(f"  audit:  fft audit {traces}", markup=False, soft_wrap=True)


def _tell_seed(result: Result, trace_dir: Path | None, console: Console) -> None:
    faults = ", ".join(f"{kind} {n}" for kind, n in sorted(result.faults.items())) or "none"
    settled = "never" if result.settled_in is None else f"in {result.settled_in:.1f} s"
    lines = [
        f"seed {result.seed}: {result.groups} groups x {result.ranks} ranks at the start",
        f"  {result.events} events, {result.commits} commits, {result.aborts} aborts, "
        f"{result.epochs} epochs, {result.seconds:.1f} virtual s, {result.checks} checks",
        f"  faults: {faults}",
        f"  well again after the last fault: {settled}",
    ]
    if trace_dir is not None:
        lines.append(f"  traces: {trace_dir / f'seed-{result.seed}'}")
    lines += [f"  VIOLATED {v.name} at {v.place or '-'}: {v.text}" for v in result.violations]
    lines.append("verdict: " + ("VIOLATION" if result.violations else "no violation"))
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)

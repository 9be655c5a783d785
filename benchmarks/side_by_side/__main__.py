"""The commands of `make bench` and `make bench-quick`: ``python -m benchmarks.side_by_side``.

``run`` continues in the folder it is given: repetitions that exist there are not repeated. ``page``
writes the page, ``list`` names rows and systems. Ctrl-C ends the running processes, and keeps the
finished results.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from benchmarks.side_by_side import machine, nvrx, page
from benchmarks.side_by_side.legs import legs
from benchmarks.side_by_side.measure import Outcome, outcome
from benchmarks.side_by_side.results import Results, Task
from benchmarks.side_by_side.rows import QUICK, ROWS, SYSTEMS, Row, System
from fft.errors import FftError
from fft.trace.audit import read_lines

TRIES = 3
"""Attempts at a repetition that does not reach its fault."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.side_by_side", description=__doc__)
    parser.add_argument("what", choices=("run", "page", "list"))
    parser.add_argument("--dir", type=Path, help="folder of the run; else runs/bench-<time>")
    parser.add_argument("--reps", type=int, default=5, help="repetitions of each row and system")
    parser.add_argument("--row", action="append", choices=ROWS, help="only this row; several times")
    parser.add_argument(
        "--system", action="append", choices=SYSTEMS, help="only this one, likewise"
    )
    parser.add_argument("--quick", action="store_true", help="some rows, once, in five minutes")
    parser.add_argument("--again", action="store_true", help="page: read the events anew")
    parser.add_argument("--write", action="store_true", help="put the results into docs/")
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> list[tuple[Row, System]]:
    """Return the requested rows and systems, in order."""
    pairs = [(row, system) for row in ROWS.values() for system in row.systems]
    if args.quick:
        pairs = [(ROWS[row], SYSTEMS[name]) for row, names in QUICK for name in names]
    return [
        (row, system)
        for row, system in pairs
        if (not args.row or row.name in args.row)
        and (not args.system or system.name in args.system)
    ]


def in_turn(pairs: list[tuple[Row, System]], reps: int) -> Iterator[Task]:
    """Order the runs row by row as A/B/A/B: all systems run a repetition before the next one."""
    for row in dict.fromkeys(row for row, _ in pairs):
        for number in range(1, reps + 1):
            for _, system in (pair for pair in pairs if pair[0] is row):
                yield Task(row, system, number)


def possible(pairs: list[tuple[Row, System]], results: Results) -> list[tuple[Row, System]]:
    """Return the pairs that can run here; the page gives the reason for the others."""
    why = nvrx.why_not() if any(system.manager == "nvrx" for _, system in pairs) else None
    for row, system in pairs:
        if why and system.manager == "nvrx" and results.absence(row, system) != why:
            results.add_absence(row, system, why)
    return [pair for pair in pairs if why is None or pair[1].manager != "nvrx"]


def run(args: argparse.Namespace, results: Results, console: Console) -> bool:
    """Run the missing repetitions. Return whether all are complete in the end."""
    tasks = list(in_turn(possible(chosen(args), results), 1 if args.quick else args.reps))
    left = [task for task in tasks if not results.done(task)]
    if left:
        results.add({"kind": "machine", "machine": machine.described()})
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        all_of_it = bar.add_task("", total=len(tasks), completed=len(tasks) - len(left))
        for task in left:
            bar.update(all_of_it, description=task.name)
            found = repetition(task, results, console)
            if found is not None:
                console.print(f"{task.name}: {told(task, found)}", style="dim", markup=False)
            bar.advance(all_of_it)
    return all(map(results.done, tasks))


def repetition(task: Task, results: Results, console: Console) -> Outcome | None:
    """Run a repetition and keep its result. None if it gave no result twice."""
    from benchmarks.side_by_side.launch import Launch, LaunchError  # imports torch

    limit_s = task.row.limit_s(task.system, results.in_vain(task.row, task.system))
    for number in range(TRIES):
        home = results.directory / "work" / f"{task.name}{'' if number == 0 else f'-{number}'}"
        shutil.rmtree(home, ignore_errors=True)  # an interrupted repetition
        try:
            events = Launch(task.row, task.system, home.resolve(), limit_s).run()
        # Hours of other repetitions may be left
        except (LaunchError, FftError, RuntimeError, OSError) as error:
            console.print(f"{task.name}: {error!r}", style="red", markup=False)
            continue
        found = outcome(task.row, events)
        results.keep_events(task, events)
        results.add_outcome(task, found)
        if task.row.fault is None and task.system.manager == "fft":
            results.add_legs(task, legs(read_lines(home / "traces")))
        _tidy(home)
        return found
    return None


def _tidy(home: Path) -> None:
    """Keep only the logs of a repetition; its events are kept elsewhere."""
    shutil.rmtree(home / "traces", ignore_errors=True)
    for path in (*home.glob("events-*"), *home.glob("here-*")):
        path.unlink()


def told(task: Task, found: Outcome) -> str:
    """Describe a result briefly, for the progress output."""
    if task.row.fault is None:
        return (
            f"step {found.step_p50_ms:.2f} ms, protocol {found.cost_p50_ms:.2f} ms"
            if found.step_p50_ms is not None and found.cost_p50_ms is not None
            else "no steps"
        )
    after = "never" if found.next_commit_ms is None else f"{found.next_commit_ms:.0f} ms"
    whole = "" if found.whole_ms is None else f", all contribute after {found.whole_ms:.0f} ms"
    return f"next commit {after}{whole}, {found.splits} splits, {found.died} died"


def show(results: Results, console: Console) -> None:
    """Print the tables."""
    for title, headings, rows in (
        ("fault → next commit, ms", page.HEADLINE, page.headline(results)),
        ("all columns, ms", page.FAULTS, page.fault_rows(results)),
        ("without a fault, ms", page.QUIET, page.quiet_rows(results)),
        ("where FFT's own time goes, ms", page.LEGS_OF, page.leg_rows(results)),
    ):
        if rows:
            table = Table(title=title)
            for heading in headings:
                table.add_column(heading, overflow="fold")
            for row in rows:
                table.add_row(*row)
            console.print(table)


def main() -> None:
    """Run the repetitions, show and write the results."""
    args, console = arguments(), Console()
    if not console.is_terminal:  # a pipe has no width
        console.width = 200
    # The exit ends the running processes, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.what == "list":
        for row, system in chosen(args):
            console.print(f"{row.name:<22} {system.name:<14} {row.title}", highlight=False)
        return
    if args.what == "page" and args.dir is None:
        args.dir = page.KEPT.parent
    results = Results(args.dir or Path("runs", f"bench-{datetime.now():%Y%m%d-%H%M%S}"))
    good = True
    if args.what == "run":
        os.environ["RUST_LOG"] = "error"
        console.print(f"results: {results.directory} (to go on: --dir {results.directory})")
        try:
            good = run(args, results, console)
        except KeyboardInterrupt:
            console.print(f"stopped; to go on: --dir {results.directory}")
            sys.exit(130)
    elif args.again:
        again = results.directory / "again"
        shutil.rmtree(again, ignore_errors=True)
        results = results.measured_again(again)
    show(results, console)
    if args.write:
        from benchmarks.side_by_side import plot

        page.write(results)
        if page.fault_rows(results):
            plot.draw(results, page.PLOT)
        console.print(f"page: {page.PAGE}")
    sys.exit(not good)


if __name__ == "__main__":
    main()

"""The commands that check a spec: `fft dev simulate`, `fft dev check`, `fft dev mutants`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fft.cli.shared import SPEC, console, plain_errors

Jobs = Annotated[
    int | None,
    typer.Option(help="Processes at once; one per core, as far as memory goes, if absent."),
]


def simulate(
    spec: Annotated[
        str, typer.Argument(help="A spec: a name, or the path of a YAML file.")
    ] = "hsdp",
    seeds: Annotated[
        int | None, typer.Option(help="Number of seeds to run; 1000 if absent.")
    ] = None,
    first: Annotated[int, typer.Option(help="The first of them.")] = 0,
    jobs: Jobs = None,
    seed: Annotated[int | None, typer.Option(help="Run this one seed, with more output.")] = None,
    trace_dir: Annotated[
        Path | None,
        typer.Option(help="For the traces of --seed, or of seeds that fail (runs/simulate)."),
    ] = None,
) -> None:
    """Simulate whole jobs from seeds, with faults of every kind; exit 1 on a violation."""
    from fft.prove.simulator.batch import simulate as run_seeds

    with plain_errors():
        good = run_seeds(spec, seeds, first, jobs, seed, trace_dir, console())
    raise typer.Exit(0 if good else 1)


def check(
    spec: Annotated[str, SPEC],
    deep: Annotated[bool, typer.Option("--deep", help="Wider bounds; takes half an hour.")] = False,
    bounds: Annotated[
        list[str] | None,
        typer.Option(help="Only the bounds of this name; may be given several times."),
    ] = None,
    property_: Annotated[
        list[str] | None,
        typer.Option("--property", help="Only this invariant; may be given several times."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="At most so many states for each set of bounds.")
    ] = None,
    save: Annotated[
        Path, typer.Option(help="Folder for counterexamples, as scenario files.")
    ] = Path("runs/check"),
    jobs: Jobs = None,
) -> None:
    """Search every state of a spec within bounds; exit 1 on a violation."""
    from fft.prove.searches import Choice
    from fft.prove.searches import check as search

    choice = Choice(deep, tuple(bounds or ()), tuple(property_ or ()), limit, save, jobs)
    with plain_errors():
        good = search(spec, choice, console())
    raise typer.Exit(0 if good else 1)


def mutants(
    spec: Annotated[
        str, typer.Argument(help="A spec whose rows, guards and effects are changed one by one.")
    ] = "hsdp",
    every: Annotated[
        bool, typer.Option("--all", help="All changes; takes half an hour. Else one in 50.")
    ] = False,
    write: Annotated[
        Path | None, typer.Option(help="Write the table between the markers of this file.")
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Plant known bugs, and change a spec piece by piece; exit 1 if one survives unexplained."""
    from fft.prove.searches import mutants as plant

    with plain_errors():
        good = plant(spec, every, write, jobs, console())
    raise typer.Exit(0 if good else 1)

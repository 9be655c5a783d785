"""The commands on a run's traces: `fft audit` checks the run, `fft report` shows faults' costs."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fft.cli.shared import console, plain_errors


def audit(
    directory: Annotated[Path, typer.Argument(help="A trace directory, with all its starts.")],
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Replay traces against the spec and all invariants; exit 1 on a violation, or if the run has
    committed no step, so that there was nothing to check."""
    from fft.trace.resumed import audit_job

    # An audit creates no reference cycles; the default threshold makes it an eighth slower.
    gc.set_threshold(100_000)
    with plain_errors():
        found = audit_job(directory)
        text = json.dumps(found.to_json(), indent=2) if as_json else found.render()
    sys.stdout.write(text.rstrip("\n") + "\n")
    raise typer.Exit(0 if found.ok else 1)


def report(directory: Annotated[Path, typer.Argument(help="A trace directory.")]) -> None:
    """Show each fault of a run: how it was noticed, what it cost; and waits for input."""
    from fft.trace import report as of

    with plain_errors():
        table = of.fault_table(directory)
        has_gaps = bool(damaged := of.damages(directory))
        shown: list[object] = [table if table.rows else "no fault was noticed in these traces"]
        if has_gaps:
            shown += ["these traces have gaps: faults, and what they cost, may be missing above"]
        shown += [of.fired(directory), of.place_table(directory), of.input_wait(directory)]
        shown += [of.checkpoints(directory, has_gaps), of.went_on(directory, has_gaps)]
    for part in filter(None, shown):
        # A folded path cannot be copied.
        console().print(part, markup=False, soft_wrap=isinstance(part, str))
    for line in damaged:
        sys.stderr.write(f"fft: {line}\n")

"""The commands on a run's traces: `fft audit` checks the run, `fft report` shows faults' costs."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Annotated

import typer

from fft.cli.shared import console, plain_errors, trace_folder
from fft.util.terminal import put, write_err


def audit(
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="A trace directory, with all its starts. Default: the newest run here."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Replay traces against the spec and all invariants; exit 1 on a violation, or if the run has
    committed no step, so that there was nothing to check."""
    from fft.trace.resumed import audit_job

    # An audit creates no reference cycles; the default threshold makes it an eighth slower.
    gc.set_threshold(100_000)
    with plain_errors():
        found = audit_job(trace_folder(directory))
        text = json.dumps(found.to_json(), indent=2) if as_json else found.render()
    put(text.rstrip("\n") + "\n")
    raise typer.Exit(0 if found.ok else 1)


def report(
    directory: Annotated[
        Path | None,
        typer.Argument(help="A trace directory. Default: that of the newest run here."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a timeline as one offline page.")
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.")
    ] = None,
    otlp: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send spans and figures to an OTLP/HTTP collector."),
    ] = None,
) -> None:
    """Show speed, cost of faults and waits of a run; or write or send it in another form."""
    from fft.launch.kept import kept
    from fft.trace.report import RunReport

    with plain_errors():
        folder = trace_folder(directory)
        if html is not None:
            from fft.trace.timeline import write_page

            write_page(folder, html)
            put(f"open {html} in a browser\n")
        if perfetto is not None:
            from fft.trace.perfetto import write_trace

            write_trace(folder, perfetto)
            put(f"open {perfetto} in https://ui.perfetto.dev\n")
        if otlp is not None:
            from fft.trace.otlp import export

            spans, figures = export(folder, otlp)
            put(f"sent {spans} spans and {figures} figures of {folder} to {otlp}\n")
        if html or perfetto or otlp:
            return
        if as_json:
            told = RunReport(folder).to_json() | {"ended": kept(folder)}
            put(json.dumps(told, indent=2) + "\n")
            return
        found = RunReport(folder)
        shown = [*found.parts(), *kept(folder)]
    for part in filter(None, shown):
        # A folded path cannot be copied.
        console().print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    for line in found.damages:
        write_err(line)

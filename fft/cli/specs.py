"""The commands `fft config`, `fft doctor`, and `fft dev spec`, `graph` and `schema`."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from typing import Annotated

import typer

from fft.cli.shared import SPEC, console, plain_errors
from fft.util.terminal import put


class GraphFormat(StrEnum):
    """The output languages of ``fft dev graph``."""

    mermaid = "mermaid"
    dot = "dot"


def graph(
    spec: Annotated[str, SPEC],
    form: Annotated[GraphFormat, typer.Option("--format", help="Language.")] = GraphFormat.mermaid,
    scopes: Annotated[
        bool, typer.Option("--scopes", help="Its scopes, and what flows between them.")
    ] = False,
) -> None:
    """Draw a spec as text: its machine, or its scopes."""
    from fft.protocol import graph
    from fft.protocol.load import load_machine, load_spec

    with plain_errors():
        if scopes:
            draw = {"dot": graph.scopes_to_dot, "mermaid": graph.scopes_to_mermaid}[form]
            text = draw(load_spec(spec))
        else:
            drawn = graph.to_dot if form is GraphFormat.dot else graph.to_mermaid
            text = drawn(load_machine(spec))
    put(text.rstrip("\n") + "\n")


def check_spec(
    spec: Annotated[str, SPEC],
    state: Annotated[
        str | None, typer.Option(help="Print all reactions of this state, such as HEALING.forming.")
    ] = None,
) -> None:
    """Validate a spec and print its parameter groups, votes, states and number of rows."""
    from fft.protocol.graph import reactions
    from fft.protocol.load import load_machine
    from fft.protocol.scopes import flow_in_words, in_words
    from fft.protocol.spec import FsmSpec

    with plain_errors():
        loaded = load_machine(spec)
        if state is not None:
            put("\n".join(reactions(loaded, state)) + "\n")
            return
    tables = [owner.on for _, owner in loaded.row_owners()]
    rows = sum(len(alternatives) for table in tables for alternatives in table.values())
    states = ", ".join(loaded.names)
    lines = [f"{loaded.name}: valid; {rows} rows; {len(loaded.leaves)} states, named {states}"]
    if loaded.doc:
        lines.append(loaded.doc.strip())
    if isinstance(loaded, FsmSpec):
        policies = loaded.policies
        groups, scopes = loaded.parameter_groups, loaded.scopes
        lines += in_words(groups, scopes, loaded.bound, policies.quorum)
        lines += flow_in_words(loaded.flow)
    put("\n".join(lines) + "\n")


def config(
    spec: Annotated[str, typer.Argument(help="A spec: a name, or a path.")] = "hsdp",
    chosen: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=SECONDS",
            help="Check this value too; may be given several times.",
        ),
    ] = None,
    bus: Annotated[
        str, typer.Option(envvar="FFT_BUS", help="URL of the job's bus, or its beginning.")
    ] = "tcp://",
) -> None:
    """Show every timeout: what it bounds, and where its value is from; refuse what cannot work.

    Also show the memory of this host that copies of the state may take under `fft run`.
    """
    from rich.table import Table

    from fft.launch.memory import about_memory
    from fft.protocol.load import load_spec
    from fft.protocol.timeouts import from_env, from_pairs, resolve

    with plain_errors():
        given = {**from_env(os.environ), **from_pairs(chosen or ())}
        timeouts = resolve(load_spec(spec), given, bus).values()
    table = Table("timeout", "seconds", "bounds", "from")
    for timeout in timeouts:
        table.add_row(timeout.name, f"{timeout.seconds:g}", timeout.bounds, timeout.origin)
    console().print(table)
    put(f"{about_memory()}\n")


def doctor() -> None:
    """Show the versions of Python, torch and torchft, whether FFT was tried with them, and what is
    lacking."""
    from fft.util import versions

    lines, works = versions.doctor()
    put("\n".join(lines) + "\n")
    raise typer.Exit(0 if works else 1)


def schema() -> None:
    """Print the JSON schema of specs, for editors."""
    from fft.protocol.load import json_schema

    put(json.dumps(json_schema(), indent=2) + "\n")

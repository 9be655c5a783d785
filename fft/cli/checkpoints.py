"""The commands on durable checkpoints at a path or URL: list, verify, prune, export, import."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fft.cli.shared import console, plain_errors
from fft.errors import FftError
from fft.util.terminal import put

app = typer.Typer(
    help="Durable checkpoints: list, verify, prune; export and import for torch's own.",
    no_args_is_help=True,
)

Place = Annotated[str, typer.Argument(metavar="DIR|URL", help="Where the checkpoints are.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable.")]
MIB = 2**20


class Form(StrEnum):
    """The other checkpoint formats that can be exported and imported."""

    dcp = "dcp"


@contextmanager
def _readable(place: str) -> Iterator[None]:
    """Convert an OSError of the store to FftError."""
    try:
        yield
    except OSError as error:
        raise FftError(f"{place}: {error}") from error


def _opened(place: str, is_new: bool = False) -> Any:
    """Open the checkpoints at ``place``.

    Raises FftError if it is a file, or if the directory does not exist and ``is_new`` is false.
    """
    from fft.checkpoints.files import Checkpoints
    from fft.checkpoints.stores import open_store

    if "://" not in place and not Path(place).is_dir():
        if Path(place).exists():
            raise FftError(f"{place} is no directory; name the one that has the checkpoints")
        if not is_new:
            raise FftError(f"{place}: there is no such directory")
    return Checkpoints(open_store(place))


def _step(text: str) -> int:
    """Parse a step, given as a number or as the name of a checkpoint. Raises ValueError."""
    from fft.checkpoints.files import step_of

    step = step_of(text)
    return int(text) if step is None else step


@app.command(name="list")
def list_all(place: Place, as_json: AsJson = False) -> None:
    """Show all checkpoints, and what is unfinished, by manifests and sizes of files; what is in
    the files `verify` reads."""
    from fft.checkpoints.files import name_of

    with plain_errors(), _readable(place):
        found = _opened(place).found()
    if as_json:
        entries = [
            {
                "name": entry.name,
                "problem": entry.problem,
                **(entry.manifest.model_dump(mode="json") if entry.manifest else {}),
            }
            for entry in found
        ]
        put(json.dumps(entries, indent=2) + "\n")
        return
    if not found:
        put(f"no checkpoint at {place}\n")
        return
    table = Table()
    table.add_column("checkpoint", overflow="fold", no_wrap=True)  # users copy it
    for head in ("written", "groups × ranks", "cursor", "MiB", "lineage", "state"):
        table.add_column(head, overflow="fold")  # a truncated cell cannot be copied
    for entry in found:
        if (m := entry.manifest) is None:
            table.add_row(entry.name, "", "", "", "", "", entry.problem)
            continue
        when = datetime.fromtimestamp(m.written_at).isoformat(" ", "seconds")
        size = f"{m.size / MIB:.1f}"
        groups = f"{len(m.groups)} × {m.ranks}" if m.groups else f"imported, {m.ranks} ranks"
        state = "sizes fit" if entry.name == name_of(m.step) else "sizes fit; all but its name"
        table.add_row(entry.name, when, groups, str(m.cursor), size, m.lineage, state)
    console().print(table, markup=False)
    put(
        "by manifests and sizes of files; their contents were not read: fft checkpoint verify "
        f"{place}\n"
    )


@app.command()
def verify(
    place: Place,
    step: Annotated[
        int | None, typer.Option(parser=_step, help="Of this step, or name, only; all if absent.")
    ] = None,
) -> None:
    """Read every file and compare digests; exit 1 if one is damaged or none is whole."""
    from fft.checkpoints.files import DamagedCheckpoint

    with plain_errors(), _readable(place):
        checkpoints = _opened(place)
        steps = [entry.step for entry in checkpoints.found() if entry.step is not None]
        if step is not None and step not in steps:
            checkpoints.manifest(step)  # raises an error that lists the existing steps
        bad = 0
        for each in steps if step is None else [step]:
            try:
                manifest = checkpoints.verify(each)
                text = f"step-{each}: whole, {len(manifest.files)} files, {manifest.size} bytes"
            except DamagedCheckpoint as error:
                if all(entry.step != each for entry in checkpoints.found()):
                    text = f"step-{each}: removed while this command ran"
                else:
                    bad, text = bad + 1, f"DAMAGED: {error}"
            put(text + "\n")
        if not steps:
            put(f"no checkpoint at {place}\n")
    raise typer.Exit(1 if bad or not steps else 0)


@app.command()
def prune(
    place: Place,
    keep: Annotated[int, typer.Option(min=0, help="So many of the newest stay; 0: all.")] = 3,
) -> None:
    """Remove all but the newest, and what is unfinished, unless a job is at work there.

    The newest that is whole stays in any case; its files are read for that.
    """
    from fft.checkpoints.stores import StoreError

    with plain_errors(), _readable(place), ExitStack() as held:
        checkpoints = _opened(place)
        whole, problems = checkpoints.newest()
        found = checkpoints.found()
        stays = [e.name for e in found if e.step is not None] if whole is None else []
        stays += [] if whole is None else [checkpoints.directory(whole)]
        left, gone = [], [*checkpoints.surplus(keep), *checkpoints.leftovers()]
        try:
            held.enter_context(checkpoints.store.hold())
            is_used = checkpoints.store.is_at_work()
        except StoreError:
            is_used = True
        if is_used:  # the running job may still be writing the unfinished ones
            left = [entry.name for entry in found if entry.step is None]
        gone = [name for name in dict.fromkeys(gone) if name not in (*stays, *left)]
        failed = checkpoints.remove(gone)
    for problem in problems:
        put(f"DAMAGED: {problem}\n")
    told = [f"removed {name}\n" for name in gone if name not in failed]
    told += [f"NOT removed: {name}: {error}\n" for name, error in failed.items()]
    put("".join(told) or "nothing to remove\n")
    if problems and whole is not None:
        put(f"the newest that is whole is {stays[0]}; it stays\n")
    elif problems:
        put("none is whole; all that have been published stay\n")
    if left:
        put(f"a job is at work there, and may need: {', '.join(left)}\n")
    raise typer.Exit(1 if failed else 0)


@app.command()
def export(
    place: Place,
    step: Annotated[int, typer.Argument(parser=_step, help="Of the checkpoint, or its name.")],
    target: Annotated[Path, typer.Argument(help="A new directory.")],
    to: Annotated[Form, typer.Option(help="torch.distributed.checkpoint.")] = Form.dcp,
) -> None:
    """Write a checkpoint as one of another kind, with whole tensors; needs its size in memory."""
    with plain_errors(), _readable(place):
        from fft.train.checkpoint.dcp import export_dcp

        size = export_dcp(_opened(place), step, target)
    put(f"step-{step} is in {target} for {to.value}: {size} bytes of tensors\n")


@app.command(name="import")
def import_(
    place: Place,
    source: Annotated[Path, typer.Argument(help="The directory of the other checkpoint.")],
    of: Annotated[Form, typer.Option("--from", help="What it is.")] = Form.dcp,
    step: Annotated[
        int | None, typer.Option(min=1, help="Steps behind it, if FFT has not written it.")
    ] = None,
    cursor: Annotated[
        int, typer.Option(min=0, help="Items of the data behind it, if FFT has not.")
    ] = 0,
) -> None:
    """Make a checkpoint of one of another kind, which is unpickled: only one that you trust."""
    with plain_errors(), _readable(place):
        from fft.train.checkpoint.dcp import import_dcp

        manifest = import_dcp(_opened(place, is_new=True), source, step, cursor)
    put(f"step-{manifest.step} at {place} has what is in {source} ({of.value})\n")

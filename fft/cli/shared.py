"""Helpers that the commands share: options, output of errors and tables, an operator's client."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from rich.console import Console

from fft.errors import FftError
from fft.launch.exit_status import ExitStatus
from fft.trace.starts import newest_run
from fft.util.terminal import write_err

if TYPE_CHECKING:
    from fft.operate.client import JobClient

BusUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL|DIR",
        help="URL of the job's bus, or its trace directory. Default: FFT_BUS, or the newest run "
        "here.",
    ),
]
SPEC = typer.Argument(help="A spec: a name such as hsdp, or the path of a YAML file.")


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print an error that is meant for the user to stderr, and exit with its status, usually 2."""
    try:
        yield
    except FftError as error:
        write_err(str(error))
        raise typer.Exit(getattr(error, "exit_status", ExitStatus.REFUSED)) from error
    except (OSError, RuntimeError, MemoryError) as error:
        if not _is_short(error):
            raise
        write_err(
            f"this process may not have what it needs: {error or 'out of memory'}; look at "
            "ulimit -n (files), -v (memory), -u (processes and threads)"
        )
        raise typer.Exit(ExitStatus.REFUSED) from error


def _is_short(error: Exception) -> bool:
    """Whether the error is a shortage of file descriptors, memory, processes or threads."""
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
    return isinstance(error, MemoryError) or str(error) == "can't start new thread"


def trace_folder(given: Path | None) -> Path:
    """Return ``given``, or the trace directory of the newest run in it or in the current directory.

    Raises:
        FftError: There is no run here.
    """
    if given is not None:
        return given if any(given.glob("*.jsonl")) else newest_run(given) or given
    found = newest_run(Path())
    if found is None:
        raise FftError(
            "no run in the current directory or in ./runs: name the trace directory of one "
            "(`fft run` prints it at its end)"
        )
    return found


class GroupedHelp(typer.core.TyperCommand):
    """A command whose ``--help`` lists its options by panel, one line each."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, description, options by panel, and epilog."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        panels: dict[str, list[tuple[str, str]]] = {}
        for each in (param for param in self.params if isinstance(param, typer.core.TyperOption)):
            panel = panels.setdefault(each.rich_help_panel or "Options", [])
            panel.append(_option_line(each))
        for name, rows in panels.items():
            with formatter.section(name):
                formatter.write_dl(rows, col_max=28)
        self.format_epilog(ctx, formatter)


def _option_line(option: typer.core.TyperOption) -> tuple[str, str]:
    """Return names and value of an option, and its help with the default."""
    names = ", ".join(option.opts)
    if option.secondary_opts:
        names = f"--[no-]{option.opts[0].removeprefix('--')}"
    value = "" if option.is_flag else f" {option.metavar or 'N'}"
    default = option.default
    if option.secondary_opts:
        text = f" [{'on' if default else 'off'}]"
    else:
        text = "" if default in (None, False) else f" [{getattr(default, 'value', default)}]"
    return f"{names}{value}", f"{option.help}{text}"


def console() -> Console:
    """Return a console on standard output, with a fixed width if that is not a terminal."""
    from fft.trace.display import SafeConsole

    made = SafeConsole()
    if not made.is_terminal:  # a pipe has no width, and the default of 80 would fold every cell
        made.width = 130
    return made


@contextmanager
def job_client(bus: str | None, folder: Path | None = None) -> Iterator[JobClient]:
    """Yield an operator's client on the job's bus, inside `plain_errors`.

    Args:
        bus: The option ``--bus``.
        folder: The job's trace directory, if it is given by that.
    """
    from fft.operate.client import JobClient
    from fft.operate.job_file import find_job, refuse_ended

    with plain_errors():
        url, job = find_job(bus, folder)
        refuse_ended(job)
        with JobClient(url) as client:
            yield client

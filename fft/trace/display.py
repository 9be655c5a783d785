"""Two ways to show what a running job is doing: a table in a terminal, lines in a log or a pipe.

Writes to the terminal only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fft.trace.tail import JobView


@dataclass(frozen=True)
class Row:
    """One group on the screen. ``doing`` is the supervisor's description of its processes."""

    group: str
    doing: str
    state: str = "-"
    epoch: int = 0
    step: int = 0
    loss: float | None = None
    fault: str = ""


@dataclass(frozen=True)
class Snapshot:
    """The screen at one moment; ``elapsed`` is in seconds since the start of the job."""

    elapsed: float
    rows: Sequence[Row]
    fired: int
    planned: int


def row_of(view: JobView, group: str, doing: str) -> Row:
    """Return the row of ``group``: the state of its first rank, the lowest step of all."""
    ranks = view.of(group)
    if not ranks:
        return Row(group, doing)
    first = ranks[0]
    fault = next((rank.fault for rank in ranks if rank.fault), "")
    step = min(rank.step for rank in ranks)
    fetches = next((rank.fetches for rank in ranks if rank.fetches), "")
    state = f"{first.state} ({fetches})" if fetches else first.state
    return Row(group, doing, state, first.epoch, step, first.loss, fault)


class Display(Protocol):
    """A display of snapshots; `close` restores the terminal."""

    def show(self, snapshot: Snapshot) -> None: ...

    def close(self) -> None: ...


class LiveDisplay:
    """A table that is redrawn in place, for a terminal."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        """Redraw the table."""
        title = f"{snapshot.elapsed:.0f} s, {snapshot.fired} of {snapshot.planned} faults fired"
        table = Table(title=title, title_justify="left")
        for head in ("group", "processes", "state", "epoch", "step", "loss"):
            table.add_column(head, no_wrap=True)
        table.add_column("last fault", overflow="fold", ratio=1)
        for row in snapshot.rows:
            numbers = (str(row.epoch), str(row.step), _loss(row.loss))
            table.add_row(row.group, row.doing, row.state, *numbers, Text(row.fault))
        self._live.update(table, refresh=True)

    def close(self) -> None:
        """Stop updating and leave the last table on the screen."""
        self._live.stop()


class PlainDisplay:
    """Lines for a log file or a pipe: at once when there is news, else every ten seconds.

    News is a fault, an epoch (a rollback, or groups that join or leave), or a process that starts
    or ends. A step is not news. It prints at most one line a second.
    """

    def __init__(self, console: Console, every: float = 10.0, at_most: float = 1.0) -> None:
        self._console = console
        self._every, self._at_most = every, at_most
        self._printed: Snapshot | None = None
        self._newest: Snapshot | None = None

    def show(self, snapshot: Snapshot) -> None:
        """Print the line, unless it contains nothing new or the last line is too recent."""
        last, self._newest = self._printed, snapshot
        if last is not None:
            pause = self._every if _news(snapshot) == _news(last) else self._at_most
            if snapshot.elapsed < last.elapsed + pause:
                return
        self._print(snapshot)

    def close(self) -> None:
        """Print news that came too soon after the last line."""
        last = self._printed
        if self._newest is not None and last is not None and _news(self._newest) != _news(last):
            self._print(self._newest)

    def _print(self, snapshot: Snapshot) -> None:
        self._printed = snapshot
        parts = [f"{snapshot.elapsed:6.1f} s  faults {snapshot.fired}/{snapshot.planned}"]
        for row in snapshot.rows:
            fault = f" [{row.fault}]" if row.fault else ""
            place = f"{row.state} epoch {row.epoch} step {row.step} loss {_loss(row.loss)}"
            parts.append(f"g{row.group} {row.doing}: {place}{fault}")
        line = "  |  ".join(parts)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _news(snapshot: Snapshot) -> object:
    """Return the fields whose change is printed at once."""
    return snapshot.fired, [(row.doing, row.epoch, row.fault) for row in snapshot.rows]


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"


def open_display(console: Console) -> Display:
    """Return the display that fits ``console``."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)

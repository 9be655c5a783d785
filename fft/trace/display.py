"""Two ways to show the state of a running job: a table in a terminal, lines in a log or a pipe.

This module writes only to the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import fmean
from textwrap import shorten
from typing import Protocol

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment, Segments
from rich.table import Table
from rich.text import Text

from fft.protocol.roles import Role
from fft.trace.course import Course, Fault, TimeLost, readable_cause
from fft.trace.format import progress_in_words
from fft.trace.history import RankView
from fft.trace.tail import JobView
from fft.util.terminal import printable

_STATES: dict[Role, str] = {
    "training": "training",
    "voting": "training",
    "committing": "training",
    "last_commit": "leaving",
    "aborting": "rolling back",
    "rolling_back": "rolling back",
    "apart": "local steps",
    "terminal": "left",
}
"""Descriptions of the roles of states that are not described by their own names."""
_FAULTS = 5
"""Maximum number of faults on the screen."""
_OTHER_LINES = 16
"""Lines on the screen apart from the rows of groups."""
_BAR, _SMALLEST_BAR = 24, 8
_LONGEST = 100
"""Maximum characters of a cause in the list of faults; `fft report` has all of it."""


@dataclass(frozen=True)
class Row:
    """One group on the screen. ``doing`` is the supervisor's description of its processes."""

    group: str
    doing: str
    state: str = "starting"
    epoch: int = 0
    step: int = 0
    loss: float | None = None
    fault: str = ""
    trouble: str = ""
    """The reason why it waits, for longer than usual."""


@dataclass(frozen=True)
class Snapshot:
    """The screen at one moment; ``elapsed`` is in seconds since the start of the job."""

    elapsed: float
    rows: Sequence[Row]
    fired: int
    planned: int
    course: Course = field(default_factory=Course)
    now: float = 0.0
    """The present time on the clock of ``course``."""
    title: str = "fft run"


def row_of(view: JobView, group: str, doing: str) -> Row:
    """Return the row of ``group``: the state of its first rank, the lowest step of all."""
    ranks = view.of(group)
    if not ranks:
        return Row(group, doing)
    first = ranks[0]
    fault = next((readable_cause(rank.fault) for rank in ranks if rank.fault), "")
    step = min(rank.step for rank in ranks)
    fetches = [each for (name, _), each in sorted(view.fetching.items()) if name == group]
    state = _STATES.get(first.role, first.role)
    if fetches:
        state += f" ({progress_in_words(fetches[0].got, fetches[0].total, fetches[0].left)})"
    trouble = next(filter(None, map(_trouble_of, ranks)), "")
    return Row(group, doing, state, first.epoch, step, first.loss, fault, trouble)


def _trouble_of(rank: RankView) -> str:
    """Return why a rank waits, or why it cannot join."""
    is_outside = rank.role == "joining" and not rank.is_injected
    return readable_cause(
        rank.waits if rank.waits == rank.fault else rank.fault if is_outside else ""
    )


class Display(Protocol):
    """A display of snapshots; `close` restores the terminal."""

    def show(self, snapshot: Snapshot) -> None: ...

    def write(self, line: str) -> None:
        """Print a line of a rank's output."""

    def close(self) -> None: ...


# --- what is shown ---


def render(snapshot: Snapshot, width: int = 80, height: int = 40) -> RenderableType:
    """Return the job as one renderable that fits 80 columns: progress, groups, faults."""
    course = snapshot.course
    parts: list[RenderableType] = [progress(snapshot, width), _figures(snapshot)]
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for name in ("group", "state", "step", "loss", "processes"):
        table.add_column(
            name, no_wrap=True, justify="right" if name in ("step", "loss") else "left"
        )
    rows, hidden = _most_telling(snapshot.rows, max(4, height - _OTHER_LINES))
    for row in rows:
        cells = (row.group, row.state, str(row.step or "-"), _loss(row.loss), row.doing)
        table.add_row(*map(Text, cells), style=None if row.state == "training" else "yellow")
    parts += ["", table]
    if hidden:
        parts.append(Text(f"… and {hidden} more groups that train at the same step", style="dim"))
    waits = [f"group {row.group}: {row.trouble}" for row in snapshot.rows if row.trouble]
    parts += [Text(text, style="yellow", overflow="fold") for text in waits[:_FAULTS]]
    parts += _faults(course)
    return Group(*parts)


def progress(snapshot: Snapshot, width: int = 80) -> RenderableType:
    """Return the line with the step, the progress bar and the estimated time left.

    The bar is omitted if it does not fit.
    """
    course = snapshot.course
    goal, done = course.goal.steps, course.share_done
    step = max((course.step, *(row.step for row in snapshot.rows)))
    text = f"{snapshot.title}  {_clock(snapshot.elapsed)}  step {step}"
    text += f" of {goal}" if goal else ""
    if done is None:
        return Text(text)
    left = course.left_s(snapshot.now)
    end = f"{done:.0%} ETA {'-' if left is None else _clock(left)}"
    if (room := min(_BAR, width - len(text) - len(end) - 2)) < _SMALLEST_BAR:
        return Text(f"{text} {end}", overflow="fold")
    line = Table.grid(padding=(0, 1))
    line.add_row(text, ProgressBar(total=1.0, completed=done, width=room), end)
    return line


def _figures(snapshot: Snapshot) -> Text:
    return Text(" · ".join(figures(snapshot)), overflow="fold")


def figures(snapshot: Snapshot) -> list[str]:
    """Return speed, loss, data epoch and goodput as short texts, as far as they are known."""
    course, found = snapshot.course, list[str]()
    if (rates := course.rates(snapshot.now)) is not None:
        found.append(f"{rates[0]:.1f} steps/s")
        if (samples := course.samples(rates[1])) is not None:
            found.append(f"{samples:,.0f} samples/s")
    losses = [row.loss for row in snapshot.rows if row.loss is not None]
    if losses:
        found.append(f"loss {fmean(losses):.3f}")
    if course.data_epoch:
        found.append(f"{course.data_epoch} data epochs")
    if course.goodput is not None:
        found.append(f"goodput {course.goodput:.0%}")
    if snapshot.planned:
        found.append(f"{snapshot.fired} of {snapshot.planned} planned faults fired")
    return found if found or course.step else ["no step committed yet"]


def _most_telling(rows: Sequence[Row], room: int) -> tuple[list[Row], int]:
    """Return at most ``room`` rows, first those that do not train, and the number of others."""
    if len(rows) <= room:
        return list(rows), 0
    order = sorted(rows, key=lambda row: row.state == "training")[:room]
    return [row for row in rows if row in order], len(rows) - room


def _faults(course: Course) -> list[RenderableType]:
    """Return the newest faults with their costs, and the newest changes of the membership."""
    newest, lost = course.faults[-_FAULTS:], TimeLost(course)
    told = [(fault.n, fault.step, _fault_text(fault, course, lost)) for fault in newest]
    told += [(each.n, each.step, each.text) for each in course.changes[-_FAULTS:]]
    if not told:
        return []
    count = len(course.faults)
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for _, step, text in sorted(told, reverse=True)[:_FAULTS]:
        table.add_row(f"step {step}", Text(text))
    return ["", Text(f"faults: {count}; newest events first:", style="bold"), table]


def _fault_text(fault: Fault, course: Course, lost: TimeLost) -> str:
    what = shorten(fault.cause or "rolled back", _LONGEST, placeholder=" …")
    return f"{what}; {cost(fault, course, lost)}"


def cost(fault: Fault, course: Course, lost: TimeLost) -> str:
    """Describe what a fault has cost so far."""
    time = lost.by(fault)
    found = ["no commit since" if time is None else f"{duration(time)} lost"]
    for absence in course.absences:
        if absence.n == fault.n and absence.group in fault.lost:
            state = "is away" if absence.back is None else "was away"
            length = duration(absence.seconds(course.last))
            found.append(f"group {absence.group} {state}: {absence.steps} steps, {length}")
    return "; ".join(found)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def duration(seconds: float) -> str:
    """Return the time in milliseconds or seconds."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"


# --- where it is shown ---


class SafeConsole(Console):
    """A console that shows control characters in text as signs, and keeps its own styles."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render as rich does; each text on its way to the terminal passes here."""
        for each in super().render(renderable, options):
            yield each if each.control else each._replace(text=printable(each.text))


class LiveTable:
    """A renderable that is redrawn in place, and that leaves no fragments when the terminal is
    resized."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(
            console=console, auto_refresh=False, transient=False, vertical_overflow="crop"
        )
        self._drawn: tuple[int, list[int]] = (console.width, [])
        """Width of the terminal at the last drawing, and the length of each line drawn."""
        self._live.start()

    def draw(self, renderable: RenderableType) -> None:
        """Replace what is on the screen."""
        self._follow_size()
        width = self._console.width
        found = self._console.render_lines(renderable, pad=False)[: self._console.height - 1]
        lines = [_stripped(line) for line in found]
        parts = [segment for line in lines for segment in (*line, Segment.line())]
        self._live.update(Segments(parts[:-1]), refresh=True)
        self._drawn = width, [sum(cell_len(segment.text) for segment in line) for line in lines]

    def write(self, line: str) -> None:
        """Print a line above the table; ANSI colours are kept."""
        self._follow_size()
        self._console.print(Text.from_ansi(line), soft_wrap=True)

    def close(self) -> None:
        """Stop drawing and leave the last state on the screen."""
        self._follow_size()
        self._live.stop()

    def _follow_size(self) -> None:
        """Erase the additional lines into which a narrower terminal has wrapped the drawn ones."""
        width, lengths = self._drawn
        if (now := self._console.width) < width:
            more = sum(max(0, -(-length // now) - 1) for length in lengths)
            codes = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * more
            self._console.control(Control(*codes))
        self._drawn = now, lengths


def _stripped(line: Sequence[Segment]) -> list[Segment]:
    """Return the line without blanks at its end, which a narrower terminal would wrap as well."""
    kept = list(line)
    while kept and not kept[-1].text.strip():
        kept.pop()
    if kept:
        kept[-1] = kept[-1]._replace(text=kept[-1].text.rstrip())
    return kept


class LiveDisplay:
    """Progress, groups and faults, redrawn in place, for a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._table = LiveTable(console)

    def show(self, snapshot: Snapshot) -> None:
        """Redraw the table."""
        self._table.draw(render(snapshot, *self._console.size))

    def write(self, line: str) -> None:
        """Print a line above the table."""
        self._table.write(line)

    def close(self) -> None:
        """Stop updating and leave the last table on the screen."""
        self._table.close()


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

    def write(self, line: str) -> None:
        """Print the line; a pipe gets it without ANSI colours."""
        self._console.print(Text.from_ansi(line), soft_wrap=True)

    def close(self) -> None:
        """Print news that came too soon after the last line."""
        last = self._printed
        if self._newest is not None and last is not None and _news(self._newest) != _news(last):
            self._print(self._newest)

    def _print(self, snapshot: Snapshot) -> None:
        before = () if self._printed is None else self._printed.rows
        shown = {row.group: row.fault for row in before}
        self._printed = snapshot
        goal = snapshot.course.goal.steps
        step = max((snapshot.course.step, *(row.step for row in snapshot.rows)))
        head = f"{snapshot.elapsed:6.1f} s  step {step}{f' of {goal}' if goal else ''}"
        parts = [", ".join((head, *figures(snapshot)))]
        for row in snapshot.rows:
            is_over = row.state == "training" and row.fault == shown.get(row.group)
            fault = f" [{row.fault}]" if row.fault and not is_over else ""
            parts.append(f"group {row.group} {row.doing}: {row.state} at step {row.step}{fault}")
        self.write("  |  ".join(parts))


class SilentDisplay(PlainDisplay):
    """Only the output of ranks."""

    def show(self, snapshot: Snapshot) -> None:
        """Print nothing."""


def _news(snapshot: Snapshot) -> object:
    """Return the fields whose change is printed at once."""
    return snapshot.fired, [(row.doing, row.epoch, row.fault) for row in snapshot.rows]


def open_display(console: Console) -> Display:
    """Return the display that fits ``console``."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)

"""``fft watch``: the loop that listens to a job's bus and shows the messages.

It opens one bus at a time and writes to the given console or stream. It installs no signal
handlers: the caller ends it with `Watch.stop`.
"""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Protocol

from rich.console import Console, Group, RenderableType
from rich.text import Text

from fft.bus.addresses import without_password
from fft.bus.base import TOPICS
from fft.errors import BusError
from fft.messages.commands import Check, Command, Evict
from fft.messages.progress import Report
from fft.messages.protocol import BusMessage, Decision, Record, UnreadableMessage
from fft.messages.wire import Packed
from fft.operate.client import Ear, JobClient, JobState, Word
from fft.operate.job_view import IN_EPOCH, GroupRow, JobModel, event_of
from fft.trace.course import readable_cause
from fft.trace.display import LiveTable, Row, Snapshot
from fft.trace.display import render as show

_REDRAW_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0  # between tries to reach a bus that is gone


class View(Protocol):
    """An output of the watch loop; all methods are called on the thread of the loop."""

    stays: bool
    """Whether the output remains after the end of the job, until it is stopped."""

    def word(self, line: dict[str, object]) -> None: ...

    def state(self, watch: JobModel, now: float) -> None: ...

    def close(self) -> None: ...


class Watch:
    """A loop that follows one job until `stop`, and reconnects if its bus is lost."""

    def __init__(
        self, url: str, view: View, ended: Callable[[], str | None] = lambda: None
    ) -> None:
        """Prepare to watch the job at ``url``; ``ended`` is that of `watch_job`."""
        self.model = JobModel()
        self._ended = ended
        self._url = url
        self._view = view
        self._stopped = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._generation = ""

    @property
    def how(self) -> str | None:
        """How the job ended, if it did while it was watched."""
        return self.model.how or None

    def wait(self) -> None:
        """Block until `stop`; show the verdict of `fft run`, which comes after the last record."""
        pause: float | None = _FIRST_PAUSE_S
        while not self._stopped:
            if pause is not None and (how := self._ended()) is not None:
                if how != self.how:
                    self._end(how, "verdict")
                pause = None
            with suppress(queue.Empty):
                self._wake.get(timeout=pause)

    def stop(self) -> None:
        """End `run` and `wait` soon.

        Safe on any thread and in a signal handler, because it takes no lock.
        """
        self._stopped = True
        self._wake.put(None)

    def once(self) -> None:
        """Show the job as in its registers now. Raises ``BusUnreachable``."""
        with JobClient(self._url) as desk:
            job = desk.job()
            self._begin(desk, job)
        self._view.state(self.model, time.monotonic())

    def run(self) -> None:
        """Follow the job until `stop`; retry an unreachable bus with growing pauses."""
        pause = _FIRST_PAUSE_S
        while not self._stopped and self.how is None:
            try:
                with JobClient(self._url) as desk:
                    pause = _FIRST_PAUSE_S
                    self._follow(desk)
            except (BusError, UnreadableMessage) as error:
                if type(error) is BusError:  # a wrong URL, or a missing package: waiting is no help
                    raise
                if (how := self._ended()) is not None:
                    self._end(how)
                    return
                self._lost(str(error))
                with suppress(queue.Empty):
                    self._wake.get(timeout=pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _begin(self, desk: JobClient, job: JobState) -> None:
        told = desk.reports(), time.monotonic(), desk.supervisors()
        self.model.begin(job.head, job.epoch, *told)

    def _end(self, how: str, event: str = "ended") -> None:
        """Show the last state, and stop."""
        self.model.how = how
        self._view.word({"event": event, "how": how})
        self._view.state(self.model, time.monotonic())

    def _lost(self, why: str) -> None:
        self.model.lost = why
        self._view.word({"event": "bus_lost", "cause": why})
        self._view.state(self.model, time.monotonic())

    def _follow(self, desk: JobClient) -> None:
        with desk.hearing(*TOPICS) as ear:
            job = desk.job()
            # a bus that came back empty has another job
            if desk.bus.generation != self._generation:
                self.model, self._generation = JobModel(), desk.bus.generation
            self._begin(desk, job)
            self._view.word({"event": "watching", "bus": without_password(self._url)})
            while not self._stopped:
                if self.model.has_ended():
                    self._end(self.model.how_it_ended())
                    return
                self._view.state(self.model, time.monotonic())
                self._hear(desk, ear)

    def _hear(self, desk: JobClient, ear: Ear) -> None:
        for heard in ear.words(time.monotonic() + _REDRAW_S):
            word = _plain(desk, heard)
            if word is None:
                continue
            if isinstance(word, Record) and word.kind == "epoch":
                self.model.supervisors = desk.supervisors()
            lines = self.model.see(word, time.monotonic())
            if (line := event_of(word)) is not None:
                lines.insert(0, line)
            for line in lines:
                self._view.word(line)
            if self._stopped:
                return


def _plain(desk: JobClient, word: Word) -> BusMessage | Command | Report | Record | None:
    """Return records complete, in whichever form they were announced."""
    if isinstance(word, Packed):
        return desk.whole(word) or word.record
    return word.record if isinstance(word, Decision) else word


# --- showing it ------------------------------------------------------------------------


class JsonView:
    """Output of one line per event; with ``--once`` the state as one line."""

    stays = False

    def __init__(self, stream: IO[str], clock: Callable[[], float], once: bool) -> None:
        self._stream = stream
        self._clock = clock
        self._once = once

    def word(self, line: dict[str, object]) -> None:
        """Write the event."""
        self._write(line)

    def state(self, watch: JobModel, now: float) -> None:
        """Write the state, with ``--once`` only."""
        if not self._once:
            return
        head = watch.head
        groups = {
            row.group: {
                str(number): {"state": r.state, "inc": r.inc, "pid": r.pid, "host": r.host}
                for number, r in row.ranks.items()
            }
            for row in watch.rows()
        }
        where = {"n": 0} if head is None else {"n": head.n, "epoch": head.epoch, "step": head.step}
        told = {"checkpoint": watch.newest_checkpoint(), "troubles": watch.troubles()}
        self._write({"event": "state", **where, **told, "groups": groups})

    def close(self) -> None:
        """Do nothing."""

    def _write(self, line: dict[str, object]) -> None:
        self._stream.write(json.dumps({"at": round(self._clock(), 3), **line}) + "\n")
        self._stream.flush()


class ScreenView:
    """Output as a table: redrawn in place on a terminal, else printed once at the end."""

    stays = False

    def __init__(self, console: Console, url: str) -> None:
        self._url = without_password(url)
        self._console = console
        self._last: RenderableType = Text(f"{self._url}: nothing heard yet")
        self._table = LiveTable(console) if console.is_terminal else None

    def word(self, line: dict[str, object]) -> None:
        """Ignore the event; the table shows its effect."""

    def state(self, watch: JobModel, now: float) -> None:
        """Draw the table."""
        self._last = render(watch, self._url, now, *self._console.size)
        if self._table is not None:
            self._table.draw(self._last)

    def close(self) -> None:
        """Leave the last table on the screen."""
        if self._table is not None:
            self._table.close()
        else:
            self._console.print(self._last)


def render(watch: JobModel, url: str, now: float, width: int = 80, height: int = 40) -> Group:
    """Return the job as one renderable."""
    parts: list[RenderableType] = []
    if watch.lost:
        text = f"the bus is lost, trying again: {watch.lost}"
        parts.append(Text(text, style="bold red", overflow="fold"))
    if watch.head is None:
        parts.append(Text(f"{url}: no job has begun here", overflow="fold"))
    else:
        parts.append(show(snapshot(watch, now), width, height))
    if watch.scopes:
        steps_of = (f"scope {name}: step {step}" for name, step in sorted(watch.scopes.items()))
        parts.append(Text(", ".join(steps_of), overflow="fold"))
    if (newest := watch.newest_checkpoint()) is not None:
        parts.append(Text(f"newest checkpoint: step {newest}"))
    texts = (*watch.held(), *watch.fetches(), *watch.troubles())
    parts += [Text(text, style="yellow", overflow="fold") for text in texts]
    parts += [Text(_in_words(command), overflow="fold") for command in watch.commands]
    return Group(*parts)


def snapshot(watch: JobModel, now: float) -> Snapshot:
    """Return the job at one moment, with a row for each group."""
    elapsed = now - (watch.course.epochs[0].formed if watch.course.epochs else now)
    rows = [_row(watch, row) for row in watch.rows()]
    return Snapshot(elapsed, rows, 0, 0, watch.course, now, "fft watch")


def _row(watch: JobModel, row: GroupRow) -> Row:
    """Return the group as a row of the screen."""
    head = watch.head
    is_in = bool(row.ranks) and all(rank.state == IN_EPOCH for rank in row.ranks.values())
    pids = ", ".join(f"{rank.pid}@{rank.host}" for _, rank in sorted(row.ranks.items()))
    pids = pids or f"started by {row.supervisor}"
    slow = watch.pace(row.group)
    troubles = (
        readable_cause(row.why()),
        slow and f"slow, in multiples of the median time: {slow}",
    )
    state = "training" if is_in and row.state() == IN_EPOCH else row.state()
    step = head.step if head is not None and is_in else 0
    trouble = "; ".join(filter(None, troubles))
    loss = watch.losses.get(row.group) if is_in else None
    return Row(row.group, pids, state, 0, step, loss, "", trouble)


def _in_words(command: Command) -> str:
    if isinstance(command, Evict):
        rank = "" if command.rank is None else f" rank {command.rank}"
        again = ", which is started again" if command.restart else ""
        return f"evict by {command.by}: group {command.group}{rank}{again}"
    if isinstance(command, Check):
        return f"check by {command.by}: round {command.round}, {len(command.tasks)} ranks"
    fault = command.fault.model_dump(exclude_none=True)
    return f"inject by {command.by}: " + ", ".join(f"{k} {v}" for k, v in fault.items())


def watch_job(
    url: str,
    view: View,
    *,
    once: bool,
    begin: Callable[[Watch], None],
    ended: Callable[[], str | None] = lambda: None,
) -> str | None:
    """Show the job at ``url`` until it ends or is stopped, or one time with ``once``.

    Args:
        url: URL of its bus.
        view: The output; closed at the end.
        once: Show the present state only.
        begin: Called with the `Watch` before it runs, so that the caller can stop it.
        ended: Returns how the job ended, or None; asked when the bus is lost.

    Returns:
        How the job ended, or None if it was stopped.
    """
    try:
        watch = Watch(url, view, ended)
        if once:
            watch.once()
        else:
            begin(watch)
            watch.run()
            if view.stays:
                watch.wait()
        return watch.how
    finally:
        view.close()

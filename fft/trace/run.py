"""The trace of a run for notebooks and scripts: `Run`, which ``fft.trace`` exports.

Each access reads the traces line by line. Only `course`, `summary`, `report` and the tables of
faults, absences and epochs collect figures of the whole run. pandas is needed for `frame` alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fft.errors import FftError
from fft.messages.protocol import Applied, Token
from fft.trace.course import Course
from fft.trace.lines import Header, Line, Noted, Transition, Who, parsed, record_of
from fft.trace.read import TraceFile as _TraceFile
from fft.trace.read import clocks_of, has_record, merged_lines, trace_files
from fft.trace.report import RunReport, history_of, summary
from fft.trace.starts import start_folders

if TYPE_CHECKING:
    import pandas

Table = Literal["steps", "metrics", "faults", "absences", "epochs"]


@dataclass(frozen=True)
class Step:
    """One committed step."""

    step: int
    """Number of committed steps after it."""
    at: float
    """Time of the commit in seconds, on the wall clock of the first process."""
    epoch: int
    groups: tuple[str, ...]
    """Groups of the job in this step."""
    cursor: int
    """Slices of the data consumed up to here."""
    skipped: bool
    slices: int
    """Slices of the data that the optimizer step was computed on; 0 if it was skipped."""


class Run:
    """One start of a job, by its trace directory.

    ``Run("runs/20260101-120000").frame("metrics").plot(x="step", y="loss")``

    Args:
        directory: The ``--trace-dir`` of ``fft run``, or the folder of a later start in it.

    Raises:
        FftError: There is no trace.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        trace_files(self.directory)

    @property
    def starts(self) -> list[Run]:
        """All starts of the job that left traces, in order."""
        folders = start_folders(self.directory)
        return [Run(folder) for folder in folders if any(folder.glob("*.jsonl"))]

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield every line of every trace, file by file, with the common time as ``wall``."""
        for piece, line, at in self._lines():
            plain = json.loads(piece)
            yield plain if isinstance(line, Header) else {**plain, "wall": at}

    def _lines(self) -> Iterator[tuple[bytes, Line, float]]:
        paths = trace_files(self.directory)
        clocks = clocks_of(paths)
        for piece in chain.from_iterable(_TraceFile(path).pieces() for path in paths):
            if (line := parsed(piece)) is not None:
                yield piece, line, clocks.at(line)

    def steps(self) -> Iterator[Step]:
        """Yield the committed steps in order."""
        course = Course()
        for at, _, line, _ in merged_lines(self.directory, has_record):
            record, batches = record_of(line), course.consumed_slices
            if record is not None and course.take(record, at) and record.kind == "commit":
                groups, slices = tuple(sorted(course.members)), course.consumed_slices - batches
                place = record.step, at, record.epoch
                yield Step(*place, groups, record.cursor, record.skip, slices)

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the values of ``txn.log`` of committed attempts, with step, group, rank and time.

        Attempts that were rolled back are omitted, so each rank has each step once.
        """
        logged: dict[Who, tuple[Token, dict[str, Any]]] = {}
        for _, line, at in self._lines():
            match line:
                case Noted(note="metrics", epoch=int(epoch), txn=int(txn), step=int(step)):
                    token = Token(epoch, txn)
                    place = {"group": line.group, "rank": line.rank, "step": step + 1}
                    was, known = logged.get(line.who, (token, {}))
                    earlier = known if was == token else {}
                    logged[line.who] = token, {**earlier, **place, "at": at, **line.data}
                case Transition(event=Applied(token=token)) if line.who in logged:
                    of, row = logged.pop(line.who)
                    if of == token and row["step"] == line.step:
                        yield row

    @cached_property
    def course(self) -> Course:
        """Steps, memberships, faults and absences of the run."""
        return history_of(self.directory).course

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of ``fft report``: steps, samples, speed, goodput, time lost by cause."""
        return summary(self.course)

    def report(self) -> dict[str, Any]:
        """Return what ``fft report --json`` prints, but for ``ended``, which supervisors write."""
        return RunReport(self.directory).to_json()

    def rows(self, name: Table) -> Iterator[dict[str, Any]]:
        """Yield the rows of a table as plain data.

        Raises:
            FftError: There is no such table.
        """
        match name:
            case "steps":
                yield from map(asdict, self.steps())
            case "metrics":
                yield from self.metrics()
            case "faults":
                yield from map(asdict, RunReport(self.directory).incidents)
            case "absences":
                yield from summary(self.course)["absences"]
            case "epochs":
                for stats in self.course.epochs:
                    row = {"epoch": stats.epoch, "at": stats.formed, "step": stats.step}
                    groups = tuple(sorted(stats.members))
                    yield {**row, "groups": groups, "commits": stats.commits}
            case _:
                raise FftError(
                    f"no table {name!r}; expected steps, metrics, faults, absences or epochs"
                )

    def frame(self, name: Table) -> pandas.DataFrame:
        """Return a table as a ``pandas.DataFrame``.

        Raises:
            FftError: There is no such table, or pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise FftError("Run.frame needs pandas: pip install pandas, or use Run.rows") from error
        return pandas.DataFrame(list(self.rows(name)))

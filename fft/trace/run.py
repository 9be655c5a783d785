"""The trace of a run for notebooks and scripts: `Run`, which ``fft.trace`` exports.

Each access reads the traces line by line. Only `course`, `summary`, `report` and the tables of
faults, absences and epochs collect figures of the whole run. pandas is needed for `frame` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fft.errors import FftError
from fft.trace.course import Course
from fft.trace.read import TraceFile as _TraceFile
from fft.trace.read import clocks_of, parsed, register_records, trace_files
from fft.trace.report import course_of, full_report, incidents, summary
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
        paths = trace_files(self.directory)
        clocks = clocks_of(paths)
        for path in paths:
            for line in filter(None, map(parsed, _TraceFile(path).pieces())):
                yield line if line["kind"] == "header" else {**line, "wall": clocks.at(line)}

    def steps(self) -> Iterator[Step]:
        """Yield the committed steps in order."""
        course = Course()
        for record, at in register_records(self.directory):
            batches = course.consumed_slices
            course.take(record, at)
            if record["kind"] == "commit":
                groups, skipped = tuple(sorted(course.members)), bool(record.get("skip"))
                place = record["step"], at, record["epoch"]
                slices = course.consumed_slices - batches
                yield Step(*place, groups, record["cursor"], skipped, slices)

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the values of ``txn.log`` of committed attempts, with step, group, rank and time.

        Attempts that were rolled back are omitted, so each rank has each step once.
        """
        logged: dict[tuple[str, int, int], tuple[list[int], dict[str, Any]]] = {}
        for line in self.lines():
            peer = line["group"], line["rank"], line["inc"]
            event = line.get("event") or {}
            if line.get("note") == "metrics":
                token = [line["epoch"], line["txn"]]
                place = {"group": peer[0], "rank": peer[1], "step": line["step"] + 1}
                was, known = logged.get(peer, (token, {}))
                earlier = known if was == token else {}
                logged[peer] = token, {**earlier, **place, "at": line["wall"], **line["data"]}
            elif event.get("type") == "applied" and peer in logged:
                token, row = logged.pop(peer)
                if token == event["token"] and row["step"] == line["step"]:
                    yield row

    @cached_property
    def course(self) -> Course:
        """Steps, memberships, faults and absences of the run."""
        return course_of(self.directory)

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of ``fft report``: steps, samples, speed, goodput, time lost by cause."""
        return summary(self.course)

    def report(self) -> dict[str, Any]:
        """Return what ``fft report --json`` prints."""
        return full_report(self.directory)

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
                yield from map(asdict, incidents(self.directory))
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

"""Read trace files line by line, linked by digests, up to their end or the first damage.

Files are read block by block and are not kept open, so memory use is independent of the length of a
run, and any number of traces can be read together. Only `read_lines` returns all lines at once.

The wall clocks of hosts may differ or jump. Every process traces each register record when it
receives it. The same record arrives everywhere within milliseconds, so that the records which two
processes share give the difference between their clocks.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from pydantic_core import from_json

from fft.errors import FftError
from fft.trace.format import chain
from fft.trace.lines import Line, Transition, Who, parsed, record_of

# --- clocks ---

_LATENCY_S = 0.05
"""A smaller difference may be the time that records take to arrive, and is not corrected."""
_KEPT = 4096
"""Maximum number of records kept of each process; beyond it, only every second one is kept."""


class _Clock:
    """The monotonic clock of one process, which does not jump as its wall clock may."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}
        """Record number → monotonic time at which the process first had the record."""
        self._walls: list[float] = []
        self._stride = 1

    def take(self, line: Line) -> None:
        if not self._walls:
            self._walls.append(line.wall - line.mono)
        roles = line.roles if isinstance(line, Transition) else None
        was_read_late = roles == ("joining", "joining")  # the head, at its start
        n = 0 if was_read_late or (record := record_of(line)) is None else record.n
        if not n or n % self._stride or n in self.seen:
            return
        self.seen[n] = line.mono
        self._walls.append(line.wall - line.mono)
        if len(self.seen) > _KEPT:
            self._stride *= 2
            self.seen = {n: at for n, at in self.seen.items() if n % self._stride == 0}
            self._walls = self._walls[::2]

    @property
    def wall(self) -> float:
        """Median number of seconds from its monotonic clock to its wall clock."""
        return median(self._walls)


class Clocks:
    """A common time for all traces of one scope: pass their lines to `take`, then call `at`."""

    def __init__(self) -> None:
        self._clocks: dict[Who, _Clock] = {}
        self._offsets: dict[Who, float] | None = None

    def take(self, line: Line) -> None:
        """Learn from a transition or a note."""
        self._offsets = None
        self._clocks.setdefault(line.who, _Clock()).take(line)

    def at(self, line: Line) -> float:
        """Return the time of ``line`` in seconds, on the wall clock of the first process."""
        if self._offsets is None:
            self._offsets = self._aligned()
        return line.mono + self._offsets.get(line.who, line.wall - line.mono)

    def _aligned(self) -> dict[Who, float]:
        """Seconds from the monotonic clock of each process to the common time.

        A process that shares no record with those before it, in the order of their first records,
        keeps its own wall clock.
        """
        found: dict[Who, float] = {}
        common: dict[int, float] = {}
        order = sorted(self._clocks, key=lambda who: (min(self._clocks[who].seen, default=-1), who))
        for who in order:
            clock = self._clocks[who]
            offset = clock.wall
            shared = [common[n] - at for n, at in clock.seen.items() if n in common]
            if shared and abs((seen := _mode(shared)) - offset) > _LATENCY_S:
                offset = seen
            found[who] = offset
            common = {n: at + offset for n, at in clock.seen.items()} | common
        return found


def _mode(values: Iterable[float]) -> float:
    """Return the value around which most values lie: the half-sample mode (Robertson, Cryer 1974).

    Unlike a median, it is right if more than half of the records arrived late, as at a process
    that was stopped for a while.
    """
    found = sorted(values)
    while len(found) > 2:
        half = (len(found) + 1) // 2
        first = min(range(len(found) - half + 1), key=lambda k: found[k + half - 1] - found[k])
        found = found[first : first + half]
    return mean(found)


GAP = "gap"
"""Kind of a line that replaces lines that could not be written; what follows it is not audited."""
_IS_GAP = re.compile(rb'\{"seq":\d+,"kind":"gap"')
"""Beginning of a gap line; a note of a user may contain the same text elsewhere in its line."""
_BLOCK = 1 << 15
"""Bytes read at a time, and so the memory for each trace that is being read."""


@dataclass(slots=True)
class TraceFile:
    """One file, read by `lines`; the other fields describe what was read so far."""

    path: Path
    count: int = 0
    """Number of undamaged lines."""
    torn: bool = False
    """The last lines were cut off, for example by SIGKILL; the event that they belong to is
    omitted."""
    damage: str | None = None
    gaps: list[str] = field(default_factory=list)
    """Places where lines could not be written, with the number of lines."""

    def lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the number (from 1) and record of each line, until the end or the first damage."""
        return ((number, record) for number, record, _ in self.checked())

    def checked(self) -> Iterator[tuple[int, dict[str, Any], bytes]]:
        """Yield number, record and text of each line, until the end or the first damage."""
        link = ""
        for number, piece in enumerate(self.pieces(), 1):
            problem = _damage(piece, link, number)
            if isinstance(problem, str):
                self.damage = f"{self.path.name}:{number}: {problem}"
                return
            link = problem["h"]
            self.count = number
            if problem["kind"] == GAP:
                lost = problem.get("lost")
                self.gaps.append(f"{self.path.name}:{number}: {lost} lines are missing here")
            yield number, problem, piece

    def pieces(self) -> Iterator[bytes]:
        """Yield whole lines without line ends. The file is not kept open between two blocks."""
        rest, at = b"", 0
        while True:
            with self.path.open("rb") as file:
                file.seek(at)
                block = file.read(_BLOCK)
            if not block:
                break
            at += len(block)
            *pieces, rest = (rest + block).split(b"\n")
            yield from pieces
        self.torn = bool(rest)


def has_gap(path: Path) -> bool:
    """Whether the file has a gap line. The chain is not checked."""
    return any(_IS_GAP.match(piece) for piece in TraceFile(path).pieces())


def _damage(piece: bytes, link: str, number: int) -> dict[str, Any] | str:
    """Return the record of a line, or a description of the damage."""
    try:
        text = piece.decode()
        record = _loaded(piece)
    except (ValueError, RecursionError) as error:  # RecursionError: lists nested 1000 deep
        return f"not JSON ({error}); the line was changed after it was written"
    if not isinstance(record, dict) or not isinstance(record.get("h"), str):
        return "no chain digest; the line is not from a trace"
    body = text[: text.rindex(',"h":')] + "}"
    is_whole = text.rstrip() == f'{body[:-1]},"h":"{record["h"]}"}}'  # nothing follows the digest
    if not is_whole or chain(link, body) != record["h"]:
        return "the line does not follow from the one before: changed, removed or inserted here"
    if record.get("seq") != number:
        return f"sequence number {record.get('seq')} instead of {number}"
    return record


def _loaded(piece: bytes) -> Any:
    """Parse JSON as Python does, including lone surrogates and deeper nesting."""
    try:
        return from_json(piece, cache_strings="keys")
    except ValueError:
        return json.loads(piece)


def trace_files(directory: str | Path) -> list[Path]:
    """Return the trace files of a run, by name. Raises ``FftError`` if there are none."""
    paths = sorted(Path(directory).glob("*.jsonl"))
    if not paths:
        raise FftError(f"{directory}: no trace files (*.jsonl); pass the run's --trace-dir")
    return paths


def clocks_of(paths: Iterable[Path]) -> Clocks:
    """Return the common time of all processes of one scope, by the records in their traces."""
    clocks = Clocks()
    for path in paths:
        for line in _with_records(path):
            clocks.take(line)
    return clocks


def _with_records(path: Path) -> Iterator[Line]:
    """Yield the readable lines of a trace whose event has a record."""
    return filter(None, map(parsed, filter(has_record, TraceFile(path).pieces())))


def has_record(piece: bytes) -> bool:
    """Whether the event of a line has a record, by the text of the line."""
    return b'"record":{' in piece


def is_not_of_each_step(piece: bytes) -> bool:
    """Whether a line is none of the notes of each step, by the text of the line."""
    return b'"note":"metrics"' not in piece and b'"note":"consumed"' not in piece


Timed = tuple[float, Path, Line, bytes]
"""Time, file, line and its text."""


def merged_lines(
    directory: Path,
    wanted: Callable[[bytes], bool] = lambda piece: True,
    checked: list[TraceFile] | None = None,
) -> Iterator[Timed]:
    """Return the lines of one scope in the order of time. Reads the traces twice, block by block.

    Args:
        directory: The traces of the scope.
        wanted: Returns by its text whether a line is parsed; the others are left out.
        checked: Gets the files, whose digests are then checked; each is read to its first damage.

    Raises:
        FftError: There is no trace.
    """
    files = [TraceFile(path) for path in trace_files(directory)]
    clocks = clocks_of(file.path for file in files)
    if checked is not None:
        checked += files
    timed = (_timed(file, checked is not None, clocks, wanted) for file in files)
    return heapq.merge(*timed, key=lambda item: item[0])


def _timed(
    file: TraceFile, is_checked: bool, clocks: Clocks, wanted: Callable[[bytes], bool]
) -> Iterator[Timed]:
    pieces = (each[2] for each in file.checked()) if is_checked else file.pieces()
    for piece in filter(wanted, pieces):
        if (line := parsed(piece)) is not None:
            yield clocks.at(line), file.path, line, piece


def read_lines(
    directory: str | Path, keep: Callable[[dict[str, Any]], bool] = lambda line: True
) -> list[dict[str, Any]]:
    """Return the transitions and notes of a run that ``keep`` accepts, in the order of time.

    They are plain data; their ``wall`` is the common time of all processes (`fft.trace.read`).
    Raises ``FftError`` if there is no trace.
    """
    clocks, lines = Clocks(), list[tuple[dict[str, Any], Line]]()
    for path in trace_files(directory):
        for _, plain, piece in TraceFile(path).checked():
            line = parsed(piece)
            if plain["kind"] in ("transition", "note") and line is not None:
                clocks.take(line)
            if plain["kind"] != "header" and line is not None and keep(plain):
                lines.append((plain, line))
    timed = [{**plain, "wall": clocks.at(line)} for plain, line in lines]
    return sorted(timed, key=lambda line: float(line["wall"]))

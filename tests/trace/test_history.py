"""Tests that a history depends neither on the order in which ranks are read nor on its source."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced import TracedJob, a_record

from fft.messages.progress import FetchReport, Goal, IdleReport, SpeedReport
from fft.messages.protocol import Peer
from fft.operate.job_view import JobModel
from fft.prove.simulator.run import run_seed
from fft.trace.checkpoint_notes import report_of
from fft.trace.format import FETCHING, IDLE, WARNING
from fft.trace.history import _WINDOW, History
from fft.trace.inputs import LOOP
from fft.trace.lines import Line, Noted, Transition, parsed, record_of
from fft.trace.read import TraceFile, trace_files
from fft.trace.report import history_of

Lines = list[Line]


def ranks_of(directory: Path) -> dict[str, Lines]:
    """Return the lines of each rank, of all its processes in order."""
    found: dict[str, Lines] = {}
    for path in sorted(trace_files(directory), key=lambda path: int(path.stem.partition("i")[2])):
        for line in filter(None, map(parsed, TraceFile(path).pieces())):
            found.setdefault(line.lane, []).append(line)
    return found


def interleaved(ranks: dict[str, Lines], rng: random.Random, longest: int) -> Iterator[Line]:
    """Yield all lines; each rank goes on for up to ``longest`` lines at a time."""
    left = {lane: iter(lines) for lane, lines in ranks.items()}
    while left:
        lane = rng.choice(sorted(left))
        for _ in range(rng.randint(1, longest)):
            if (line := next(left[lane], None)) is None:
                del left[lane]
                break
            yield line


def folded(lines: Iterable[Line]) -> History:
    history = History()
    for line in lines:
        history.add(line, line.wall)
    return history


def facts(history: History) -> dict[str, Any]:
    """Return all that views show; sums of seconds are rounded, as their terms are in any order."""
    notes, waits = history.checkpoints, history.waits
    return {
        "course": history.course,
        "ranks": history.ranks,
        "faults": (history.injected, history.commanded, history.comparisons.taint),
        "progress": (history.step, history.committed, history.min_groups, history.has_stages),
        "troubles": (history.warnings, history.gaps, history.fetching),
        "checkpoints": (notes.taken, notes.failed, notes.left_out, notes.too_often),
        "healed": (waits.healed, waits.checkpoint),
        "waited": {who: round(seconds, 6) for who, seconds in waits.waited.items()},
        "caused": {who: (n, round(seconds, 6)) for who, (n, seconds) in waits.caused.items()},
        "protocol": {who: round(seconds, 6) for who, seconds in waits.protocol.items()},
    }


class NotedJob(TracedJob):
    """A job with notes like those of scripts and checkpoints."""

    def note(self, group: int, name: str, data: dict[str, Any]) -> None:
        node = self.live()[group]
        self.writers[node.peer].note(name, data, node.local)

    def eventful(self) -> NotedJob:
        """Take steps with rollbacks, a lost group that comes back, and notes of each kind."""
        for group in (1, 0):
            self.note(group, LOOP, {"runs": "transactions", "goal": {"steps": 30 + group}})
            self.note(group, "script", {WARNING: f"of group {group}"})
            self.note(group, "inject", {"name": "boom", "kind": "exception", "step": 2})
        for _ in range(4):
            self.step()
        self.note(1, IDLE, {"seconds": 0.004})
        self.note(0, IDLE, {"seconds": 0.002})
        self.refuse(self.live()[1], "boom")
        self.settle()
        self.note(0, "checkpoint", {"step": 4, "published": True})
        for group in (1, 0):
            self.note(group, "checkpoint_failed", {"step": 3, "error": f"no room at {group}"})
            self.note(group, "checkpoint_skipped", {"step": 2, "reason": f"asked by {group}"})
        self.start_anew("1")
        self.note(1, FETCHING, {"bytes": 10, "total": 20, "left_s": 1.0})
        for _ in range(3):
            self.step()
        return self


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Traces of a job with notes, and of jobs under random faults."""
    folder = tmp_path_factory.mktemp("traces")
    NotedJob(folder / "noted").eventful().close()
    for spec, seed in (("hsdp", 19), ("async", 6), ("async", 19)):
        (folder / f"{spec}{seed}").mkdir()
        run_seed(seed, spec, trace_dir=folder / f"{spec}{seed}")
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["noted", "hsdp19", "async6", "async19"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), longest=st.sampled_from([1, 5, 40, 100_000]))
def test_history_does_not_depend_on_the_order_in_which_ranks_are_read(
    traces: dict[str, Path], name: str, seed: int, longest: int
) -> None:
    ranks = ranks_of(traces[name])
    by_time = folded(sorted((x for lines in ranks.values() for x in lines), key=lambda x: x.wall))
    assert by_time.course.steps > 1 and by_time.course.rollbacks
    assert facts(folded(interleaved(ranks, random.Random(seed), longest))) == facts(by_time)


def test_history_of_the_notes_is_that_of_the_first_rank(traces: dict[str, Path]) -> None:
    history = history_of(traces["noted"])
    assert history.course.goal.steps == 30 and history.warnings == {
        "script": "rank 0/0: of group 0"
    }
    assert (history.injected["boom"].group, history.checkpoints.taken) == ("0", {4})
    assert history.checkpoints.failed == {3: ["rank 0/0: no room at 0", "rank 1/0: no room at 1"]}


@pytest.mark.parametrize("name", ["noted", "hsdp19", "async6", "async19"])
def test_watch_and_traces_show_the_same_history(traces: dict[str, Path], name: str) -> None:
    """The messages are those that the ranks of the traces have broadcast."""
    lines = [x for found in ranks_of(traces[name]).values() for x in found]
    watch, history = JobModel(), folded(lines)
    for line in sorted(lines, key=lambda line: line.wall):
        if (record := record_of(line)) is not None:
            watch.see(record, line.wall)
        if isinstance(line, Noted):
            for report in reports_of(line):
                watch.see(report, line.wall)
        elif isinstance(line, Transition) and line.roles[1] == "training":
            watch.see(SpeedReport(*line.who, line.step, 0.1), line.wall)
    assert watch.course == history.course
    shown, traced = watch.checkpoints, history.checkpoints
    assert (shown.taken, shown.failed) == (traced.taken, traced.failed)
    assert shown.left_out == traced.left_out
    assert watch.fetching == history.fetching


def reports_of(line: Noted) -> Iterator[Any]:
    """Yield the reports that a rank sends with a note."""
    data = line.data
    if (report := report_of(Peer(*line.who), line.note, data)) is not None:
        yield report
    if line.note == IDLE:
        yield IdleReport(*line.who, data["seconds"])
    if line.note == FETCHING:
        yield FetchReport(*line.who, data["bytes"], data["total"], data["left_s"])
    if line.note == LOOP and "goal" in data:
        yield SpeedReport(*line.who, 0, 0.1, goal=Goal(**data["goal"]))


def test_records_within_the_window_count_in_any_order() -> None:
    """Records that come later than those of a whole window are left out; memory is bounded."""
    history, ordered = History(), History()
    records = [a_record(1, "epoch", 0, members="01")]
    records += [a_record(n, "commit", n - 1, 2 * (n - 1)) for n in range(2, 4 * _WINDOW)]
    for record in records:
        ordered.take_record(record, record.n / 10)
    for begin in range(0, len(records), _WINDOW):
        for record in reversed(records[begin : begin + _WINDOW]):
            history.take_record(record, record.n / 10 + 5.0)
        for record in records[begin : begin + _WINDOW]:
            history.take_record(record, record.n / 10)
    assert history.course == ordered.course
    assert history.course.steps == 4 * _WINDOW - 2 and len(history._records) <= 2 * _WINDOW
    history.take_record(records[0], -1.0)
    assert history.course == ordered.course


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (b'{"kind":"note","note":"fault","data":{"message":"a\\udcffb"}}', "a?b"),
        (b'{"kind":"note","note":"fault","data":{"message":"NaN","x":NaN},"new":1}', "NaN"),
    ],
)
def test_parser_reads_what_python_writes(piece: bytes, message: str) -> None:
    line = parsed(piece)
    assert isinstance(line, Noted) and line.data["message"] == message


DEEP = b'{"kind":"note","note":"x","data":' + b"[" * 5000 + b"]" * 5000 + b"}"
BROKEN = b"", b"{", b"[1]", b"\xff", DEEP, b'"\\ud800"'
OTHER = b'{"kind":"dream"}', b'{"kind":"transition"}', b'{"seq":1}'


@pytest.mark.parametrize("piece", [*BROKEN, *OTHER])
def test_parser_leaves_out_lines_that_it_cannot_read(piece: bytes) -> None:
    assert parsed(piece) is None

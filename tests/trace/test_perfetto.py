"""Tests of `fft report --perfetto`: the file is parsed with Perfetto's own messages."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from traced import TracedJob, peak_of
from typer.testing import CliRunner

from fft.cli import app
from fft.messages.protocol import Peer
from fft.trace.report import history_of
from fft.trace.writer import TraceWriter

pytest.importorskip("perfetto.trace_builder.proto_builder", reason="perfetto is missing")

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from fft.trace.perfetto import write_trace


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Two groups: 5 steps, a rollback, a lost group that comes back and fetches, 3 more steps."""
    job = TracedJob(tmp_path / "traces")
    for _ in range(5):
        job.step()
    job.refuse(job.live()[1], "boom")
    job.settle()
    job.start_anew("1")
    for _ in range(3):
        job.step()
    job.close()
    return job.directory


@dataclass
class Slice:
    """A slice and those in it."""

    begin: int
    end: int
    name: str
    facts: dict[str, Any]
    inner: list[Slice] = field(default_factory=list)


class Parsed:
    """The tracks of a file, with their slices and instants."""

    def __init__(self, path: Path) -> None:
        self.names: dict[int, tuple[str, ...]] = {}
        self.slices: dict[tuple[str, ...], list[Slice]] = defaultdict(list)
        self.instants: dict[tuple[str, ...], list[str]] = defaultdict(list)
        events = []
        for packet in Trace.FromString(path.read_bytes()).packet:
            if packet.HasField("track_descriptor"):
                track = packet.track_descriptor
                parent = self.names[track.parent_uuid] if track.parent_uuid else ()
                assert track.uuid not in self.names
                self.names[track.uuid] = (*parent, track.name)
            else:
                assert packet.trusted_packet_sequence_id == 1
                events.append(packet)
        events.sort(key=lambda packet: packet.timestamp)  # stable, as in Perfetto
        stacks: dict[tuple[str, ...], list[Slice]] = defaultdict(list)
        for packet in events:
            event, at = packet.track_event, packet.timestamp
            lane = self.names[event.track_uuid]
            stack = stacks[lane]
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                facts = {a.name: a.string_value or a.int_value for a in event.debug_annotations}
                made = Slice(at, at, event.name, facts)
                (stack[-1].inner if stack else self.slices[lane]).append(made)
                stack.append(made)
            elif event.type == TrackEvent.TYPE_SLICE_END:
                stack.pop().end = at
            else:
                self.instants[lane].append(event.name)
        assert not any(stacks.values()), "each slice ends"


def test_file_has_a_track_for_each_rank_and_one_for_the_job(traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.pftrace"
    done = CliRunner().invoke(app, ["report", str(traces), "--perfetto", str(out)])
    assert done.exit_code == 0 and "ui.perfetto.dev" in done.stdout
    found = Parsed(out)
    everything = list(range(history_of(traces).course.step))
    for group, steps in (("0", everything), ("1", [s for s in everything if s != 5])):
        slices = found.slices[(f"group {group}", "rank 0")]
        committed = [each for each in slices if each.facts.get("outcome") == "committed"]
        assert [each.name for each in committed] == [f"step {step}" for step in steps]
        for each in committed:
            names = [part.name for part in each.inner]
            assert names == ["step function", "waits for the others", "update"]
            assert each.begin == each.inner[0].begin and each.end == each.inner[-1].end
            assert all(a.end == b.begin for a, b in pairwise(each.inner))
        kinds = Counter(each.name for each in slices)
        assert kinds["rolls back"] >= 1 and kinds["forms an epoch"] >= 2
        assert all(a.end <= b.begin for a, b in pairwise(slices)), "no overlap"
    (fetch,) = found.slices[("group 1", "rank 0", "transfers")]
    assert fetch.facts["bytes"] > 0
    faults = found.slices[("job", "faults")]
    assert any("boom" in each.name and each.facts["step"] == 5 for each in faults)
    assert any(name.startswith("epoch ") for name in found.instants[("job", "epochs")])


def test_file_of_a_long_trace_needs_little_memory(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path, Peer("0", 0, 1))
    for number in range(10_000):
        trace.note("inject", {"name": f"f{number}", "kind": "kill", "filler": "x" * 1000})
    trace.close()
    out = tmp_path / "out"
    assert peak_of(lambda: write_trace(tmp_path, out) or out) < 20e6
    assert len(Parsed(out).instants[("group 0", "rank 0", "events")]) == 10_000


def test_file_that_cannot_be_written_is_named(traces: Path) -> None:
    out = traces / "no" / "x"
    done = CliRunner().invoke(app, ["report", str(traces), "--perfetto", str(out)])
    assert done.exit_code == 2 and str(out) in done.stderr

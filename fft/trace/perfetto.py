"""``fft report --perfetto``: write a run as a trace for https://ui.perfetto.dev.

Each rank has a track, as in the timeline page, with rollbacks, the forming of epochs, and attempts.
An attempt contains the step function, the wait for the votes of others, and the update. The job has
tracks with faults, epochs and changes. Packets are written as they are built, so memory does not
grow with the traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from fft.errors import FftError
from fft.trace.course import Course, TimeLost
from fft.trace.display import cost
from fft.trace.format import scope_folders, scope_of
from fft.trace.happenings import Happening, Happenings
from fft.trace.lines import Noted
from fft.trace.read import is_not_of_each_step, merged_lines
from fft.trace.report import history_of
from fft.trace.timeline import name_of

try:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
except ImportError as error:
    raise FftError(
        f"fft report --perfetto needs Perfetto ({error}): pip install 'fft-torch[perfetto]'"
    ) from error

_SEQUENCE = 1
"""The only packet sequence: on each track, a slice ends before the next one begins."""
_NAMES = {
    "compute": "step function",
    "wait": "waits for the others",
    "update": "update",
    "rollback": "rolls back",
    "transfer": "fetches the state",
    "form": "forms an epoch",
    "join": "joins",
    "local": "local steps",
}

Arguments = Mapping[str, str | int]
_NONE: Arguments = {}


class _Tracks:
    """Write tracks, and slices and instants on them."""

    def __init__(self, file: IO[bytes]) -> None:
        self._builder = StreamingTraceProtoBuilder(file)
        self._known: dict[tuple[str, ...], int] = {}

    def of(self, *names: str) -> int:
        """Return the track with this path of names. Create it and its parents if absent."""
        if (found := self._known.get(names)) is not None:
            return found
        parent = self.of(*names[:-1]) if len(names) > 1 else None
        made = self._known[names] = len(self._known) + 1
        packet = self._builder.create_packet()
        packet.track_descriptor.uuid = made
        packet.track_descriptor.name = names[-1]
        if parent is not None:
            packet.track_descriptor.parent_uuid = parent
        self._builder.write_packet(packet)
        return made

    def begin(self, track: int, at: float, name: str, facts: Arguments = _NONE) -> None:
        self._event(track, at, TrackEvent.TYPE_SLICE_BEGIN, name, facts)

    def end(self, track: int, at: float) -> None:
        self._event(track, at, TrackEvent.TYPE_SLICE_END)

    def instant(self, track: int, at: float, name: str, facts: Arguments = _NONE) -> None:
        self._event(track, at, TrackEvent.TYPE_INSTANT, name, facts)

    def _event(
        self, track: int, at: float, kind: Any, name: str = "", facts: Arguments = _NONE
    ) -> None:
        packet = self._builder.create_packet()
        packet.timestamp = int(at * 1e9)
        packet.trusted_packet_sequence_id = _SEQUENCE
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        if name:
            event.name = name
        for key, value in facts.items():
            note = event.debug_annotations.add()
            note.name = key
            if isinstance(value, int):
                note.int_value = value
            else:
                note.string_value = value
        self._builder.write_packet(packet)


def write_trace(directory: Path, out: Path) -> None:
    """Write the run in ``directory`` as a Perfetto trace.

    Raises:
        FftError: There is no trace, or the file cannot be written.
    """
    course = history_of(directory).course
    try:
        with out.open("wb") as file:
            tracks = _Tracks(file)
            _write_course(tracks, course)
            for folder in scope_folders(directory):
                name = scope_of(directory, folder)
                scope = (f"scope {name}",) if name else ()
                _write_scope(tracks, folder, scope)
    except OSError as error:
        raise FftError(f"{out} cannot be written: {error.strerror}; name another file") from error


def _write_course(tracks: _Tracks, course: Course) -> None:
    """Write the tracks of the job: faults, epochs and changes."""
    faults, epochs = tracks.of("job", "faults"), tracks.of("job", "epochs")
    lost = TimeLost(course)
    for fault in course.faults:
        facts: Arguments = {
            "step": fault.step,
            "cause": fault.cause,
            "cost": cost(fault, course, lost),
        }
        tracks.begin(faults, fault.at, fault.cause or "rolled back", facts)
        tracks.end(faults, fault.at if fault.committed is None else fault.committed)
    for phase in course.epochs:
        members: Arguments = {"groups": ", ".join(sorted(phase.members)), "step": phase.step}
        tracks.instant(epochs, phase.formed, f"epoch {phase.epoch}", members)
    for change in course.changes:
        tracks.instant(epochs, change.at, change.text, {"step": change.step})


def _write_scope(tracks: _Tracks, folder: Path, scope: tuple[str, ...]) -> None:
    found = Happenings()

    def lane(rank: str) -> tuple[str, ...]:
        group, _, number = rank.rpartition("/")
        return (*scope, f"group {group}", f"rank {number}")

    def write(parts: Iterable[Happening]) -> None:
        for part in parts:
            _write_part(tracks, lane(part.rank), part)

    for at, path, line, _ in merged_lines(folder, is_not_of_each_step):
        write(found.take(path, line, at))
        if isinstance(line, Noted) and (name := name_of(line)):
            events = tracks.of(*lane(line.lane), "events")
            tracks.instant(events, at, name, {"file": path.name, "line": line.seq})
    write(found.end())


def _write_part(tracks: _Tracks, lane: tuple[str, ...], part: Happening) -> None:
    """Write an activity of one rank. Transfers overlap other activities, so they have a track."""
    facts: dict[str, str | int] = {"epoch": part.token[0], "txn": part.token[1], **part.facts}
    if part.outcome:
        facts["outcome"] = part.outcome
    track = tracks.of(*lane, "transfers") if part.kind == "transfer" else tracks.of(*lane)
    if part.kind != "step":
        tracks.begin(track, part.start, _NAMES[part.kind], facts)
        tracks.end(track, part.end)
        return
    tracks.begin(track, part.start, f"step {part.facts['step']}", facts)
    ends = [*(start for _, start, _ in part.parts[1:]), part.end]
    for (kind, start, _), end in zip(part.parts, ends, strict=True):
        tracks.begin(track, start, _NAMES[kind])
        tracks.end(track, end)
    tracks.end(track, part.end)

"""The trace: one JSON Lines file per process, enough to decide every guarantee afterwards.

Each line is one ``write`` to the file, made before the effects of the traced event are carried out,
so that a SIGKILL loses at most the line being written. ``h`` chains the lines: it is a digest of
the previous line's ``h`` and the line's own text, so that a changed, lost or inserted line is
detected. Lines that cannot be written, for example on a full disk, are counted and dropped, and a
line of kind ``gap`` reports them: training does not depend on its trace. This module does not
import the engine.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import PydanticSerializationError, to_json

from fft.errors import FftError
from fft.messages.protocol import Event, Peer, event_to_json
from fft.protocol.participant import Outcome
from fft.protocol.spec import FsmSpec
from fft.protocol.state import Config, Local
from fft.trace.format import FORMAT, cause_of, chain, where
from fft.util.files import is_disk_full
from fft.util.names import in_file_name

logger = logging.getLogger(__name__)

Records = list[tuple[str, dict[str, Any]]]


class _End(NamedTuple):
    """The end of a trace as written so far."""

    size: int = 0
    """Size in bytes."""
    seq: int = 0
    link: str = ""


def encode_line(line: dict[str, Any]) -> str:
    """Encode a line as JSON; it may contain an event."""
    try:
        return to_json(line, inf_nan_mode="constants").decode()
    except PydanticSerializationError:  # a lone surrogate, as in a file name
        return json.dumps(line, separators=(",", ":"), default=event_to_json)


def trace_path(directory: Path, peer: Peer) -> Path:
    """Return the file of one participant: ``g<group>r<rank>i<incarnation>.jsonl``."""
    return directory / f"g{in_file_name(peer.group)}r{peer.rank}i{peer.inc}.jsonl"


def header(spec: FsmSpec, config: Config, local: Local, **more: Any) -> dict[str, Any]:
    """Return what a replay needs besides the events: spec, configuration, initial state."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    values["timeouts"] = dict(config.timeouts)
    values["flow"] = [dataclasses.asdict(other) for other in config.flow]
    start = {
        "lineage": local.lineage,
        "step": local.step,
        "cursor": local.cursor,
        "batches": local.batches,
        "returned": local.returned,
    }
    return {
        "format": FORMAT,
        "spec": spec.model_dump(mode="json"),
        "config": values,
        "start": start,
        **more,
    }


class TraceWriter:
    """A writer of records to one participant's file. Thread-safe; ``close`` ends it.

    Args:
        directory: The directory of the file; created if absent. None writes no trace, so the run
            cannot be audited.
        peer: The participant.
        clocks: (wall, monotonic) clocks, in seconds.

    Raises:
        FftError: The file has lines, so it is the trace of another job.
        OSError: The file cannot be created, for another reason than a full disk.
    """

    def __init__(
        self,
        directory: Path | None,
        peer: Peer,
        clocks: tuple[Callable[[], float], Callable[[], float]] = (time.time, time.monotonic),
    ) -> None:
        self.peer = peer
        self.path: Path | None = None
        self._fd: int | None = None
        self._wall, self._mono = clocks
        self._end = _End()
        self._before: tuple[_End, int] | None = None
        """Where the last write began, and its number of records, including lost ones."""
        self._lost = 0
        """Number of records that could not be written and that no gap line reports yet."""
        self._problem: str | None = None
        """Why lines are lost at present, or None."""
        self._on_lost: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        if directory is not None:
            self.path = trace_path(directory, peer)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            try:
                directory.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self.path, flags, 0o644)
            except OSError as error:
                if not is_disk_full(error):
                    raise
                logger.error("no trace: %s; training continues, and cannot be audited", error)
                self._problem = str(error)
            else:
                self._refuse_used(self._fd)

    def _refuse_used(self, fd: int) -> None:
        """Raise FftError if the file has lines: another job or an earlier start wrote them."""
        if os.fstat(fd).st_size:
            self.close()
            raise FftError(
                f"{self.path} already has lines: expected a new or empty file; give each job "
                "its own directory (trace_dir=, FFT_TRACE_DIR, or --trace-dir)"
            )

    def on_lost(self, hear: Callable[[str], None]) -> None:
        """Call ``hear`` with the reason when lines begin to be lost, or at once if they already
        are.

        The call is made on any thread that writes, with a lock held: it must not wait.
        """
        with self._lock:
            self._on_lost = hear
            if self._problem is not None:
                hear(self._problem)

    def write(self, kind: str, fields: dict[str, Any]) -> None:
        """Append one record."""
        self._write([(kind, fields)])

    def _write(self, records: Records) -> None:
        """Append records in one write, so that no other record or kill separates them."""
        with self._lock:
            if self._fd is None:
                return
            told = [self._gap(), *records] if self._lost else records
            try:
                self._append(self._fd, told)
            except OSError as error:
                self._lose(self._fd, len(records), error)
                return
            if self._problem is not None:
                self._problem = None
                logger.error("the trace %s can be written again; it has a gap", self.path)

    def _append(self, fd: int, records: Records) -> None:
        """Append records. On OSError the file keeps its previous end."""
        begin, (_, seq, link) = self._end, self._end
        who = {"group": self.peer.group, "rank": self.peer.rank, "inc": self.peer.inc}
        when = {"wall": self._wall(), "mono": self._mono()}
        text = ""
        for kind, fields in records:
            seq += 1
            body = encode_line({"seq": seq, "kind": kind, **when, **who, **fields})
            link = chain(link, body)
            text += f'{body[:-1]},"h":"{link}"}}\n'
        data = text.encode()
        try:
            _write_all(fd, data)
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, begin.size)
            raise
        self._end = _End(begin.size + len(data), seq, link)
        self._before = begin, len(records) + max(0, self._lost - 1)
        self._lost = 0

    def _gap(self) -> tuple[str, dict[str, Any]]:
        return "gap", {"lost": self._lost}

    def _lose(self, fd: int, records: int, error: OSError) -> None:
        """Count unwritten records; the first time, mark the place while there is some room."""
        self._lost += records
        if self._problem is not None:
            return
        self._problem = str(error)
        if self._on_lost is not None:
            self._on_lost(self._problem)
        told = "the trace %s cannot be written: %s; training continues, the audit will show it"
        logger.error(told, self.path, error)
        with suppress(OSError):
            self._append(fd, [self._gap()])
            return
        if self._before is None:
            return
        # There is no room for a line, so the gap line replaces the last write, which is also lost.
        end, count = self._before
        with suppress(OSError):
            os.ftruncate(fd, end.size)
            self._end, self._lost = end, self._lost + count
            self._append(fd, [self._gap()])

    def outcome(self, before: Local, after: Local, event: Event, out: Outcome, now: float) -> None:
        """Append what one event did: a line per row taken, or one line with the reason why not.

        Events that the table ignores by name, and decisions received a second time, change nothing
        and leave no line.
        """
        if self._fd is None:
            return
        if out.verdict in ("known", "ignored"):
            return
        told = {"event": event, "at": now}
        if out.verdict != "row":
            self.write(out.verdict, {**where(before), **told, "reason": out.reason})
            return
        there = where(after)
        rows = [
            {
                **there,
                "from": step.source,
                "to": step.dest,
                "roles": step.roles,
                "on": step.event,
                "guards": step.guards,
                "effects": step.effects,
                **cause_of(after),
                **(told if i == 0 else {"event": None}),
            }
            for i, step in enumerate(out.steps)
        ]
        self._write([("transition", row) for row in rows])

    def note(self, name: str, data: dict[str, Any], local: Local | None = None) -> None:
        """Append something that is not a transition, such as metrics, a fault, a consumed slice."""
        there = where(local) if local is not None else {}
        self.write("note", {"note": name, "data": data, **there})

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            if self._fd is None:
                return
            if self._lost:
                logger.error("the trace %s ends without its last %d lines", self.path, self._lost)
                with suppress(OSError):  # an earlier gap line may be in the file already
                    self._append(self._fd, [self._gap()])
            os.close(self._fd)
            self._fd = None


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]

"""The trace: one JSON Lines file per process, enough to decide every guarantee afterwards.

Each line is one ``write`` to the file, made before the effects of what it tells are carried out,
so that a SIGKILL loses at most the line being written. ``h`` chains the lines: it is a digest of
the previous line's ``h`` and the line's own text, so that a changed, lost or inserted line shows.
Never imports the engine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from fft.core.local import Config, Local, members
from fft.core.messages import Event, Peer, event_to_json
from fft.core.participant import Outcome
from fft.spec import FsmSpec
from fft.traceformat import FORMAT, chain


def _encode(line: dict[str, Any]) -> str:
    try:
        return to_json(line, inf_nan_mode="constants").decode()
    except PydanticSerializationError:  # half a character, as in the name of a file
        return json.dumps(line, separators=(",", ":"))


def trace_path(directory: Path, peer: Peer) -> Path:
    """File of one participant: ``g<group>r<rank>i<incarnation>.jsonl``."""
    safe = "".join(ch if ch.isalnum() or ch in "-_." else "_" for ch in peer.group)
    return directory / f"g{safe}r{peer.rank}i{peer.inc}.jsonl"


def header(spec: FsmSpec, config: Config, local: Local, **more: Any) -> dict[str, Any]:
    """What a replay needs besides the events: spec, configuration, the state at the start."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    values["timeouts"] = dict(config.timeouts)
    start = {
        "lineage": local.lineage,
        "step": local.step,
        "cursor": local.cursor,
        "batches": local.batches,
    }
    return {
        "format": FORMAT,
        "spec": spec.model_dump(mode="json"),
        "config": values,
        "start": start,
        **more,
    }


class TraceWriter:
    """Appends records to one participant's file. Thread-safe; ``close`` ends it.

    Args:
        directory: made if absent. None: nothing is written (and nothing can be audited).
        clocks: (wall, monotonic) in seconds.
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
        self._seq = 0
        self._link = ""
        self._lock = threading.Lock()
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self.path = trace_path(directory, peer)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o644)

    def write(self, kind: str, fields: dict[str, Any]) -> None:
        """Append one record."""
        self._write([(kind, fields)])

    def _write(self, records: list[tuple[str, dict[str, Any]]]) -> None:
        """Append records in one write: nothing comes between them, and no kill but in a write."""
        with self._lock:
            if self._fd is None:
                return
            who = {"group": self.peer.group, "rank": self.peer.rank, "inc": self.peer.inc}
            when = {"wall": self._wall(), "mono": self._mono()}
            text = ""
            for kind, fields in records:
                self._seq += 1
                line = {"seq": self._seq, "kind": kind, **when, **who, **fields}
                body = _encode(line)
                self._link = chain(self._link, body)
                text += f'{body[:-1]},"h":"{self._link}"}}\n'
            _write_all(self._fd, text.encode())

    def outcome(self, before: Local, after: Local, event: Event, out: Outcome, now: float) -> None:
        """Append what one event did: a line per row taken, or a line that says why not.

        Events that the table ignores by name, and decisions heard a second time, change nothing
        and leave no line.
        """
        if self._fd is None:
            return
        if out.verdict in ("known", "ignored"):
            return
        told = {"event": event_to_json(event), "at": now}
        if out.verdict != "row":
            self.write(out.verdict, {**_where(before), **told, "reason": out.reason})
            return
        where = _where(after)
        rows = [
            {
                **where,
                "from": step.source,
                "to": step.dest,
                "on": step.event,
                "guards": step.guards,
                "effects": step.effects,
                "cause": after.cause or None,
                **(told if i == 0 else {"event": None}),
            }
            for i, step in enumerate(out.steps)
        ]
        self._write([("transition", row) for row in rows])

    def note(self, name: str, data: dict[str, Any], local: Local | None = None) -> None:
        """Append something that is no transition: metrics, an injected fault, a slice consumed."""
        where = _where(local) if local is not None else {}
        self.write("note", {"note": name, "data": data, **where})

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


def _where(s: Local) -> dict[str, Any]:
    return {
        "epoch": s.token.epoch,
        "txn": s.token.txn,
        "step": s.step,
        "lineage": s.lineage,
        "state": s.state,
        "members": [g.group for g in members(s)],
    }


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]

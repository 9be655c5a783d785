"""The lines that processes write while they run: one JSON object per event, unbuffered.

Every line has ``e`` (the kind of event), ``t`` (wall clock, ns), ``m`` (monotonic clock of the
machine, ns), and ``g``, ``r``, ``pid`` (the process). A line is one ``write``, so a SIGKILL loses
no written event. The module does not import torch, because launcher and workers of every system
import it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]
LAUNCHER = -1
"""Group and rank of a process that is not a worker."""


class Pen:
    """A writer of the events of one process."""

    def __init__(self, directory: Path, group: int, rank: int) -> None:
        self._who = {"g": group, "r": rank, "pid": os.getpid()}
        path = directory / f"events-{group}-{rank}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def say(self, what: str, **fields: Any) -> None:
        """Write one event, now."""
        now = {"e": what, "t": time.time_ns(), "m": time.monotonic_ns()}
        os.write(self._file, (json.dumps({**now, **self._who, **fields}) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class Reader:
    """A reader that follows the files of a repetition while they grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}

    def news(self) -> list[Event]:
        """Return the complete lines since the last call."""
        found: list[Event] = []
        for path in sorted(self._directory.glob("events-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            found += [json.loads(line) for line in whole.splitlines()]
        return sorted(found, key=lambda event: int(event["m"]))


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file, without a truncated last line."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield json.loads(line)

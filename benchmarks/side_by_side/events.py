"""The lines that processes write while they run: one JSON object an event, unbuffered.

Every line has ``e`` (what), ``t`` (wall clock, ns), ``m`` (monotonic clock of the machine, ns),
``g``, ``r``, ``pid`` (who). A line goes out with one ``write``: a SIGKILL takes none that was said.
Knows no torch: launcher and workers of every system import it.
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
"""Group and rank of who is no worker."""


class Pen:
    """Writes the events of one process."""

    def __init__(self, directory: Path, group: int, rank: int) -> None:
        self._who = {"g": group, "r": rank, "pid": os.getpid()}
        path = directory / f"events-{group}-{rank}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def say(self, what: str, **fields: Any) -> None:
        """One event, now."""
        now = {"e": what, "t": time.time_ns(), "m": time.monotonic_ns()}
        os.write(self._file, (json.dumps({**now, **self._who, **fields}) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class Reader:
    """Follows the files of a repetition while they grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}

    def news(self) -> list[Event]:
        """Whole lines that have come since the last call."""
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
    """Objects of a JSON Lines file; a last line that was cut off is left out."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield json.loads(line)

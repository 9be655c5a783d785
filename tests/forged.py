"""Traces that were modified and linked anew, for tests of what the audit still detects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fft.trace.format import chain

Change = Callable[[dict[str, Any]], list[dict[str, Any]]]


def rewrite(path: Path, change: Change) -> None:
    """Replace each record by the results of ``change``, numbered and linked anew."""
    link, out, seq = "", [], 0
    for line in path.read_text().splitlines():
        record = json.loads(line)
        record.pop("h", None)
        for new in change(record):
            seq += 1
            body = json.dumps({**new, "seq": seq}, separators=(",", ":"))
            link = chain(link, body)
            out.append(f'{body[:-1]},"h":"{link}"}}\n')
    path.write_text("".join(out))


def nth_note(name: str, nth: int, change: Change) -> Change:
    """Apply ``change`` to the ``nth`` note of a name, counted from 0, and leave the others
    alone."""
    seen = -1

    def of_one(record: dict[str, Any]) -> list[dict[str, Any]]:
        nonlocal seen
        if record.get("note") != name:
            return [record]
        seen += 1
        return change(record) if seen == nth else [record]

    return of_one


def without(name: str) -> Change:
    """Remove all notes of a name."""
    return lambda record: [] if record.get("note") == name else [record]


def saying(**data: object) -> Change:
    """Replace fields in the data of a note."""
    return lambda record: [{**record, "data": {**record["data"], **data}}]


def in_turn(*changes: Change) -> Change:
    """Apply changes one after another, each to the results of the one before it."""

    def of_one(record: dict[str, Any]) -> list[dict[str, Any]]:
        records = [record]
        for change in changes:
            records = [new for each in records for new in change(each)]
        return records

    return of_one


def gap_after(line: bytes) -> bytes:
    """Insert the record that a writer leaves after ``line`` when it could not write for a while."""
    last = json.loads(line)
    who = {name: last[name] for name in ("wall", "mono", "group", "rank", "inc")}
    record = {"seq": last["seq"] + 1, "kind": "gap", **who, "lost": 9}
    body = json.dumps(record, separators=(",", ":"))
    return f'{body[:-1]},"h":"{chain(last["h"], body)}"}}\n'.encode()

"""Traces that were changed, and linked anew: for tests of what the audit finds all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fft.trace.format import chain

Change = Callable[[dict[str, Any]], list[dict[str, Any]]]


def rewrite(path: Path, change: Change) -> None:
    """Put what ``change`` makes of each record in its place: numbered and linked anew."""
    link, out, seq = "", [], 0
    for line in path.read_text().splitlines():
        record = json.loads(line)
        del record["h"]
        for new in change(record):
            seq += 1
            body = json.dumps({**new, "seq": seq}, separators=(",", ":"))
            link = chain(link, body)
            out.append(f'{body[:-1]},"h":"{link}"}}\n')
    path.write_text("".join(out))


def nth_note(name: str, nth: int, change: Change) -> Change:
    """``change`` of the note that is the ``nth`` of its name, from 0; the rest is left alone."""
    seen = -1

    def of_one(record: dict[str, Any]) -> list[dict[str, Any]]:
        nonlocal seen
        if record.get("note") != name:
            return [record]
        seen += 1
        return change(record) if seen == nth else [record]

    return of_one


def without(name: str) -> Change:
    """Leave all notes of that name out."""
    return lambda record: [] if record.get("note") == name else [record]


def saying(**data: object) -> Change:
    """The same note with other data."""
    return lambda record: [{**record, "data": {**record["data"], **data}}]


def in_turn(*changes: Change) -> Change:
    """One after the other, each of what the one before it has made."""

    def of_one(record: dict[str, Any]) -> list[dict[str, Any]]:
        records = [record]
        for change in changes:
            records = [new for each in records for new in change(each)]
        return records

    return of_one


def gap_after(line: bytes) -> bytes:
    """What a writer that could write no more has put after ``line``."""
    last = json.loads(line)
    who = {name: last[name] for name in ("wall", "mono", "group", "rank", "inc")}
    record = {"seq": last["seq"] + 1, "kind": "gap", **who, "lost": 9}
    body = json.dumps(record, separators=(",", ":"))
    return f'{body[:-1]},"h":"{chain(last["h"], body)}"}}\n'.encode()

"""The last line of each trace of a start, noted by the supervisor when its processes have ended.

A trace shows that a line in its middle was removed, but not that its last line was. So the notes
are kept in a folder beside the traces. They belong to the job and not to one of its later starts,
so the removal of a whole start is noticed as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from fft.protocol.invariants import Finding
from fft.trace.starts import number_of, root_of

FOLDER = "ends"
"""Subdirectory of a job's traces that holds the notes, a file for each start and supervisor."""
_CHUNK = 64 * 1024
_FIRST = "start1"


def note_ends(folder: Path, supervisor: str) -> None:
    """Note the last whole line of each trace of a start.

    Args:
        folder: The traces of the start.
        supervisor: Name of the supervisor, unique among those of the job.

    Raises:
        OSError: The notes cannot be written, or the traces cannot be read.
    """
    ends = {}
    for path in _traces(folder):
        if (end := _last_line(path)) is not None:
            ends[str(path.relative_to(folder))] = end
    place = root_of(folder) / FOLDER
    place.mkdir(exist_ok=True)
    made = place / f"{_name(folder)}-{supervisor}.json"
    new = made.with_suffix(".new")
    new.write_text(json.dumps(ends, indent=1) + "\n")
    new.rename(made)


def forget_ends(folder: Path) -> None:
    """Remove notes about earlier traces in the folder of a start that is about to begin."""
    for path in (root_of(folder) / FOLDER).glob(f"{_name(folder)}-*.json"):
        path.unlink(missing_ok=True)


def judge_ends(root: Path) -> Finding:
    """Check that each trace of a job still has the line with which it ended."""
    finding = Finding("ends")
    for path in sorted((root / FOLDER).glob("*.json")):
        start = path.name.partition("-")[0]
        folder = root if start == _FIRST else root / start
        try:
            for name, end in json.loads(path.read_text()).items():
                trace = folder / name
                text = f"{trace} ended with line {end['seq']}, which was removed or changed"
                finding.expect(_has_line(trace, end["h"]), text, f"{FOLDER}/{path.name}")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            finding.expect(False, f"it is not readable: {error!r}", f"{FOLDER}/{path.name}")
    return finding


def _name(folder: Path) -> str:
    return f"start{number_of(folder)}"


def _traces(folder: Path) -> Iterator[Path]:
    """Yield the traces of a start, including those of its other scopes."""
    for path in sorted(folder.rglob("*.jsonl")):
        if root_of(folder / path.relative_to(folder).parts[0]) != folder:
            yield path


def _last_line(path: Path) -> dict[str, object] | None:
    """Return number and digest of the last whole line, or None if there is none."""
    with path.open("rb") as file:
        size, held = file.seek(0, 2), b""
        while size and held.count(b"\n") < 2:
            step = min(size, max(_CHUNK, len(held)))
            size -= step
            file.seek(size)
            held = file.read(step) + held
    lines = held[: held.rfind(b"\n") + 1].splitlines()
    try:
        line = json.loads(lines[-1]) if lines else {}
        return {"seq": line["seq"], "h": line["h"]}
    except (ValueError, LookupError, TypeError):
        return None  # the audit reports such lines


def _has_line(path: Path, digest: str) -> bool:
    """Return whether the file has a line with this digest."""
    word = f'"h":"{digest}"'.encode()
    try:
        with path.open("rb") as file:
            return any(word in line for line in file)
    except FileNotFoundError:
        return False

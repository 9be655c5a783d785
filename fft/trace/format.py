"""Definitions that the writer and the readers of a trace share. Pure."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fft.protocol.state import Local, members

FORMAT = 4
"""Version in every header."""
READABLE = 3, FORMAT
"""Versions that can be read. Format 3 has causes without codes, which read as ``none``."""
INNER = "inner"
"""Subdirectory of a job's traces that holds the directories of the scopes inside replica groups."""
SCOPES = "scopes"
"""Subdirectory for the scopes of later stages; the first stage's traces are the job's."""

RUNS = 1024
"""Maximum number of runs kept when the record numbers of one kind are counted while traces are read
side by side. If each commit ends an epoch, each record is a separate run."""

DIGESTS = "digests"
"""Key in ``owes`` of a header: whether each commit and each heal of the process has a digest."""

IDLE = "idle"
"""Name of the note of a rank whose script took long between two transactions: the seconds, which
end with the note."""
FETCHING = "fetching"
"""Name of the note about a long fetch: bytes received, total bytes, seconds left."""
UNREACHABLE = "unreachable"
"""Name of the note of a joiner that waits outside the epoch: the addresses it cannot connect to."""
RESULT_REFUSED = "result_refused"
"""Name of the note of a rank that refuses the result of a step: reaction, reason, norm, metrics."""
WARNING = "warning"
"""Key of a note with a warning about the script, which the supervisor shows once per note name."""
NO_REFORM = "no_reform"
"""Name of the note that revokes ``reforms`` of the header: no rank of the group can be replaced."""


def scope_folders(directory: Path) -> list[Path]:
    """Return the trace directories of a job: its own, and those of the later stages' scopes."""
    return [directory, *sorted(directory.glob(f"{SCOPES}/*"))]


def scope_folder(directory: Path, scope: str) -> Path:
    """Return the trace directory of a stage's scope.

    Args:
        scope: Name of the scope, empty for the first stage.
    """
    return directory / SCOPES / scope if scope else directory


def scope_of(directory: Path, folder: Path) -> str:
    """Return the scope of one of the `scope_folders`; empty for the first stage."""
    return "" if folder == directory else folder.name


def inner_folder(directory: Path, group: str, store: str) -> Path:
    """Return the trace directory for the own scope of one instance of a group."""
    name = f"g{group}-{store}"
    return directory / INNER / "".join(ch if ch.isalnum() or ch in "-_." else "_" for ch in name)


def progress_in_words(got: int, total: int, left_s: float) -> str:
    """Return how much of a state has arrived: ``1.2 of 8.0 GiB, 35 s left``."""
    unit, size = ("GiB", 2**30) if total >= 2**30 else ("MiB", 2**20)
    return f"{got / size:.1f} of {total / size:.1f} {unit}, {left_s:.0f} s left"


def chain(previous: str, body: str) -> str:
    """Return the digest that links a line to the previous one. ``body``: the line without ``h``."""
    return hashlib.blake2b(f"{previous}\n{body}".encode(), digest_size=8).hexdigest()


def cause_of(s: Local) -> dict[str, Any]:
    """Return a participant's cause, as in every line about a row; two nulls if it has none."""
    if not s.cause.text:
        return {"cause": None, "code": None}
    return {"cause": s.cause.text, "code": s.cause.code}


def where(s: Local) -> dict[str, Any]:
    """Return a participant's position and state, as in every line of its trace."""
    return {
        "epoch": s.token.epoch,
        "txn": s.token.txn,
        "step": s.step,
        "lineage": s.lineage,
        "state": s.state,
        "members": [g.group for g in members(s)],
    }

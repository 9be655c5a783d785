"""What writer and reader of a trace agree on. Pure."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fft.protocol.state import Local, members

FORMAT = 3
"""Version in every header; a reader refuses another one."""
INNER = "inner"
"""In the folder of a job's traces: the folders of the scopes inside of replica groups."""
SCOPES = "scopes"
"""The same of the scopes of stages, but for the first one's, whose traces are the job's."""

RUNS = 1024
"""Of the numbers of records of one kind, as who reads traces side by side counts them: runs that it
keeps. Where each commit ends an epoch, each record is a run of its own."""

DIGESTS = "digests"
"""In ``owes`` of a header: whether each commit and each heal of the process has a digest."""

FETCHING = "fetching"
"""A note of a fetch that takes long: bytes that have arrived, those of the whole, seconds left."""
UNREACHABLE = "unreachable"
"""A note of a joiner that waits outside the epoch: which addresses it cannot connect to."""
NO_REFORM = "no_reform"
"""A note: since the header, the ranks of this group can be replaced no more."""


def scope_folders(directory: Path) -> list[Path]:
    """Where the ranks of a job trace: the job's own folder, and those of further stages' scopes."""
    return [directory, *sorted(directory.glob(f"{SCOPES}/*"))]


def scope_folder(directory: Path, scope: str) -> Path:
    """Where the ranks of a stage's scope trace; ``scope``: its name, empty for the first one."""
    return directory / SCOPES / scope if scope else directory


def inner_folder(directory: Path, group: str, store: str) -> Path:
    """Where the ranks of one life of a group trace their own scope."""
    name = f"g{group}-{store}"
    return directory / INNER / "".join(ch if ch.isalnum() or ch in "-_." else "_" for ch in name)


def progress_in_words(got: int, total: int, left_s: float) -> str:
    """Return how much of a state has arrived: ``1.2 of 8.0 GiB, 35 s left``."""
    unit, size = ("GiB", 2**30) if total >= 2**30 else ("MiB", 2**20)
    return f"{got / size:.1f} of {total / size:.1f} {unit}, {left_s:.0f} s left"


def chain(previous: str, body: str) -> str:
    """Digest that links a line to the one before it. ``body``: the line without its ``h``."""
    return hashlib.blake2b(f"{previous}\n{body}".encode(), digest_size=8).hexdigest()


def where(s: Local) -> dict[str, Any]:
    """Where a participant stands: in every line of its own."""
    return {
        "epoch": s.token.epoch,
        "txn": s.token.txn,
        "step": s.step,
        "lineage": s.lineage,
        "state": s.state,
        "members": [g.group for g in members(s)],
    }

"""The trace directories of a job that was started several times: one for each later start."""

from __future__ import annotations

import itertools
from pathlib import Path

from fft.util.names import in_file_name

_MARK = ".start-of-"
"""Prefix of a file whose name states which start of a job has its traces in the same directory."""


def start_folder(root: Path) -> Path:
    """Return the directory for the traces of the next start: ``root``, if that has none yet."""
    if not any(root.glob("*.jsonl")) and not (root / "start2").exists():
        return root
    for number in itertools.count(2):
        folder = root / f"start{number}"
        if not any(folder.glob("*.jsonl")) and not (root / f"start{number + 1}").exists():
            return folder
    raise AssertionError("there is always a number")


def folder_of(root: Path, start: str) -> Path:
    """Return the directory in ``root`` for the traces of one start of a job, and mark it.

    All processes of a start get the same directory, on all hosts that share ``root``. The caller
    makes sure that no process of another job writes to ``root`` meanwhile.

    Args:
        root: The directory of all starts; created if absent.
        start: Name of the start on the bus, such as ``job-7f4d.start2``.

    Raises:
        OSError: The directory cannot be created.
    """
    mark = _MARK + in_file_name(start)
    if (found := _marked(root, mark)) is not None:
        return found
    folder = start_folder(root)
    # another process of this start may have marked one meanwhile
    if (found := _marked(root, mark)) is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    (folder / mark).touch()
    return folder


def _marked(root: Path, mark: str) -> Path | None:
    return next((folder for folder in start_folders(root) if (folder / mark).exists()), None)


def start_folders(root: Path) -> list[Path]:
    """Return ``root`` and the directories of the starts after it, in order."""
    later = [path for path in root.glob("start*") if _is_later(path) and path.is_dir()]
    return [root, *sorted(later, key=lambda path: int(path.name[5:]))]


def newest_run(place: Path) -> Path | None:
    """Return the directory with the newest traces of a job: ``place``, one in it, or in ``runs``.

    It is the directory of all starts of the job; None if there is no trace. Traces may also be one
    level deeper in ``traces``, where ``fft launch`` puts them.
    """
    patterns = ("*/", "runs/*/", "*/traces/", "runs/*/traces/")
    found = [place, *(folder for pattern in patterns for folder in place.glob(pattern))]
    timed = [(max(times), folder) for folder in found if (times := _times(folder))]
    return max(timed)[1] if timed else None


def _times(folder: Path) -> list[float]:
    """Return when the traces of all starts of a job were last changed."""
    traces = (path for start in start_folders(folder) for path in start.glob("g*r*i*.jsonl"))
    return [path.stat().st_mtime for path in traces]


def number_of(folder: Path) -> int:
    """Return the number of the start whose traces are in ``folder``."""
    return int(folder.name[5:]) if _is_later(folder) else 1


def root_of(folder: Path) -> Path:
    """Return the directory of all starts of the job whose start has its traces in ``folder``."""
    return folder.parent if _is_later(folder) else folder


def start_after(folder: Path) -> Path | None:
    """Return the directory of the next start that left traces, or None for the last."""
    number, root = number_of(folder), root_of(folder)
    return next((f for f in start_folders(root)[1:] if int(f.name[5:]) > number and _used(f)), None)


def _is_later(folder: Path) -> bool:
    return folder.name.startswith("start") and folder.name[5:].isdigit()


def _used(folder: Path) -> bool:
    return any(folder.glob("*.jsonl"))

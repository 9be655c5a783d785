"""The traces of a job that was started several times: a folder for each start after the first."""

from __future__ import annotations

import itertools
from pathlib import Path


def start_folder(root: Path) -> Path:
    """Where the traces of the next start go: ``root``, if it has none yet."""
    if not any(root.glob("*.jsonl")) and not (root / "start2").exists():
        return root
    for number in itertools.count(2):
        folder = root / f"start{number}"
        if not any(folder.glob("*.jsonl")) and not (root / f"start{number + 1}").exists():
            return folder
    raise AssertionError("there is always a number")


def start_folders(root: Path) -> list[Path]:
    """``root``, and those of the starts after it, in their order."""
    later = [path for path in root.glob("start*") if _is_later(path) and path.is_dir()]
    return [root, *sorted(later, key=lambda path: int(path.name[5:]))]


def start_after(folder: Path) -> Path | None:
    """The next start that has left traces after the one whose folder this is; None: it was the
    last."""
    number = int(folder.name[5:]) if _is_later(folder) else 1
    root = folder.parent if number > 1 else folder
    return next((f for f in start_folders(root)[1:] if int(f.name[5:]) > number and _used(f)), None)


def _is_later(folder: Path) -> bool:
    return folder.name.startswith("start") and folder.name[5:].isdigit()


def _used(folder: Path) -> bool:
    return any(folder.glob("*.jsonl"))

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
    later = [path for path in root.glob("start*") if path.name[5:].isdigit() and path.is_dir()]
    return [root, *sorted(later, key=lambda path: int(path.name[5:]))]

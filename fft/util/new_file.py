"""Names of new files in folders that several processes, or hosts, share."""

from __future__ import annotations

import itertools
from pathlib import Path


def claimed(path: Path) -> Path:
    """Create an empty file at ``path``, or at the next free name, and return its path.

    The second file of the name ``g0r0-1.log`` is ``g0r0-1.2.log``. No two callers get one file.

    Raises:
        OSError: The file cannot be created.
    """
    for number in itertools.count(1):
        name = path.name if number == 1 else f"{path.stem}.{number}{path.suffix}"
        try:
            path.with_name(name).open("xb").close()
        except FileExistsError:
            continue
        return path.with_name(name)
    raise AssertionError("the count never ends")

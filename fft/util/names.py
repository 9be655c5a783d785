"""Names that users choose: error texts for unknown ones, and their use in file names."""

from __future__ import annotations

import difflib
import hashlib
import string
from collections.abc import Iterable

_IN_FILE_NAMES = frozenset(string.ascii_letters + string.digits + "-_.")


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return an error text with the nearest known name, or with all of them if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
    return f"unknown {kind} {name!r}; {hint}"


def in_file_name(name: str) -> str:
    """Return ``name`` made safe for file systems and URLs; different names stay different."""
    safe = "".join(ch if ch in _IN_FILE_NAMES else "_" for ch in name)
    if safe != name:
        safe += f"-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
    return safe

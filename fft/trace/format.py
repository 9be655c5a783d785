"""What writer and reader of a trace agree on. Pure."""

from __future__ import annotations

import hashlib

FORMAT = 2
"""Version in every header; a reader refuses another one."""


def chain(previous: str, body: str) -> str:
    """Digest that links a line to the one before it. ``body``: the line without its ``h``."""
    return hashlib.blake2b(f"{previous}\n{body}".encode(), digest_size=8).hexdigest()

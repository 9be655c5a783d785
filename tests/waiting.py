"""Polling for conditions that offer no event, such as those of another process or thread."""

from __future__ import annotations

import time
from collections.abc import Callable

_LOOKS_S = 0.005


def wait_until(holds: Callable[[], bool], what: str, within: float = 120.0) -> None:
    """Poll until ``holds`` returns true; fail after ``within`` seconds."""
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
        time.sleep(_LOOKS_S)

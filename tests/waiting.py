"""Polling for conditions that offer no event, such as those of another process or thread."""

from __future__ import annotations

import time
from collections.abc import Callable

_LOOKS_S = 0.005


def wait_until(holds: Callable[[], bool], what: str, within: float = 120.0) -> None:
    """Poll until ``holds`` returns true; fail after ``within`` seconds."""
    assert is_true_within(holds, within), f"not within {within:g} s: {what}"


def is_true_within(holds: Callable[[], bool], within: float) -> bool:
    """Poll until ``holds`` returns true; return False after ``within`` seconds."""
    deadline = time.monotonic() + within
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOKS_S)
    return True

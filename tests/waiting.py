"""The one way in which tests wait for what has no event: another process, or another thread."""

from __future__ import annotations

import time
from collections.abc import Callable

_LOOKS_S = 0.002


def wait_until(holds: Callable[[], bool], what: str, within: float = 30.0) -> None:
    """Look again and again until it holds; fail after so many seconds."""
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
        time.sleep(_LOOKS_S)

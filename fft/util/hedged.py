"""Several tries at something that may hang, one beside the other; the first to succeed counts."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

_T = TypeVar("_T")

_TRIES: Final = 4
_TRY_S: Final = 0.5


def hedged(attempt: Callable[[], _T], timeout: float, name: str) -> _T:
    """What ``attempt`` returns or raises, on a thread of its own.

    A fresh one is started beside one that takes longer than 0.5 s: a lookup of a name whose packet
    was lost takes 5 s, and the next one none. One that is left behind must end by itself, with
    nothing to give back. ``name``: of the threads. Raises `TimeoutError` after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    tries: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            tries.put((attempt(), None))
        except Exception as error:  # noqa: BLE001 - handed to the caller's thread below
            tries.put((None, error))

    for number in range(_TRIES):
        threading.Thread(target=run, name=name, daemon=True).start()
        left = deadline - time.monotonic()
        if number < _TRIES - 1:
            left = min(left, _TRY_S)
        try:
            made, error = tries.get(timeout=max(0.0, left))
        except queue.Empty:
            continue
        if error is not None:
            raise error
        return made  # type: ignore[no-any-return]
    raise TimeoutError(f"no end of {name} within {timeout:g} s")

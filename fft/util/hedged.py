"""Hedged attempts at an operation that may hang: the first one to finish decides."""

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
    """Return or raise the result of the first call of ``attempt`` that finishes.

    Each call runs on its own thread. Another one starts if none has finished after 0.5 s, up to
    four in all: a name lookup whose packet was lost takes 5 s, while a new one answers at once. A
    call that is left behind must end by itself and hold no resources.

    Args:
        timeout: Limit in seconds for all calls together.
        name: Name of the threads.

    Raises:
        TimeoutError: No call finished in time.
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

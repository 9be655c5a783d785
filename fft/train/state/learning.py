"""Fetch of a joiner's state while its step function runs, on one thread per fetch.

A group that joins is behind in its first txn. It fetches the state while all groups compute,
contributes no gradients, and loads the state before it votes (`fft.train.healing`). Raft's
learners are the model: members that receive the log and do not count yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from fft.messages.protocol import Record

Payload = dict[str, Any]
_AGAIN_S = 0.05


class Learning:
    """One fetch of the state with which the epoch of ``record`` begins.

    Args:
        record: The epoch record.
        source: The group that sends the state.
        fetch: Returns the state and its size in bytes, within its own time limit, or raises.
        stop: Makes a running ``fetch`` fail at once.
        told: Called on the thread of the fetch when it has ended, with or without success.
    """

    def __init__(
        self,
        record: Record,
        source: str,
        fetch: Callable[[], tuple[Payload, int]],
        stop: Callable[[], None],
        told: Callable[[], None],
    ) -> None:
        self.record = record
        self.source = source
        """The group that sends the state."""
        self._fetch, self._stop = fetch, stop
        self._came: Future[tuple[Payload, int]] = Future()
        self._came.add_done_callback(lambda _: told())
        # not an executor, whose threads would delay the exit of a process that fails elsewhere
        threading.Thread(target=self._run, name="fft-learning", daemon=True).start()

    def _run(self) -> None:
        try:
            self._came.set_result(self._fetch())
        except BaseException as error:  # noqa: BLE001 - raised again in result()
            self._came.set_exception(error)

    @property
    def ended(self) -> bool:
        """Whether the fetch has ended, so that `result` returns at once."""
        return self._came.done()

    def result(self) -> tuple[Payload, int]:
        """Return the state and its size in bytes, or raise the error of the fetch."""
        return self._came.result()

    def close(self, limit: float) -> None:
        """End a fetch that is no longer needed; wait at most ``limit`` seconds for its end."""
        deadline = time.monotonic() + limit
        while not self.ended and time.monotonic() < deadline:
            self._stop()  # repeated, because the fetch may not have connected yet
            wait([self._came], _AGAIN_S)

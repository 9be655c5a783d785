"""The state of a learner on its way, while the learner's body runs. One thread for each fetch.

A group that joins is behind in its first txn: it fetches what the others hold while they, and it,
compute, gives no gradients, and takes the state over before it votes (`fft.train.healing`). After
Raft's learners: members that receive, and do not count yet.
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
    """One fetch of the state that ``record`` begins with.

    Args:
        fetch: gives the state and its size in bytes, within a limit of its own, or raises.
        stop: makes ``fetch`` fail at once, where it has begun.
        told: called on the thread of the fetch when it has ended, however it did.
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
        """The group whose state it is."""
        self._fetch, self._stop = fetch, stop
        self._came: Future[tuple[Payload, int]] = Future()
        self._came.add_done_callback(lambda _: told())
        # no executor: its threads would hold up the end of a process that dies of something else
        threading.Thread(target=self._run, name="fft-learning", daemon=True).start()

    def _run(self) -> None:
        try:
            self._came.set_result(self._fetch())
        except BaseException as error:  # noqa: BLE001 - raised again in result()
            self._came.set_exception(error)

    @property
    def ended(self) -> bool:
        """Whether `result` has something to say."""
        return self._came.done()

    def result(self) -> tuple[Payload, int]:
        """The state and its size. Raises what the fetch raised."""
        return self._came.result()

    def close(self, limit: float) -> None:
        """It is wanted no longer: end the fetch, and wait at most ``limit`` seconds for that."""
        deadline = time.monotonic() + limit
        while not self.ended and time.monotonic() < deadline:
            self._stop()  # again: it may not have had a connection yet
            wait([self._came], _AGAIN_S)

"""The state of a learner on its way, while the learner's body runs. One thread for each fetch.

A group that joins is behind in its first txn: it fetches what the others hold while they, and it,
compute, gives no gradients, and takes the state over before it votes (`fft.manager`). After Raft's
learners: members that receive, and do not count yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from fft.core.messages import Record

Payload = dict[str, Any]


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
        self._fetch, self._stop, self._told = fetch, stop, told
        self._came: tuple[Payload, int] | None = None
        self._failed: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fft-learning", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._came = self._fetch()
        except BaseException as error:  # noqa: BLE001 - raised again in result()
            self._failed = error
        self._ended.set()
        self._told()

    @property
    def ended(self) -> bool:
        """Whether `result` has something to say."""
        return self._ended.is_set()

    def result(self) -> tuple[Payload, int]:
        """The state and its size. Raises what the fetch raised."""
        self._ended.wait()
        if self._failed is not None:
            raise self._failed
        assert self._came is not None
        return self._came

    def close(self, limit: float) -> None:
        """It is wanted no longer: end the fetch, and wait at most ``limit`` seconds for that."""
        while not self._ended.wait(0.0):
            self._stop()  # again: it may not have had a connection yet
            if self._ended.wait(min(0.05, limit)) or (limit := limit - 0.05) <= 0:
                return

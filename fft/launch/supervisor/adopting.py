"""Adoption of groups whose supervisor was lost with its host, by a supervisor with enough spares.

Reads the bus and sends requests over it; starts no process. Owns one thread, because it waits for
answers.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from fft.errors import BusError
from fft.launch.supervisor.config import RunConfig, SupervisorError
from fft.launch.supervisor.ending import Absent
from fft.launch.supervisor.links import Links
from fft.messages.protocol import UnreadableMessage
from fft.util.log_sampler import LogSampler

LOOK_S = 1.0
"""Interval between two reads of the epoch, in seconds."""
_AGAIN_S = 15.0
"""Time before a group is requested again whose supervisor has answered, in seconds: that supervisor
restarts the group itself."""
_END_S = 2.0

logger = logging.getLogger(__name__)


class Adopter:
    """Claims lost groups for one supervisor, which keeps ``room`` current and takes `claimed`."""

    def __init__(self, config: RunConfig, links: Links, wake: Callable[[], None]) -> None:
        """Prepare the thread; `start` starts it.

        Args:
            wake: Called on the thread after a group was claimed.
        """
        self.room = 0
        """Number of groups that the spares suffice for."""
        self._links, self._wake = links, wake
        own = range(config.first_group, config.first_group + config.groups)
        others = [str(n) for n in range(config.groups_in_all) if n not in own]
        self._can = bool(others) and config.spares >= config.ranks
        self._absent = Absent(others)
        self._missed: frozenset[str] = frozenset()
        self._ask_at: dict[str, float] = {}
        self._claimed: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._troubles = LogSampler()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fft-adopting", daemon=True)

    def start(self) -> None:
        """Start looking for lost groups, if there can be any; the links must be open."""
        if self._can:
            self._thread.start()

    def claimed(self) -> Iterator[str]:
        """Yield the groups claimed since the last call, which the supervisor is to start."""
        with suppress(queue.Empty):
            while True:
                yield self._claimed.get_nowait()

    def close(self) -> None:
        """Stop looking. Idempotent; takes at most 2 s."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            if self._is_full():
                self._missed = frozenset()
                continue
            try:
                self._look()
            except (BusError, UnreadableMessage, SupervisorError) as error:
                if (count := self._troubles.add("look")) is not None:
                    logger.warning("cannot look for lost groups (%d by now): %s", count, error)

    def _is_full(self) -> bool:
        return self._stop.is_set() or self.room < 1

    def _is_wanted_no_more(self, group: str) -> bool:
        return self._is_full() or group not in self._absent.look(self._links.bus)

    def _look(self) -> None:
        """Claim one group that was missing in two looks in a row and whose holder is silent."""
        missing = self._absent.look(self._links.bus)
        again, self._missed = missing & self._missed, missing
        now = time.monotonic()
        for group in sorted(again):
            if self._ask_at.get(group, now) > now:
                continue
            if self._links.claims.adopt(group, partial(self._is_wanted_no_more, group)):
                self._claimed.put(group)
                self.room -= 1
                self._wake()
                return
            self._ask_at[group] = time.monotonic() + _AGAIN_S

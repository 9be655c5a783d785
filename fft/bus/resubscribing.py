"""A listener that is taken up again when it fell behind. Owns one subscription at a time.

Touches no transport.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from fft.bus.base import BusError, BusOverrun, ErrorBus, Subscription, Topic

logger = logging.getLogger(__name__)


def _nobody(_: BusError) -> None:
    """Nobody needs to know."""


class ResubscribingListener(Subscription):
    """Hears ``topic`` on ``bus`` until it is closed, or the bus itself is lost.

    What comes while it is being taken up again is missed. Both are logged. Raises what
    ``subscribe`` does.
    """

    def __init__(
        self,
        bus: ErrorBus,
        topic: Topic,
        on_message: Callable[[bytes], None],
        who: str,
        on_missed: Callable[[BusError], None] = _nobody,
        on_lost: Callable[[BusError], None] = _nobody,
    ) -> None:
        """``who``: the listener's name in the log. ``on_missed``: told once it hears again."""
        self._bus, self._topic, self._on_message, self._who = bus, topic, on_message, who
        self._on_missed, self._on_lost = on_missed, on_lost
        self._lock = threading.Lock()
        self._closed = False
        self._turn = 0
        self._present: Subscription | None = None
        self._take_up()

    def _take_up(self) -> None:
        with self._lock:
            self._turn += 1
            turn = self._turn
        present = self._bus.subscribe(self._on_message, self._lose, self._topic)
        with self._lock:
            if not self._closed and turn == self._turn:  # else it was lost before we came here
                self._present = present
                return
        present.close()

    def _lose(self, error: BusError) -> None:
        if isinstance(error, BusOverrun):
            logger.warning("%s missed messages of the topic %s: %s", self._who, self._topic, error)
            try:
                self._take_up()
            except BusError as again:
                error = again
            else:
                self._on_missed(error)
                return
        with self._lock:
            if self._closed:
                return
        logger.error("%s no longer receives the topic %s: %s", self._who, self._topic, error)
        self._on_lost(error)

    def close(self) -> None:
        """As every subscription's."""
        with self._lock:
            self._closed = True
            present = self._present
        if present is not None:
            present.close()

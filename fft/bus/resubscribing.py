"""A listener that subscribes again after an overrun. It owns one subscription at a time.

It uses the `ErrorBus` interface only, not a transport.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from fft.bus.base import BusOverrun, ErrorBus, Subscription, Topic
from fft.errors import BusError

logger = logging.getLogger(__name__)


def _nobody(_: BusError) -> None:
    """Ignore the error; the default callback."""


class ResubscribingListener(Subscription):
    """A listener of ``topic`` on ``bus`` that lasts until it is closed or the bus is lost.

    It misses the messages that arrive while it subscribes again. An overrun and a lost bus are
    logged. The constructor raises the errors of ``ErrorBus.subscribe``.
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
        """Subscribe.

        Args:
            who: Name of the listener in the log.
            on_missed: Called with the overrun, once the listener has subscribed again.
            on_lost: Called with the error that ends the subscription for good.
        """
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
            if not self._closed and turn == self._turn:  # else it was already lost and replaced
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
        """Stop listening; see ``Subscription.close``."""
        with self._lock:
            self._closed = True
            present = self._present
        if present is not None:
            present.close()

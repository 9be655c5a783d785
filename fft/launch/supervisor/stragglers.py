"""Hears the speed reports for the supervisor, and names the slow ranks.

Owns one subscription. Never acts by itself.
"""

from __future__ import annotations

import logging
import queue
from contextlib import suppress

from fft.bus import ErrorBus
from fft.bus.resubscribing import ResubscribingListener
from fft.health.detectors.straggler import Change, Stragglers
from fft.messages.protocol import UnreadableMessage
from fft.messages.speed import SpeedReport, decode_report

logger = logging.getLogger(__name__)


class PaceEar:
    """Hears words of progress from now on; what they say is asked for by one thread."""

    def __init__(self, bus: ErrorBus) -> None:
        self.stragglers = Stragglers()
        self._heard: queue.SimpleQueue[SpeedReport] = queue.SimpleQueue()
        self._subscription = ResubscribingListener(bus, "progress", self._hear, "the supervisor")

    def news(self) -> list[Change]:
        """Who has become slow since the last call, and who is slow no more."""
        changes: list[Change] = []
        with suppress(queue.Empty):
            while True:
                word = self._heard.get_nowait()
                rank = f"{word.group}/{word.rank}"
                changes += self.stragglers.hear(rank, word.inc, word.compute)
        return changes

    def too_slow(self, limit: float | None) -> set[str]:
        """Name who has become slow, or is slow no more, in the log; who is so by ``limit``."""
        for change in self.news():
            what = "straggler" if change.slow else "no longer a straggler"
            logger.warning("%s: %s", what, change.evidence)
        slow = self.stragglers.slow.items()
        return {rank for rank, factor in slow if limit is not None and factor >= limit}

    def close(self) -> None:
        """Stop listening."""
        self._subscription.close()

    def _hear(self, payload: bytes) -> None:
        with suppress(UnreadableMessage):  # nothing depends on it
            word = decode_report(payload)
            if isinstance(word, SpeedReport):
                self._heard.put(word)

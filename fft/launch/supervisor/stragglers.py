"""Hears the speed reports for the supervisor, and names the slow ranks.

Owns one subscription. Never acts by itself.
"""

from __future__ import annotations

import queue
from contextlib import suppress

from fft.bus import ErrorBus
from fft.bus.resubscribing import ResubscribingListener
from fft.health.detectors.straggler import Change, Stragglers
from fft.messages.protocol import UnreadableMessage
from fft.messages.speed import SpeedReport, decode_report


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

    def close(self) -> None:
        """Stop listening."""
        self._subscription.close()

    def _hear(self, payload: bytes) -> None:
        with suppress(UnreadableMessage):  # nothing depends on it
            word = decode_report(payload)
            if isinstance(word, SpeedReport):
                self._heard.put(word)

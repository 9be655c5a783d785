"""Receive the reports of ranks to the supervisor, and find the slow ranks.

Owns one subscription. Never acts by itself.
"""

from __future__ import annotations

import logging
import queue
import threading
from contextlib import suppress

from fft.bus import ErrorBus
from fft.bus.resubscribing import ResubscribingListener
from fft.errors import BusError
from fft.health.detectors.straggler import Change, Stragglers
from fft.messages.commands import fresh_id
from fft.messages.progress import (
    CheckpointReport,
    Mark,
    Report,
    SpeedReport,
    TraceReport,
    decode_report,
    encode_report,
)
from fft.messages.protocol import UnreadableMessage
from fft.trace.tail import JobView

_CATCH_UP_S = 2.0

logger = logging.getLogger(__name__)


class ProgressEar:
    """Receives progress reports from construction on; one thread asks for the results."""

    def __init__(self, bus: ErrorBus) -> None:
        self.stragglers = Stragglers()
        self._bus = bus
        self._mark, self._is_at_mark = Mark(fresh_id()), threading.Event()
        self._speeds: queue.SimpleQueue[SpeedReport] = queue.SimpleQueue()
        self._others: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._subscription = ResubscribingListener(bus, "progress", self._hear, "the supervisor")

    def news(self) -> list[Change]:
        """Return the ranks that became slow, or are no longer slow, since the last call."""
        changes: list[Change] = []
        with suppress(queue.Empty):
            while True:
                word = self._speeds.get_nowait()
                rank = f"{word.group}/{word.rank}"
                changes += self.stragglers.hear(rank, word.inc, word.compute)
        return changes

    def too_slow(self, limit: float | None) -> set[str]:
        """Log the ranks that became slow or are no longer slow.

        Returns:
            The ranks that are slower than the median by the factor ``limit``.
        """
        for change in self.news():
            what = "straggler" if change.slow else "no longer a straggler"
            logger.warning("%s: %s", what, change.evidence)
        slow = self.stragglers.slow.items()
        return {rank for rank, factor in slow if limit is not None and factor >= limit}

    def tell_troubles(self, view: JobView) -> None:
        """Log gaps in traces and checkpoints that were not taken.

        They come from the reports, which are added to ``view``, and from the traces in ``view``.
        """
        with suppress(queue.Empty):
            while True:
                word = self._others.get_nowait()
                if isinstance(word, CheckpointReport):
                    view.checkpoints.hear(word)
                elif isinstance(word, TraceReport):
                    rank = word.group, word.rank
                    known, view.gaps[rank] = view.gaps.get(rank), word.inc
                    if known == word.inc:  # logged already
                        continue
                    logger.warning(
                        "the trace of rank %s/%d cannot be written: %s; training continues, and "
                        "`fft audit` and `fft report` will lack what is lost",
                        word.group,
                        word.rank,
                        word.why,
                    )
        while troubles := view.checkpoints.troubles:
            logger.warning("%s; training continues", troubles.pop(0))

    def catch_up(self) -> None:
        """Wait until all earlier reports have arrived, for at most 2 s."""
        try:
            self._bus.broadcast(encode_report(self._mark), "progress")
        except BusError as error:
            logger.debug("what ranks said last may not be heard: %s", error)
            return
        self._is_at_mark.wait(_CATCH_UP_S)

    def close(self) -> None:
        """Stop listening."""
        self._subscription.close()

    def _hear(self, payload: bytes) -> None:
        with suppress(UnreadableMessage):  # reports are only informative
            word = decode_report(payload)
            if isinstance(word, SpeedReport):
                self._speeds.put(word)
            elif word == self._mark:
                self._is_at_mark.set()
            else:
                self._others.put(word)

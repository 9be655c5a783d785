"""Has the log and the trace of a rank name the place of each error of its own."""

from __future__ import annotations

import logging

from fft.protocol.state import Local
from fft.trace.writer import TraceWriter
from fft.util.error_places import Place, place_of

logger = logging.getLogger(__name__)

_REMEMBERED = 100
"""Places whose traceback was logged; a new one after so many is logged like a known one."""


class PlaceLog:
    """The errors of one rank. Any thread; formats tracebacks, so not for moments that count."""

    def __init__(self, trace: TraceWriter) -> None:
        self._trace = trace
        self._seen: set[tuple[str, str]] = set()

    def note(self, error: BaseException, local: Local) -> None:
        """Trace where ``error`` comes from, and log it: the traceback once for each place."""
        place = place_of(error)
        self._trace.note(
            "fault",
            {
                "type": place.type,
                "message": place.message,
                "where": place.where,
                "operation": place.operation,
                "traceback": place.text,
            },
            local,
        )
        self._log(place, local.step)

    def _log(self, place: Place, step: int) -> None:
        operation = f" ({place.operation})" if place.operation else ""
        text = f"an error of this rank in step {step}: {place.short()}{operation}"
        if place.signature in self._seen or len(self._seen) >= _REMEMBERED:
            logger.warning("%s", text)
            return
        self._seen.add(place.signature)
        logger.warning("%s\n%s", text, place.text.rstrip())

"""A participant's side of the words of progress: times its bodies, and says how long they took; and
says what others of the process have to report.

Owns one thread, which speaks in the topic ``progress`` and does nothing else: what is slow or lost
there is nothing to the step or to the engine. Knows nothing of torch.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from statistics import median_low
from types import TracebackType

from fft.bus.base import BusError, ErrorBus
from fft.messages.progress import Report, SpeedReport, encode_report, register_of
from fft.messages.protocol import Peer
from fft.util.errors import FftError
from fft.util.log_sampler import LogSampler

VARIABLE = "FFT_PROGRESS_INTERVAL"
DEFAULT_INTERVAL_S = 1.0
WORDS_A_SECOND = 100
"""Of a whole job, at most: in a big one each rank speaks more seldom."""
_KEEP = 1024
"""Bodies timed between two words, at most."""

logger = logging.getLogger(__name__)


def interval_from(given: float | None, env: Mapping[str, str] = os.environ) -> float:
    """Seconds between two words, 0 for none: ``given``, else ``FFT_PROGRESS_INTERVAL``, else 1.

    Raises FftError for what is no number of seconds.
    """
    text = env.get(VARIABLE) if given is None else str(given)
    try:
        seconds = DEFAULT_INTERVAL_S if not text else float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        where = VARIABLE if given is None else "progress_interval="
        raise FftError(f"{where} is {text!r}; give seconds, or 0 for no words of progress")
    return seconds


class _Waiting:
    """Around what waits for others, inside a body. One object, so that it costs next to nothing."""

    __slots__ = ("_pacer", "_since")

    def __init__(self, pacer: ProgressReporter) -> None:
        self._pacer = pacer
        self._since = threading.local()

    def __enter__(self) -> None:
        self._since.at = self._pacer.clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pacer.waited += self._pacer.clock() - self._since.at


class ProgressReporter:
    """Times the bodies of one participant. ``begin`` … ``committed`` on its main thread.

    With ``interval`` 0 there is no word of its own, and no thread until something is to be said.
    """

    def __init__(
        self,
        bus: ErrorBus,
        peer: Peer,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
        scope: str | None = None,
    ) -> None:
        self.clock = clock
        self.waiting = _Waiting(self)
        """To be entered around waits for others; not within itself."""
        self.waited = 0.0
        """Seconds in the present body that were no work of its own."""
        self._bus, self._peer, self._interval, self._scope = bus, peer, interval, scope
        self._begun = 0.0
        self._own = 0.0
        self._lock = threading.Lock()
        self._bodies: list[float] = []
        self._step = 0
        self._ranks = 1
        self._failed = LogSampler()
        self._to_say: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        """None: nothing more."""
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if interval > 0:
            self._start()

    def begin(self) -> None:
        """A txn begins."""
        self.waited = 0.0
        self._begun = self.clock()

    def end(self) -> None:
        """Its body has ended; what follows is the vote."""
        self._own = self.clock() - self._begun - self.waited

    def committed(self, step: int, ranks: int) -> None:
        """It was committed, as step number ``step``, by a job of so many ``ranks``."""
        with self._lock:
            self._step, self._ranks = step, ranks
            if len(self._bodies) < _KEEP:
                self._bodies.append(max(0.0, self._own))

    def say(self, report: Report) -> None:
        """Have the thread say ``report``. Any thread; never waits. Nothing after `close`."""
        with self._lock:
            if self._is_closed:
                return
            self._to_say.put(report)
            if self._thread is None:
                self._start()

    def close(self) -> None:
        """Say what was to be said, and nothing more. Idempotent; returns within 1 s, whatever the
        bus does."""
        with self._lock:
            self._is_closed = True
        self._to_say.put(None)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(1.0)

    def word(self) -> SpeedReport | None:
        """What there is to say since the last call; None: nothing was committed."""
        with self._lock:
            bodies, self._bodies = self._bodies, []
            step = self._step
        if not bodies:
            return None
        group, rank, inc = self._peer
        return SpeedReport(group, rank, inc, step, round(median_low(bodies), 6), self._scope)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._speak, name="fft-progress", daemon=True)
        self._thread.start()

    def _speak(self) -> None:
        due = self._next()
        while True:
            try:
                word = self._to_say.get(timeout=max(0.0, due - time.monotonic()))
                if word is None:
                    return
            except queue.Empty:
                due, word = self._next(), self.word()
                if word is None:
                    continue
            try:
                if (register := register_of(word)) is not None:
                    self._bus.write(register, encode_report(word))
                self._bus.broadcast(encode_report(word), "progress")
            except BusError as error:  # what is wrong with the bus, the engine finds out itself
                if (count := self._failed.add("word")) is not None:
                    logger.info("a word of progress was not said (%d by now): %s", count, error)

    def _next(self) -> float:
        """When the next word of its own is due."""
        if not self._interval:
            return time.monotonic() + threading.TIMEOUT_MAX / 2
        return time.monotonic() + max(self._interval, self._ranks / WORDS_A_SECOND)

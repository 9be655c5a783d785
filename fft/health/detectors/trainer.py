"""Judge one trainer by its pulse, on behalf of its monitor. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fft.health.detectors.base import GREEN, Level, Verdict
from fft.health.detectors.hang import Looked, Moved, ProgressConfig, ProgressDetector, Stopped
from fft.health.detectors.pulse import Reading, changes
from fft.health.detectors.silence import Seen, SilenceConfig, SilenceDetector
from fft.protocol.timeouts import HOST_LIMIT_S

# in intervals: the maximum time between two looks that counts; beyond it we were absent
_LOOKS = 2.0


@dataclass(frozen=True, slots=True)
class MonitorConfig:
    """Limits, in seconds. Raises ValueError for limits that are inconsistent.

    Attributes:
        max_s: Maximum time that a trainer may make no progress; set by the user.
        grace_s: Time from yellow to red.
        min_s: Minimum of the thresholds.
        interval_s: Time between two looks, and between records, which take 0.3 ms under load.
        term_s: Time from SIGTERM to SIGKILL.
        host_s: Silence of the whole host after which others go on without the trainer.
    """

    max_s: float = 600.0
    grace_s: float = 30.0
    min_s: float = 1.0
    interval_s: float = 0.05
    term_s: float = 5.0
    host_s: float = HOST_LIMIT_S

    def __post_init__(self) -> None:
        if not (self.interval_s > 0 and self.term_s >= 0 and self.host_s > 0):
            raise ValueError("need interval_s > 0, term_s >= 0 and host_s > 0")
        self.progress()

    def progress(self) -> ProgressConfig:
        """Return the limits for a main thread that should move."""
        return ProgressConfig(self.max_s, self.grace_s, self.min_s, look_s=_LOOKS * self.interval_s)

    def silence(self) -> SilenceConfig:
        """Return the limits for the beats of a process whose main thread waits."""
        return SilenceConfig(self.max_s, self.grace_s, self.min_s, look_s=_LOOKS * self.interval_s)


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a trainer that is alive: its time, and the pulse."""

    at: float
    reading: Reading
    stopped: bool = False
    """The kernel reports that the process is stopped. It need not be checked while it beats."""
    busy: bool = False
    """A child that the main thread started in this txn, and waits for, is computing."""


class Monitor:
    """A judge of one trainer by its pulse. Pure: it takes looks and returns verdicts.

    While the main thread waits for a peer only the beats count, which should then come regardless
    of the peer: without them the process is stopped, or a thread keeps the interpreter lock.
    Otherwise only the main thread counts: if beats fail, it does not move either. A process that is
    stopped is suspected in any state.
    """

    def __init__(self, config: MonitorConfig | None = None) -> None:
        config = config or MonitorConfig()
        self._progress = ProgressDetector(config.progress())
        self._silence = SilenceDetector("a process whose main thread waits", config.silence())
        self._seen = Reading()
        self._stopped = False
        self._min_s = config.min_s
        self._beat_at = -math.inf
        self._suspected_at: float | None = None

    def observe(self, event: Look) -> None:
        """Take one look."""
        self._progress.observe(Looked(event.at))
        for change in changes(self._seen, event.reading):
            self._progress.observe(change)
        if event.busy:
            self._progress.observe(Moved(event.at))
        if event.stopped != self._stopped:
            self._stopped = event.stopped
            self._progress.observe(Stopped(event.at, event.stopped))
        self._silence.observe(Seen(event.at, event.reading.beat or None))
        if event.reading.beat != self._seen.beat:
            self._beat_at = event.at
        self._seen = event.reading
        if self.verdict(event.at).level is Level.GREEN:
            self._suspected_at = None
        elif self._suspected_at is None:
            self._suspected_at = event.at

    def verdict(self, now: float) -> Verdict:
        """Return the verdict at ``now``, in monotonic seconds."""
        if self._seen.left:
            return GREEN
        progress = self._progress.verdict(now)
        if self._seen.waiting and not self._seen.atomic:
            return max(self._silence.verdict(now), progress, key=lambda verdict: verdict.level)
        return progress

    def is_mute(self, now: float) -> bool:
        """Whether no thread of it has run recently."""
        return now - self._beat_at > self._min_s / 2

    def stands_still(self, now: float) -> bool:
        """Whether the main thread has not run recently, so that its children must be checked."""
        return now - max(self._seen.moved, self._seen.marked) > self._min_s / 4

    def concerns_others(self, now: float) -> bool:
        """Whether others must be notified, because the trainer cannot or did not recover by itself.

        Either no thread of it has run recently, or its main thread is still stuck although its own
        rollback should have unwound it.
        """
        if self._suspected_at is None:
            return False
        return self.is_mute(now) or now - self._suspected_at > self._min_s

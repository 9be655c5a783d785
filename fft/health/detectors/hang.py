"""Detect that a main thread hangs, from the times at which it moved. Pure.

A main thread must meet three conditions. First, it must move at least every ``threshold`` seconds:
a txn begins or ends, a mark is set (a ping, a reduction), or the interpreter runs a bytecode.
Second, inside a txn or an atomic section it must move in another way than by bytecodes at least
every ``max_s`` seconds, because a loop that waits in vain runs bytecodes too. Third, the process
must not be stopped (SIGSTOP) for longer than a txn may stand still, even outside a txn. Outside a
txn a main thread has time for work of the user's, but its peers may be in the next txn already.

The threshold follows the job: ``factor`` times the median of the last step times, between ``min_s``
and ``max_s``. The median keeps a few slow steps (a checkpoint, a compilation) from raising it. A
threshold that raised an alarm doubles for this step, so that a step that is slow for a good reason
finishes at last; a commit resets that. An alarm that was raised in a txn ends only with a mark or
the end of the txn.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import assert_never

from fft.health.detectors.base import GREEN, Attention, Level, Verdict


@dataclass(frozen=True, slots=True)
class Begun:
    """A txn at ``step`` begins."""

    at: float
    step: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The txn has ended.

    Attributes:
        took_s: Its duration, if its begin was not observed.
        count: Number of txns that have ended since the last event of this kind, including this one.
    """

    at: float
    committed: bool
    took_s: float | None = None
    count: int = 1


@dataclass(frozen=True, slots=True)
class Marked:
    """Work was done: a ping, a reduction issued."""

    at: float


@dataclass(frozen=True, slots=True)
class Moved:
    """The main thread ran a bytecode, which does not prove that it does useful work."""

    at: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """The main thread begins or stops waiting for a peer, whose faults are not its own."""

    at: float
    on: bool


@dataclass(frozen=True, slots=True)
class Atomic:
    """A critical section of the user's begins or ends; only ``max_s`` limits it."""

    at: float
    on: bool


@dataclass(frozen=True, slots=True)
class Looked:
    """The observer looked, whether or not there was anything to see."""

    at: float


@dataclass(frozen=True, slots=True)
class Stopped:
    """The whole process was found stopped, or running again."""

    at: float
    on: bool


ProgressEvent = Begun | Ended | Marked | Moved | Waiting | Atomic | Looked | Stopped


@dataclass(frozen=True, slots=True)
class ProgressConfig:
    """Limits, in seconds. Raises ValueError for limits that are inconsistent.

    Attributes:
        max_s: Maximum time that the main thread may stand still; set by the user.
        grace_s: Time from yellow to red.
        min_s: Minimum of the threshold.
        factor: Threshold as a multiple of the median step time.
        window: Number of step times in the median.
        samples: Number of txns that must be committed before the median is used; until then the
            limit is ``max_s``. An observer may have seen fewer of them, since short ones end
            between looks.
        look_s: Maximum time between two looks of the observer that counts.
    """

    max_s: float = 600.0
    grace_s: float = 30.0
    min_s: float = 1.0
    factor: float = 5.0
    window: int = 32
    samples: int = 3
    look_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.min_s <= self.max_s < math.inf:
            raise ValueError(f"need 0 < min_s <= max_s, not {self.min_s:g} and {self.max_s:g}")
        if not (self.grace_s >= 0 and self.factor >= 1 and self.look_s > 0):
            raise ValueError("need grace_s >= 0, factor >= 1 and look_s > 0")
        if not 1 <= self.samples <= self.window:
            raise ValueError(f"need 1 <= samples <= window, not {self.samples} and {self.window}")


class ProgressDetector:
    """Judges one main thread. Green until the first observation that is not a look."""

    def __init__(self, config: ProgressConfig | None = None) -> None:
        self.config = config or ProgressConfig()
        self._attention = Attention(self.config.look_s)
        self._times: deque[float] = deque(maxlen=self.config.window)
        self._step: int | None = None
        self._begun_at: float | None = None
        self._waiting = False
        self._atomic = False
        self._moved = _Since()
        self._worked = _Since()
        self._stopped = _Since()
        self._alarms = 0
        self._commits = 0

    # --- observing ---

    def observe(self, event: ProgressEvent) -> None:
        """Take one event. Times may run back a little; the newest counts."""
        if isinstance(event, Looked):
            late = self._attention.look(event.at)
            self._moved.excuse(late)
            self._worked.excuse(late)
            self._stopped.excuse(late)
            return
        if isinstance(event, Stopped):
            self._stopped = _Since()
            if event.on:
                self._stopped.now(event.at, self._attention)
            return
        if self._excess(self._moved, event.at, self.threshold()) >= 0:
            if isinstance(event, Moved) and self.in_txn:
                return  # the signals for unwinding a step wake a main thread that stays stuck
            self._alarms += 1
        match event:
            case Begun(at=at, step=step):
                self._begin(at, step)
            case Ended(at=at, committed=committed, took_s=took):
                self._end(at, committed, took)
                self._commits += event.count if committed else 0
            case Waiting(on=on):
                self._waiting = on
            case Atomic(on=on):
                self._atomic = on
            case Marked() | Moved():
                pass
            case _:
                assert_never(event)
        self._moved.now(event.at, self._attention)
        if not isinstance(event, Moved):
            self._worked.now(event.at, self._attention)

    def _begin(self, at: float, step: int) -> None:
        if step != self._step:
            self._alarms = 0
        self._step, self._begun_at = step, at

    def _end(self, at: float, committed: bool, took: float | None) -> None:
        if took is None and self._begun_at is not None:
            took = at - self._begun_at
        self._begun_at = None
        if committed:
            self._alarms = 0
            if took is not None and took >= 0:
                self._times.append(took)

    # --- judging ---

    @property
    def in_txn(self) -> bool:
        """Whether a txn is open."""
        return self._begun_at is not None

    def threshold(self) -> float:
        """Return the maximum time without a move in the present state, in seconds."""
        config = self.config
        if self._atomic or not self.in_txn or not self._is_timed:
            return config.max_s
        return min(config.max_s, self._base() * 2.0 ** min(self._alarms, 64))

    @property
    def _is_timed(self) -> bool:
        return self._commits >= self.config.samples and bool(self._times)

    def _base(self) -> float:
        """Return the time that a txn may stand still, by the timed steps; at least ``min_s``."""
        middle = median(self._times) if self._times else 0.0
        return max(self.config.min_s, self.config.factor * middle)

    def verdict(self, now: float) -> Verdict:
        """Return green, yellow past a limit, or red ``grace_s`` later, with the limit as reason."""
        still = self._excess(self._moved, now, self.threshold())
        idle = -math.inf
        if self.in_txn or self._atomic:
            idle = self._excess(self._worked, now, self.config.max_s)
        stopped = -math.inf
        if self._stopped.at is not None:
            bound = min(self.config.max_s, self._base())
            stopped = self._stopped.seconds(now, self._attention) - bound
        excess = max(still, idle, stopped)
        if excess < 0:
            return GREEN
        if stopped >= max(still, idle):
            reason = self._is_stopped(now)
        else:
            reason = self._stands_still(now) if still >= idle else self._runs_idle(now)
        if excess < self.config.grace_s:
            return Verdict(Level.YELLOW, reason)
        return Verdict(Level.RED, f"{reason}, and the {self.config.grace_s:g} s of grace are over")

    def _excess(self, since: _Since, now: float, limit: float) -> float:
        """Return the seconds by which the time since then exceeds ``limit``; may be negative."""
        if self._waiting or since.at is None:
            return -math.inf
        return since.seconds(now, self._attention) - limit

    def _stands_still(self, now: float) -> str:
        seconds = self._moved.seconds(now, self._attention)
        return f"no progress for {seconds:.2f} s {self._place()} ({self._explained()})"

    def _runs_idle(self, now: float) -> str:
        seconds = self._worked.seconds(now, self._attention)
        return (
            f"the interpreter runs, but no progress was marked for {seconds:.2f} s {self._place()} "
            f"(the maximum is {self.config.max_s:g} s)"
        )

    def _is_stopped(self, now: float) -> str:
        seconds = self._stopped.seconds(now, self._attention)
        return (
            f"no progress: the process has been stopped for {seconds:.2f} s {self._place()} "
            f"(SIGSTOP; threshold {min(self.config.max_s, self._base()):.2f} s)"
        )

    def _place(self) -> str:
        if self._step is None:
            return "before the first step"
        return f"at step {self._step}" if self.in_txn else f"after step {self._step}"

    def _explained(self) -> str:
        threshold, config = self.threshold(), self.config
        if self._atomic:
            return f"in an atomic section; the maximum is {config.max_s:g} s"
        if not self.in_txn:
            return f"outside every txn; the maximum is {config.max_s:g} s"
        if not self._is_timed:
            return f"the maximum is {config.max_s:g} s; too few steps were timed for a shorter one"
        return f"threshold {threshold:.2f} s = {self._derived(threshold)}"

    def _derived(self, threshold: float) -> str:
        config, middle = self.config, median(self._times)
        wanted = config.factor * middle
        text = f"{config.factor:g} × the median {middle:.2g} s of {len(self._times)} steps"
        if wanted < config.min_s:
            text = f"the minimum, which is more than {text}"
        if self._alarms:
            text += f", doubled {self._alarms} × after alarms at this step"
        if threshold >= config.max_s:
            text = f"the maximum; otherwise {text}"
        return text


class _Since:
    """Time since an event, minus the time that the observer missed."""

    __slots__ = ("_excused", "at")

    def __init__(self) -> None:
        self.at: float | None = None
        self._excused = 0.0

    def now(self, at: float, attention: Attention) -> None:
        """Record the event at ``at``; an earlier time than the recorded one is ignored."""
        if self.at is None or at >= self.at:
            self.at, self._excused = at, attention.missed_since(at)

    def excuse(self, seconds: float) -> None:
        """Exclude this many seconds from the time."""
        if self.at is not None:
            self._excused += seconds

    def seconds(self, now: float, attention: Attention) -> float:
        """Return the seconds that count, at ``now``; 0 if there was no event."""
        if self.at is None:
            return 0.0
        return now - self.at - self._excused - attention.late(now)

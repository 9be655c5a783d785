"""Judge one trainer by its pulse, on behalf of its monitor. Pure.

Detect that a main thread hangs, from the times at which it moved. Pure.

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

The others wait for the first steps of a process that joins their job. In these only marks count,
and ``factor`` times the median step of the other ranks is the limit. Beyond it the process is
suspected, but it is ended only beyond the other limits: it may compile.

The pulse: a record in shared memory from which a monitor reads a trainer's progress.

Pure with respect to clocks and threads; touches one anonymous memory file (Linux). One process
writes, and another reads. (The reader also writes one word: that it is going to end the writer.)
Neither waits for the other, so a writer that is stopped in the middle, holds the interpreter lock,
or is dead can be read like any other. Each field is 8 bytes, aligned, and stored at once (a
``memoryview`` item); each is meaningful by itself. A reader takes the record twice until it finds
it unchanged (double collect: Afek et al., *Atomic snapshots of shared memory*, 1993), a few times
at most; the next look corrects a record that is still inconsistent. The file is sealed at its size,
so a reader cannot be made to read beyond its end.

Times are seconds on ``CLOCK_MONOTONIC``, which all processes of a host share.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final, assert_never

from fft.health.detectors.base import GREEN, Attention, Level, Verdict, counted
from fft.health.detectors.silence import Seen, SilenceConfig, SilenceDetector
from fft.protocol.timeouts import HOST_LIMIT_S

# --- hang ---


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
    """The observer looked, whether or not there was anything to see.

    ``starved``: seconds since the last look in which the process waited for a core.
    """

    at: float
    starved: float = 0.0


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
            limit follows the steps of other ranks, or is ``max_s``. An observer may have seen
            fewer of them, since short ones end between looks.
        look_s: Maximum time between two looks of the observer that counts.
        first_s: Minimum of the threshold while it follows the steps of other ranks, because the
            first steps of a process load what the later ones use.
    """

    max_s: float = 600.0
    grace_s: float = 30.0
    min_s: float = 1.0
    factor: float = 5.0
    window: int = 32
    samples: int = 3
    look_s: float = math.inf
    first_s: float = 10.0

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
        self.expected_s = 0.0
        """Median time of a step on the other ranks of the job; 0 if it is unknown."""
        self.joiner_s = 0.0
        """Least limit for a joiner in a step for which other ranks wait; 0 for other processes."""
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
            self._moved.excuse(late, event.starved)
            self._worked.excuse(late, event.starved)
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
        elif not isinstance(event, Moved) and self._lateness(event.at) >= 0:
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
        # a joiner's first steps keep the alarms, since they have no times of their own
        if step != self._step and self._is_timed:
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
        if self._atomic or not self.in_txn or not (self._is_timed or self.expected_s):
            return config.max_s
        base = self._base() if self._is_timed else max(config.first_s, self._base())
        return self._raised(base)

    def _raised(self, base: float) -> float:
        """Return a threshold after the alarms so far."""
        return min(self.config.max_s, base * 2.0 ** min(self._alarms, 64))

    @property
    def _is_timed(self) -> bool:
        return self._commits >= self.config.samples and bool(self._times)

    def _base(self) -> float:
        """Return the time that a txn may stand still, by the timed steps; at least ``min_s``."""
        middle = median(self._times) if self._is_timed else self.expected_s
        middle = middle or (median(self._times) if self._times else 0.0)
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
            is_late = self._lateness(now) >= 0
            return Verdict(Level.YELLOW, self._is_late(now)) if is_late else GREEN
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

    def _lateness(self, now: float) -> float:
        """Return the seconds by which a joiner exceeds the time that the others' steps allow it.

        Bytecodes and compilations count as standing still, because the others wait for them, too.
        """
        if not (self.joiner_s and self.in_txn and self.expected_s) or self._is_timed:
            return -math.inf
        return self._excess(self._worked, now, self._joiners_limit)

    @property
    def _joiners_limit(self) -> float:
        return self._raised(max(self.joiner_s, self._base()))

    def _is_late(self, now: float) -> str:
        seconds = self._worked.seconds(now, self._attention)
        return (
            f"no progress was marked for {seconds:.2f} s {self._place()} by a process that joins "
            f"(threshold {self._joiners_limit:.2f} s, from {self.config.factor:g} × the median "
            f"{self.expected_s:.2g} s of the other ranks)"
        )

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
        if not self._is_timed and self.expected_s:
            first, doubled = config.first_s, f", doubled {self._alarms} ×" if self._alarms else ""
            text = f"{config.factor:g} × the median {self.expected_s:.2g} s of the other ranks"
            return f"threshold {threshold:.2f} s, from {text}, at least {first:g} s{doubled}"
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
    """Time since an event, minus the time that the observer missed, and waits for a core."""

    __slots__ = ("_excused", "_starved", "at")

    def __init__(self) -> None:
        self.at: float | None = None
        self._excused = self._starved = 0.0

    def now(self, at: float, attention: Attention) -> None:
        """Record the event at ``at``; an earlier time than the recorded one is ignored."""
        if self.at is None or at >= self.at:
            self.at, self._excused, self._starved = at, attention.missed_since(at), 0.0

    def excuse(self, missed: float, starved: float = 0.0) -> None:
        """Exclude seconds that the observer missed, or in which the process waited for a core."""
        if self.at is not None:
            self._excused += missed
            self._starved += starved

    def seconds(self, now: float, attention: Attention) -> float:
        """Return the seconds that count, at ``now``; 0 if there was no event."""
        if self.at is None:
            return 0.0
        return counted(now - self.at - self._excused - attention.late(now), self._starved)


# --- pulse ---

_MAGIC: Final = 0x3_4646_5450  # "FFTP", with the version of this layout before it
_BEAT, _MOVED, _MARKED, _BEGUN, _ENDED, _TOOK = range(1, 7)
_STEP, _COMMITS, _OPEN, _WAITING, _ATOMIC, _LEFT, _DOOMED = range(7, 14)
_EXPECTED, _JOINS = 14, 15
_SLOTS: Final = 16
_BYTES: Final = 8 * _SLOTS
_COLLECTS: Final = 4


@dataclass(frozen=True, slots=True)
class Reading:
    """The record at one time. Times are in seconds; 0 means never.

    Attributes:
        beat: Time at which any thread of the process last ran.
        moved: Time at which the main thread was last seen to run a bytecode.
        marked: Time of the main thread's last mark, or begin or end of a txn or section.
        begun: Time at which the newest txn began.
        ended: Time at which the last txn ended.
        took: Duration of the last committed txn.
        expected: Median duration of a step on the other ranks.
        step: Step of the newest txn.
        commits: Number of committed txns.
        in_txn: Whether a txn is open.
        waiting: Whether the main thread waits for a peer.
        atomic: Whether it is in an atomic section.
        joins: Least limit if other ranks wait in a first step of this process, else 0.
        left: Whether the process has marked that it ends on purpose.
    """

    beat: float = 0.0
    moved: float = 0.0
    marked: float = 0.0
    begun: float = 0.0
    ended: float = 0.0
    took: float = 0.0
    expected: float = 0.0
    step: int = 0
    commits: int = 0
    in_txn: bool = False
    waiting: bool = False
    atomic: bool = False
    joins: float = 0.0
    left: bool = False


class Pulse:
    """The writing side. All methods but `beat` and `moved` belong to the main thread.

    ``clock`` returns monotonic seconds (``time.monotonic``). Raises OSError if there is no memory.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.fd = os.memfd_create("fft-pulse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """The memory file; a process that inherits it can read the pulse. Open until ``close``."""
        os.ftruncate(self.fd, _BYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = mmap.mmap(self.fd, _BYTES)
        whole = memoryview(self._map)
        self._times = whole.cast("d")
        self._counts = whole.cast("q")
        self._counts[0] = _MAGIC
        self.waiting = _Section(self, _WAITING)
        """``with pulse.waiting:`` the main thread waits for a peer. May be nested."""
        self.atomic = _Section(self, _ATOMIC)
        """``with pulse.atomic:`` it is in a critical section of the user's. May be nested."""

    # --- any thread ---

    @property
    def doomed(self) -> bool:
        """Whether the reader is about to end this process; then a SIGTERM is not a drain
        request."""
        return self.fd >= 0 and self._counts[_DOOMED] > 0

    def beat(self) -> None:
        """Record that some thread of this process runs."""
        self._times[_BEAT] = self._clock()

    def moved(self) -> None:
        """Record that the main thread ran a bytecode just now."""
        self._times[_MOVED] = self._clock()

    def expect(self, seconds: float) -> None:
        """Record how long a step takes on the other ranks of the job."""
        if self.fd >= 0:
            self._times[_EXPECTED] = seconds

    # --- main thread ---

    def ping(self) -> None:
        """Record that work was done."""
        self._times[_MARKED] = self._clock()

    def begin(self, step: int) -> None:
        """Record that a txn at ``step`` begins."""
        self._counts[_STEP] = step
        self._times[_BEGUN] = self._times[_MARKED] = self._clock()
        self._counts[_OPEN] = 1

    def end(self, committed: bool) -> None:
        """Record that the txn has ended; without an open txn this is only a mark."""
        now = self._times[_MARKED] = self._clock()
        if not self._counts[_OPEN]:
            return
        self._counts[_OPEN] = 0
        self._times[_ENDED] = now
        if committed:
            self._times[_TOOK] = now - self._times[_BEGUN]
            self._counts[_COMMITS] += 1

    def join(self, least_s: float) -> None:
        """Record the least limit if other ranks wait in a first step of this process, else 0."""
        if self._times[_JOINS] != least_s:
            self.ping()
            self._times[_JOINS] = least_s

    def leave(self) -> None:
        """Record that this process ends on purpose, so its end is not a fault."""
        self._counts[_LEFT] = 1

    def close(self) -> None:
        """Release the memory; nothing may be written any more. Idempotent."""
        if self.fd < 0:
            return
        self._times.release()
        self._counts.release()
        os.close(self.fd)
        self.fd = -1


class _Section:
    """A section of the main thread that the record shows; a reusable context manager."""

    __slots__ = ("_pulse", "_slot")

    def __init__(self, pulse: Pulse, slot: int) -> None:
        self._pulse = pulse
        self._slot = slot

    def __enter__(self) -> None:
        self._pulse.ping()
        self._pulse._counts[self._slot] += 1

    def __exit__(self, *raised: object) -> None:
        # The mark comes first, so that a reader never sees the end of a wait with an old mark.
        self._pulse.ping()
        self._pulse._counts[self._slot] -= 1


class PulseReader:
    """The reading side. ``fd`` may be closed after construction. It writes only in `doom`."""

    def __init__(self, fd: int) -> None:
        """Map the memory. Raises ValueError if ``fd`` is not a pulse of this version."""
        if os.fstat(fd).st_size != _BYTES:
            raise ValueError(f"descriptor {fd} is not a pulse: it has not {_BYTES} bytes")
        self._map = mmap.mmap(fd, _BYTES)
        whole = memoryview(self._map)
        self._times = whole.cast("d")
        self._counts = whole.cast("q")
        if self._counts[0] != _MAGIC:
            raise ValueError(f"descriptor {fd} is not a pulse of this version of FFT")

    def read(self) -> Reading:
        """Return the current record. Never blocks, regardless of the writer."""
        newest = self._collect()
        for _ in range(_COLLECTS):
            before, newest = newest, self._collect()
            if before == newest:
                break
        return newest

    def doom(self) -> None:
        """Mark that the writer is going to be ended."""
        self._counts[_DOOMED] = 1

    def _collect(self) -> Reading:
        times, counts = self._times, self._counts
        return Reading(
            beat=times[_BEAT],
            moved=times[_MOVED],
            marked=times[_MARKED],
            begun=times[_BEGUN],
            ended=times[_ENDED],
            took=times[_TOOK],
            expected=times[_EXPECTED],
            step=counts[_STEP],
            commits=counts[_COMMITS],
            in_txn=counts[_OPEN] > 0,
            waiting=counts[_WAITING] > 0,
            atomic=counts[_ATOMIC] > 0,
            joins=times[_JOINS],
            left=counts[_LEFT] > 0,
        )

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._times.release()
        self._counts.release()


def changes(before: Reading, after: Reading) -> list[ProgressEvent]:
    """Return the events between two readings, for a `ProgressDetector`.

    If several txns ended in between, only the last is in an event, with its duration and their
    number. This is a fair sample of step times, since it depends only on when the reader looks.
    """
    events: list[ProgressEvent] = []
    if after.commits != before.commits:
        count = after.commits - before.commits
        events.append(Ended(after.ended, committed=True, took_s=after.took, count=count))
    elif after.ended != before.ended:
        events.append(Ended(after.ended, committed=False))
    if after.in_txn and after.begun != before.begun:
        events.append(Begun(after.begun, after.step))
    if after.atomic != before.atomic:
        events.append(Atomic(after.marked, after.atomic))
    if after.waiting != before.waiting:
        events.append(Waiting(after.marked, after.waiting))
    if after.marked != before.marked:
        events.append(Marked(after.marked))
    if after.moved != before.moved:
        events.append(Moved(after.moved))
    return events


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
    starved: float = 0.0
    """Seconds since the last look in which a thread of the trainer waited for a core. They need not
    be read while it makes progress."""


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
        self._progress.expected_s = event.reading.expected
        self._progress.observe(Looked(event.at, event.starved))
        for change in changes(self._seen, event.reading):
            self._progress.observe(change)
        self._progress.joiner_s = event.reading.joins  # after the events that end its delay
        if event.busy:
            self._progress.observe(Moved(event.at))
        if event.stopped != self._stopped:
            self._stopped = event.stopped
            self._progress.observe(Stopped(event.at, event.stopped))
        self._silence.observe(Seen(event.at, event.reading.beat or None, event.starved))
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

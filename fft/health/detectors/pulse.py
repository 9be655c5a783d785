"""The pulse: a record in shared memory from which a monitor reads a trainer's progress.

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
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fft.health.detectors.hang import Atomic, Begun, Ended, Marked, Moved, ProgressEvent, Waiting

_MAGIC: Final = 0x1_4646_5450  # "FFTP", with the version of this layout before it
_BEAT, _MOVED, _MARKED, _BEGUN, _ENDED, _TOOK = range(1, 7)
_STEP, _COMMITS, _OPEN, _WAITING, _ATOMIC, _LEFT, _DOOMED = range(7, 14)
_SLOTS: Final = 14
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
        step: Step of the newest txn.
        commits: Number of committed txns.
        in_txn: Whether a txn is open.
        waiting: Whether the main thread waits for a peer.
        atomic: Whether it is in an atomic section.
        left: Whether the process has marked that it ends on purpose.
    """

    beat: float = 0.0
    moved: float = 0.0
    marked: float = 0.0
    begun: float = 0.0
    ended: float = 0.0
    took: float = 0.0
    step: int = 0
    commits: int = 0
    in_txn: bool = False
    waiting: bool = False
    atomic: bool = False
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
            step=counts[_STEP],
            commits=counts[_COMMITS],
            in_txn=counts[_OPEN] > 0,
            waiting=counts[_WAITING] > 0,
            atomic=counts[_ATOMIC] > 0,
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

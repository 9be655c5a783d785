"""The history of a job, computed from the records of its head register: steps, memberships, faults
and goodput.

A rollback accuses a rank if its cause is evidence against it: its own step function failed, or
others saw it end, hang or stay away. A cause that reports only a failed collective or an expired
wait accuses no rank: its author was only the first to notice. `CauseCode` documents which causes
accuse.

Pure. The same class serves ``fft run`` and ``fft watch`` while a job runs, and ``fft report``
afterwards. Times are seconds on one clock; records arrive in the order of their numbers, and a
record that was seen before is ignored.
"""

from __future__ import annotations

import re
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fft.messages.causes import CauseCode
from fft.messages.progress import Goal
from fft.messages.protocol import Record

_RECENT = 40
"""Number of commits over which the present rate is averaged."""
_STALE_S = 10.0
"""Time without a commit after which there is no present rate."""
_PEER = re.compile(r"(?P<group>[^\s,;:(]+)/(?P<rank>\d+)#\d+")
"""Compact name of a participant: ``GROUP/RANK#INCARNATION``."""


def readable_cause(cause: str) -> str:
    """Return the first line of a cause with the names of participants spelled out.

    The reporting participant is omitted if the text after it starts with another participant.
    """
    text = cause.partition("\n")[0]
    author, _, rest = text.partition(": ")
    if _PEER.fullmatch(author) and _PEER.match(rest):
        text = rest
    return _PEER.sub(r"group \g<group> rank \g<rank>", text)


# --- blame ---

Place = tuple[str, int]
"""(group, rank): a place in the job, independent of the process that holds it."""


@dataclass(frozen=True)
class Rollback:
    """One ABORT.

    Attributes:
        named: Ranks that its cause is evidence against; it may be empty.
        is_open: Gradients of replicas differed without a majority, so that only later attempts can
            show which replica is wrong.
    """

    n: int
    step: int
    by: str
    cause: str
    named: frozenset[Place]
    is_open: bool = False

    @classmethod
    def of(cls, record: Record) -> Rollback:
        """Return the rollback that a record decides."""
        named = frozenset((peer.group, peer.rank) for peer in record.accused)
        is_open = not named and record.code == CauseCode.GRADIENTS_DIFFER
        return cls(record.n, record.step, str(record.by), record.cause, named, is_open)


def place_text(place: Place) -> str:
    """Return the place in display form: ``GROUP/RANK``."""
    return f"{place[0]}/{place[1]}"


def named_by_all(rollbacks: Iterable[Rollback], at_least: int) -> Place | None:
    """Return the one rank that all rollbacks name, if there are at least ``at_least``.

    Open rollbacks name no rank and are ignored. A run of two or more rollbacks needs at least two
    that are not open.
    """
    run = list(rollbacks)
    closed = [each.named for each in run if not each.is_open]
    if len(run) < max(1, at_least) or len(closed) < min(2, len(run)):
        return None
    everywhere = frozenset.intersection(*closed)
    return next(iter(everywhere)) if len(everywhere) == 1 else None


# --- the course ---


@dataclass(slots=True)
class EpochStats:
    """The commits of one epoch.

    In an asynchronous job each synchronization begins an epoch. These count as one until a group
    joins or leaves, or a fault occurs.
    """

    epoch: int
    members: frozenset[str]
    formed: float
    """Time of the epoch record."""
    step: int
    """Committed steps at its beginning."""
    commits: int = 0
    first_slices: int = 0
    """Slices of the data that its first commit has consumed."""
    slices: int = 0
    """Slices that its other commits have consumed."""
    pause: float = 0.0
    """Seconds from the last commit of an earlier epoch to its first one; 0 without an earlier
    commit."""
    has_fault_before: bool = False
    """Whether a fault occurred in this pause."""
    first: float = 0.0
    """Time of its first commit."""
    last: float = 0.0

    @property
    def rate(self) -> float | None:
        """Slices per second between its first and last commit; None if there are too few."""
        return self.slices / (self.last - self.first) if self.last > self.first else None


@dataclass(slots=True)
class Fault:
    """One rollback of the job."""

    rollback: Rollback
    at: float
    cause: str
    code: str
    since: float
    """Time of the last commit or rollback before it; its own time if there was neither."""
    lost: tuple[str, ...] = ()
    """Groups that the next epoch lacks, except those that left on purpose."""
    committed: float | None = None
    """Time of the next commit."""
    after: EpochStats | None = None
    """The epoch of the next commit."""
    before: EpochStats | None = None
    is_last: bool = True
    """No other rollback came between this one and the next commit."""

    @property
    def n(self) -> int:
        """Number of its record."""
        return self.rollback.n

    @property
    def step(self) -> int:
        """The step that was rolled back."""
        return self.rollback.step

    @property
    def is_recomputation(self) -> bool:
        """Whether the step was only computed again, to compare its gradients."""
        return self.code == CauseCode.RECOMPUTED and not self.lost

    @property
    def cost_s(self) -> float | None:
        """Seconds from the rollback to the next commit, or None if there was none."""
        return None if self.committed is None else self.committed - self.at


@dataclass(slots=True)
class Absence:
    """The time during which one group was not in the job."""

    group: str
    step: int
    at: float
    planned: bool
    """The group left on purpose, after a commit."""
    n: int
    """Number of the record that ended its last epoch."""
    steps: int = 0
    """Steps committed without it."""
    back: float | None = None
    """Time of the epoch with which it returned."""

    def seconds(self, last: float | None) -> float:
        """Return how long it lasted; if it is not over, until the newest commit, ``last``."""
        return max(0.0, (self.back or last or self.at) - self.at)


@dataclass(slots=True)
class Change:
    """A change of the membership that is no fault: groups that joined, returned or left."""

    step: int
    at: float
    text: str
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    n: int = 0


@dataclass
class Course:
    """The job so far; `take` each record."""

    goal: Goal = field(default_factory=Goal)
    n: int = 0
    step: int = 0
    cursor: int = 0
    consumed_slices: int = 0
    """Slices that optimizer steps have consumed."""
    skipped: int = 0
    """Slices that were consumed without an optimizer step."""
    outstanding_slices: int = 0
    """Slices before the cursor that no step has consumed: leased ones, and ones that lost groups
    returned."""
    sizes: Counter[int] = field(default_factory=Counter)
    """Number of slices of a step → number of steps; empty if groups take local steps."""
    idle: list[tuple[float, float]] = field(default_factory=list)
    """Times in which scripts worked between two transactions, such as an evaluation, as begin and
    end, in the order of the begins; empty if they are not known. They count neither as lost by a
    fault nor by a join."""
    ended: bool = False
    """The job ended with a commit."""
    block: int = 0
    """Number of the newest record that ends a live block."""
    epochs: list[EpochStats] = field(default_factory=list)
    rollbacks: list[Fault] = field(default_factory=list)
    """All rollbacks, those of recomputed steps included."""
    absences: list[Absence] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    _begun: tuple[int, int, int] | None = None
    """Cursor, consumed slices and step at the beginning."""
    _first: tuple[float, int, int] | None = None
    """Time, step and consumed slices of the first commit."""
    _recent: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Time, step and consumed slices of the newest commits."""
    _pending: list[Fault] = field(default_factory=list)
    _left: tuple[str, ...] = ()
    _ended_by: int = 0

    def take(self, record: Record, at: float) -> bool:
        """Take a record that was first received at time ``at``; return whether it was new."""
        if record.n <= self.n:
            return False
        self.n = record.n
        held = len(record.leases) + len(record.returned)
        if self._begun is None:
            self._begun = record.cursor - held, record.batches, record.step
            self.consumed_slices = record.batches
        match record.kind:
            case "epoch":
                self._form(record, at)
            case "abort":
                self._roll_back(record, at)
            case "commit":
                self._commit(record, at)
        self.step, self.cursor = record.step, record.cursor
        self.consumed_slices = record.batches
        self.outstanding_slices = held
        return True

    def take_idle(self, seconds: float, at: float) -> None:
        """Add ``seconds`` of work between two transactions, which ended at ``at``."""
        insort(self.idle, (at - seconds, at))

    # --- results ---

    @property
    def members(self) -> frozenset[str]:
        """Groups of the newest epoch."""
        return self.epochs[-1].members if self.epochs else frozenset()

    @property
    def began(self) -> float:
        """Time of the first epoch."""
        return self.epochs[0].formed if self.epochs else 0.0

    @property
    def last(self) -> float | None:
        """Time of the newest commit."""
        return next((stats.last for stats in reversed(self.epochs) if stats.commits), None)

    @property
    def begun_step(self) -> int:
        """Step at the beginning of this start of the job."""
        return self._begun[2] if self._begun else 0

    @property
    def steps(self) -> int:
        """Steps committed in this start of the job."""
        return self.step - self.begun_step

    @property
    def slices(self) -> int:
        """Slices that the steps of this start have consumed."""
        return self.consumed_slices - (self._begun[1] if self._begun else 0)

    @property
    def smaller(self) -> int:
        """Number of steps with fewer slices than the largest step."""
        return self.sizes.total() - self.sizes[max(self.sizes, default=0)]

    @property
    def unused(self) -> int:
        """Slices before the cursor that no group trained in a job that has ended; 0 while it
        runs."""
        return self.outstanding_slices if self.ended else 0

    @property
    def repeated(self) -> int:
        """Slices that were consumed more than once, by the counters of the records."""
        if self._begun is None:
            return 0
        return max(
            0, self.slices + self.skipped - (self.cursor - self.outstanding_slices - self._begun[0])
        )

    @property
    def faults(self) -> list[Fault]:
        """The rollbacks that were not planned."""
        return [each for each in self.rollbacks if not each.is_recomputation]

    def samples(self, slices: float | None) -> float | None:
        """Return the number of samples in ``slices``; None if the size of a batch is unknown."""
        if slices is None or self.goal.samples is None:
            return None
        return slices * self.goal.items * self.goal.samples

    def rates(self, now: float | None = None) -> tuple[float, float] | None:
        """Return the recent steps and slices per second; None if there are too few commits, or, at
        ``now``, none in the last 10 s."""
        if not self._recent or (now is not None and now - self._recent[-1][0] > _STALE_S):
            return None
        return _speed(self._recent[0], self._recent[-1])

    @property
    def share_done(self) -> float | None:
        """The completed fraction of the planned steps or of the planned data, whichever is
        larger."""
        parts = []
        if self.goal.steps:
            parts.append(self.step / self.goal.steps)
        if self.goal.all_items:
            parts.append(self.cursor * self.goal.items / self.goal.all_items)
        return min(1.0, max(parts)) if parts else None

    def left_s(self, now: float | None = None) -> float | None:
        """Return the estimated seconds until the planned end, or None if it is unknown."""
        rates = self.rates(now)
        if rates is None:
            return None
        steps, slices = rates
        parts = []
        if self.goal.steps and steps:
            parts.append((self.goal.steps - self.step) / steps)
        if self.goal.all_items and slices:
            parts.append((self.goal.all_items / self.goal.items - self.cursor) / slices)
        return max(0.0, min(parts)) if parts else None

    @property
    def data_epoch(self) -> int | None:
        """Number of completed data epochs, or None if the loader has none."""
        goal = self.goal
        return self.cursor * goal.items // goal.epoch_items if goal.epoch_items else None

    @property
    def elapsed(self) -> float:
        """Seconds from the first commit to the newest one; starting up is not counted."""
        return 0.0 if self._first is None or self.last is None else self.last - self._first[0]

    @property
    def mean_rates(self) -> tuple[float, float] | None:
        """Steps and slices per second from the first to the newest commit."""
        return None if self._first is None else _speed(self._first, self._recent[-1])

    @property
    def goodput(self) -> float | None:
        """Committed samples divided by those of an undisturbed run of the same length."""
        rate = TimeLost(self).undisturbed_rate
        if not rate or self.mean_rates is None:
            return None
        pauses = (
            (stats.first - stats.pause, stats.first) for stats in self.epochs if stats.commits
        )
        own = sum(self.idle_s(since, until) for since, until in pauses)
        return min(1.0, self.mean_rates[1] / rate * self.elapsed / max(self.elapsed - own, 1e-9))

    def idle_s(self, since: float, until: float) -> float:
        """Return the seconds between two times in which a script worked between transactions."""
        total, end = 0.0, since
        for begun, ended in self.idle:
            total += max(0.0, min(ended, until) - max(begun, end))
            end = max(end, ended)
        return total

    @property
    def run(self) -> list[Rollback]:
        """The rollbacks since the last commit, in order; all are attempts at the same step."""
        return [fault.rollback for fault in self._pending]

    def away(self) -> Iterator[Absence]:
        """Yield the absences that are not over."""
        return (absence for absence in self.absences if absence.back is None)

    # --- records ---

    def _form(self, record: Record, at: float) -> None:
        members, was = _groups(record), self.members
        gone = was - members
        for fault in self._pending:
            if not fault.lost and (lost := sorted(gone - set(self._left))):
                fault.lost = tuple(lost)
                if not {group for group, _ in fault.rollback.named} & set(lost):
                    # the cause is what a survivor noticed, and must not read as its fault
                    why = f"; noticed as: {fault.cause}" if fault.cause else ""
                    fault.cause = f"group {', '.join(lost)} was lost{why}"
        is_undisturbed = all(fault.is_recomputation for fault in self._pending)
        if members == was and is_undisturbed and (self._pending or record.standing):
            self._left, self.epochs[-1].epoch = (), record.epoch  # the job goes on as before
            return
        came = tuple(sorted(members - was)) if self.epochs else ()
        for group in sorted(gone):
            absence = Absence(group, record.step, at, group in self._left, self._ended_by)
            self.absences.append(absence)
        for absence in self.away():
            if absence.group in came:
                absence.back = at
        if came:
            again = {absence.group for absence in self.absences}
            text = "; ".join(f"group {g} {'came back' if g in again else 'joined'}" for g in came)
            self.changes.append(Change(record.step, at, text, joined=came, n=record.n))
        self._left = ()
        self.epochs.append(EpochStats(record.epoch, members, at, record.step))

    def _roll_back(self, record: Record, at: float) -> None:
        if record.skip:
            return
        before = next((stats for stats in reversed(self.epochs) if stats.rate is not None), None)
        since = max(self.last or 0.0, self._pending[-1].at if self._pending else 0.0) or at
        rollback, cause = Rollback.of(record), readable_cause(record.cause)
        fault = Fault(rollback, at, cause, str(record.code), since, before=before)
        for earlier in self._pending:
            earlier.is_last = False
        self._ended_by = record.n
        self.rollbacks.append(fault)
        self._pending.append(fault)

    def _commit(self, record: Record, at: float) -> None:
        # an observer that started during an epoch has not received the epoch record
        if not self.epochs:
            self.epochs.append(EpochStats(record.epoch, frozenset(), at, record.step))
        stats, consumed = self.epochs[-1], record.batches - self.consumed_slices
        self.skipped += record.cursor - self.cursor if record.skip else 0
        if consumed > 0 and not record.leases:
            self.sizes[consumed] += 1
        if not stats.commits:
            stats.first, stats.first_slices = at, consumed
            stats.pause = 0.0 if self.last is None else at - self.last
            stats.has_fault_before = any(not each.is_recomputation for each in self._pending)
        else:
            stats.slices += consumed
        stats.commits, stats.last = stats.commits + 1, at
        for fault in self._pending:
            fault.committed, fault.after = at, stats
        self._pending = []
        for absence in self.away():
            absence.steps += 1
        if stats.commits == 1:
            self._recent.clear()
        self._recent.append((at, record.step, record.batches))
        self._first = self._first or self._recent[-1]
        self._left = record.leavers
        self.ended |= record.last
        self.block = record.n if record.live == "end" else self.block
        if record.change:
            self._ended_by = record.n
        if self._left and not record.last:
            names = ", ".join(self._left)
            text = f"group {names} left after this commit"
            self.changes.append(Change(record.step, at, text, left=self._left, n=record.n))


class TimeLost:
    """The time that a job has lost so far, compared with an undisturbed run.

    Attributes:
        undisturbed_rate: Slices per second in the epochs with the most members, from the first to
            the last commit of each. It estimates the rate of an undisturbed run. None if no epoch
            has two commits.
    """

    def __init__(self, course: Course) -> None:
        self._course = course
        timed = [each for each in course.epochs if each.rate is not None]
        self._most = max((len(each.members) for each in timed), default=0)
        whole = [each for each in timed if self._is_whole(each)]
        seconds = sum(each.last - each.first for each in whole)
        self.undisturbed_rate = sum(each.slices for each in whole) / seconds if whole else None

    def by(self, fault: Fault) -> float | None:
        """Return the seconds that a fault has cost, or None if there was no commit after it.

        This is the time from the commit before it to the one after it, less one step. It includes
        detection, rollback and the repeated attempt. If several rollbacks came between two
        commits, each has the time since the one before it. The time of scripts between two
        transactions is not lost.
        """
        if fault.committed is None or fault.after is None:
            return None
        if not fault.is_last:
            return fault.at - fault.since - self._course.idle_s(fault.since, fault.at)
        idle = self._course.idle_s(fault.since, fault.committed)
        return max(0.0, fault.committed - fault.since - idle - self._first_step_s(fault.after))

    def around(self, change: Change) -> float:
        """Return the seconds that a join has cost: the pause before the next commit, less a step.

        It is 0 for a leave, and where a fault has caused the pause.
        """
        epochs = (e for e in self._course.epochs if e.formed >= change.at and e.commits)
        first = next(epochs, None) if change.joined else None
        return 0.0 if first is None or first.has_fault_before else self._pause_s(first)

    def causes(self) -> dict[str, float]:
        """Return the seconds lost by cause.

        ``faults``: the sum of `by` for faults after the first commit. ``joins and leaves``: the
        same for pauses around joins and planned leaves. ``absent groups``: the work that absent
        groups would have done. Together they are the part of `Course.elapsed` that `Course.goodput`
        lacks. ``recomputation``: from the rollback of a step that is computed again to its commit;
        not part of the goodput.
        """
        course, rate, first = self._course, self.undisturbed_rate, self._course._first
        faults = sum(self.by(f) or 0.0 for f in course.faults if first and f.at >= first[0])
        again = sum(each.cost_s or 0.0 for each in course.rollbacks if each.is_recomputation)
        joins = absent = 0.0
        for stats in (stats for stats in course.epochs if stats.commits and rate):
            step = self._first_step_s(stats) if stats.pause else 0.0
            joins += 0.0 if stats.has_fault_before else self._pause_s(stats)
            if rate and not self._is_whole(stats):
                trained = stats.slices + (stats.first_slices if stats.pause else 0)
                absent += stats.last - stats.first + step - trained / rate
        found = {"faults": faults, "absent groups": max(0.0, absent), "joins and leaves": joins}
        return found | {"recomputation": again}

    def _pause_s(self, stats: EpochStats) -> float:
        if not stats.commits:
            return 0.0
        idle = self._course.idle_s(stats.first - stats.pause, stats.first)
        return max(0.0, stats.pause - idle - self._first_step_s(stats))

    def _first_step_s(self, stats: EpochStats) -> float:
        """Return the seconds that the first step of an epoch would have taken without a pause."""
        if stats.commits > 1 and not self._is_whole(stats):
            return (stats.last - stats.first) / (stats.commits - 1)
        return stats.first_slices / self.undisturbed_rate if self.undisturbed_rate else 0.0

    def _is_whole(self, stats: EpochStats) -> bool:
        """Return whether the epoch has as many members as the largest one with a known rate."""
        return len(stats.members) >= self._most


def _speed(
    first: tuple[float, int, int], last: tuple[float, int, int]
) -> tuple[float, float] | None:
    """Return the steps and slices per second between two commits; None if they are too close."""
    seconds = last[0] - first[0]
    steps, slices = last[1] - first[1], last[2] - first[2]
    return (steps / seconds, slices / seconds) if seconds > 0 else None


def _groups(record: Record) -> frozenset[str]:
    """Return the groups of the job after an epoch record; in an asynchronous job also those in
    their local phase."""
    inside = {entry.group for entry in record.members}
    return frozenset(inside | {each.entry.group for each in record.standing})

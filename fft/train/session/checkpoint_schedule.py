"""Checkpoint schedules: all ranks that have a commit agree on whether a checkpoint is due.

If all groups are in every txn, the commit record decides. A checkpoint is due at an interval of
steps, and at the first commit of an epoch that lacks the writer of the previous checkpoint. With
an interval in seconds, the first rank of the writing group announces a later step in a register of
the job bus.

If groups train locally between synchronizations, they have different commits. Then no record
determines the writer or the time of the last checkpoint. Instead, the first rank of the txn's first
member announces the checkpoint in the register before its vote. A commit includes that vote, so
every rank that has the commit finds the announcement. Ranks outside the txn do not take part in the
checkpoint. Scopes of stages have their own schedule in `fft.train.paradigms.stages.due`.

The code runs on the main thread, unless a docstring states otherwise.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fft.bus import ErrorBus
from fft.checkpoints.files import attempt_name
from fft.checkpoints.plan import Checkpointing
from fft.errors import BusError
from fft.messages.effects import StartTxn
from fft.messages.protocol import Peer, Record, Token
from fft.trace.checkpoint_notes import TOO_OFTEN
from fft.train.session.participation import Participation

AT = "checkpoint/at"
"""Register of a scope's bus that holds the newest announcements of checkpoints."""
NAMED = 2
"""Maximum number of announcements in the register.

One checkpoint may be in progress when the last one of the job is announced.
"""
_AHEAD = 2
"""Steps between announcement and checkpoint; no rank is this far ahead of the announcing rank."""
_EARLY = 0.1
"""Fraction of the interval, at its end, in which ranks read the register."""

logger = logging.getLogger(__name__)

Note = Callable[[str, dict[str, Any]], None]
"""Writes an event to the trace."""


class Named(NamedTuple):
    """Identifier of an attempt at a checkpoint, the same on all ranks."""

    name: str
    """Name of the attempt: equal on all ranks, and unique among attempts."""
    step: int
    """Step of the checkpoint."""
    writer: str
    """The group whose ranks write the shared state of all groups."""
    is_missed: bool = False
    """Whether this rank's stage had no commit at the position, so the rank delivers no files."""


class CheckpointSchedule(ABC):
    """The schedule that decides when a rank takes a checkpoint and which ranks it waits for.

    Attributes:
        outlives: Whether a rank that has ended still contributes its final state to later
            checkpoints of other ranks.
    """

    outlives = False

    @abstractmethod
    def before_vote(self, plan: StartTxn, last: bool, skip: bool) -> None:
        """Prepare the vote of this rank, which is about to be YES.

        Args:
            plan: The open txn.
            last: Whether this txn is the last one, unless it is skipped.
            skip: Whether this rank votes to skip the txn.
        """

    @abstractmethod
    def due(self, record: Record, epoch: Record) -> Named | None:
        """Return the checkpoint to take at this commit, or None.

        Args:
            record: The commit record.
            epoch: The epoch record that lists the members of its txn.
        """

    @abstractmethod
    def left(self, record: Record, epoch: Record) -> frozenset[str]:
        """Return the groups of ``epoch`` that have left the job or whose processes were replaced.

        A group that leaves with the commit ``record`` still delivers its files. Thread-safe.
        """

    @abstractmethod
    def is_awaited(self, record: Record) -> bool:
        """Return whether other ranks may still be behind ``record``. Thread-safe."""

    def ended(self, record: Record, epoch: Record) -> Named | None:
        """Handle the end of this rank's scope at ``record`` without a commit marked as last.

        Returns:
            The checkpoint to take of that state, or None.
        """
        return None

    def left_alone(self, record: Record) -> Named | None:
        """Return the checkpoint of a group that left after ``record`` when no group stays.

        Returns:
            The checkpoint, or None if there is none to take, such as when it was already taken.
        """
        return None

    def absent(self, named: Named, epoch: Record) -> frozenset[str]:
        """Return the groups for which this rank declines to deliver. Thread-safe."""
        return frozenset()

    def after_end(self, stops: threading.Event) -> Iterator[Named]:
        """Yield the checkpoints of the remaining ranks until ``stops`` is set.

        It runs on a separate thread.

        Raises:
            BusError, UnreadableMessage, ValueError: The announcements cannot be read.
        """
        return iter(())


class RecordSchedule(CheckpointSchedule):
    """The schedule for groups that are in every txn of the job."""

    def __init__(self, plan: Checkpointing, job: Participation) -> None:
        self._plan, self._job = plan, job
        self._last: tuple[Record, Record] | None = None
        """Commit record and epoch record of the newest attempt."""
        self._epoch = 0
        """Epoch of the last commit on this rank."""
        self._ends: Token | None = None
        """Token of the last vote's txn if that vote marked it as the last of the job."""
        self._since: float | None = None

    def before_vote(self, plan: StartTxn, last: bool, skip: bool) -> None:
        """Record whether this txn is the last; this schedule announces nothing before a vote."""
        self._ends = plan.token if last else None

    def due(self, record: Record, epoch: Record) -> Named | None:
        """See `CheckpointSchedule.due`."""
        return named_after(self._job, record, epoch) if self._is_due(record, epoch) else None

    def _is_due(self, record: Record, epoch: Record) -> bool:
        is_last = record.last or (record.skip and self._ends == record.token)
        if record.skip and not (is_last and self._is_behind(record)):
            return False  # a skipped txn changes no step, and further txns follow
        is_new, self._epoch = record.epoch != self._epoch, record.epoch
        if not (is_last or (is_new and self._is_writer_lost(epoch))):
            steps = self._plan.steps
            is_named = self._is_named(record, epoch) if steps is None else record.step % steps == 0
            if not is_named:
                return False
        self._last, self._since = (record, epoch), time.monotonic()
        return True

    def left(self, record: Record, epoch: Record) -> frozenset[str]:
        """See `CheckpointSchedule.left`; these groups are not in the newest epoch of the job."""
        return departed_groups(self._job, epoch)

    def is_awaited(self, record: Record) -> bool:
        """See `CheckpointSchedule.is_awaited`.

        A rank delivers its files only after its script has requested the next txn.
        """
        local = self._job.local
        return local is not None and local.lineage == record.lineage

    def left_alone(self, record: Record) -> Named | None:
        """See `CheckpointSchedule.left_alone`."""
        group = self._job.peer.group
        if self._last is not None:
            commit, epoch = self._last
            if commit.lineage == record.lineage and epoch.members[0].group == group:
                return None  # this group writes it
        name = attempt_name(self._job.bus.generation, f"{record.n}|{record.lineage}|{group}")
        return Named(name, record.step, group)

    def _is_behind(self, record: Record) -> bool:
        """Return whether no checkpoint of this job covers the steps before ``record``."""
        return self._last is None or self._last[0].step < record.step

    def _is_writer_lost(self, epoch: Record) -> bool:
        """Return whether the writer of the last checkpoint was restarted or has left."""
        if self._last is None:
            return False
        _, then = self._last
        return not set(then.members[0].peers()) <= epoch.peer_set

    def _is_named(self, record: Record, epoch: Record) -> bool:
        """Return whether the register announces this step, for an interval in seconds.

        After the interval, the first rank of the writing group also announces a later step.
        """
        seconds = self._plan.seconds
        assert seconds is not None
        passed = None if self._since is None else time.monotonic() - self._since
        if passed is not None and passed < (1 - _EARLY) * seconds:
            return False
        try:
            held = self._job.bus.read(AT)
            named = int(held) if held is not None else 0
            is_mine = is_first(self._job.peer, epoch)
            if is_mine and named < record.step and (passed is None or passed >= seconds):
                self._job.bus.write(AT, str(record.step + _AHEAD).encode())
        except (BusError, ValueError) as error:
            logger.warning("cannot see when the next checkpoint is due: %s", error)
            return False
        return named == record.step


class Announcement(NamedTuple):
    """An entry of the register, which announces a checkpoint at a txn."""

    token: Token
    """The txn at whose commit the checkpoint is taken; without a commit there is no checkpoint."""
    step: int
    """Number of committed steps after the txn."""
    writer: frozenset[Peer]
    """The processes that write the shared state of all groups."""
    name: str
    """Name of the attempt."""
    cursor: int
    """Data position at the end of the txn."""
    is_last: bool
    """Whether the commit of the txn may be the last one of the job."""

    @property
    def named(self) -> Named:
        """The checkpoint that this entry announces."""
        return Named(self.name, self.step, min(self.writer).group)


def encode_announcements(words: Sequence[Announcement]) -> bytes:
    """Encode entries for the register."""
    return json.dumps([[*word[:2], sorted(word.writer), *word[3:]] for word in words]).encode()


def decode_announcements(data: bytes) -> tuple[Announcement, ...]:
    """Decode the result of `encode_announcements`. Raises ValueError."""
    try:
        return tuple(
            Announcement(Token(*token), int(step), frozenset(Peer(*peer) for peer in writer), *rest)
            for token, step, writer, *rest in json.loads(data)
        )
    except TypeError as error:
        raise ValueError(f"the register {AT} holds no words of checkpoints") from error


class AnnouncedSchedule(CheckpointSchedule):
    """The common part of schedules in which one rank announces a checkpoint before its vote.

    Args:
        bus: Bus of the scope of the announced txns.
        is_busy: Returns whether this rank still writes the previous checkpoint.
    """

    def __init__(
        self,
        plan: Checkpointing,
        job: Participation,
        bus: ErrorBus,
        is_busy: Callable[[], bool],
    ) -> None:
        self._plan, self._job, self._bus, self._is_busy = plan, job, bus, is_busy
        self._words: tuple[Announcement, ...] = ()
        """The newest entries of the register; ``_since`` is the time of their first read."""
        self._since = 0.0

    def before_vote(self, plan: StartTxn, last: bool, skip: bool) -> None:
        """See `CheckpointSchedule.before_vote`.

        Announces a checkpoint of this txn if this rank announces checkpoints and one is due.
        """
        epoch, step = epoch_to_name_in(self._job, plan), plan.step + (not skip)
        if epoch is None:
            return
        may_end = self._may_end(last and not skip, epoch)
        if skip and not may_end:
            return  # a skipped txn changes no step, and further txns follow
        try:
            self._look()
            if not (self._is_wanted(step, epoch) or may_end):
                return
            if self._is_busy() and not may_end:
                why = "the last one of this group is being written"
                self._give_up(step, why, too_often=True)
                return
            writer = frozenset(epoch.members[0].peers())
            name = attempt_name(self._job.bus.generation, f"{plan.token}")
            self._say(
                Announcement(plan.token, step, writer, name, plan.next_cursor, may_end), plan.step
            )
        except (BusError, ValueError) as error:
            self._give_up(step, f"it could not be named: {error}")

    def due(self, record: Record, epoch: Record) -> Named | None:
        """See `CheckpointSchedule.due`.

        The last commit of the job has a checkpoint even without an announcement.
        """
        if record.skip and not record.last:
            return None
        try:
            self._look()
        except (BusError, ValueError) as error:
            if not record.last:
                self._give_up(record.step, f"whether it was named cannot be seen: {error}")
        words = (w for w in self._words if (w.token, w.step) == (record.token, record.step))
        named = next((word.named for word in words), None)
        return self._unnamed_last(record, epoch) if named is None and record.last else named

    def _unnamed_last(self, record: Record, epoch: Record) -> Named | None:
        """Return the checkpoint of the job's last commit, which has no announcement."""
        return named_after(self._job, record, epoch)

    def is_awaited(self, record: Record) -> bool:
        """Return False, because all members reach the position at the same time."""
        return False

    def _may_end(self, last: bool, epoch: Record) -> bool:
        """Return whether the txn may be the last one of the job; False by default."""
        return False

    def _look(self) -> None:
        """Read the newest entries of the register. Raises BusError, ValueError."""
        words = announcements_on(self._bus)
        if words != self._words:
            self._words, self._since = words, time.monotonic()

    def _say(self, word: Announcement, done: int) -> None:
        # an entry for a later step belongs to a txn that did not commit
        others = [w for w in self._words if w.step <= done]
        words = (*others, word)[-NAMED:]
        self._bus.write(AT, encode_announcements(words))
        self._words, self._since = words, time.monotonic()

    def _is_wanted(self, step: int, epoch: Record) -> bool:
        """Return whether a checkpoint is due at the txn of ``epoch`` that leads to ``step``."""
        steps, seconds = self._plan.steps, self._plan.seconds
        if self._words:
            word = self._words[-1]
            job = {p for at in epoch.standing for p in at.entry.peers()} | epoch.peer_set
            if word.step >= step or not word.writer <= job:
                return True  # the announced txn did not commit, or its writer is lost
        if steps is not None:
            return step % steps == 0
        assert seconds is not None
        return not self._words or time.monotonic() - self._since >= seconds

    def _give_up(self, step: int, why: str, too_often: bool = False) -> None:
        report_skipped(self._job.report_checkpoint, step, why, too_often)


def report_skipped(note: Note, step: int, why: str, too_often: bool = False) -> None:
    """Log and trace that a checkpoint of ``step`` was skipped without a failure. Thread-safe.

    Args:
        note: Writes the event to the trace.
        step: Step of the skipped checkpoint.
        why: The reason, for the log and the trace.
        too_often: Whether the reason is that the previous checkpoint is still being written.
    """
    logger.warning("no checkpoint of step %d: %s", step, why)
    told = {"step": step, "reason": why}
    note("checkpoint_skipped", told | ({TOO_OFTEN: True} if too_often else {}))


def announcements_on(bus: ErrorBus) -> tuple[Announcement, ...]:
    """Read the announcements on the bus of a scope. Raises BusError, ValueError."""
    held = bus.read(AT)
    return () if held is None else decode_announcements(held)


def named_after(job: Participation, record: Record, epoch: Record) -> Named:
    """Return a checkpoint whose name derives from its record; the first member writes it."""
    name = attempt_name(job.bus.generation, f"{record.n}|{record.lineage}")
    return Named(name, record.step, epoch.members[0].group)


def epoch_to_name_in(job: Participation, plan: StartTxn) -> Record | None:
    """Return the epoch of the txn if this rank announces checkpoints of its scope, else None."""
    epoch = None if job.local is None else job.local.epoch
    if epoch is None or epoch.epoch != plan.token.epoch or not is_first(job.peer, epoch):
        return None
    return epoch


def departed_groups(job: Participation, epoch: Record) -> frozenset[str]:
    """Return the groups of ``epoch`` that are not in the newest epoch, or have replaced processes.

    Thread-safe.
    """
    local = job.local
    now = local.epoch if local is not None else None
    if local is None or now is None or local.role == "terminal" or now.epoch <= epoch.epoch:
        return frozenset()
    stays = {entry.group for entry in now.members if set(entry.peers()) <= epoch.peer_set}
    return frozenset(entry.group for entry in epoch.members) - stays


def is_first(peer: Peer, epoch: Record) -> bool:
    """Return whether ``peer`` is the first rank of the first member of an epoch."""
    first = epoch.members[0]
    return (peer.group, peer.rank) == (first.group, min(rank.rank for rank in first.ranks))

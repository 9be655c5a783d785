"""Checkpoint schedules: all ranks that have a commit agree on whether a checkpoint is due.

The votes decide: a checkpoint is due at a commit if a vote asked for one, and the record says so
(``Record.checkpoint``). Every rank that has the commit has the record. The first rank of the first
member asks when the interval is over, each rank asks with the last txn, and each that knows the
group that wrote the newest checkpoint asks when that group is lost. A checkpoint is also due at the
last commit of a job, even if no vote asked. Ranks outside the txn do not take part.

Scopes of stages have their own schedule in `fft.train.paradigms.stages.due`. The code runs on the
main thread, unless a docstring states otherwise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fft.checkpoints.files import attempt_name
from fft.checkpoints.plan import Checkpointing
from fft.messages.effects import StartTxn
from fft.messages.protocol import Peer, Record
from fft.trace.checkpoint_notes import ABOUT_TOO_OFTEN, TOO_OFTEN
from fft.train.session.participation import Participation

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


class CheckpointSchedule:
    """The schedule that decides when a rank takes a checkpoint and which ranks it waits for.

    Args:
        is_busy: Returns whether this rank still writes the previous checkpoint.

    Attributes:
        outlives: Whether a rank that has ended still contributes its final state to later
            checkpoints of other ranks.
    """

    outlives = False

    def __init__(
        self, plan: Checkpointing, job: Participation, is_busy: Callable[[], bool]
    ) -> None:
        self._plan, self._job, self._is_busy = plan, job, is_busy
        self._newest: tuple[Record, Record] | None = None
        """Commit record and epoch record of the newest checkpoint that this rank had to take."""
        self._known, self._since = 0, 0.0
        """The newest ``Record.checkpoint`` that this rank has seen at a vote, and the time of the
        first vote that saw it."""
        self._is_too_often = False
        """Whether the warning about overlapping checkpoints has been logged."""

    def asks(self, plan: StartTxn, last: bool, skip: bool) -> bool:
        """Return whether the YES vote that this rank is about to cast asks for a checkpoint.

        Args:
            plan: The open txn.
            last: Whether this txn is the last one, unless it is skipped.
            skip: Whether this rank votes to skip the txn.
        """
        local = self._job.local
        if local is None or local.epoch is None or local.head is None:
            return False
        if self._known != local.head.checkpoint:
            self._known, self._since = local.head.checkpoint, time.monotonic()
        if last or skip:  # a skip changes no step, and further txns follow unless it is the last
            return last and not (skip and self._has_taken(plan.step))
        if self._is_writer_lost(local.epoch, local.head):
            return True
        if not (is_first(self._job.peer, local.epoch) and self._is_interval_over(plan)):
            return False
        if self._is_busy():
            self.skip_too_often(plan.step + 1)
            self._since = time.monotonic()
            return False
        return True

    def skip_too_often(self, step: int) -> None:
        """Report that this rank skips the checkpoint of ``step``, as it writes the one before."""
        if not self._is_too_often:
            self._is_too_often = True
            logger.warning("%s: %s", self._plan.place, ABOUT_TOO_OFTEN)
        why = "the one before is still being written"
        report_skipped(self._job.report_checkpoint, step, why, too_often=True)

    def due(self, record: Record, epoch: Record) -> Named | None:
        """Return the checkpoint to take at this commit, or None.

        Args:
            record: The commit record.
            epoch: The epoch record that lists the members of its txn.
        """
        if record.checkpoint == record.n:
            self._newest = record, epoch
        elif not record.last:
            return None
        return self._named(f"{record.n}|{record.lineage}", record, epoch.members[0].group)

    def left(self, record: Record, epoch: Record) -> frozenset[str]:
        """Return the groups of ``epoch`` that have left the job or whose processes were replaced.

        A group that leaves with the commit ``record`` still delivers its files. Thread-safe.
        """
        return departed_groups(self._job, epoch)

    def is_awaited(self, record: Record) -> bool:
        """Return whether other ranks may still be behind ``record``. Thread-safe.

        A rank delivers its files only after its script has requested the next txn.
        """
        local = self._job.local
        return local is not None and local.lineage == record.lineage

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
            Stages have no commit in common, and groups of an asynchronous job leave at different
            steps.
        """
        group, local = self._job.peer.group, self._job.local
        if record.bound or local is None or local.others:
            return None
        if self._newest is not None:
            commit, epoch = self._newest
            if commit.lineage == record.lineage and epoch.members[0].group == group:
                return None  # this group writes it
        return self._named(f"{record.n}|{record.lineage}|{group}", record, group)

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

    def _named(self, record_id: str, record: Record, writer: str) -> Named:
        return Named(attempt_name(self._job.bus.generation, record_id), record.step, writer)

    def _has_taken(self, step: int) -> bool:
        return self._newest is not None and self._newest[0].step >= step

    def _is_writer_lost(self, epoch: Record, head: Record) -> bool:
        """Return whether the writer of the newest checkpoint was restarted or has left.

        Only the members of its txn know the writer, so each of them asks for the next one.
        """
        if self._newest is None or self._newest[0].n != head.checkpoint:
            return False
        job = {p for at in epoch.standing for p in at.entry.peers()} | epoch.peer_set
        return not set(self._newest[1].members[0].peers()) <= job

    def _is_interval_over(self, plan: StartTxn) -> bool:
        if self._plan.steps is not None:
            return (plan.step + 1) % self._plan.steps == 0
        assert self._plan.seconds is not None
        return self._known == 0 or time.monotonic() - self._since >= self._plan.seconds


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

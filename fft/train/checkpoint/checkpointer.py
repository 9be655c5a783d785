"""The main thread's part of durable checkpoints: take the one that is due, and bound its copy.

A checkpoint is due at the same commits on all ranks that have them (`due`). These are commits at
an interval of steps or seconds, the last commit of a job, and the first commit after the loss of a
writing group. The paradigm creates the schedule. If each stage has its own scope, a checkpoint
combines one commit of each stage.

The copy starts when the script requests the next txn or leaves the job. Therefore it includes
changes by the script since the commit, such as a scheduler step on a validation loss or random
numbers drawn.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from fft.checkpoints.files import Checkpoints
from fft.checkpoints.peers import copy_store
from fft.checkpoints.plan import Checkpointing
from fft.checkpoints.stores import open_store
from fft.errors import BusError, FftError
from fft.messages.effects import StartTxn
from fft.messages.protocol import GroupEntry, Record, UnreadableMessage
from fft.protocol.state import leavers, staying
from fft.train.checkpoint.contents import Copies, Snapshot
from fft.train.checkpoint.loading import CheckpointLoader, refuse_at_once
from fft.train.checkpoint.writer import NAME, RankWriter, WriteAttempt, WriterContext, Writers
from fft.train.session.checkpoint_schedule import CheckpointSchedule, Named, report_skipped
from fft.train.session.rank_context import RankContext
from fft.train.session.rank_state import CheckpointHooks

logger = logging.getLogger(__name__)


class _Pending(NamedTuple):
    """A state whose copy has not been started."""

    named: Named | None
    """The due checkpoint, or None if the stage has ended and takes part in later ones only."""
    record: Record
    """The commit record of the state."""
    epoch: Record


class Checkpointer(CheckpointHooks):
    """The checkpoints of one rank; its methods run on the main thread."""

    def __init__(self, plan: Checkpointing, rank: RankContext) -> None:
        """Open the checkpoint store.

        Raises:
            CheckpointError: This job cannot take checkpoints, or the requested checkpoint has other
                scopes than this job.
        """
        self.plan = plan
        self.checkpoints = Checkpoints(open_store(str(plan.place)))
        self._rank, self._job, self._state = rank, rank.job, rank.state
        source = self.checkpoints
        if plan.source:
            source = Checkpoints(copy_store(plan.source, rank.settings.token))
        refuse_at_once(plan, source, rank.scope)
        self.loader = CheckpointLoader(plan, source, rank)
        self._copies = Copies(rank.state)
        self._due: CheckpointSchedule = rank.state.paradigm.schedule(plan, self._is_writing)
        peer, tell = rank.job.peer, rank.job.report_checkpoint
        place = (peer.group, peer.rank)
        self._context = WriterContext(self.checkpoints, self._due, place, plan.keep, tell)
        self._writers = Writers(self._context)
        self._at_work = ExitStack()
        self._pending: _Pending | None = None
        """The checkpoint that is due at the last commit."""
        self._failing = threading.Event()
        """Set when the script fails, so this rank does not wait for others."""
        self._serving_thread: threading.Thread | None = None
        """The thread that serves later checkpoints after this stage has ended."""
        self._has_ended = False
        """Whether this rank has received the last commit."""

    def _is_writing(self) -> bool:
        return self._writers.is_writing

    def resume(self) -> None:
        """See `CheckpointLoader.resume`."""
        self.loader.resume()

    def joined(self) -> None:
        """Mark the store as in use, and trace the checkpoint that the job resumed from.

        The trace must have its header already.
        """
        try:
            self._at_work.enter_context(self.checkpoints.store.at_work())
        except OSError as error:
            place = self.checkpoints.store.url
            logger.warning("others cannot see that this process writes at %s: %s", place, error)
        self.loader.trace()

    def asks(self, plan: StartTxn, last: bool, skip: bool) -> bool:
        """See `CheckpointSchedule.asks`."""
        return self._due.asks(plan, last, skip)

    def committed(self, record: Record, epoch: Record | None) -> None:
        """Schedule the checkpoint that is due at ``record``, if any.

        A stage that has ended is scheduled too, because it takes part in later checkpoints.

        Args:
            record: The commit record that corresponds to the current state.
            epoch: The epoch record that lists the members, if known.
        """
        if epoch is None or epoch.epoch != record.epoch:
            return  # the job has continued without this rank
        named, self._has_ended = self._due.due(record, epoch), record.last
        if named is not None:
            attempt = self._attempt(named, record, epoch)
            self._decline_for_absent(attempt)
            if named.is_missed:
                self._leave_out(
                    attempt, "no commit of this stage has come to its place in the data"
                )
                named = None
            elif not record.last and self._writers.is_writing:
                self._due.skip_too_often(named.step)
                self._writers.decline(attempt)
                named = None
        if named is not None or (record.last and self._due.outlives):
            self._pending = _Pending(named, record, epoch)

    def take(self) -> None:
        """Start the checkpoint that is due, if any.

        It includes changes by the script since the commit.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._begin(*pending)

    def ended(self) -> None:
        """Take the last checkpoint of a stage that has ended.

        A stage may end without a commit marked as last: it may have resumed from a checkpoint
        taken at its end, or have skipped its last txn.
        """
        if (newest := self._newest_state()) is not None:
            named = self._due.ended(*newest)
            if named is not None or self._due.outlives:
                self._begin(named, *newest)

    def left(self) -> None:
        """Take a checkpoint of the newest commit if this rank left after it and no group stays.

        If the last groups leave with a commit, that commit already has a checkpoint. Otherwise each
        leaving group takes its own checkpoint, because the other groups may have died.
        """
        newest, local, peer = self._newest_state(), self._job.local, self._job.peer
        if newest is None or local is None or peer.group in leavers(local) or staying(local, peer):
            return  # others continue
        record, epoch = newest
        if (named := self._due.left_alone(record)) is not None:
            self._has_ended = True
            self._begin(named, record, replace(epoch, members=(GroupEntry(peer.group, "", ()),)))

    def _newest_state(self) -> tuple[Record, Record] | None:
        """Return the record and the epoch of this rank's state if no commit was marked as last.

        Returns:
            None if there was such a commit, or if the job has a newer state.
        """
        self.take()
        at, local = self._state.position, self._job.local
        if self._has_ended or at is None or local is None:
            return None
        if local.epoch is None or local.head is None or at.lineage != local.head.lineage:
            return None
        return replace(at, last=True), local.epoch

    def before_change(self) -> None:
        """Finish the copy, because the committed state is about to change."""
        if (waited := self._copies.finish()) > 1e-3:
            self._job.note("checkpoint_waited", {"stall_ms": round(waited * 1e3, 3)})

    def close(self, serves: bool = True) -> None:
        """Wait until files are written, and a limited time for other ranks. Idempotent.

        Args:
            serves: Whether a stage that has ended keeps serving the remaining stages until they
                end.
        """
        self.before_change()
        pending, self._pending = self._pending, None
        if pending is not None and pending.named is not None:
            attempt = self._attempt(pending.named, pending.record, pending.epoch)
            self._leave_out(attempt, "the script has ended with an error after that commit")
        self._context.closing.set()
        if not serves:
            self._failing.set()
        if self._serving_thread is not None:
            self._serving_thread.join()  # this thread has its own timeouts
        self._writers.close()
        self._at_work.close()

    def _attempt(self, named: Named, record: Record, epoch: Record) -> WriteAttempt:
        return WriteAttempt.of(self._rank, named, record, epoch, self.loader.origin)

    def _leave_out(self, attempt: WriteAttempt, why: str) -> None:
        report_skipped(self._job.report_checkpoint, attempt.named.step, why)
        self._writers.decline(attempt)

    def _decline_for_absent(self, attempt: WriteAttempt) -> None:
        """Write "declined" receipts for ranks of this stage that are not in its txn.

        The receipts prevent other ranks from waiting for them.
        """
        for group in self._due.absent(attempt.named, attempt.epoch):
            self._writers.decline(attempt, group)

    def _begin(self, named: Named | None, record: Record, epoch: Record) -> None:
        """Copy and write the state after ``record``.

        Args:
            named: The checkpoint, or None if the state is only part of later ones.
            record: The commit record. The last state of a stage that has ended is part of all
                further checkpoints.
            epoch: The epoch record of that commit.
        """
        serves, group = record.last and self._due.outlives, self._job.peer.group
        attempt = self._attempt(named or Named("", record.step, group), record, epoch)
        if record.last:  # no rank waits for this thread any longer
            self._await_delivery()
        snapshot = self._copy_of(attempt, serves or group == attempt.named.writer)
        if snapshot is None:
            if named is not None:
                self._writers.decline(attempt)
        elif serves:
            work = partial(self._serve, named and attempt, record, epoch, snapshot)
            self._serving_thread = threading.Thread(target=work, name=NAME, daemon=True)
            self._serving_thread.start()
        else:
            self._writers.write(attempt, snapshot)

    def _await_delivery(self) -> None:
        """Wait until this rank's earlier checkpoints are written and their memory is free."""
        self.before_change()  # a copy in progress counts as delivered only after this
        if not self._writers.await_delivery():
            self._copies.leave_memory()

    def _copy_of(self, attempt: WriteAttempt, shared: bool) -> Snapshot | None:
        """Start the copy of the committed state, or return None if it is not serializable."""
        self.before_change()
        step, began = attempt.named.step, time.monotonic()
        try:
            snapshot = self._copies.begin(shared, attempt.gives)
        except (TypeError, FftError, RuntimeError) as error:
            logger.error("no checkpoint of step %d: %s", step, error)
            self._job.report_checkpoint("checkpoint_failed", {"step": step, "error": str(error)})
            return None
        stall_ms = round((time.monotonic() - began) * 1e3, 3)
        self._job.note("checkpoint_begun", {"step": step, "stall_ms": stall_ms})
        return snapshot

    def _serve(
        self, attempt: WriteAttempt | None, record: Record, epoch: Record, snapshot: Snapshot
    ) -> None:
        """Write the last state of this stage to ``attempt`` and to all further checkpoints.

        It runs on a separate thread.
        """
        snapshot.copy()  # before waiting for later checkpoints, which may take long
        if attempt is not None:
            RankWriter(self._context, attempt, snapshot).run()
        try:
            for each in self._due.after_end(self._failing):
                attempt = self._attempt(each, record, epoch)
                self._decline_for_absent(attempt)
                RankWriter(self._context, attempt, snapshot).run()
        except (BusError, UnreadableMessage, ValueError) as error:
            text = "checkpoints of the stages that go on will lack this one: %s"
            logger.warning(text, error)

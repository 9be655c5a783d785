"""The main thread's part of durable checkpoints: decide when one is due, and bound its copy.

A checkpoint is due at the same commits on all ranks that have them (`due`): at an interval of steps
or seconds, at the last commit of a job, and at the first commit after the loss of the group that
was to write the previous checkpoint. The paradigm makes the schedule. If each stage has its own
scope, a checkpoint combines one commit of each stage.

The copy begins when the script asks for the next txn or leaves the job. So it includes what the
script has done since the commit, such as a schedule that steps by a validation loss, or random
numbers that were drawn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from fft.errors import BusError, FftError
from fft.messages.effects import StartTxn
from fft.messages.protocol import GroupEntry, Record, UnreadableMessage
from fft.protocol.state import leavers, staying
from fft.trace.checkpoint_notes import ABOUT_TOO_OFTEN
from fft.train.checkpoint.contents import Copies, Snapshot
from fft.train.checkpoint.due import CheckpointSchedule, Named, tell_left_out
from fft.train.checkpoint.files import Checkpoints
from fft.train.checkpoint.loading import Loader, refuse_at_once
from fft.train.checkpoint.plan import Checkpointing
from fft.train.checkpoint.stores import open_store
from fft.train.checkpoint.writer import NAME, Attempt, RankWriter, WriterContext, Writers
from fft.train.rank_context import RankContext
from fft.train.rank_state import CheckpointHooks

logger = logging.getLogger(__name__)


class _Pending(NamedTuple):
    """A checkpoint that is due, but whose copy has not begun."""

    attempt: Attempt | None
    """None if the stage has ended and takes part in later checkpoints only."""
    work: Callable[[], None]
    """Begins the copy, or whatever else the stage owes to the checkpoint."""


class Checkpointer(CheckpointHooks):
    """The checkpoints of one rank; its methods run on the main thread."""

    def __init__(self, plan: Checkpointing, rank: RankContext) -> None:
        """Open the checkpoint store.

        Raises:
            CheckpointError: This job can take no checkpoints, or the checkpoint that it is to
                resume from has other scopes.
        """
        self.plan = plan
        self.checkpoints = Checkpoints(open_store(str(plan.place)))
        refuse_at_once(plan, self.checkpoints, rank.scope)
        self._rank, self._job, self._state = rank, rank.job, rank.state
        self._loader = Loader(plan, self.checkpoints, rank)
        self._copies = Copies(rank.state)
        self._due: CheckpointSchedule = rank.state.paradigm.schedule(plan, self._is_writing)
        peer, tell = rank.job.peer, rank.job.report_checkpoint
        place = (peer.group, peer.rank)
        self._context = WriterContext(self.checkpoints, self._due, place, plan.keep, tell)
        self._writers = Writers(self._context)
        self._at_work = ExitStack()
        self._pending: _Pending | None = None
        """The checkpoint that is due with the last commit."""
        self._failing = threading.Event()
        """The script ends with an error, so nothing is waited for."""
        self._outliving: threading.Thread | None = None
        """The thread that serves later checkpoints after this stage has ended."""
        self._has_ended = False
        """This rank has seen the last commit."""
        self._is_too_often = False
        """The warning was logged that a checkpoint is due before the previous one is written."""

    def _is_writing(self) -> bool:
        return self._writers.is_writing

    def resume(self) -> None:
        """See `Loader.resume`."""
        self._loader.resume()

    def joined(self) -> None:
        """Trace what the job resumed from, once the trace has its header. From now on other
        processes see that this place is in use."""
        try:
            self._at_work.enter_context(self.checkpoints.store.at_work())
        except OSError as error:
            place = self.checkpoints.store.url
            logger.warning("others cannot see that this process writes at %s: %s", place, error)
        self._loader.trace()

    def before_vote(self, plan: StartTxn, last: bool, skip: bool) -> None:
        """Name the checkpoint of this txn, if this rank is to name it."""
        self._due.before_vote(plan, last, skip)

    def committed(self, record: Record, epoch: Record | None) -> None:
        """Plan the checkpoint that is due with ``record``, which the whole state now corresponds
        to.

        Args:
            epoch: The epoch record that lists the members, if known.
        """
        if epoch is None or epoch.epoch != record.epoch:
            return  # the job has gone on without this rank
        named, self._has_ended = self._due.due(record, epoch), record.last
        is_missed = named is not None and named.is_missed
        if record.last and self._due.outlives:
            kept = None if is_missed else named
            work = partial(self._outlive, kept, record, epoch)
            attempt = None if kept is None else self._attempt(kept, record, epoch)
            self._pending = _Pending(attempt, work)
            if not is_missed:
                return
        if named is None:
            return
        attempt = self._attempt(named, record, epoch)
        self._decline_for_absent(attempt)
        if is_missed:
            self._leave_out(attempt, "no commit of this stage has come to its place in the data")
        elif not record.last and self._writers.is_writing:
            self._leave_out(attempt, "the one before is still being written", too_often=True)
        else:
            self._pending = _Pending(attempt, partial(self._begin, attempt))

    def take(self) -> None:
        """Begin the checkpoint that is due, if any. It includes what the script did since the
        commit."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.work()

    def ended(self) -> None:
        """Take the last checkpoint of a stage that has nothing left to do.

        Its state is its last one even without a last commit: it may have resumed from a checkpoint
        of its end, or its last txn was a skip.
        """
        self.take()
        at, local = self._state.position, self._job.local
        if self._has_ended or at is None or local is None or local.epoch is None:
            return
        if local.head is None or at.lineage != local.head.lineage:
            return  # this rank's state is not the one of the others
        self.before_change()  # a copy in progress counts as delivered only after this
        record, epoch = replace(at, last=True), local.epoch
        named = self._due.ended(record, epoch)
        if self._due.outlives:
            self._outlive(None, record, epoch)
        elif named is not None:
            self._begin(self._attempt(named, record, epoch))

    def before_change(self) -> None:
        """Finish the copy, because state that the commit has left is about to change."""
        if (waited := self._copies.finish()) > 1e-3:
            self._job.note("checkpoint_waited", {"stall_ms": round(waited * 1e3, 3)})

    def close(self, serves: bool = True) -> None:
        """Wait for files that are being written, and a limited time for other ranks. Idempotent.

        Args:
            serves: A stage that has ended goes on serving the remaining stages until they end, too.
        """
        self.before_change()
        pending, self._pending = self._pending, None
        if pending is not None and pending.attempt is not None:
            why = "the script has ended with an error after that commit"
            self._leave_out(pending.attempt, why)
        self._context.closing.set()
        if not serves:
            self._failing.set()
        if self._outliving is not None:
            self._outliving.join()  # it has limits of its own
        self._writers.close()
        self._at_work.close()

    def left(self) -> None:
        """Take a checkpoint of the newest commit if this rank left after it and no group stays.

        The commit with which the last groups leave has a checkpoint already. Without such a commit,
        each group that leaves takes a checkpoint alone, since the others may have died.
        """
        self.take()
        at, local = self._state.position, self._job.local
        if self._has_ended or at is None or local is None or local.head is None:
            return
        left = self._job.peer.group in leavers(local) or bool(staying(local, self._job.peer))
        if left or local.epoch is None or at.lineage != local.head.lineage:
            return  # others continue, or this rank does not hold the newest state
        self._has_ended = True
        self.before_change()
        record = replace(at, last=True)
        if (named := self._due.left_alone(record)) is not None:
            alone = replace(local.epoch, members=(GroupEntry(self._job.peer.group, "", ()),))
            self._begin(self._attempt(named, record, alone))

    def _attempt(self, named: Named, record: Record, epoch: Record) -> Attempt:
        rank, spec = self._rank, self._rank.settings.spec
        return Attempt(
            named,
            record,
            epoch,
            rank.world,
            rank.scope.by_rank,
            spec.name,
            spec.digest(),
            self._loader.origin,
            rank.settings.expected_groups,
        )

    def _leave_out(self, attempt: Attempt, why: str, too_often: bool = False) -> None:
        if too_often and not self._is_too_often:
            self._is_too_often = True
            logger.warning("%s: %s", self.checkpoints.store.url, ABOUT_TOO_OFTEN)
        tell_left_out(self._job.report_checkpoint, attempt.named.step, why, too_often)
        self._writers.decline(attempt)

    def _decline_for_absent(self, attempt: Attempt) -> None:
        """Decline for the ranks of this stage that are not in its txn, so that no rank waits for
        them."""
        for group in self._due.absent(attempt.named, attempt.epoch):
            self._writers.decline(attempt, group)

    def _begin(self, attempt: Attempt) -> None:
        if attempt.record.last:  # no rank waits for this thread any more
            self._await_delivery()
        snapshot = self._copy_of(attempt, self._job.peer.group == attempt.named.writer)
        if snapshot is None:
            self._writers.decline(attempt)
        else:
            self._writers.write(attempt, snapshot)

    def _await_delivery(self) -> None:
        """Wait until this rank's files of earlier checkpoints are written, so that the memory of
        their copies is free."""
        if not self._writers.await_delivery():
            self._copies.leave_memory()

    def _copy_of(self, attempt: Attempt, shared: bool) -> Snapshot | None:
        """Begin the copy of the committed state, or return None if it does not fit into a file."""
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

    def _outlive(self, named: Named | None, record: Record, epoch: Record) -> None:
        """Copy the last state of this stage, which has ended with ``record``, and deliver it to the
        checkpoint ``named`` and to those that the remaining stages take later."""
        self._await_delivery()
        own = Named("", record.step, self._job.peer.group)
        snapshot = self._copy_of(self._attempt(named or own, record, epoch), shared=True)
        if snapshot is None:
            return

        def work() -> None:
            snapshot.copy()  # now, since the checkpoints that need it may come much later
            later = self._due.after_end(self._failing)
            try:
                for each in later if named is None else (named, *later):
                    attempt = self._attempt(each, record, epoch)
                    self._decline_for_absent(attempt)
                    RankWriter(self._context, attempt, snapshot).run()
            except (BusError, UnreadableMessage, ValueError) as error:
                text = "checkpoints of the stages that go on will lack this one: %s"
                logger.warning(text, error)

        self._outliving = threading.Thread(target=work, name=NAME, daemon=True)
        self._outliving.start()

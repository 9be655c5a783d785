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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from fft.durable.checkpoints import Checkpoints
from fft.durable.manifest import Origin
from fft.durable.plan import Checkpointing
from fft.durable.stores import open_store
from fft.errors import BusError, FftError
from fft.messages.effects import StartTxn
from fft.messages.protocol import Record, UnreadableMessage
from fft.protocol.state import leavers, staying
from fft.trace.checkpoint_notes import ABOUT_TOO_OFTEN
from fft.trace.inputs import RESTORED
from fft.train.checkpoint.due import CheckpointSchedule, Named, tell_left_out
from fft.train.checkpoint.loading import Loader, origin_of, refuse_at_once
from fft.train.checkpoint.snapshot import Snapshot, Staging
from fft.train.checkpoint.writer import Attempt, Cleared, RankWriter
from fft.train.rank_context import RankContext
from fft.train.rank_state import CheckpointHooks
from fft.util.version import __version__

COPY_LIMIT_S = 30.0
"""How long the next update waits for a copy; after that the checkpoint is given up, not the
step."""
_CLOSE_S = 300.0
"""How long a process that is to end waits for the last checkpoint of the job to be written."""

logger = logging.getLogger(__name__)


NAME, IDLE = "fft-checkpoint", "fft-checkpoint-idle"
"""Names of a thread at work and of an idle one."""


class _Hand:
    """One thread. It is a daemon, since a process may end while it works."""

    def __init__(self) -> None:
        self._work = SimpleQueue[tuple[Callable[[], None], threading.Event] | None]()
        self._over: threading.Event | None = None
        self._has_failed = False
        self._thread = threading.Thread(target=self._serve, name=IDLE, daemon=True)
        self._thread.start()

    @property
    def is_free(self) -> bool:
        return self._over is None or (self._over.is_set() and not self._has_failed)

    def do(self, work: Callable[[], None]) -> threading.Event:
        over = self._over = threading.Event()
        self._thread.name = NAME
        self._work.put((work, over))
        return over

    def end(self) -> None:
        self._work.put(None)

    def _serve(self) -> None:
        while (found := self._work.get()) is not None:
            work, over = found
            try:
                work()
            except BaseException:
                self._has_failed = True
                raise  # for threading.excepthook
            finally:
                self._thread.name = IDLE
                over.set()


class Threads:
    """A pool that grows to the number of jobs at work at once. One thread submits the jobs.

    The training waits until a new thread runs, mostly a tenth of a millisecond, but now and then
    some milliseconds if other threads want the interpreter.
    """

    def __init__(self) -> None:
        self._hands: list[_Hand] = []

    def do(self, work: Callable[[], None]) -> threading.Event:
        """Run ``work`` on one of the threads and return an event that is set at its end. An
        exception ends that thread."""
        free = next((hand for hand in self._hands if hand.is_free), None)
        if free is None:
            free = _Hand()
            self._hands.append(free)
        return free.do(work)

    def close(self) -> None:
        """End each thread after its current job. Idempotent."""
        for hand in self._hands:
            hand.end()
        self._hands.clear()


class _Pending(NamedTuple):
    """A checkpoint that is due, but whose copy has not begun."""

    attempt: Attempt | None
    """None if the stage has ended and takes part in later checkpoints only."""
    epoch: Record
    work: Callable[[], None]
    """Begins the copy, or whatever else the stage owes to the checkpoint."""


class Checkpointer(CheckpointHooks):
    """The checkpoints of one rank; its methods run on the main thread."""

    def __init__(
        self,
        plan: Checkpointing,
        rank: RankContext,
    ) -> None:
        """Open the checkpoint store.

        Raises:
            CheckpointError: This job can take no checkpoints, or the checkpoint that it is to
                resume from has other scopes.
        """
        self.plan = plan
        self.checkpoints = Checkpoints(open_store(str(plan.place)))
        refuse_at_once(plan, self.checkpoints, rank.scope)
        self.origin: Origin | None = None
        """The checkpoint that this job resumed from, if any."""
        self._job, self._state, self._scope = rank.job, rank.state, rank.scope
        self._spec, self._spec_digest = rank.settings.spec.name, rank.settings.spec.digest()
        self._groups, self._ranks = rank.settings.expected_groups, rank.world
        self._staging = Staging()
        self._snapshot: Snapshot | None = None
        self._threads, self._at_work = Threads(), ExitStack()
        self._cleared = Cleared(self.checkpoints)
        self._writers: dict[threading.Event, RankWriter] = {}
        """The writers still at work, by the event that is set when their thread is done."""
        self._due: CheckpointSchedule = rank.state.paradigm.schedule(plan, self._is_writing)
        self._pending: _Pending | None = None
        """The checkpoint that is due with the last commit."""
        self._closing = threading.Event()
        self._failing = threading.Event()
        """The script ends with an error, so nothing is waited for."""
        self._outliving: threading.Thread | None = None
        """The thread that serves later checkpoints after this stage has ended."""
        self._has_ended = False
        """This rank has seen the last commit."""
        self._changed_late: frozenset[str] = frozenset()
        self._is_too_often = False
        """The warning was logged that a checkpoint is due before the previous one is written."""
        self._has_resumed = False
        self._resumed: dict[str, Any] | None = None
        self._entries: Sequence[tuple[int, int]] = ()
        """Slice and version of each stage output that was loaded."""

    def resume(self) -> None:
        """Load the checkpoint that the job is to resume from, if any, before joining. Idempotent.

        Raises CheckpointError, DamagedCheckpoint, StateMismatch.
        """
        if self._has_resumed or self._job.engine is not None:
            return
        self._has_resumed = True
        began = time.monotonic()
        given = self.plan, self.checkpoints, self._job, self._groups, self._ranks
        loader = Loader(*given, self._scope)
        if (manifest := loader.choose()) is None:
            return
        found = loader.load(manifest, self._state)
        self.origin = origin_of(found)
        seconds = time.monotonic() - began
        told = {"step": found.at.step, "lineage": found.at.lineage, "as": found.lineage}
        told |= {"place": self.checkpoints.store.url, "seconds": round(seconds, 3)}
        told["attempt"] = manifest.attempt
        self._entries = found.entries
        told["takes_same"] = self._state.paradigm.takers != self._ranks
        self._resumed = told
        logger.info("resumed from the checkpoint of step %d, in %.1f s", manifest.step, seconds)
        is_other = manifest.spec_digest != self._spec_digest or manifest.fft_version != __version__
        if manifest.spec and is_other:  # an imported one has none
            logger.warning(
                "the checkpoint of step %d was written by FFT %s with spec %s, and this is FFT %s "
                "with spec %s, or another version of it",
                manifest.step,
                manifest.fft_version,
                manifest.spec,
                __version__,
                self._spec,
            )

    def joined(self) -> None:
        """Trace what the job resumed from, once the trace has its header. From now on other
        processes see that this place is in use."""
        try:
            self._at_work.enter_context(self.checkpoints.store.at_work())
        except OSError as error:
            place = self.checkpoints.store.url
            logger.warning("others cannot see that this process writes at %s: %s", place, error)
        if self._resumed is not None:
            self._job.note("resumed", self._resumed)
        for number, version in self._entries:
            self._job.note(RESTORED, {"slice": number, "version": version})

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
            self._pending = _Pending(attempt, epoch, work)
            if not is_missed:
                return
        if named is None:
            return
        attempt = self._attempt(named, record, epoch)
        self._decline_for_absent(attempt, epoch)
        if is_missed:
            why = "no commit of this stage has come to its place in the data"
            self._leave_out(attempt, epoch, why)
        elif not record.last and self._is_writing():
            self._leave_out(attempt, epoch, "the one before is still being written", too_often=True)
        else:
            self._pending = _Pending(attempt, epoch, partial(self._begin, attempt, epoch))

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
            self._await_delivery()
            self._begin(self._attempt(named, record, epoch), epoch)

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
            attempt = self._attempt(named, record, local.epoch)
            self._begin(replace(attempt, groups=(self._job.peer.group,)), local.epoch)

    def _attempt(self, named: Named, record: Record, epoch: Record) -> Attempt:
        groups = tuple(entry.group for entry in epoch.members)
        spec = self._scope.by_rank, self._spec, self._spec_digest
        return Attempt(named, record, groups, self._ranks, *spec, self.origin, self._groups)

    def _leave_out(
        self, attempt: Attempt, epoch: Record, why: str, too_often: bool = False
    ) -> None:
        if too_often and not self._is_too_often:
            self._is_too_often = True
            logger.warning("%s: %s", self.checkpoints.store.url, ABOUT_TOO_OFTEN)
        tell_left_out(self._job.report_checkpoint, attempt.named.step, why, too_often)
        self._decline(attempt, epoch)

    def _await_delivery(self) -> None:
        """Wait until this rank's files of earlier checkpoints are written.

        The writer that publishes one may wait longer for other ranks. At the limit, their copies
        keep their memory and this rank stages in new memory.
        """
        until = time.monotonic() + _CLOSE_S
        for writer in self._writers.values():
            if not writer.has_delivered.wait(max(0.0, until - time.monotonic())):
                self._staging = Staging()

    def _decline_for_absent(self, attempt: Attempt, epoch: Record) -> None:
        """Decline for the ranks of this stage that are not in its txn, so that no rank waits for
        them."""
        for group in self._due.absent(attempt.named, epoch):
            self._decline(attempt, epoch, group)

    def _decline(self, attempt: Attempt, epoch: Record, group: str = "") -> None:
        """Decline for this rank, or for its rank of ``group``, so that no rank waits for it. The
        write happens on a thread, so this rank does not wait for the disk."""
        writer = self._writer_of(attempt, None, epoch, group)
        self._do(writer, writer.decline)

    def _do(self, writer: RankWriter, work: Callable[[], None]) -> None:
        """Run ``work`` of ``writer`` on a thread; failed earlier attempts are removed now."""
        for earlier in self._writers.values():
            earlier.supersede()
        self._writers[self._threads.do(work)] = writer

    def _is_writing(self) -> bool:
        """Whether this rank still writes a checkpoint or has to publish one."""
        self._writers = {over: w for over, w in self._writers.items() if not over.is_set()}
        return any(not writer.is_over for writer in self._writers.values())

    def _begin(self, attempt: Attempt, epoch: Record) -> None:
        if attempt.record.last:  # no rank waits for this thread any more
            self._await_delivery()
        snapshot = self._copy_of(attempt, self._job.peer.group == attempt.named.writer)
        if snapshot is None:
            self._decline(attempt, epoch)
            return
        writer = self._writer_of(attempt, snapshot, epoch)
        self._do(writer, writer.run)

    def _copy_of(self, attempt: Attempt, shared: bool) -> Snapshot | None:
        """Begin the copy of the committed state, or return None if it does not fit into a file."""
        self.before_change()
        step, began = attempt.named.step, time.monotonic()
        given = self._state, self._staging, shared, self._changed_late, attempt.gives
        try:
            self._snapshot = Snapshot(*given)
        except (TypeError, FftError, RuntimeError) as error:
            logger.error("no checkpoint of step %d: %s", step, error)
            self._job.report_checkpoint("checkpoint_failed", {"step": step, "error": str(error)})
            return None
        stall_ms = round((time.monotonic() - began) * 1e3, 3)
        self._job.note("checkpoint_begun", {"step": step, "stall_ms": stall_ms})
        return self._snapshot

    def _writer_of(
        self, attempt: Attempt, snapshot: Snapshot | None, epoch: Record, group: str = ""
    ) -> RankWriter:
        """Make the writer for this rank, or for the same rank of ``group``."""
        peer, record = self._job.peer, attempt.record
        return RankWriter(
            self.checkpoints,
            attempt,
            snapshot,
            (group or peer.group, peer.rank),
            self.plan.keep,
            self._job.report_checkpoint,
            partial(self._due.left, record, epoch),
            partial(self._due.is_awaited, record),
            self._closing,
            self._cleared,
        )

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
                    self._decline_for_absent(attempt, epoch)
                    self._writer_of(attempt, snapshot, epoch).run()
            except (BusError, UnreadableMessage, ValueError) as error:
                text = "checkpoints of the stages that go on will lack this one: %s"
                logger.warning(text, error)

        self._outliving = threading.Thread(target=work, name=NAME, daemon=True)
        self._outliving.start()

    def before_change(self) -> None:
        """Finish the copy, because state that the commit has left is about to change."""
        snapshot = self._snapshot
        if snapshot is None:
            return
        self._snapshot = None
        waited = snapshot.finish(COPY_LIMIT_S)
        self._changed_late |= frozenset(snapshot.edited)
        if waited > 1e-3:
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
            self._leave_out(pending.attempt, pending.epoch, why)
        self._closing.set()
        if not serves:
            self._failing.set()
        if self._outliving is not None:
            self._outliving.join()  # it has limits of its own
        until = time.monotonic() + _CLOSE_S
        for over in self._writers:
            over.wait(max(0.0, until - time.monotonic()))
        if self._is_writing():
            logger.error("a checkpoint is still being written after %g s; it is left", _CLOSE_S)
        self._writers = {}
        self._cleared.sweep()
        self._threads.close()
        self._at_work.close()

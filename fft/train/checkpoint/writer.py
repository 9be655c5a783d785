"""The writer of one rank's part of a checkpoint, on a background thread.

The thread copies the state, writes its files, reads them back for their digests, and writes a
receipt. The first rank of the writing group waits for the receipts of the others. Then it publishes
the checkpoint or removes a failed attempt (`Gathering`). If each stage has its own scope, that rank
belongs to the first stage.

Ranks communicate only by files, without collectives or messages, so a rollback has nothing to
abort. A rank polls for files with growing pauses.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Self

import torch

from fft.checkpoints.files import (
    Checkpoints,
    File,
    Manifest,
    Origin,
    Passed,
    Receipt,
    Scope,
    partial_name,
)
from fft.checkpoints.stores import MANIFEST
from fft.errors import FftError
from fft.messages.protocol import Record
from fft.train.checkpoint.contents import Snapshot, write_rank
from fft.train.session.checkpoint_schedule import CheckpointSchedule, Named, Note, report_skipped
from fft.train.session.rank_context import RankContext
from fft.util.version import __version__

_BEFORE_DELIVERY = ("copying", "writing", "waiting for the end of the step function")
logger = logging.getLogger(__name__)


_POLL_S, _LONGEST_POLL_S = 0.02, 1.0
_WAIT_S, _WAIT_FACTOR = 60.0, 4.0
"""Timeout for other ranks: ``_WAIT_S`` seconds plus ``_WAIT_FACTOR`` times this rank's duration.

Other ranks write as much data as this rank.
"""
_CLOSING_S = 5.0
"""Timeout in seconds for other ranks of a failed attempt during shutdown."""
_REMEMBERED = 16
"""Number of removed attempts to check again for files of late ranks.

Publishing a checkpoint removes the remains of older attempts.
"""


_CLOSE_S = 300.0
"""Timeout in seconds for the last checkpoint of the job during shutdown."""
NAME, IDLE = "fft-checkpoint", "fft-checkpoint-idle"
"""Thread names while busy and while idle."""


Receipts = dict[tuple[str, int], Receipt]


@dataclass(frozen=True)
class WriteAttempt:
    """A checkpoint that all ranks of an epoch take together, each writing its own part."""

    named: Named
    record: Record
    """Commit record of the checkpoint in the scope of this rank."""
    epoch: Record
    """Epoch record of the commit, which lists the member groups."""
    ranks: int
    stages: Sequence[str]
    """Scope names by rank, if each stage has its own scope."""
    spec: str
    spec_digest: str
    origin: Origin | None
    most: int = 0
    """Expected number of groups of the job; 0 if unknown."""
    mesh: str = ""
    """The layout of the mesh of each group, as in `Manifest`."""
    items: int = 0
    """Number of data items in a slice, as in `Manifest`."""

    @classmethod
    def of(
        cls, rank: RankContext, named: Named, record: Record, epoch: Record, origin: Origin | None
    ) -> Self:
        """Return the attempt ``named`` of this rank. ``origin`` is the checkpoint it began with."""
        spec = rank.settings.spec
        return cls(
            named,
            record,
            epoch,
            rank.world,
            rank.scope.by_rank,
            spec.name,
            spec.digest(),
            origin,
            rank.settings.expected_groups,
            rank.groups.mesh_text,
            rank.state.paradigm.items_per_step,
        )

    def manifest(
        self, scopes: Mapping[str, Scope], groups: Iterable[str], files: Iterable[File]
    ) -> Manifest:
        """Return the manifest of these files.

        Args:
            scopes: Position of each scope of the job.
            groups: The groups whose ranks have written all of their files.
        """
        return Manifest(
            **self.at.model_dump(),
            scopes=dict(scopes),
            writer=self.named.writer,
            groups=tuple(groups),
            ranks=self.ranks,
            mesh=self.mesh,
            items=self.items,
            spec=self.spec,
            spec_digest=self.spec_digest,
            fft_version=__version__,
            torch_version=torch.__version__,
            attempt=self.named.name,
            written_at=time.time(),
            resumed_from=self.origin,
            files=tuple(files),
        )

    @property
    def groups(self) -> tuple[str, ...]:
        """Member groups of the epoch."""
        return tuple(entry.group for entry in self.epoch.members)

    @property
    def directory(self) -> str:
        """The directory for the files of the unfinished attempt."""
        return partial_name(self.named.step, self.named.name)

    @property
    def at(self) -> Scope:
        """Position of the scope after the commit."""
        return position_of(self.record)

    @property
    def gives(self) -> range:
        """Slices whose entries the next stage may still need at its own checkpoint position.

        That position is less than one txn behind this stage, except at the end of the job. Later
        slices belong to attempts that did not commit.
        """
        cursor, most = self.record.cursor, max(len(self.groups), self.most)
        return range(0 if self.record.last else max(0, cursor - most), cursor)


def position_of(record: Record) -> Scope:
    """Return the position of a scope after the commit ``record``."""
    returned = sorted((*record.returned, *(lease.slice for lease in record.leases)))
    return Scope(
        step=record.step,
        lineage=record.lineage,
        batches=record.batches,
        cursor=record.cursor,
        returned=tuple(returned),
    )


@dataclass(frozen=True)
class WriterContext:
    """The settings and tools that the writers of one rank share.

    Attributes:
        due: The schedule, which determines the ranks to wait for.
        place: Group and rank.
        keep: Number of newest checkpoints to keep; 0 keeps all.
        note: Traces and reports an outcome.
        closing: Set when this process shuts down.
        removed: Directories of the newest failed attempts that this rank has removed.
    """

    checkpoints: Checkpoints
    due: CheckpointSchedule
    place: tuple[str, int]
    keep: int
    note: Note
    closing: threading.Event = field(default_factory=threading.Event)
    removed: deque[str] = field(default_factory=partial(deque, maxlen=_REMEMBERED))

    def sweep(self) -> None:
        """Remove directories that a late rank has recreated after their removal.

        Thread-safe. A failed removal is logged.
        """
        store = self.checkpoints.store
        for directory in tuple(self.removed):
            try:
                if store.files(directory):
                    store.remove(directory)
                    logger.info("%s was removed again: a rank was late with its part", directory)
            except OSError as error:
                logger.warning("%s has failed, and cannot be removed: %s", directory, error)


class Gathering:
    """Collects the receipts of one attempt, on the thread of the writing group's first rank.

    That rank also removes the files of a failed attempt, because no other rank can publish them.

    Args:
        context: The settings of this rank.
        attempt: The attempt whose receipts are collected.
        superseded: Set when this rank starts another attempt.
    """

    def __init__(
        self, context: WriterContext, attempt: WriteAttempt, superseded: threading.Event
    ) -> None:
        self._context, self._attempt, self._superseded = context, attempt, superseded
        self._checkpoints, self._closing = context.checkpoints, context.closing
        ranks, self._writer = range(attempt.ranks), attempt.named.writer
        self.needed = {(self._writer, rank) for rank in ranks}
        """The places (group, rank) whose files a checkpoint requires."""
        self.wanted = {(group, rank) for group in attempt.groups for rank in ranks}

    def receipts(self, own_s: float) -> Receipts:
        """Wait for all expected receipts, and return those found.

        Args:
            own_s: Seconds that this rank has spent on the attempt.

        Raises OSError, Passed.
        """
        return self._wait(own_s, is_failed=False)

    def clear(self, own_s: float, is_passed: bool = False) -> None:
        """Remove the failed attempt when no rank writes to it any longer.

        The wait is that of `receipts`, but ends when the next attempt begins, because that attempt
        needs the space. Ranks that still write to this attempt then fail. During shutdown the wait
        takes at most 5 s. If a rank is still writing then, the next start of the job removes the
        attempt. A failed removal is logged.

        Args:
            own_s: Seconds that this rank has spent on the attempt.
            is_passed: Whether a later checkpoint supersedes the attempt, so no wait is needed.
        """
        store, directory = self._checkpoints.store, self._attempt.directory
        try:
            found = Receipts() if is_passed else self._wait(own_s, is_failed=True)
            files = store.files(directory)
            if MANIFEST in files:
                return  # the checkpoint is complete; only its final rename failed
            is_left = self._closing.is_set() and not (is_passed or self._superseded.is_set())
            if files and is_left and not self._have_all_reported(found, is_failed=True):
                logger.warning(
                    "%s is left to the next start: not all ranks have said that they write no more "
                    "in it",
                    directory,
                )
                return
            self._context.removed.append(directory)
            store.remove(directory)
            if files:
                logger.info("%s was removed: it has failed", directory)
        except OSError as error:
            logger.warning("%s has failed, and cannot be removed: %s", directory, error)

    def _wait(self, own_s: float, is_failed: bool) -> Receipts:
        attempt, found, pause = self._attempt, Receipts(), _POLL_S
        began = time.monotonic()
        until, closing, was_there = began + _WAIT_S + _WAIT_FACTOR * own_s, False, False
        while True:
            known = len(found)
            if is_failed:
                is_there = bool(self._checkpoints.store.files(attempt.directory))
                if not is_there and (was_there or self._closing.is_set()):
                    return found  # already removed, or never created
                was_there = is_there
            found = self._checkpoints.receipts(attempt.directory, attempt.named.name, found)
            if self._have_all_reported(found, is_failed) or (
                is_failed and self._superseded.is_set()
            ):
                return found
            now = time.monotonic()
            if is_failed and self._closing.is_set():
                if not closing:
                    until, closing = min(until, now + _CLOSING_S), True
                    logger.warning(
                        "%s has failed: waiting for ranks that may still write in it, %g s at most",
                        attempt.directory,
                        until - now,
                    )
            elif self._context.due.is_awaited(attempt.record) and not self._closing.is_set():
                until = max(until, now + _WAIT_S + _WAIT_FACTOR * own_s)
            elif attempt.stages and len(found) > known:  # the next stage may take equally long
                until = max(until, now + _WAIT_S + _WAIT_FACTOR * (now - began))
            if now >= until:
                return found
            if not is_failed:
                if any(place in found and not found[place].files for place in self.needed):
                    return found
                if pause == _LONGEST_POLL_S:
                    self._checkpoints.refuse_passed(attempt.named.step, attempt.named.name)
            self._superseded.wait(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_S)

    def _have_all_reported(self, found: Receipts, is_failed: bool) -> bool:
        """Return whether all ranks that are still in the job have delivered or declined."""
        attempt = self._attempt
        gone = self._context.due.left(attempt.record, attempt.epoch) - {self._writer}
        awaited = {place for place in self.wanted if place[0] not in gone}
        if is_failed:
            awaited.discard((self._writer, 0))  # this rank
        return awaited <= found.keys()


def decline(checkpoints: Checkpoints, attempt: WriteAttempt, place: tuple[str, int]) -> None:
    """Write a "declined" receipt: this rank delivers no files for ``attempt``. Thread-safe."""
    group, rank = place
    receipt = Receipt(attempt=attempt.named.name, group=group, rank=rank, files=())
    try:
        checkpoints.deliver(attempt.directory, receipt)
    except OSError as error:
        logger.warning(
            "that group %s rank %d delivers nothing cannot be written at %s: %s; others wait for "
            "it in vain",
            group,
            rank,
            checkpoints.store.url,
            error,
        )


class RankWriter:
    """The work of one rank for one attempt; `run` runs on a background thread.

    Args:
        context: The settings of this rank.
        attempt: The attempt to write.
        snapshot: The copy, or None if this rank only declines.
        group: The group of the rank that declines. Defaults to the group of this rank.
    """

    def __init__(
        self,
        context: WriterContext,
        attempt: WriteAttempt,
        snapshot: Snapshot | None = None,
        group: str = "",
    ) -> None:
        self._context, self._attempt, self._snapshot = context, attempt, snapshot
        self._checkpoints = context.checkpoints
        self._group, self._rank = group or context.place[0], context.place[1]
        self._superseded = threading.Event()
        self._gathering = Gathering(context, attempt, self._superseded)
        self._phase = ""
        self.has_delivered = threading.Event()
        """Set when this rank's part is written or has failed, so its copy is no longer needed."""
        self.is_over = False
        """Whether this rank's part failed or was declined, so only cleanup remains."""

    @property
    def _publishes(self) -> bool:
        """Whether this rank publishes the checkpoint, or removes it after a failure."""
        return (self._group, self._rank) == (self._attempt.named.writer, 0)

    def supersede(self) -> None:
        """Remove this attempt now if it failed, because another one starts. Thread-safe."""
        if self.is_over:
            self._superseded.set()

    def decline(self) -> None:
        """Decline to deliver files; called instead of `run`."""
        self.is_over = True
        self.has_delivered.set()
        decline(self._checkpoints, self._attempt, (self._group, self._rank))
        if self._publishes:
            self._gathering.clear(0.0)

    def run(self) -> None:
        """Write this rank's files, and publish the checkpoint if this rank is responsible for it.

        An error fails only this checkpoint, not the training.
        """
        began = time.monotonic()
        told: dict[str, Any] = {"step": self._attempt.named.step}
        told["place"] = self._checkpoints.store.url
        try:
            self._deliver_and_publish(told, began)
        except (OSError, FftError, RuntimeError) as error:
            self.is_over = True
            cause = self._or_passed(error)
            self._tell(cause, told)  # before the next checkpoint, which may wait for this one
            self.has_delivered.set()
            if self._publishes:
                is_passed = isinstance(cause, Passed)
                self._gathering.clear(time.monotonic() - began, is_passed)
            return
        finally:
            self.has_delivered.set()
        self._context.note("checkpoint", told)

    def _deliver_and_publish(self, told: dict[str, Any], began: float) -> None:
        self._context.sweep()  # a failed attempt may take up the space
        self._at("copying")
        assert self._snapshot is not None
        if not self._snapshot.copy() or self._snapshot.problem is not None:
            raise FftError(self._snapshot.problem or "it was not copied")
        self._at("writing")
        files = self._write(self._snapshot)
        told["bytes"] = sum(file.size for file in files)
        told["copy_ms"] = round(self._snapshot.copy_s * 1e3, 3)
        told["write_ms"] = round((time.monotonic() - began) * 1e3, 3)
        self.has_delivered.set()
        if self._publishes:
            self._publish(time.monotonic() - began)
            told["published"] = True
            self._prune()

    def _tell(self, error: Exception, told: dict[str, Any]) -> None:
        """Log and trace the reason for a missing checkpoint."""
        step = self._attempt.named.step
        if isinstance(error, Passed):
            report_skipped(self._context.note, step, str(error))
            return
        text = f"{type(error).__name__}: {error}"
        logger.error(
            "no checkpoint of step %d: group %s rank %d was %s, and failed: %s; training "
            "continues, and the next one is tried",
            step,
            self._group,
            self._rank,
            self._phase,
            text,
        )
        self._context.note("checkpoint_failed", {**told, "phase": self._phase, "error": text})
        if self._phase in _BEFORE_DELIVERY:
            decline(self._checkpoints, self._attempt, (self._group, self._rank))

    def _or_passed(self, error: Exception) -> Exception:
        """Return `Passed` if a later checkpoint was published, otherwise ``error``.

        Publishing a checkpoint removes earlier attempts, which can cause ``error``.
        """
        named = self._attempt.named
        try:
            self._checkpoints.refuse_passed(named.step, named.name)
        except Passed as passed:
            return passed
        except OSError:
            logger.debug("nor can be seen what others have written", exc_info=True)
        return error

    def _at(self, phase: str) -> None:
        self._phase = phase

    def _write(self, snapshot: Snapshot) -> tuple[File, ...]:
        """Write this rank's files and its receipt."""
        attempt = self._attempt
        store, directory = self._checkpoints.store, attempt.directory
        place = self._group, self._rank
        files = write_rank(store, directory, place, snapshot.data, snapshot.tensors)
        receipt = Receipt(
            attempt=attempt.named.name,
            group=self._group,
            rank=self._rank,
            files=files,
            at=attempt.at if attempt.stages else None,
        )
        self._at("waiting for the end of the step function")
        snapshot.await_confirmation()
        self._at("delivering")
        self._checkpoints.deliver(directory, receipt)
        return files

    # --- the first rank of the writing group ---

    def _publish(self, own_s: float) -> None:
        self._at("waiting for the others")
        receipts = self._gather(own_s)
        self._at("publishing")
        self._checkpoints.publish(self._attempt.directory, self._manifest(receipts))

    def _prune(self) -> None:
        """Remove older checkpoints. An error only wastes space: the new one is published."""
        try:
            for name in self._checkpoints.prune(self._context.keep):
                logger.info("checkpoint %s was removed: %d are kept", name, self._context.keep)
        except OSError as error:
            place = self._checkpoints.store.url
            logger.warning("older checkpoints at %s cannot be removed: %s", place, error)

    def _gather(self, own_s: float) -> dict[tuple[str, int], Receipt]:
        """Return the receipts of all ranks that have delivered files.

        Args:
            own_s: Seconds that this rank has spent on the attempt.

        Raises FftError if a rank of the writing group has delivered no files.
        """
        attempt, writer = self._attempt, self._attempt.named.writer
        found = self._gathering.receipts(own_s)
        needed, wanted = self._gathering.needed, self._gathering.wanted
        delivered = {place for place, receipt in found.items() if receipt.files}
        if missing := sorted(needed - delivered):
            names = ", ".join(f"rank {rank}" for _, rank in missing)
            if any(place in found for place in missing):
                raise FftError(f"{names} of group {writer} delivers nothing, as it has said")
            raise FftError(
                f"{names} of group {writer} has delivered no files to "
                f"{self._checkpoints.store.url}; is that on a file system that all hosts share?"
            )
        if late := sorted(wanted - delivered):
            names = ", ".join(f"{group}/{rank}" for group, rank in late)
            logger.warning(
                "the checkpoint of step %d is without buffers and random states of %s",
                attempt.named.step,
                names,
            )
        return {place: found[place] for place in delivered}

    def _manifest(self, receipts: dict[tuple[str, int], Receipt]) -> Manifest:
        """Build the manifest. Raises FftError if the positions of the stages are inconsistent."""
        attempt = self._attempt
        ranks = range(attempt.ranks)
        scopes = self._stages(receipts) if attempt.stages else {"job": attempt.at}
        whole = [
            group
            for group in attempt.groups
            if all((group, rank) in receipts for rank in ranks)
            and all(receipts[group, k].at == receipts[attempt.named.writer, k].at for k in ranks)
        ]
        listed = [receipts[group, rank] for group in whole for rank in ranks]
        files = [file for receipt in listed for file in receipt.files]
        return attempt.manifest(scopes, whole, files)

    def _stages(self, receipts: dict[tuple[str, int], Receipt]) -> dict[str, Scope]:
        """Return the position of each stage.

        Raises FftError if a stage is ahead of the previous stage, or lacks a position.
        """
        found, writer = dict[str, Scope](), self._attempt.named.writer
        for rank, stage in enumerate(self._attempt.stages):
            at = receipts[writer, rank].at
            if at is None:
                raise FftError(f"rank {rank} of group {writer} does not say where its stage stands")
            if found and at.cursor > (before := [*found.values()][-1]).cursor:
                raise FftError(
                    f"stage {stage!r} came to slice {at.cursor} of the data, and the stage before "
                    f"it to {before.cursor}"
                )
            found[stage] = at
        return found


class _Hand:
    """One daemon thread of the pool; a process may exit while the thread is busy."""

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


class WorkerPool:
    """A thread pool that grows to the number of concurrent tasks, which one thread submits.

    The pool reuses idle threads, because starting a thread blocks the training. That takes about
    0.1 ms, and sometimes several ms if other threads hold the GIL.
    """

    def __init__(self) -> None:
        self._hands: list[_Hand] = []

    def do(self, work: Callable[[], None]) -> threading.Event:
        """Run ``work`` on one of the threads and return an event that is set at its end.

        An exception ends that thread.
        """
        free = next((hand for hand in self._hands if hand.is_free), None)
        if free is None:
            free = _Hand()
            self._hands.append(free)
        return free.do(work)

    def close(self) -> None:
        """End each thread after its current task. Idempotent."""
        for hand in self._hands:
            hand.end()
        self._hands.clear()


class Writers:
    """The active writers of one rank; used on the main thread."""

    def __init__(self, context: WriterContext) -> None:
        self.context = context
        self._threads = WorkerPool()
        self._at_work: dict[threading.Event, RankWriter] = {}
        """The writers by the event that the end of their task sets."""

    @property
    def is_writing(self) -> bool:
        """Whether this rank still has to write or publish a checkpoint."""
        self._at_work = {over: w for over, w in self._at_work.items() if not over.is_set()}
        return any(not writer.is_over for writer in self._at_work.values())

    def write(self, attempt: WriteAttempt, snapshot: Snapshot) -> None:
        """Write this rank's part of ``attempt`` on a background thread."""
        writer = RankWriter(self.context, attempt, snapshot)
        self._start(writer, writer.run)

    def decline(self, attempt: WriteAttempt, group: str = "") -> None:
        """Decline for this rank, or for the same rank of ``group``, so that no rank waits for it.

        A background thread writes the receipt, so the main thread does not wait for the disk.
        """
        writer = RankWriter(self.context, attempt, group=group)
        self._start(writer, writer.decline)

    def _start(self, writer: RankWriter, work: Callable[[], None]) -> None:
        """Run ``work`` of ``writer`` on a thread, and remove earlier failed attempts."""
        for earlier in self._at_work.values():
            earlier.supersede()
        self._at_work[self._threads.do(work)] = writer

    def await_delivery(self) -> bool:
        """Wait until this rank's files of earlier checkpoints are written.

        The rank that publishes a checkpoint may wait longer for other ranks.

        Returns:
            Whether all files were written within the timeout.
        """
        until = time.monotonic() + _CLOSE_S
        delivered = [
            writer.has_delivered.wait(max(0.0, until - time.monotonic()))
            for writer in self._at_work.values()
        ]
        return all(delivered)

    def close(self) -> None:
        """Wait until files are written, and a limited time for other ranks. Idempotent.

        The caller must have set ``context.closing``.
        """
        until = time.monotonic() + _CLOSE_S
        for over in self._at_work:
            over.wait(max(0.0, until - time.monotonic()))
        if self.is_writing:
            logger.error("a checkpoint is still being written after %g s; it is left", _CLOSE_S)
        self._at_work = {}
        self.context.sweep()
        self._threads.close()

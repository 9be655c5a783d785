"""Collection of what ranks have delivered for an attempt, by the rank that is to publish it.

That rank waits for receipts. If the attempt has failed, it also removes the files: no other rank
can publish it, so it cannot become a checkpoint any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from fft.durable.checkpoints import Checkpoints
from fft.durable.manifest import Origin, Receipt, Scope, partial_name
from fft.durable.stores import MANIFEST
from fft.messages.protocol import Record
from fft.train.checkpoint.due import Named

_POLL_S, _LONGEST_POLL_S = 0.02, 1.0
_WAIT_S, _WAIT_FACTOR = 60.0, 4.0
"""Time for other ranks, which have as much to write: so many seconds, plus so many times as long as
this rank took."""
_CLOSING_S = 5.0
"""Time for other ranks in seconds, if the attempt has failed and this process is to end."""
_REMEMBERED = 16
"""Number of failed attempts to remember; leftovers of older ones are removed when a checkpoint is
published."""

logger = logging.getLogger(__name__)

Receipts = dict[tuple[str, int], Receipt]


@dataclass(frozen=True)
class Attempt:
    """A checkpoint that all ranks of an epoch take together, each writing its own part."""

    named: Named
    record: Record
    """Commit record of the checkpoint; that of this stage, if each stage has its own scope."""
    groups: tuple[str, ...]
    """Member groups of its epoch."""
    ranks: int
    stages: Sequence[str]
    """Scope names by rank, if each stage has its own scope."""
    spec: str
    spec_digest: str
    origin: Origin | None
    most: int = 0
    """Number of groups of the job, as far as it was announced."""

    @property
    def directory(self) -> str:
        """The directory into which its files are written first."""
        return partial_name(self.named.step, self.named.name)

    @property
    def at(self) -> Scope:
        """Position of the scope after the commit."""
        record = self.record
        returned = sorted((*record.returned, *(lease.slice for lease in record.leases)))
        return Scope(
            step=record.step,
            lineage=record.lineage,
            batches=record.batches,
            cursor=record.cursor,
            returned=tuple(returned),
        )

    @property
    def gives(self) -> range:
        """Slices whose entries the next stage may lack when it reaches its own position.

        That position is less than one of its txns behind, except at the end of the job. Later
        slices belong to attempts that were not committed.
        """
        cursor, most = self.record.cursor, max(len(self.groups), self.most)
        return range(0 if self.record.last else max(0, cursor - most), cursor)


class Cleared:
    """Attempts that this rank has removed. A rank that was late may have created a directory
    again."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._directories = deque[str](maxlen=_REMEMBERED)

    def add(self, directory: str) -> None:
        """Remember that ``directory`` is being removed. Runs on any thread, as does `sweep`."""
        self._directories.append(directory)

    def sweep(self) -> None:
        """Remove directories that exist again. Logs what cannot be removed."""
        store = self._checkpoints.store
        for directory in tuple(self._directories):
            try:
                if store.files(directory):
                    store.remove(directory)
                    logger.info("%s was removed again: a rank was late with its part", directory)
            except OSError as error:
                logger.warning("%s has failed, and cannot be removed: %s", directory, error)


class Gathering:
    """The receipts of one attempt; used by the thread of the writing group's first rank.

    Args:
        left: Returns the groups that have left the job since, or were restarted.
        is_awaited: Whether other ranks may reach their position only later.
        superseded: Set when this rank has begun another attempt.
        cleared: Records that this attempt was removed.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        attempt: Attempt,
        left: Callable[[], Set[str]],
        is_awaited: Callable[[], bool],
        closing: threading.Event,
        superseded: threading.Event,
        cleared: Cleared,
    ) -> None:
        self._checkpoints, self._attempt, self._cleared = checkpoints, attempt, cleared
        self._left, self._is_awaited, self._closing = left, is_awaited, closing
        self._superseded = superseded
        ranks, self._writer = range(attempt.ranks), attempt.named.writer
        self.needed = {(self._writer, rank) for rank in ranks}
        """The places (group, rank) without whose files there is no checkpoint."""
        self.wanted = {(group, rank) for group in attempt.groups for rank in ranks}

    def receipts(self, own_s: float) -> Receipts:
        """Wait until no more receipts are to be expected, and return those found.

        Args:
            own_s: How long this rank has written, in seconds.

        Raises OSError, Passed.
        """
        return self._wait(own_s, is_failed=False)

    def clear(self, own_s: float, is_passed: bool = False) -> None:
        """Remove the failed attempt once no rank writes to it any more.

        Waits as `receipts` does, but no longer than until the next attempt begins, which needs the
        space: a rank that still writes to this one fails, too. If this process is to end, it waits
        for 5 s at most. If a rank still writes then, the attempt is left to the next start. Logs
        what cannot be removed.

        Args:
            own_s: How long this rank has written, in seconds.
            is_passed: The attempt failed long ago, so there is nothing to wait for.
        """
        store, directory = self._checkpoints.store, self._attempt.directory
        try:
            found = Receipts() if is_passed else self._wait(own_s, is_failed=True)
            files = store.files(directory)
            if MANIFEST in files:
                return  # it is a checkpoint, of which only the renaming has failed
            is_left = self._closing.is_set() and not (is_passed or self._superseded.is_set())
            if files and is_left and not self._have_all_said(found, is_failed=True):
                logger.warning(
                    "%s is left to the next start: not all ranks have said that they write no more "
                    "in it",
                    directory,
                )
                return
            self._cleared.add(directory)
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
                    return found  # removed when a later one was published, or never created
                was_there = is_there
            found = self._checkpoints.receipts(attempt.directory, attempt.named.name, found)
            if self._have_all_said(found, is_failed) or (is_failed and self._superseded.is_set()):
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
            elif self._is_awaited() and not self._closing.is_set():
                until = max(until, now + _WAIT_S + _WAIT_FACTOR * own_s)
            elif attempt.stages and len(found) > known:  # the next stage may need as long
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

    def _have_all_said(self, found: Receipts, is_failed: bool) -> bool:
        """Whether all ranks that are still in the job have delivered or declined."""
        gone = self._left() - {self._writer}
        awaited = {place for place in self.wanted if place[0] not in gone}
        if is_failed:
            awaited.discard((self._writer, 0))  # this rank
        return awaited <= found.keys()

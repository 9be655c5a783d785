"""What ranks have delivered for an attempt at a checkpoint, for the rank that is to publish it.

That rank waits for receipts. If the attempt has failed, it is also the one that removes what is
there: nobody else can publish it, so it cannot become a checkpoint any more.
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
"""For others, who have as much to write: so many seconds, and so many times as long as here."""
_CLOSING_S = 5.0
"""For others, if the attempt has failed and this process is to end."""
_REMEMBERED = 16
"""Attempts that have failed; what older ones left goes when a checkpoint is published."""

logger = logging.getLogger(__name__)

Receipts = dict[tuple[str, int], Receipt]


@dataclass(frozen=True)
class Attempt:
    """A checkpoint that all ranks of an epoch take together, each for itself."""

    named: Named
    record: Record
    """Of the commit; of the stage's own, where each has a scope."""
    groups: tuple[str, ...]
    """Members of its epoch."""
    ranks: int
    stages: Sequence[str]
    """Scopes by rank, where each stage has one of its own."""
    spec: str
    spec_digest: str
    origin: Origin | None
    most: int = 0
    """Groups of the job, as far as they were announced."""

    @property
    def directory(self) -> str:
        """Where its files go first."""
        return partial_name(self.named.step, self.named.name)

    @property
    def at(self) -> Scope:
        """Where the scope stands after the commit."""
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
        """Of these slices the next stage may lack entries when it has come to its own place, which
        is less than a txn of its own behind; but at the end of the job. Later ones are of attempts
        that came to nothing."""
        cursor, most = self.record.cursor, max(len(self.groups), self.most)
        return range(0 if self.record.last else max(0, cursor - most), cursor)


class Cleared:
    """Attempts that this rank has removed. One that was late may have made a directory anew."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._directories = deque[str](maxlen=_REMEMBERED)

    def add(self, directory: str) -> None:
        """It is being removed. Any thread, as `sweep`."""
        self._directories.append(directory)

    def sweep(self) -> None:
        """Remove what is there again. Logs what cannot be removed."""
        store = self._checkpoints.store
        for directory in tuple(self._directories):
            try:
                if store.files(directory):
                    store.remove(directory)
                    logger.info("%s was removed again: a rank was late with its part", directory)
            except OSError as error:
                logger.warning("%s has failed, and cannot be removed: %s", directory, error)


class Gathering:
    """Of one attempt; used by the thread of the first rank of the group that writes.

    ``left``: which groups have left the job since, or have been started anew. ``is_awaited``:
    whether others can come to their place only later. ``superseded``: this rank has begun another
    attempt. ``cleared``: where it is remembered that this one was removed.
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
        """Without files of these there is no checkpoint."""
        self.wanted = {(group, rank) for group in attempt.groups for rank in ranks}

    def receipts(self, own_s: float) -> Receipts:
        """Those of all who have said something, when nothing more is to be waited for; ``own_s``:
        how long this rank has written. Raises OSError, Passed."""
        return self._wait(own_s, is_failed=False)

    def clear(self, own_s: float, is_passed: bool = False) -> None:
        """Remove the attempt, which has failed, when nobody writes in it any more.

        Waits as `receipts` does, but no longer than until the next attempt begins, which needs the
        room: who still writes in this one fails, too. ``is_passed``: that was long ago. When this
        process is to end, it waits for 5 s at most; if somebody writes even then, the attempt is
        left to the next start. Logs what cannot be removed.
        """
        store, directory = self._checkpoints.store, self._attempt.directory
        try:
            found = Receipts() if is_passed else self._wait(own_s, is_failed=True)
            files = store.files(directory)
            if MANIFEST in files:
                return  # it is a checkpoint: only that it got its name has failed
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
                    return found  # removed, as a later one was published; or nobody could begin it
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
            elif attempt.stages and len(found) > known:  # the next one may need as long
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
        """Whether all have delivered, or said that they do not, who are in the job still."""
        gone = self._left() - {self._writer}
        awaited = {place for place in self.wanted if place[0] not in gone}
        if is_failed:
            awaited.discard((self._writer, 0))  # this rank
        return awaited <= found.keys()

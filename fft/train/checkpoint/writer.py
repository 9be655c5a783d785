"""What one rank does for a checkpoint beside the training, on a thread of its own.

It copies, writes its files, reads them again for their digests, and leaves a receipt. The first
rank of the group that writes waits for the receipts of the others, and publishes. No collective and
no message is needed: the files are all that ranks know of each other here, so that a rollback has
nothing to abort. Files have nothing to wait on; they are looked at again, in growing pauses.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import torch

import fft
from fft.durable.checkpoints import Checkpoints, Passed
from fft.durable.manifest import (
    File,
    Manifest,
    Origin,
    Receipt,
    Scope,
    partial_name,
)
from fft.messages.protocol import Record
from fft.train.checkpoint.rank_file import write_rank
from fft.train.checkpoint.snapshot import Snapshot
from fft.util.errors import FftError

_BEFORE_DELIVERY = ("copying", "writing", "waiting for the end of the body")
_POLL_S, _LONGEST_POLL_S = 0.02, 1.0
_WAIT_S, _WAIT_FACTOR = 60.0, 4.0
"""For others, who have as much to write: so many seconds, and so many times as long as here."""

logger = logging.getLogger(__name__)

Note = Callable[[str, dict[str, Any]], None]
"""Puts something into the trace."""


@dataclass(frozen=True)
class Attempt:
    """A checkpoint that all ranks of an epoch take together, each for itself."""

    record: Record
    """Of the commit."""
    groups: tuple[str, ...]
    """Members of its epoch."""
    ranks: int
    name: str
    """Equal on all ranks, and of no other attempt."""
    spec: str
    spec_digest: str
    origin: Origin | None

    @property
    def writer(self) -> str:
        """The group whose ranks write what all groups have in common."""
        return self.groups[0]

    @property
    def directory(self) -> str:
        """Where its files go first."""
        return partial_name(self.record.step, self.name)


def decline(checkpoints: Checkpoints, attempt: Attempt, place: tuple[str, int]) -> None:
    """Say that a rank delivers nothing for ``attempt``. Any thread."""
    group, rank = place
    receipt = Receipt(attempt=attempt.name, group=group, rank=rank, files=())
    try:
        checkpoints.deliver(attempt.directory, receipt)
    except OSError as error:
        logger.warning("nor can that be said at %s: %s", checkpoints.store.url, error)


class RankWriter:
    """Of one attempt and one rank; `run` is its thread's work.

    ``left``: which groups have left the job since, or have been started anew.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        attempt: Attempt,
        snapshot: Snapshot,
        place: tuple[str, int],
        keep: int,
        note: Note,
        left: Callable[[], Set[str]],
        closing: threading.Event,
    ) -> None:
        self._checkpoints = checkpoints
        self._attempt = attempt
        self._snapshot = snapshot
        self._group, self._rank = place
        self._keep = keep
        self._note = note
        self._left = left
        self._closing = closing
        self._stage = ""
        self.published = False

    def run(self) -> None:
        """The whole of it. An error costs this checkpoint, and nothing else."""
        attempt, began = self._attempt, time.monotonic()
        told: dict[str, Any] = {"step": attempt.record.step, "place": self._checkpoints.store.url}
        try:
            self._at("copying")
            if not self._snapshot.copy() or self._snapshot.problem is not None:
                raise FftError(self._snapshot.problem or "it was not copied")
            files = self._write()
            told["bytes"] = sum(file.size for file in files)
            told["copy_ms"] = round(self._snapshot.copy_s * 1e3, 3)
            told["write_ms"] = round((time.monotonic() - began) * 1e3, 3)
            if (self._group, self._rank) == (attempt.writer, 0):
                self._publish(time.monotonic() - began)
                told["published"] = True
        except (OSError, FftError, RuntimeError) as error:
            self._tell(error, told)
            return
        self._note("checkpoint", told)

    def _tell(self, error: Exception, told: dict[str, Any]) -> None:
        """Why there is no checkpoint."""
        step = self._attempt.record.step
        try:
            if not isinstance(error, Passed) and self._stage != "removing older ones":
                self._refuse_passed()  # what it has left was removed, and so this has failed
        except Passed as passed:
            error = passed
        except OSError:
            logger.debug("nor can be seen what others have written", exc_info=True)
        if isinstance(error, Passed):
            logger.warning("no checkpoint of step %d: %s", step, error)
            self._note("checkpoint_skipped", {"step": step, "reason": str(error)})
            return
        text = f"{type(error).__name__}: {error}"
        logger.error(
            "no checkpoint of step %d: group %s rank %d was %s, and failed: %s; training "
            "continues, and the next one is tried",
            step,
            self._group,
            self._rank,
            self._stage,
            text,
        )
        self._note("checkpoint_failed", {**told, "stage": self._stage, "error": text})
        if self._stage in _BEFORE_DELIVERY:
            decline(self._checkpoints, self._attempt, (self._group, self._rank))

    def _refuse_passed(self) -> None:
        self._checkpoints.refuse_passed(self._attempt.record.step, self._attempt.name)

    def _at(self, stage: str) -> None:
        self._stage = stage

    def _write(self) -> tuple[File, ...]:
        """This rank's files and its receipt."""
        store, directory = self._checkpoints.store, self._attempt.directory
        self._at("writing")
        place, snapshot = (self._group, self._rank), self._snapshot
        files = write_rank(store, directory, place, snapshot.data, snapshot.tensors)
        receipt = Receipt(
            attempt=self._attempt.name, group=self._group, rank=self._rank, files=files
        )
        self._at("waiting for the end of the body")
        self._snapshot.confirmed.wait()  # which comes with it, with a rollback, and at the end
        if self._snapshot.problem is not None:
            raise FftError(self._snapshot.problem)
        self._at("delivering")
        self._checkpoints.deliver(directory, receipt)
        return files

    # --- the first rank of the group that writes ---

    def _publish(self, own_s: float) -> None:
        self._at("waiting for the others")
        receipts = self._gather(time.monotonic() + _WAIT_S + _WAIT_FACTOR * own_s)
        self._at("publishing")
        self._checkpoints.publish(self._attempt.directory, self._manifest(receipts))
        self.published = True
        self._at("removing older ones")
        for name in self._checkpoints.prune(self._keep):
            logger.info("checkpoint %s was removed: %d are kept", name, self._keep)

    def _gather(self, until: float) -> dict[tuple[str, int], Receipt]:
        """The receipts of all who have delivered. Raises FftError: a rank of this group has not."""
        attempt = self._attempt
        ranks = range(attempt.ranks)
        needed = {(attempt.writer, rank) for rank in ranks}
        wanted = {(group, rank) for group in attempt.groups for rank in ranks}
        found, pause = dict[tuple[str, int], Receipt](), _POLL_S
        while True:
            found = self._checkpoints.receipts(attempt.directory, attempt.name, found)
            gone = self._left() - {attempt.writer}
            if {place for place in wanted if place[0] not in gone} <= found.keys():
                break
            if time.monotonic() >= until:
                break
            if any(place in found and not found[place].files for place in needed):
                break
            if pause == _LONGEST_POLL_S:
                self._refuse_passed()
            self._closing.wait(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_S)
        delivered = {place for place, receipt in found.items() if receipt.files}
        if missing := sorted(needed - delivered):
            names = ", ".join(f"rank {rank}" for _, rank in missing)
            if any(place in found for place in missing):
                raise FftError(
                    f"{names} of group {attempt.writer} delivers nothing, as it has said"
                )
            raise FftError(
                f"{names} of group {attempt.writer} has delivered no files to "
                f"{self._checkpoints.store.url}; is that on a file system that all hosts share?"
            )
        if late := sorted(wanted - delivered):
            names = ", ".join(f"{group}/{rank}" for group, rank in late)
            logger.warning(
                "the checkpoint of step %d is without buffers and random states of %s",
                attempt.record.step,
                names,
            )
        return {place: found[place] for place in delivered}

    def _manifest(self, receipts: dict[tuple[str, int], Receipt]) -> Manifest:
        attempt, record = self._attempt, self._attempt.record
        ranks = range(attempt.ranks)
        whole = [g for g in attempt.groups if all((g, rank) in receipts for rank in ranks)]
        listed = [receipts[group, rank] for group in whole for rank in ranks]
        returned = sorted((*record.returned, *(lease.slice for lease in record.leases)))
        return Manifest(
            step=record.step,
            lineage=record.lineage,
            batches=record.batches,
            cursor=record.cursor,
            returned=tuple(returned),
            scopes={"job": Scope(step=record.step, lineage=record.lineage)},
            writer=attempt.writer,
            groups=tuple(whole),
            ranks=attempt.ranks,
            spec=attempt.spec,
            spec_digest=attempt.spec_digest,
            fft_version=fft.__version__,
            torch_version=torch.__version__,
            attempt=attempt.name,
            written_at=time.time(),
            resumed_from=attempt.origin,
            files=tuple(file for receipt in listed for file in receipt.files),
        )

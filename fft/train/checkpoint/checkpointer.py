"""The main thread's part of durable checkpoints: when one is due, and what waits for its copy.

A checkpoint is due at the same commits on all ranks that have them (`due`): every so many steps, or
so often; with the last commit of a job; and with the first one without the group that was to write
the one before.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import Any

import fft
from fft.durable.checkpoints import Checkpoints
from fft.durable.manifest import Origin, attempt_name
from fft.durable.plan import Checkpointing
from fft.durable.stores import open_store
from fft.messages.protocol import Record
from fft.protocol.spec import FsmSpec
from fft.train.checkpoint.due import DueByRecord, DueByWord
from fft.train.checkpoint.loading import Loader, origin_of
from fft.train.checkpoint.snapshot import Snapshot, Staging
from fft.train.checkpoint.writer import Attempt, RankWriter, decline
from fft.train.participation import Participation
from fft.train.rank_state import RankState
from fft.util.errors import FftError

COPY_LIMIT_S = 30.0
"""The next update waits for a copy for so long; then the checkpoint is given up, not the step."""
_CLOSE_S = 300.0
"""For the last checkpoint of a job to be written, when its processes are to end."""

logger = logging.getLogger(__name__)


class Checkpointer:
    """Of one rank. Main thread, unless it says otherwise."""

    def __init__(
        self,
        plan: Checkpointing,
        job: Participation,
        state: RankState,
        spec: FsmSpec,
        groups: int,
        ranks: int,
    ) -> None:
        """``groups``: of the job, as far as it was announced; ``ranks``: of each."""
        self.plan = plan
        self.checkpoints = Checkpoints(open_store(str(plan.place)))
        self.origin: Origin | None = None
        """The checkpoint that this job has begun with."""
        self._job, self._state = job, state
        self._spec, self._spec_digest = spec.name, spec.digest()
        self._groups, self._ranks = groups, ranks
        self._staging = Staging()
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._writer: RankWriter | None = None
        self._due: DueByRecord | DueByWord = DueByRecord(plan, job)
        if spec.bound:
            self._due = DueByWord(plan, job, self._is_writing)
        self._closing = threading.Event()
        self._changed_late: frozenset[str] = frozenset()
        self._has_resumed = False
        self._resumed: dict[str, Any] | None = None
        state.resume, state.before_change = self.resume, self.before_change
        state.before_vote, state.after_commit = self._due.before_vote, self.committed

    def resume(self) -> None:
        """Begin with a checkpoint, if the job is to, before it is joined. Idempotent.

        Raises CheckpointError, DamagedCheckpoint, StateMismatch.
        """
        if self._has_resumed or self._job.engine is not None:
            return
        self._has_resumed = True
        began = time.monotonic()
        loader = Loader(self.plan, self.checkpoints, self._job, self._groups, self._ranks)
        if (manifest := loader.choose()) is None:
            return
        found = loader.load(manifest, self._state)
        self.origin = origin_of(found)
        seconds = time.monotonic() - began
        told = {"step": manifest.step, "lineage": manifest.lineage, "as": found.lineage}
        told |= {"place": self.checkpoints.store.url, "seconds": round(seconds, 3)}
        told["takes_same"] = self._state.items_per_slice != self._ranks
        self._resumed = told
        logger.info("resumed from the checkpoint of step %d, in %.1f s", manifest.step, seconds)
        is_other = (
            manifest.spec_digest != self._spec_digest or manifest.fft_version != fft.__version__
        )
        if manifest.spec and is_other:  # an imported one has none
            logger.warning(
                "the checkpoint of step %d was written by FFT %s with spec %s, and this is FFT %s "
                "with spec %s, or another version of it",
                manifest.step,
                manifest.fft_version,
                manifest.spec,
                fft.__version__,
                self._spec,
            )

    def joined(self) -> None:
        """The trace has its header: it can tell what the job has begun with."""
        if self._resumed is not None:
            self._job.note("resumed", self._resumed)

    def committed(self, record: Record, epoch: Record | None) -> None:
        """The state is that of ``record`` as a whole. ``epoch``: of its members."""
        if epoch is None or epoch.epoch != record.epoch:
            return  # the job has gone on without this rank
        if not self._due.is_due(record, epoch):
            return
        step = record.step
        if self._thread is not None and record.last:  # nobody waits for this thread any more
            self._thread.join(_CLOSE_S)
        if self._is_writing():
            logger.warning(
                "no checkpoint of step %d: the one before is still being written to %s, which is "
                "slower than they come",
                step,
                self.checkpoints.store.url,
            )
            self._job.note("checkpoint_skipped", {"step": step, "reason": "the last is under way"})
            self._decline(self._attempt(record, epoch))
            return
        self._begin(record, epoch)

    def _attempt(self, record: Record, epoch: Record) -> Attempt:
        groups = tuple(entry.group for entry in epoch.members)
        name = attempt_name(self._job.bus.generation, f"{record.n}|{record.lineage}")
        spec = self._spec, self._spec_digest
        return Attempt(record, groups, self._ranks, name, *spec, self.origin)

    def _decline(self, attempt: Attempt) -> None:
        """Have nobody wait for this rank, which does not wait for the disk, either."""
        place = self._job.peer.group, self._job.peer.rank
        work = partial(decline, self.checkpoints, attempt, place)
        threading.Thread(target=work, name="fft-checkpoint-declined", daemon=True).start()

    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _begin(self, record: Record, epoch: Record) -> None:
        self.before_change()
        attempt = self._attempt(record, epoch)
        peer, began = self._job.peer, time.monotonic()
        try:
            shared = peer.group == attempt.writer
            snapshot = Snapshot(self._state, self._staging, shared, self._changed_late)
        except (TypeError, FftError, RuntimeError) as error:
            logger.error("no checkpoint of step %d: %s", record.step, error)
            self._job.note("checkpoint_failed", {"step": record.step, "error": str(error)})
            self._decline(attempt)
            return
        self._job.note(
            "checkpoint_begun",
            {"step": record.step, "stall_ms": round((time.monotonic() - began) * 1e3, 3)},
        )
        self._snapshot = snapshot
        self._writer = RankWriter(
            self.checkpoints,
            attempt,
            snapshot,
            (peer.group, peer.rank),
            self.plan.keep,
            self._job.note,
            partial(self._due.left, record, epoch),
            self._closing,
        )
        self._thread = threading.Thread(target=self._writer.run, name="fft-checkpoint", daemon=True)
        self._thread.start()

    def before_change(self) -> None:
        """Something of what a commit has left is about to change: the copy must be done."""
        snapshot = self._snapshot
        if snapshot is None:
            return
        self._snapshot = None
        waited = snapshot.finish(COPY_LIMIT_S)
        self._changed_late |= frozenset(snapshot.edited)
        if waited > 1e-3:
            self._job.note("checkpoint_waited", {"stall_ms": round(waited * 1e3, 3)})

    def close(self) -> None:
        """Wait for what is being written, but not for others for long. Idempotent."""
        self.before_change()
        thread, self._thread = self._thread, None
        if thread is None or self._writer is None:
            return
        thread.join(_CLOSE_S)
        if thread.is_alive():
            logger.error("a checkpoint is still being written after %g s; it is left", _CLOSE_S)
        self._closing.set()

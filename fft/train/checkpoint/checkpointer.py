"""The main thread's part of durable checkpoints: when one is due, and what waits for its copy.

A checkpoint is due by the record of a commit, so that all ranks of all groups take part in the same
ones without a word: every so many steps, with the last commit of a job, and with the first of an
epoch from which the group is gone that was to write the one before. Where it goes by time, the
first rank of the group that writes names the step in a register of the job's bus.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Set
from functools import partial
from typing import Any

import fft
from fft.bus import BusError
from fft.durable.checkpoints import Checkpoints
from fft.durable.manifest import Origin
from fft.durable.plan import Checkpointing
from fft.durable.stores import open_store
from fft.messages.protocol import Record
from fft.protocol.spec import FsmSpec
from fft.train.checkpoint.loading import Loader, origin_of
from fft.train.checkpoint.snapshot import Snapshot, Staging
from fft.train.checkpoint.writer import Attempt, RankWriter
from fft.train.participation import Participation
from fft.train.rank_state import RankState
from fft.util.errors import FftError

AT = "checkpoint/at"
"""Register of the job's bus: the step of the newest checkpoint that goes by time."""
COPY_LIMIT_S = 30.0
"""The next update waits for a copy for so long; then the checkpoint is given up, not the step."""
_CLOSE_S = 300.0
"""For the last checkpoint of a job to be written, when its processes are to end."""
_AHEAD = 2
"""Steps from the word to the checkpoint: nobody can be so far ahead of who says it."""
_EARLY = 0.1
"""Of the interval: so long before its end ranks begin to look whether a step was named."""

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
        self._last: tuple[Record, Record] | None = None
        """Commit and epoch of the newest attempt."""
        self._epoch = 0
        """Of the last commit here."""
        self._since: float | None = None
        self._closing = threading.Event()
        self._changed_late: frozenset[str] = frozenset()
        self._has_resumed = False
        self._resumed: dict[str, Any] | None = None
        state.resume, state.before_change = self.resume, self.before_change
        state.after_commit = self.committed

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
        if record.skip and not (record.last and self._is_behind(record)):
            return  # no step, and more are to come
        is_new, self._epoch = record.epoch != self._epoch, record.epoch
        if not self._is_due(record, epoch, is_new):
            return
        self._last, self._since = (record, epoch), time.monotonic()
        step = record.step
        if self._thread is not None and record.last:  # nobody waits for this thread any more
            self._thread.join(_CLOSE_S)
        if self._thread is not None and self._thread.is_alive():
            logger.warning(
                "no checkpoint of step %d: the one before is still being written to %s, which is "
                "slower than they come",
                step,
                self.checkpoints.store.url,
            )
            self._job.note("checkpoint_skipped", {"step": step, "reason": "the last is under way"})
            return
        self._begin(record, epoch)

    def _is_behind(self, record: Record) -> bool:
        """Whether the steps before ``record`` are in no checkpoint of this job."""
        return self._last is None or self._last[0].step < record.step

    def _begin(self, record: Record, epoch: Record) -> None:
        self.before_change()
        groups = tuple(entry.group for entry in epoch.members)
        attempt = Attempt(
            record,
            groups,
            self._ranks,
            _name_of(self._job.bus.generation, record),
            self._spec,
            self._spec_digest,
            self.origin,
        )
        peer, began = self._job.peer, time.monotonic()
        try:
            shared = peer.group == attempt.writer
            snapshot = Snapshot(self._state, self._staging, shared, self._changed_late)
        except (TypeError, FftError, RuntimeError) as error:
            logger.error("no checkpoint of step %d: %s", record.step, error)
            self._job.note("checkpoint_failed", {"step": record.step, "error": str(error)})
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
            partial(self._left, epoch),
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

    def _left(self, epoch: Record) -> Set[str]:
        """The writer's thread: groups of ``epoch`` that are not in the job's newest epoch, or whose
        processes are others. Who leaves with a commit still delivers."""
        local = self._job.local
        now = local.epoch if local is not None else None
        if local is None or now is None or local.role == "terminal" or now.epoch <= epoch.epoch:
            return frozenset()
        stays = {entry.group for entry in now.members if set(entry.peers()) <= epoch.peer_set}
        return frozenset(entry.group for entry in epoch.members) - stays

    # --- when ---

    def _is_due(self, record: Record, epoch: Record, is_new: bool) -> bool:
        if record.last or (is_new and self._is_writer_lost(epoch)):
            return True
        if (steps := self.plan.steps) is not None:
            return record.step % steps == 0
        return self._is_named(record, epoch)

    def _is_writer_lost(self, epoch: Record) -> bool:
        """Whether the group that was to write the last one has other processes now, or none."""
        if self._last is None:
            return False
        _, then = self._last
        return not set(then.members[0].peers()) <= epoch.peer_set

    def _is_named(self, record: Record, epoch: Record) -> bool:
        """By time: whether this is the step that the writer's first rank has named."""
        seconds = self.plan.seconds
        assert seconds is not None
        passed = None if self._since is None else time.monotonic() - self._since
        if passed is not None and passed < (1 - _EARLY) * seconds:
            return False
        try:
            held = self._job.bus.read(AT)
            named = int(held) if held is not None else 0
            peer, first = self._job.peer, epoch.members[0]
            is_mine = (peer.group, peer.rank) == (first.group, 0)
            if is_mine and named < record.step and (passed is None or passed >= seconds):
                self._job.bus.write(AT, str(record.step + _AHEAD).encode())
        except (BusError, ValueError) as error:
            logger.warning("cannot see when the next checkpoint is due: %s", error)
            return False
        return named == record.step

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


def _name_of(generation: str, record: Record) -> str:
    """Of an attempt: equal on all ranks, and of no other life of the bus."""
    text = f"{generation}|{record.n}|{record.lineage}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

"""Copies of a rank's state in the memory of its host, between two durable checkpoints.

The copy is a `Snapshot`, as for a durable checkpoint; a thread writes it into the folder in shared
memory that `fft run` owns. No rank waits for another, except that a rank votes for the commit of
the next copy only when its own last copy is complete. So whenever a copy begins anywhere, the one
before is complete on all members of the epoch, and each rank needs room for two.

Without a given interval, the first commit of a start is copied. Then the first rank of the first
group measures the additional time of the steps beside a copy, and names in a register the step of
the next copy, so that copies cost 1 % of the time. The other ranks read the register on their
thread. A rank that misses a step only makes that copy incomplete.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from functools import partial
from typing import Any

from fft.checkpoints.copies import deliver, keep_newest
from fft.checkpoints.files import Checkpoints, Manifest, Origin, attempt_name, file_stem
from fft.checkpoints.peers import Deputy, copy_store, key_of
from fft.checkpoints.plan import COPIES, Checkpointing, MemoryPlan
from fft.errors import BusError, FftError
from fft.messages.effects import StartTxn
from fft.messages.protocol import Record
from fft.train.checkpoint.checkpointer import Checkpointer
from fft.train.checkpoint.contents import COPY_LIMIT_S, Copies, Snapshot, write_rank
from fft.train.checkpoint.loading import CheckpointLoader
from fft.train.checkpoint.writer import WorkerPool, WriteAttempt
from fft.train.session.checkpoint_schedule import Named, is_first
from fft.train.session.rank_context import RankContext
from fft.train.session.rank_state import CheckpointHooks

AT = "memory/at"
"""Register of the job's bus: the step of the next copy."""
_SHARE = 0.01
"""Part of the time that copies may cost."""
_AHEAD = 4
"""Least number of commits between the announcement of a copy and the copy."""
_STEPS = 32
"""Number of steps without a copy whose median is the time of a step."""
_COPIES = 5
"""Number of copies whose median is the cost of a copy."""

logger = logging.getLogger(__name__)


class Pace:
    """Chooses the interval of copies by their cost. Pure; times are in seconds."""

    def __init__(self) -> None:
        self._plain = deque[float](maxlen=_STEPS)
        self._beside: list[float] = []
        self._costs = deque[float](maxlen=_COPIES)

    def stepped(self, took: float, has_copied: bool) -> None:
        """Take the time of a step, and whether a copy was made or written during it."""
        if has_copied:
            self._beside.append(took)
            return
        if self._beside and self._plain:
            usual = statistics.median(self._plain)
            self._costs.append(max(0.0, sum(self._beside) - usual * len(self._beside)))
        self._beside = []
        self._plain.append(took)

    def disturbed(self) -> None:
        """Drop the present measurement, because a fault has added to the time of a step."""
        self._beside = []

    @property
    def is_measuring(self) -> bool:
        """Whether the cost of the last copy is not known yet."""
        return bool(self._beside)

    def steps(self) -> int:
        """Return the number of steps from one copy to the next."""
        if not self._plain or not self._costs:
            return _AHEAD
        cost, step = statistics.median(self._costs), statistics.median(self._plain)
        return max(_AHEAD, round(cost / (_SHARE * step)))


class MemoryCopies(CheckpointHooks):
    """The copies of one rank. Its methods run on the main thread, after those of ``durable``."""

    def __init__(
        self, plan: MemoryPlan, rank: RankContext, durable: Checkpointer | None = None
    ) -> None:
        self._plan, self._rank, self._job = plan, rank, rank.job
        self._durable = durable
        self._hooks = durable or CheckpointHooks()
        self._store = copy_store(plan.place, rank.settings.token)
        token = rank.settings.token
        self._deputy = Deputy(rank.job.bus, plan.place, key_of(token)) if token else None
        self._place = rank.job.peer.group, rank.job.peer.rank
        self._copies = Copies(rank.state)
        self._threads = WorkerPool()
        self._written = threading.Event()
        """Set when no copy is being written."""
        self._written.set()
        self._is_asking = False
        """The register is being read or written."""
        self._next = 0
        """Step of the next copy, if the interval is measured; set by the thread as well."""
        self._pending: tuple[Record, Record] | None = None
        self._last: tuple[float, Record] | None = None
        """Time of the last commit, and its record."""
        self._was_busy = False
        self._pace = Pace()
        self._is_off = bool(rank.scope.by_rank)  # stages have no common commit
        self._loader: CheckpointLoader | None = None
        """Resumes from a copy in a job without durable checkpoints; else ``durable`` does."""
        if plan.resume is not None and durable is None:
            given = Checkpointing(plan.place, resume=plan.resume, source=str(plan.place))
            self._loader = CheckpointLoader(given, Checkpoints(self._store), rank)

    def resume(self) -> None:
        """See `CheckpointHooks.resume`."""
        self._hooks.resume()
        if self._loader is not None:
            self._loader.resume()

    def joined(self) -> None:
        """See `CheckpointHooks.joined`."""
        self._hooks.joined()
        if self._loader is not None:
            self._loader.trace()

    def asks(self, plan: StartTxn, last: bool, skip: bool) -> bool:
        """Complete the last copy if the txn leads to the next one. See `CheckpointHooks.asks`."""
        if not skip and self._is_due(plan.step + 1) and not self._written.is_set():
            with self._rank.watchers.waiting():  # bounded, and no hang
                self._copies.finish()
                self._written.wait(COPY_LIMIT_S)
        return self._hooks.asks(plan, last, skip)

    def committed(self, record: Record, epoch: Record | None) -> None:
        """Schedule the copy that is due at ``record``, if any."""
        self._hooks.committed(record, epoch)
        if self._is_off or epoch is None or epoch.epoch != record.epoch or record.skip:
            return
        if self._rank.state.registered_state is None and not self._rank.state.users:
            return  # there is no state to copy
        self._measure(record)
        if self._is_due(record.step) and self._written.is_set():
            self._pending = record, epoch
        elif self._plan.every is None and self._next <= record.step and not self._is_asking:
            self._is_asking = True
            self._threads.do(partial(self._agree, record.step, is_first(self._job.peer, epoch)))

    def take(self) -> None:
        """Start the copy that is due, if any."""
        self._hooks.take()
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self._copies.finish()
        try:
            snapshot = self._copies.begin(shared=True, gives=range(0))
        except (TypeError, FftError, RuntimeError) as error:
            self._turn_off(f"the state cannot be written: {error}")
            return
        self._written.clear()
        self._threads.do(partial(self._write, snapshot, *pending))

    def before_change(self) -> None:
        """Finish the copy, because the committed state is about to change."""
        self._hooks.before_change()
        self._copies.finish()

    def ended(self) -> None:
        """See `CheckpointHooks.ended`."""
        self._hooks.ended()

    def left(self) -> None:
        """See `CheckpointHooks.left`."""
        self._hooks.left()

    def close(self) -> None:
        """Wait until the copy in progress is written. Idempotent."""
        self._copies.finish()
        self._written.wait(COPY_LIMIT_S)
        self._threads.close()

    # --- when ---

    @property
    def _origin(self) -> Origin | None:
        """The copy or checkpoint that the job has begun with, if any."""
        loader = self._loader if self._durable is None else self._durable.loader
        return None if loader is None else loader.origin

    def _is_due(self, step: int) -> bool:
        origin, every = self._origin, self._plan.every
        first = 1 if origin is None else origin.step + 1
        return step in (first, self._next) if every is None else step % every == 0

    def _measure(self, record: Record) -> None:
        now, busy = time.monotonic(), not self._written.is_set()
        if self._last is not None:
            since, before = self._last
            if (before.epoch, before.step + 1) == (record.epoch, record.step):
                self._pace.stepped(now - since, busy or self._was_busy)
            else:
                self._pace.disturbed()
        self._last, self._was_busy = (now, record), busy

    def _agree(self, step: int, names: bool) -> None:
        """Read the step of the next copy; name it if ``names`` and the last one is over."""
        try:
            held = self._job.bus.read(AT)
            at = int(held) if held is not None else 0
            if at <= step and names and not self._pace.is_measuring:
                at = step + self._pace.steps()
                self._job.bus.write(AT, b"%d" % at)
            self._next = max(self._next, at)
        except (BusError, ValueError) as error:
            logger.warning("cannot see when the next copy in memory is due: %s", error)
        finally:
            self._is_asking = False

    # --- one copy, on a thread ---

    def _write(self, snapshot: Snapshot, record: Record, epoch: Record) -> None:
        began = time.monotonic()
        try:
            if not snapshot.copy():
                raise FftError(snapshot.problem or "it was not copied")
            size = sum(t.nbytes for t in snapshot.tensors.values())
            if COPIES * size > self._plan.limit:
                needed_mb, limit_mb = COPIES * size / 1e6, self._plan.limit / 1e6
                self._turn_off(
                    f"two copies and a buffer of this rank need {needed_mb:.0f} MB, and each rank "
                    f"of this host may take {limit_mb:.0f} MB"
                )
                return
            keep_newest(self._plan.place, file_stem(*self._place), below=record.step)
            attempt = self._attempt(record, epoch)
            directory, rank = attempt.directory, self._place[1]
            files = write_rank(self._store, directory, self._place, snapshot.data, snapshot.tensors)
            snapshot.await_confirmation()
            scopes = {self._rank.scope.name: attempt.at}
            part = attempt.manifest(scopes, attempt.groups, files)
            told: dict[str, Any] = {"step": record.step, "bytes": sum(f.size for f in files)}
            told |= {"place": self._store.url, "attempt": attempt.named.name}
            told["files"] = {file.name: file.sha256 for file in files}
            told["copy_ms"] = round(snapshot.copy_s * 1e3, 3)
            told["write_ms"] = round((time.monotonic() - began) * 1e3, 3)
            self._job.note("memory_copy", told)  # before it counts, so that an audit knows it
            deliver(self._store, directory, part, rank)
            self._store_on_peer(directory, part, epoch)
        except (OSError, FftError, RuntimeError) as error:
            self._failed(record.step, error)
        finally:
            self._written.set()

    def _store_on_peer(self, directory: str, part: Manifest, epoch: Record) -> None:
        """Store a complete copy on another host, if no other host has the same shard."""
        rank = self._place[1]
        here = {r.host for entry in epoch.members for r in entry.ranks if r.rank == rank}
        if self._deputy is None or len(here) > 1:
            return
        try:
            url = self._deputy.store(directory, part, rank)
        except (OSError, FftError) as error:
            self._failed(part.step, error, "on another host")
        else:
            if url is not None:
                self._job.note("memory_copy_on_peer", {"step": part.step, "at": url})

    def _attempt(self, record: Record, epoch: Record) -> WriteAttempt:
        name = attempt_name(self._job.bus.generation, f"{record.n}|{record.lineage}")
        named = Named(name, record.step, writer=self._place[0])
        return WriteAttempt.of(self._rank, named, record, epoch, self._origin)

    def _failed(self, step: int, error: Exception, where: str = "in memory") -> None:
        text = f"{type(error).__name__}: {error}"
        logger.warning("no copy of step %d %s: %s; training continues", step, where, text)
        self._job.note("memory_copy_failed", {"step": step, "error": text})

    def _turn_off(self, why: str) -> None:
        self._is_off = True
        self._copies.leave_memory()
        self._job.warn("memory_copies_off", f"no copies of the state in memory: {why}")

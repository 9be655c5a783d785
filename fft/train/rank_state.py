"""What this rank holds of the job's state: what was registered, where the data are, the position.

Main thread. Touches models, optimizers and data source by reference, and no process group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchft.manager import Manager

from fft.bus.base import ErrorBus
from fft.durable.manifest import Scope
from fft.messages.effects import StartTxn
from fft.messages.protocol import Record
from fft.train.data.sharded import Sharded, ShardedInputs, ShardedSource, Shelf
from fft.train.data.source import DataSource, Identify, Inputs, LeasedInputs, as_source
from fft.train.injector import Injector
from fft.train.local_tensors import bits_of, put_bits
from fft.train.periodic.shared_state import SharedState
from fft.train.settings import Settings
from fft.train.stages.input import refuse_unconnected
from fft.train.state.equality_checks import EqualityChecks
from fft.train.state.random_states import capture_random
from fft.train.state.sharded import reshard
from fft.train.state.step_state import Rewindable, StepState, TornState
from fft.train.updates import Updates
from fft.util.errors import FftError

if TYPE_CHECKING:
    from fft.train.periodic.inner_scope import InnerScope
    from fft.train.periodic.synchronizer import Synchronizer
    from fft.train.stages.output import StageOutput
    from fft.train.stages.scope import StageScope

logger = logging.getLogger(__name__)

SCALER = "grad_scaler"
"""Name of the scaler's state among what is registered."""


class RankState:
    """Of one rank. Before ``register`` it is only what functions of the user's load and save."""

    def __init__(
        self,
        manager: Manager,
        injector: Injector | None,
        settings: Settings,
        stage: StageScope | None = None,
    ) -> None:
        """``stage``: which one this rank is, where each steps by itself."""
        self._manager = manager
        self._stage = stage
        self.output: StageOutput | None = None
        """What this stage gives to the next one."""
        self._takers = 1 if settings.spec.samples == "per_group" else manager._group_world_size
        """Ranks of a group that take an item of the data each; 1: all take the same."""
        self._injector = injector
        self._check_every = settings.check_replicas
        """Steps between comparisons of replicas."""
        self._digests = settings.digest == "commit"
        self.models: list[nn.Module] = []
        self.pipelines: list[Rewindable] = []
        self.step: StepState | None = None
        self.updates = Updates()
        self.synchronizer: Synchronizer | None = None
        """Of groups that step alone."""
        self.inner: InnerScope | None = None
        """Of groups of several ranks that do."""
        self.checks: EqualityChecks | None = None
        self._entries_checked: int | None = None
        """Entries of optimizer states at the last look for what cannot be sent; None: none yet."""
        self.has_extra = False
        """Something is registered besides model, optimizer, schedule and scaler."""
        self.source: DataSource | ShardedSource | None = None
        self.loader: Any = None
        """The loader that the source draws from; it knows what was drawn and not consumed."""
        self.position: Record | None = None
        """The record that the state on this rank is that of."""
        self.lost: BaseException | None = None
        """The error that left this state uncommitted, until a peer's state replaces it."""
        self.lineage, self.cursor = "", 0
        self.returned: tuple[int, ...] = ()
        """Of the checkpoint that was loaded, if one was."""
        self._resume_at: Any = None
        """Where a stateful loader resumes."""
        self.resume: Callable[[], object] = lambda: None
        """Begins with a durable checkpoint, if the job is to, before it is joined; once."""
        self.before_change: Callable[[], object] = lambda: None
        """Called before what a commit has left is changed by anything but a body."""
        self.before_vote: Callable[[StartTxn, bool, bool], object] = lambda plan, last, skip: None
        """Called before this rank says YES, with whether no txn is to come after this one, and
        whether it is to be skipped, as far as it is known."""
        self.after_commit: Callable[[Record, Record | None], object] = lambda record, epoch: None
        """Called when the state is that of a committed record; with the epoch that made it."""
        self.before_next: Callable[[], object] = lambda: None
        """Called when the script asks for a txn: what it does between two is done."""
        self.at_end: Callable[[], object] = lambda: None
        """Called when nothing is left to do for this stage, before the others hear that."""

    def register(
        self,
        models: list[nn.Module],
        optimizers: list[torch.optim.Optimizer],
        schedulers: list[Any],
        extra: Mapping[str, Any],
        generators: Sequence[torch.Generator] | None,
        scaler: Any | None,
    ) -> None:
        """As ``ManagerFFT.register``; what was registered before is forgotten."""
        others = dict(extra)
        self.has_extra = bool(others)
        if scaler is not None:
            if SCALER in others:
                raise FftError(f"extra={{{SCALER!r}: …}} and scaler=: give one of them")
            others[SCALER] = scaler
        updates = Updates(optimizers, schedulers, scaler)
        for function in self.updates.after:  # registered before
            updates.on_commit(function)
        self.updates.close()
        self.updates = updates
        self.models = models
        self._entries_checked = None
        self.step = StepState(models, optimizers, schedulers, others, generators, self.pipelines)
        self.step.refuse_replaced_parameters()
        self.synchronizer = None
        self.checks = EqualityChecks(self.step.fingerprint, self._check_every)
        if self._injector is not None:
            for module in models:
                self._injector.attach(module)

    def end_gathering(self) -> None:
        """No txn is to come: have FSDP2's modules hold their shards, which an evaluation may have
        left gathered. On all groups alike; who takes the last checkpoint has done it already."""
        reshard(self.models)

    def synchronize_by(self, synchronizer: Synchronizer) -> None:
        """Groups step alone: what they share is ``synchronizer``'s, and a COMMIT steps it."""
        self.synchronizer = synchronizer
        self.checks = EqualityChecks(synchronizer.shared.fingerprint, self._check_every)

    @property
    def is_frozen(self) -> bool:
        """Whether nothing is trained here: a stage that only feeds the next one."""
        return self._stage is not None and self.step is not None and not self.updates.has_optimizers

    def refuse_sync(self) -> None:
        """Raise FftError if gradients are not averaged in this job."""
        if self.synchronizer is not None:
            raise FftError(
                "gradients averaged by sync_gradients(), or by DistributedDataParallel, with fft."
                f"{type(self.synchronizer).__name__}: groups that step alone have no common "
                "backward pass in which they could be; leave the call, or the wrapper, out"
            )

    def describe(self, models: str) -> str:
        """What this rank reduces, in words; ``models``: by the reducers."""
        return models if self.synchronizer is None else self.synchronizer.describe()

    @property
    def committed(self) -> Updates | Synchronizer:
        """What a COMMIT of the job steps."""
        return self.updates if self.synchronizer is None else self.synchronizer

    @property
    def shared(self) -> StepState | SharedState | None:
        """What all groups have in common."""
        return self.step if self.synchronizer is None else self.synchronizer.shared

    def is_outer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is one that steps what the groups share."""
        outer = () if self.synchronizer is None else self.synchronizer.outer
        return any(each is optimizer for each in outer)

    def put_back(self) -> None:
        """After a rollback of the job's: put back the start of the step, if it has begun here.

        What the ranks of a group commit together is put back by their own scope.

        Raises TornState: part of it is lost for good.
        """
        if self.inner is not None:
            return
        self.updates.forget()
        if self.step is None:
            return
        self.before_change()
        if not self.step.captured:  # aborted before: the state is that of the last commit
            self.step.unwind()
            return
        try:
            self.step.restore()
        except TornState:
            if self.synchronizer is None:
                raise
            logger.exception("this group begins anew from the last synchronisation")
            self.synchronizer.start_over()

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Put buffers and random generators back at the end: what runs in it is no step."""
        assert self.step is not None, "asked before"
        rng = capture_random(self.step.generators)
        buffers = [(b, bits_of(b)) for model in self.models for b in model.buffers()]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, bits in buffers:
                    put_bits(buffer, bits)
            for put_back in rng:
                put_back()

    def digest(self) -> str:
        """Digest of parameters, optimizer state and buffers."""
        if self.step is None:
            raise FftError("call manager.register(model, optimizer) before digest()")
        return self.step.digest()

    @property
    def owes_digests(self) -> bool:
        """Whether each commit and each heal of this rank has a digest for the audit."""
        return self._digests and self.shared is not None

    def digest_for_audit(self) -> str | None:
        """Digest that the audit compares between replicas; None if none is owed."""
        if not self._digests or self.shared is None:
            return None
        return self.shared.digest(buffers=False)

    def refuse_unsendable(self) -> None:
        """Raise FftError if a joiner could not get what is registered, before it asks for it.

        Looks at the optimizer states again after each update that has added entries to them.
        """
        if self.step is None or self._entries_checked == (count := self.step.count_entries()):
            return
        try:
            self.step.export()
            if self.synchronizer is not None:
                self.synchronizer.shared.export()
        except TypeError as error:
            raise FftError(
                f"what is registered cannot be sent to a group that joins: {error}"
            ) from error
        self._entries_checked = count

    # --- data ---

    def leased_inputs(self, source: DataSource, steps: int) -> LeasedInputs:
        """What this rank takes of it, if its group steps alone so often. Raises DataError."""
        rank = self._manager._group_rank if self._takers > 1 else 0
        return LeasedInputs(source, steps, self._takers, rank)

    def shard_of(
        self, loader: Any, kind: Sharded, group: str, bus: ErrorBus, identify: Identify | None
    ) -> ShardedSource:
        """The source of a loader over a share of the data. Raises FftError: the job has none."""
        if self.synchronizer is not None or self._stage is not None:
            raise FftError(
                f"transactions(loader, sharded={kind!r}): this job hands out its data by leases, "
                "or from stage to stage; pass a loader over the whole data, and leave sharded= out"
            )
        if kind == "rank" and self._takers == 1 < self._manager._group_world_size:
            raise FftError(
                "transactions(loader, sharded='rank'): all ranks of a group take the same batch "
                "with this spec; pass sharded='group'"
            )
        rank = self._manager._group_rank
        shelf = Shelf(bus.read, bus.write)
        return ShardedSource(loader, kind, group, rank, self._takers, shelf, identify)

    def consumed(self, plan: StartTxn) -> None:
        """The txn of ``plan`` is committed."""
        if isinstance(self.source, ShardedSource):
            self.source.committed(plan)

    def inputs_from(self, source: DataSource | ShardedSource) -> Inputs | ShardedInputs:
        """What this rank takes of it."""
        if isinstance(source, ShardedSource):
            return ShardedInputs(source)
        if self.output is not None:
            self.output.draws_from(source)
        rank = self._manager._group_rank if self._takers > 1 else 0
        return Inputs(source, self._takers, rank)

    def open_source(
        self,
        loader: Any,
        replay_only: bool,
        identify: Identify | None = None,
        sharded: Callable[[Any], ShardedSource] | None = None,
    ) -> DataSource | ShardedSource:
        """The data source of ``loader``, where the checkpoint says; the caller opens it."""
        if self._stage is not None:
            refuse_unconnected(self._stage, self.output, loader)
        if self.source is None or self.loader is not loader or self.source.in_any_order:
            made = as_source(loader, replay_only, identify) if sharded is None else sharded(loader)
            self.source, self.loader = made, loader
        if self._resume_at is not None:
            resume = getattr(self.source, "resume", self.source.load)
            resume(self._resume_at, self.cursor * self._takers)
            self._resume_at = None
        return self.source

    def export_data(self) -> Any:
        """Of the data source, where the state stands; None: there is none."""
        if self.source is None or self.position is None:
            return None
        if isinstance(self.source, ShardedSource):
            return self.source.export_all()
        return self.source.export(self.position.cursor * self._takers)

    @property
    def items_per_slice(self) -> int:
        """Items of the data that a slice has: one for each rank of a group that takes its own."""
        return self._takers

    # --- where it stands ---

    def stands_at(self, record: Record) -> None:
        """The state is that of ``record`` now."""
        self.position = record
        self._manager._step = record.step
        self._manager._batches_committed = record.batches

    def stands_apart(self, step: int, groups: int) -> None:
        """The group goes on alone from ``step``; so many were in its last epoch."""
        if self._injector is not None:
            self._injector.begin(step, groups, 0)

    def checkpoint_fields(self) -> dict[str, Any]:
        """What belongs into a checkpoint besides torchft's own fields."""
        at = self.position  # not where the engine stands: it hears of an update when it is over
        lineage, cursor = (self.lineage, self.cursor) if at is None else (at.lineage, at.cursor)
        found: dict[str, Any] = {"lineage": lineage, "cursor": cursor}
        unused = self.returned
        if at is not None:
            unused = (*at.returned, *(lease.slice for lease in at.leases))
        if unused:
            found["returned"] = sorted(unused)
        if self.source is not None and not self.source.in_any_order:
            found["data"] = self.source.export(cursor * self._takers)
        return found

    def continue_from(self, checkpoint: Mapping[str, Any]) -> None:
        """Take those fields over, before the job is joined."""
        self.lineage = checkpoint.get("lineage", "")
        self.cursor = checkpoint.get("cursor", checkpoint["batches_committed"])
        self.returned = tuple(checkpoint.get("returned", ()))
        self._resume_at = checkpoint.get("data")

    @property
    def users(self) -> dict[str, Callable[[], Any]]:
        """The functions of the user that export a state, by name."""
        return dict(self._manager._user_state_dicts)

    @property
    def loads(self) -> dict[str, Callable[[Any], None]]:
        """Those that take a state over."""
        return dict(self._manager._load_state_dict_fns)

    def resume_at(self, at: Scope, lineage: str, cursor: int, data: Any) -> None:
        """The state is that of a checkpoint; before the job is joined. ``data``: what the source
        had exported, which takes it over once it is there."""
        self._manager._step = at.step
        self._manager._batches_committed = at.batches
        self.lineage, self.cursor, self.returned = lineage, cursor, at.returned
        self._resume_at = data

    # --- from rank to rank ---

    def export(self, record: Record) -> dict[str, Any]:
        """All of it, for a peer that starts with ``record``."""
        manager, shared = self._manager, self.shared
        position = record.cursor * self._takers
        return {
            "fft": {"lineage": record.lineage, "cursor": record.cursor},
            "torchft": {"step": record.step, "batches_committed": record.batches},
            "user": {key: value() for key, value in manager._user_state_dicts.items()},
            "state": shared.export(bool(record.learners)) if shared is not None else None,
            "data": self.source.export(position) if self.source is not None else None,
        }

    def load(self, payload: dict[str, Any], record: Record, keep_gradients: bool) -> None:
        """Take over what a peer has exported. Raises FftError if there is nothing to take it."""
        loads = self._manager._load_state_dict_fns
        missing = [key for key in loads if key not in payload["user"]]
        if missing:
            raise FftError(f"the peer's state lacks {missing[0]!r}, which is registered here")
        if self.step is None and not loads:
            raise FftError(
                "this rank must fetch state, but has nothing to load it into: pass state_dict and "
                "load_state_dict, or call manager.register(model, optimizer)"
            )
        self.before_change()
        for key, load in loads.items():
            load(payload["user"][key])
        if self.synchronizer is not None:
            self.synchronizer.load(payload["state"], keep_gradients)
        elif self.step is not None:
            self.step.load(payload["state"], keep_gradients)
        if self.source is not None:
            self.source.load(payload["data"], record.cursor * self._takers)
        self.lost = None

    def close(self) -> None:
        """Take the hooks off the optimizers. Idempotent. (The source is closed before.)"""
        self.updates.close()

    def close_source(self) -> None:
        """End the source's workers. Idempotent."""
        if self.source is not None:
            self.source.close()

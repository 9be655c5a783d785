"""This rank's part of the job's state: registered objects, position of the data, last record.

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
from fft.errors import FftError
from fft.messages.effects import StartTxn
from fft.messages.protocol import Record
from fft.train.data.sharded import Sharded, ShardedInputs, ShardedSource, Shelf
from fft.train.data.source import DataSource, Identify, Inputs, LeasedInputs, as_source
from fft.train.injector import Injector
from fft.train.local_tensors import bits_of, put_bits
from fft.train.paradigms.periodic.shared_state import SharedState
from fft.train.paradigms.stages.input import refuse_unconnected
from fft.train.settings import Settings
from fft.train.state.equality_checks import EqualityChecks
from fft.train.state.random_states import capture_random
from fft.train.state.sharded import reshard
from fft.train.state.step_state import Rewindable, StepState, TornState
from fft.train.updates import Updates

if TYPE_CHECKING:
    from fft.train.paradigms.periodic.inner_scope import InnerScope
    from fft.train.paradigms.periodic.synchronizer import Synchronizer
    from fft.train.paradigms.stages.output import StageOutput
    from fft.train.paradigms.stages.scope import StageScope

logger = logging.getLogger(__name__)

SCALER = "grad_scaler"
"""Name of the scaler's state among the registered states."""


class RankState:
    """The state of one rank. Before ``register`` it consists only of the user's load and save
    functions."""

    def __init__(
        self,
        manager: Manager,
        injector: Injector | None,
        settings: Settings,
        stage: StageScope | None = None,
    ) -> None:
        """Start without registered objects.

        Args:
            stage: The stage of this rank, if each stage has its own scope.
        """
        self._manager = manager
        self._stage = stage
        self.output: StageOutput | None = None
        """The output of this stage for the next one."""
        self._takers = 1 if settings.spec.samples == "per_group" else manager._group_world_size
        """Number of ranks of a group that take separate data items; 1 if all ranks take the same
        item."""
        self._injector = injector
        self._check_every = settings.config.check_replicas
        """Number of steps between comparisons of replicas."""
        self._digests = settings.config.digest == "commit"
        self.models: list[nn.Module] = []
        self.pipelines: list[Rewindable] = []
        self.step: StepState | None = None
        self.updates = Updates()
        self.synchronizer: Synchronizer | None = None
        """Synchronizes groups that train locally; else None."""
        self.inner: InnerScope | None = None
        """The inner scope of groups with several ranks that train locally."""
        self.checks: EqualityChecks | None = None
        self._entries_checked: int | None = None
        """Number of optimizer state entries at the last check for values that cannot be sent, or
        None before the first check."""
        self.has_extra = False
        """Objects other than model, optimizer, schedule and scaler are registered."""
        self.source: DataSource | ShardedSource | None = None
        self.loader: Any = None
        """The loader that the source draws from; it knows which items were drawn but not
        consumed."""
        self.position: Record | None = None
        """The record that the state on this rank corresponds to."""
        self.lost: BaseException | None = None
        """The error that left this state uncommitted, until a peer's state replaces it."""
        self.lineage, self.cursor = "", 0
        self.returned: tuple[int, ...] = ()
        """Returned slices of the loaded checkpoint, if any."""
        self._resume_at: Any = None
        """Position at which a stateful loader resumes."""
        self.resume: Callable[[], object] = lambda: None
        """Loads the durable checkpoint that the job is to resume from, if any, before joining;
        once."""
        self.before_change: Callable[[], object] = lambda: None
        """Called before anything but the step function changes the committed state."""
        self.before_vote: Callable[[StartTxn, bool, bool], object] = lambda plan, last, skip: None
        """Called before this rank votes YES, with the plan, whether no txn is to come after this
        one, and whether the txn is to be skipped, as far as this is known."""
        self.after_commit: Callable[[Record, Record | None], object] = lambda record, epoch: None
        """Called when the state corresponds to a committed record, with the epoch that made it."""
        self.before_next: Callable[[], object] = lambda: None
        """Called when the script asks for a txn, that is, after its work between two txns."""
        self.at_end: Callable[[], object] = lambda: None
        """Called when nothing is left to do for this stage, before the others are informed."""

    def register(
        self,
        models: list[nn.Module],
        optimizers: list[torch.optim.Optimizer],
        schedulers: list[Any],
        extra: Mapping[str, Any],
        generators: Sequence[torch.Generator] | None,
        scaler: Any | None,
    ) -> None:
        """See ``ManagerFFT.register``; replaces what was registered before."""
        others = dict(extra)
        self.has_extra = bool(others)
        if scaler is not None:
            if SCALER in others:
                raise FftError(f"extra={{{SCALER!r}: …}} and scaler=: give one of them")
            others[SCALER] = scaler
        updates = Updates(optimizers, schedulers, scaler)
        for function in self.updates.after:  # those registered before
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
        """Reshard FSDP2's modules, which an evaluation may have left gathered, when no txn is to
        come. This happens on all groups alike; a rank that takes the last checkpoint has done it
        already."""
        reshard(self.models)

    def synchronize_by(self, synchronizer: Synchronizer) -> None:
        """Make a COMMIT step ``synchronizer``, which holds the state that locally training groups
        share."""
        self.synchronizer = synchronizer
        self.checks = EqualityChecks(synchronizer.shared.fingerprint, self._check_every)

    @property
    def is_frozen(self) -> bool:
        """Whether this stage trains nothing and only feeds the next one."""
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
        """Describe the tensors that this rank reduces; ``models`` is the description by the
        reducers."""
        return models if self.synchronizer is None else self.synchronizer.describe()

    @property
    def committed(self) -> Updates | Synchronizer:
        """The object that a COMMIT of the job steps."""
        return self.updates if self.synchronizer is None else self.synchronizer

    @property
    def shared(self) -> StepState | SharedState | None:
        """The state that all groups have in common."""
        return self.step if self.synchronizer is None else self.synchronizer.shared

    def is_outer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is an outer optimizer, which steps the shared state."""
        outer = () if self.synchronizer is None else self.synchronizer.outer
        return any(each is optimizer for each in outer)

    def put_back(self) -> None:
        """Restore the start of the step after a rollback of the job, if the step has begun here.

        State that the ranks of a group commit together is restored by their own scope.

        Raises TornState if part of it is lost for good.
        """
        if self.inner is not None:
            return
        self.updates.forget()
        if self.step is None:
            return
        self.before_change()
        # aborted before the capture, so the state is that of the last commit
        if not self.step.captured:
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
        """Restore buffers and random generators at the end, since the block is not a step."""
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
        """Raise FftError if the registered state cannot be sent to a joiner, before one asks for
        it.

        Checks the optimizer states again after each update that has added entries to them.
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
        """Return this rank's inputs if its group trains locally for ``steps`` steps. Raises
        DataError."""
        rank = self._manager._group_rank if self._takers > 1 else 0
        return LeasedInputs(source, steps, self._takers, rank)

    def shard_of(
        self, loader: Any, kind: Sharded, group: str, bus: ErrorBus, identify: Identify | None
    ) -> ShardedSource:
        """Return the source of a loader over a share of the data. Raises FftError if the job has
        none."""
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
        """Mark the data of ``plan``, whose txn is committed, as consumed."""
        if isinstance(self.source, ShardedSource):
            self.source.committed(plan)

    def inputs_from(self, source: DataSource | ShardedSource) -> Inputs | ShardedInputs:
        """Return this rank's inputs from ``source``."""
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
        """Return the data source of ``loader`` at the checkpoint's position; the caller opens
        it."""
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
        """Export the data source at the position of the state, or return None if there is none."""
        if self.source is None or self.position is None:
            return None
        if isinstance(self.source, ShardedSource):
            return self.source.export_all()
        return self.source.export(self.position.cursor * self._takers)

    @property
    def items_per_slice(self) -> int:
        """Number of data items of a slice: one for each rank of a group that takes its own."""
        return self._takers

    # --- where it stands ---

    def stands_at(self, record: Record) -> None:
        """Set the position: the state now corresponds to ``record``."""
        self.position = record
        self._manager._step = record.step
        self._manager._batches_committed = record.batches

    def stands_apart(self, step: int, groups: int) -> None:
        """Begin a local phase at ``step``, after an epoch of ``groups`` groups."""
        if self._injector is not None:
            self._injector.begin(step, groups, 0)

    def checkpoint_fields(self) -> dict[str, Any]:
        """Return the fields of a checkpoint besides torchft's own."""
        at = self.position  # not the engine's position, which moves only after the update
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
        """Load those fields, before joining the job."""
        self.lineage = checkpoint.get("lineage", "")
        self.cursor = checkpoint.get("cursor", checkpoint["batches_committed"])
        self.returned = tuple(checkpoint.get("returned", ()))
        self._resume_at = checkpoint.get("data")

    @property
    def users(self) -> dict[str, Callable[[], Any]]:
        """The user's functions that export a state, by name."""
        return dict(self._manager._user_state_dicts)

    @property
    def loads(self) -> dict[str, Callable[[Any], None]]:
        """The user's functions that load a state, by name."""
        return dict(self._manager._load_state_dict_fns)

    def resume_at(self, at: Scope, lineage: str, cursor: int, data: Any) -> None:
        """Set the position to that of a checkpoint, before joining. ``data`` is the source's
        export, which the source loads once it exists."""
        self._manager._step = at.step
        self._manager._batches_committed = at.batches
        self.lineage, self.cursor, self.returned = lineage, cursor, at.returned
        self._resume_at = data

    # --- from rank to rank ---

    def export(self, record: Record) -> dict[str, Any]:
        """Export the whole state for a peer that starts with ``record``."""
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
        """Load a peer's export. Raises FftError if there is nothing to load it into."""
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
        """Remove the hooks from the optimizers. Idempotent. (The source is closed separately.)"""
        self.updates.close()

    def close_source(self) -> None:
        """End the source's workers. Idempotent."""
        if self.source is not None:
            self.source.close()

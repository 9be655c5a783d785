"""State of this rank: registered objects, position of the data, last committed record.

Main thread. Touches models, optimizers and data source by reference, and no process group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torchft.manager import Manager

from fft.bus.base import ErrorBus
from fft.checkpoints.files import Scope
from fft.errors import FftError, StateError
from fft.messages.effects import StartTxn
from fft.messages.protocol import Record
from fft.train.data.sharded import ShardedInputs, ShardedSource, ShardStateStore
from fft.train.data.source import DataSource, Inputs, Loader, as_source
from fft.train.guard.injector import Injector
from fft.train.session.paradigm import Paradigm, SharedState
from fft.train.session.settings import Settings
from fft.train.state.equality_checks import EqualityChecks
from fft.train.state.local_tensors import bits_of, write_data
from fft.train.state.plain_state import digest_of, parts_of, refuse_unloadable, unlike_places
from fft.train.state.random_states import capture_random
from fft.train.state.sharded import reshard
from fft.train.state.step_state import Rewindable, StepState
from fft.train.state.updates import Updates

logger = logging.getLogger(__name__)

SCALER = "grad_scaler"
"""Name of the scaler's state among the registered states."""


class CheckpointHooks:
    """Hooks for durable checkpoints of a rank's state.

    They do nothing; ``Checkpointer`` overrides them.
    """

    def resume(self) -> None:
        """Load the checkpoint that the job starts from, if any, before joining. Idempotent."""

    def joined(self) -> None:
        """Called when the trace of this rank has its header, before the rank joins the job."""

    def before_change(self) -> None:
        """Called before code other than a step function modifies the committed state."""

    def asks(self, plan: StartTxn, last: bool, skip: bool) -> bool:
        """Called before this rank votes YES; returns whether its vote asks for a checkpoint.

        Args:
            plan: the open txn.
            last: the job ends with this txn, unless it is skipped.
            skip: the txn is skipped, as far as this rank knows.
        """
        return False

    def committed(self, record: Record, epoch: Record | None) -> None:
        """Called when the state has reached the committed ``record``; ``epoch`` is its epoch."""

    def take(self) -> None:
        """Called when the script asks for a txn, after its code between two txns."""

    def ended(self) -> None:
        """Called when this rank has nothing left to do, before it reports that to the others."""

    def left(self) -> None:
        """Called when this rank has left the job without an error. Idempotent."""


class FetchedStateDiffers(StateError):
    """The state of a joiner is not that of the group it was fetched from; the message names the
    entry."""


def _is_own(part: str) -> bool:
    """Whether groups may differ in a part of the exported state."""
    return part in ("buffers", "extra", "progress", "flags.modes", "flags.buffers")


class RankState:
    """The state of one rank. Before ``register`` it consists only of the user's load and save
    functions."""

    def __init__(self, manager: Manager, injector: Injector | None, settings: Settings) -> None:
        self._manager = manager
        self.paradigm: Paradigm[Any]
        """The training paradigm; set once all components exist."""
        self.checkpoints = CheckpointHooks()
        self._injector = injector
        self._settings = settings
        self.models: list[nn.Module] = []
        self.pipelines: list[Rewindable] = []
        self.registered_state: StepState | None = None
        self.updates = Updates()
        self.checks: EqualityChecks | None = None
        self._entries_checked: int | None = None
        """Number of optimizer state entries at the last check for values that cannot be sent, or
        None before the first check."""
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
        """Saved state from which a stateful loader resumes."""

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
        if scaler is not None:
            if SCALER in others:
                raise FftError(
                    f"extra={{{SCALER!r}: …}} and scaler= are both given; pass one of them"
                )
            others[SCALER] = scaler
        for name, each in others.items():
            if not all(callable(getattr(each, f"{do}state_dict", None)) for do in ("", "load_")):
                raise FftError(
                    f"extra[{name!r}]: expected an object with state_dict() and load_state_dict(), "
                    f"got {type(each).__name__}; keep it in an object of a class that has both"
                )
        for optimizer in optimizers:
            refuse_unloadable(optimizer)
        updates = Updates(optimizers, schedulers, scaler)
        for function in self.updates.after:  # callbacks that were registered before
            updates.on_commit(function)
        self.updates.close()
        self.updates = updates
        self.models = models
        self._entries_checked = None
        self.registered_state = StepState(
            models, optimizers, schedulers, others, generators, self.pipelines
        )
        self.refuse_unfit()
        self.paradigm.registered()
        config = self._settings.config
        fingerprint = partial(self.registered_state.fingerprint, config.check_buffers)
        self.checks = EqualityChecks(fingerprint, config.check_replicas)
        if self._injector is not None:
            for module in models:
                self._injector.attach(module)

    def skip_step(self) -> None:
        """End a step of FFT's own loop without an update, so that it changes no registered state.

        Only the scale of a scaler, the data position and the random generators move on.
        """
        if self.registered_state is not None:
            self.registered_state.skip()
        self.updates.skip()

    @property
    def registered(self) -> StepState:
        """The registered state, which must exist."""
        assert self.registered_state is not None, "loops refuse to begin without one"
        return self.registered_state

    def reshard_models(self) -> None:
        """Reshard FSDP2's modules after the last txn, because an evaluation may have gathered them.

        All groups do so, since a rank that takes the last checkpoint has done it already.
        """
        reshard(self.models)

    def refuse_unfit(self) -> None:
        """Raise FftError if an optimizer does not step the parameters that the models have now.

        Models may have been sharded since they were registered. If an evaluation has gathered their
        parameters, they are resharded first.
        """
        self.reshard_models()
        self.registered.refuse_replaced_parameters()

    def compare_by(self, fingerprint: Callable[[], str]) -> None:
        """Compare replicas by ``fingerprint`` instead of the registered state."""
        self.checks = EqualityChecks(fingerprint, self._settings.config.check_replicas)

    @property
    def shared(self) -> SharedState | None:
        """The state that all groups share, or None if none is registered."""
        return self.paradigm.shared

    def restore(self) -> None:
        """Restore the start of the step after a rollback of the job, if the step has begun here.

        Raises TornState if part of it is lost for good.
        """
        self.updates.forget()
        if self.registered_state is None:
            return
        self.checkpoints.before_change()
        # aborted before the capture: the state is that of the last commit
        if not self.registered_state.captured:
            self.registered_state.unwind()
            return
        self.registered_state.restore()

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore buffers and random generators at the end, since the block is not a step."""
        rng = capture_random(self.registered.generators)
        buffers = [(b, bits_of(b)) for model in self.models for b in model.buffers()]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, bits in buffers:
                    write_data(buffer, bits)
            for restore in rng:
                restore()

    def digest(self) -> str:
        """Digest of parameters, optimizer state and buffers."""
        if self.registered_state is None:
            raise FftError("call manager.register(model, optimizer) before digest()")
        return self.registered_state.digest()

    @property
    def traces_digests(self) -> bool:
        """Whether each commit and each heal of this rank has a digest for the audit."""
        return self._settings.config.digest == "commit" and self.shared is not None

    def digest_for_audit(self) -> str | None:
        """Digest that the audit compares between replicas; None if none is owed."""
        if not self.traces_digests:
            return None
        assert self.shared is not None, "traces_digests checks it"
        return self.shared.digest(buffers=False)

    def refuse_unsendable(self) -> None:
        """Raise FftError if the registered state cannot be sent to a joiner, before one asks for
        it.

        Checks the optimizer states again after each update that has added entries to them.
        """
        if self.registered_state is None or self._entries_checked == (
            count := self.registered_state.count_entries()
        ):
            return
        try:
            self.registered_state.export()
            if (shared := self.shared) is not None and shared is not self.registered_state:
                shared.export()
        except TypeError as error:
            raise FftError(
                f"the registered state cannot be sent to a group that joins: {error}"
            ) from error
        self._entries_checked = count

    # --- data ---

    def consumed(self, plan: StartTxn) -> None:
        """Mark the data of ``plan``, whose txn is committed, as consumed."""
        if isinstance(self.source, ShardedSource):
            self.source.committed(plan)

    def inputs_from(self, source: DataSource | ShardedSource) -> Inputs | ShardedInputs:
        """Return this rank's inputs from ``source``."""
        if isinstance(source, ShardedSource):
            return ShardedInputs(source)
        return Inputs(source, self.paradigm.items_per_step, self.paradigm.batches.number)

    def open_source(
        self, settings: Loader, group: str, bus: ErrorBus
    ) -> DataSource | ShardedSource:
        """Return the data source of a loader, at the loaded checkpoint. The caller opens it.

        Args:
            settings: The loader, with its settings.
            group: The group of this rank.
            bus: The bus of the job, for the states of shards.
        """
        loader, identify = settings.loader, settings.identify
        if self.source is None or self.loader is not loader or self.source.in_any_order:
            self.loader = loader
            if (kind := settings.sharded) is None:
                self.source = as_source(settings)
            else:
                own, shelf = self.paradigm.batches, ShardStateStore(bus.read, bus.write)
                self.source = ShardedSource(
                    loader, kind, group, own.number, own.size, shelf, identify
                )
        if self._resume_at is not None:
            resume = getattr(self.source, "resume", self.source.load)
            resume(self._resume_at, self.cursor * self.paradigm.items_per_step)
            self._resume_at = None
        return self.source

    def export_data(self) -> Any:
        """Export the data source at the position of the state, or return None if there is none."""
        if self.source is None or self.position is None:
            return None
        if isinstance(self.source, ShardedSource):
            return self.source.export_all()
        return self.source.export(self.position.cursor * self.paradigm.items_per_step)

    # --- position ---

    def set_position(self, record: Record) -> None:
        """Set the position: the state now corresponds to ``record``."""
        self.position = record
        self._manager._torchft.step = record.step
        self._manager._torchft.batches_committed = record.batches

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
            found["data"] = self.source.export(cursor * self.paradigm.items_per_step)
        return found

    def continue_from(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the fields of `checkpoint_fields`, before joining the job."""
        self.lineage = checkpoint.get("lineage", "")
        self.cursor = checkpoint.get("cursor", checkpoint["batches_committed"])
        self.returned = tuple(checkpoint.get("returned", ()))
        self._resume_at = checkpoint.get("data")

    @property
    def users(self) -> dict[str, Callable[[], Any]]:
        """The user's functions that export a state, by name."""
        return dict(self._manager._torchft.user_state_dicts)

    @property
    def loads(self) -> dict[str, Callable[[Any], None]]:
        """The user's functions that load a state, by name."""
        return dict(self._manager._torchft.load_state_dict_fns)

    def resume_at(self, at: Scope, lineage: str, cursor: int, data: Any) -> None:
        """Set the position to that of a checkpoint, before joining. ``data`` is the source's
        export, which the source loads once it exists."""
        self._manager._torchft.step = at.step
        self._manager._torchft.batches_committed = at.batches
        self.lineage, self.cursor, self.returned = lineage, cursor, at.returned
        self._resume_at = data

    # --- from rank to rank ---

    def export(self, record: Record) -> dict[str, Any]:
        """Export the whole state for a peer that starts with ``record``."""
        manager, shared = self._manager, self.shared
        position = record.cursor * self.paradigm.items_per_step
        return {
            "fft": {"lineage": record.lineage, "cursor": record.cursor},
            "torchft": {"step": record.step, "batches_committed": record.batches},
            "user": {key: value() for key, value in manager._torchft.user_state_dicts.items()},
            "state": shared.export(bool(record.learners)) if shared is not None else None,
            "data": self.source.export(position) if self.source is not None else None,
        }

    def load(
        self, payload: dict[str, Any], record: Record, source: str, keep_gradients: bool
    ) -> None:
        """Load the export of a rank of group ``source``.

        Raises:
            FftError: No object is registered for it.
            FetchedStateDiffers: The loaded state is not the one that was sent.
        """
        loads = self._manager._torchft.load_state_dict_fns
        missing = [key for key in loads if key not in payload["user"]]
        if missing:
            raise FftError(f"the peer's state lacks {missing[0]!r}, which is registered here")
        if self.registered_state is None and not loads:
            raise FftError(
                "this rank must fetch state, but has nothing to load it into: pass state_dict and "
                "load_state_dict, or call manager.register(model, optimizer)"
            )
        self.checkpoints.before_change()
        for key, load in loads.items():
            load(payload["user"][key])
        self.paradigm.load_shared(payload["state"], keep_gradients)
        if self.source is not None:
            self.source.load(payload["data"], record.cursor * self.paradigm.items_per_step)
        if (shared := self.shared) is not None:
            place = next(unlike_places(payload["state"], shared.export()), None)
            if place is not None:
                raise FetchedStateDiffers(
                    f"{place} of this rank differs from that of group {source} after its state was "
                    "loaded: load_state_dict() must restore all that state_dict() returns, and "
                    "state_dict() must leave out what changes by itself (a clock, a count of calls)"
                )
        self.lost = None

    def digest_for_first_vote(self, computed_meanwhile: bool) -> str | None:
        """Digest of all that is equal on all groups, by part, for the first votes with a joiner.

        Args:
            computed_meanwhile: A joiner has fetched its state while step functions ran, so that
                registered objects and buffers must be equal, too.
        """
        if (shared := self.shared) is None:
            return None
        parts = {n: digest_of(v) for n, v in parts_of(shared.export()) if not _is_own(n)}
        more = self.paradigm.digests_to_compare() or {}
        if not computed_meanwhile:
            is_due = self._settings.config.check_buffers
            more = {n: d for n, d in more.items() if is_due and n.startswith("buffers ")}
        return "\n".join(f"{name}={digest}" for name, digest in sorted((parts | more).items()))

    def close(self) -> None:
        """Remove the hooks from the optimizers. Idempotent. (The source is closed separately.)"""
        self.updates.close()

    def close_source(self) -> None:
        """End the source's workers. Idempotent."""
        if self.source is not None:
            self.source.close()

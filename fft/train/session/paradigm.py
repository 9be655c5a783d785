"""Interface between FFT's training code and the training paradigms.

A paradigm determines how the replica groups of a job train together: what a COMMIT changes, which
loop the script runs, which data a rank takes, when a checkpoint is due, what a vote waits for, and
how a rank leaves. `Paradigm` is the only interface through which shared code reaches these choices;
shared code never asks which paradigm it is.

This module imports no paradigm. `Lockstep` has the behaviour of HSDP and DDP, and the other
paradigms derive from it. `fft.train.paradigms.selection` makes the paradigm of a spec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import nn

from fft.checkpoints.plan import Checkpointing
from fft.engine.loop import Engine
from fft.messages.effects import StartTxn
from fft.protocol.state import Config
from fft.train.data.sharded import ShardedSource
from fft.train.data.source import DataSource
from fft.train.gradients.reducer import Reducer
from fft.train.limits import Feature
from fft.train.process_groups.mesh_layout import BatchShare
from fft.train.session.checkpoint_schedule import CheckpointSchedule

LoopT = TypeVar("LoopT")
"""The class of the loop, `fft.train.step.transaction.TransactionLoop`, which is above this file."""


class Committed(Protocol):
    """The update that a COMMIT of the job makes on this rank."""

    def apply(self) -> None:
        """Make the update."""

    def skip(self) -> None:
        """End the step without an update."""

    def done(self) -> None:
        """Call the user's functions that follow an update."""


class SharedState(Protocol):
    """The state that all replica groups share."""

    def export(self, copy_mutable: bool = False) -> dict[str, object]:
        """Return live tensors and plain data; ``copy_mutable``: no step function changes them."""

    def digest(self, buffers: bool = True) -> str:
        """Return a digest of all bits, for the audit."""


class VotePrecondition(Protocol):
    """A condition outside the job that must hold before this rank votes YES."""

    def start(self) -> None:
        """Start, once the job is joined."""

    def ask(self, plan: StartTxn) -> None:
        """Request the condition for the txn that begins.

        Raises:
            NoLighthouseQuorum: the condition has failed in too many attempts in a row.
        """

    def wait_until_met(self, plan: StartTxn) -> Exception | None:
        """Wait until the condition holds. Return the reason for a NO if it does not."""

    def end(self) -> None:
        """End the wait, because the txn is over. Thread-safe. Idempotent."""

    def pause(self) -> None:
        """Wait before the next attempt, after a rollback of a job that makes no progress."""

    def close(self) -> None:
        """End the threads. Idempotent."""


class Paradigm(ABC, Generic[LoopT]):
    """The paradigm of one rank; one instance per manager.

    Methods run on the main thread unless they say otherwise. Those that are not abstract are hooks,
    which do nothing unless a paradigm needs them.

    Attributes:
        kind: The paradigm in the table of limits.
        can_reform: Whether a group may continue with another process in the place of one that it
            has lost.
        steps_together: Whether all ranks of the job are at the same step, which recomputation and
            shared statistics require.
    """

    kind: ClassVar[Feature]
    can_reform: bool
    steps_together: bool

    # --- the job ---

    def refuse_unconnected(self) -> None:
        """Raise FftError if the ranks of this group cannot train the registered models together."""

    def common_settings(self) -> Mapping[str, Any]:
        """Return the settings of the script that all processes of the job must have in common."""
        return {}

    def joined(self, config: Config) -> None:
        """Start what the paradigm runs beside the job; the engine of the job runs already."""

    @abstractmethod
    def vote_preconditions(self) -> Sequence[VotePrecondition]:
        """Create the vote preconditions of this rank, which the caller owns."""

    def interrupted(self, cause: str) -> None:
        """React to a command for the main thread, or to the failure of the job's engine.

        Called on the engine's thread.
        """

    # --- committed state ---

    @property
    @abstractmethod
    def committed(self) -> Committed:
        """The update that a COMMIT of the job makes."""

    @abstractmethod
    def skip_step(self) -> None:
        """End a txn of FFT's own loop without an update; its step function changes no state."""

    @property
    @abstractmethod
    def shared(self) -> SharedState | None:
        """The state that all groups share, or None if none is registered."""

    def registered(self) -> None:
        """Reset what belongs to models that were registered before."""

    def describe(self, models: str) -> str:
        """Describe what this rank reduces; ``models`` describes its reducers."""
        return models

    def is_outer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether ``optimizer`` steps the shared state and not a rank's own parameters."""
        return False

    def register_pipeline(self, schedule: Any, averaged: Callable[[nn.Module], Reducer]) -> None:
        """Roll ``schedule`` back, and average its gradients, with each txn.

        Args:
            schedule: of ``torch.distributed.pipelining``.
            averaged: averages the gradients of a module, and returns its reducer.

        Raises:
            FftError: the schedule does not fit.
        """

    @property
    def steps_use_state(self) -> bool:
        """Whether step functions compute on the state that a joiner fetches, and may change it."""
        return True

    @abstractmethod
    def reduced(self) -> list[torch.Tensor]:
        """Return the local parts of the tensors that the commit of the open txn applies on this
        rank.

        They are equal on ranks of one number.
        """

    @abstractmethod
    def must_skip(self, plan: StartTxn) -> bool:
        """Return whether the update of the open txn must be skipped on all ranks.

        Raises:
            ResultRefused: The txn must be rolled back.
            GroupAborted, CollectiveFailed: A rollback has started in the meantime.
        """

    @abstractmethod
    def digests_to_compare(self) -> dict[str, str] | None:
        """Return digests of ``extra`` and buffers, if they must be equal on all groups.

        Raises:
            TypeError: a value cannot be sent to a joiner.
        """

    @abstractmethod
    def restore(self) -> None:
        """Restore the start of the step after a rollback of the job.

        Raises:
            TornState: a part of the state is lost.
        """

    @abstractmethod
    def load_shared(self, state: Any, keep_gradients: bool) -> None:
        """Load the shared state of another group.

        Args:
            state: what `SharedState.export` of that group has returned.
            keep_gradients: the gradients that this txn has reduced belong to that state.
        """

    # --- inputs and the loop ---

    @property
    @abstractmethod
    def batches(self) -> BatchShare:
        """The batches, each an item of the loader, that this replica group takes in a step."""

    @property
    def items_per_step(self) -> int:
        """Number of items in a slice: one for each rank of a group, unless ranks share an item."""
        return self.batches.size

    @property
    def items_in_slice(self) -> int:
        """Number of items that a group consumes in a txn of the job, over all local steps."""
        return self.items_per_step

    def refuse_unregistered(self) -> None:
        """Raise FftError if the process has made objects that it should have registered."""

    def refuse_loop(self, loader: Any) -> None:
        """Raise FftError if a loop over ``loader`` cannot begin as the script has set it up."""

    @abstractmethod
    def steps(
        self, loop: LoopT, source: DataSource | ShardedSource, max_steps: int | None
    ) -> Iterator[Any]:
        """Yield the transactions of the script until the job is over, or this group has left."""

    def await_command(self, engine: Engine, txn: StartTxn | None) -> None:
        """Work until the engine has a command for the main thread, if there is work.

        Args:
            engine: of the job.
            txn: the txn that is open on this rank, if one is.
        """

    def txn_committed(self, txn: Any) -> None:
        """React to the commit of a txn of the loop, after its update."""

    # --- checkpoints ---

    @abstractmethod
    def schedule(self, plan: Checkpointing, is_writing: Callable[[], bool]) -> CheckpointSchedule:
        """Return the checkpoint schedule of this rank.

        Args:
            plan: the user's.
            is_writing: whether this rank still writes the checkpoint before.

        Raises:
            CheckpointError: this job can take no checkpoints.
        """

    def export_own(self, gives: range) -> dict[str, Any]:
        """Return the state of this rank for a checkpoint, besides buffers and RNG states.

        Args:
            gives: slices whose outputs the next stage may still need.
        """
        return {}

    @abstractmethod
    def export_shared(self) -> tuple[dict[str, Any], Mapping[str, torch.Tensor]]:
        """Return the shared state for a checkpoint, and the parameters that a thread adds to it.

        The thread copies these and the optimizer state while the next step function runs.
        """

    @abstractmethod
    def load_checkpoint(self, found: Mapping[str, Any], own: Any, buffers: Any) -> None:
        """Load the state of a checkpoint.

        Args:
            found: what `export_shared` has returned, complete.
            own: what `export_own` has returned, with this rank's buffers, or None if the checkpoint
                has no state of this rank.
            buffers: those of this rank, else of the group that wrote ``found``.

        Raises:
            UnfitCheckpoint: a job of another paradigm wrote it.
            StateMismatch: the state differs from the registered one; the message names the
                difference.
        """

    def load_entries(self, own: Mapping[str, Any] | None) -> Sequence[tuple[int, int]]:
        """Load the outputs for the next stage from ``own``. Return slice and version of each."""
        return ()

    @abstractmethod
    def without_own(self, writer: str) -> str:
        """Describe the initial state of a rank of which the checkpoint has no state.

        Args:
            writer: the group that wrote the shared state.
        """

    # --- the end ---

    def left(self, is_failing: bool) -> None:
        """Serve the ranks that still need this one, after it has left the job; then end.

        Args:
            is_failing: the script ends with an error, so no wait takes place.
        """

    def close(self) -> None:
        """End the threads and connections of the paradigm. Idempotent."""

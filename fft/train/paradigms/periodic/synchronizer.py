"""The synchronization of groups that take local steps: the common part of LocalSGD and DiLoCo.

Each synchronization is one transaction of the job. A group computes its contribution once and keeps
it until the decision, so a repeated attempt reduces the same values. The code runs on the main
thread and modifies the modules and optimizers of the script in place.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torchft.manager import Manager

from fft.errors import FftError
from fft.messages.causes import CauseCode
from fft.messages.effects import StartTxn
from fft.messages.protocol import Fault
from fft.train.limits import Feature
from fft.train.paradigms.periodic.contribution import Contribution, Packing
from fft.train.paradigms.periodic.shared_state import Fragment, SharedState, Storage
from fft.train.session.rank_context import RankContext
from fft.train.state.local_tensors import local_of
from fft.train.state.sharded import reshard

_ANEW = "a new beginning"


@dataclass(frozen=True)
class SyncSchedule:
    """The number of local steps between synchronizations; fragments take turns.

    Attributes:
        sync_every: Local steps between two synchronizations of one fragment.
        fragments: Number of fragments.
        delay: Number of local steps that overlap with a reduction.

    Raises:
        FftError: The values are inconsistent.
    """

    sync_every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        if self.sync_every < 1 or self.sync_every % self.fragments:
            raise FftError(
                f"sync_every={self.sync_every} with {self.fragments} fragments: give a multiple of "
                "their number, for they are synchronised in turn, after equal numbers of steps"
            )
        if not 0 <= self.delay < self.steps:
            raise FftError(
                f"a fragment is synchronised {self.steps} steps after the one before it, and "
                f"fragment_sync_delay={self.delay}: give less"
            )

    @property
    def steps(self) -> int:
        """Number of local steps from one synchronization to the next."""
        return self.sync_every // self.fragments

    @property
    def launch_at(self) -> int:
        """Number of local steps after which the reduction starts."""
        return self.steps - self.delay


class LocalPhase:
    """The local steps that a group has taken since its last synchronization.

    Attributes:
        lease: The leased data slice for these steps, or None before there is one.
        position: Number of these steps.
        weights: Per fragment, the total weight of the steps since its last reduction.
    """

    lease: int | None

    def __init__(self, fragments: int) -> None:
        self.lease, self.position = None, 0
        self.weights = [0.0] * fragments
        self._history = _ANEW

    def continues(self, plan: StartTxn) -> bool:
        """Return whether the local steps are the contribution to the txn of ``plan``."""
        return self.lease == plan.lease

    def enter(self, plan: StartTxn) -> None:
        """Continue in the txn of ``plan``, or start a new phase in it if there is no lease."""
        self.lease = plan.lease

    def stepped(self, weight: float) -> None:
        """Record a committed step of this weight."""
        self._history = _after(self._history, f"{self.lease}.{self.position}")
        self.position += 1
        self.weights = [sum_ + weight for sum_ in self.weights]

    def take_weight(self, fragment: int) -> float:
        """Return and reset the weight for a reduction; later steps count toward the next one."""
        weight, self.weights[fragment] = self.weights[fragment], 0.0
        return weight

    def end(self) -> None:
        """End the phase after a synchronization."""
        self._history = _after(self._history, "synchronised")
        self.lease, self.position = None, 0

    def void(self) -> None:
        """End the phase without a synchronization, and discard its steps."""
        self.lease, self.position = None, 0
        self.weights = [0.0] * len(self.weights)
        self._history = _ANEW

    def standing(self) -> str:
        """Describe the position; the text is equal on ranks of a group with consistent states."""
        return f"inner step {self.position} of slice {self.lease}, after {self._history}"

    def traced(self) -> dict[str, int]:
        """Return the fields for the trace entry of the committed synchronization."""
        return {"inner_steps": self.position}


class Synchronizer(ABC):
    """The common part of LocalSGD and DiLoCo, created between ``manager.register`` and the loop.

    Attributes:
        schedule: The number of local steps between synchronizations.
        packing: The packing of contributions into buckets.
        plan: The settings that must be equal in all groups, by name.
        shared: The state that the groups share.
        outer: The outer optimizers, stepped when a txn of the job commits.
        phase: The local steps since the last synchronization.
        is_launched: Whether the reduction of this attempt has been started.
    """

    algorithm: ClassVar[str]
    feature: ClassVar[Feature]

    def __init__(
        self,
        manager: Manager,
        fragments: Sequence[nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizers: Sequence[torch.optim.Optimizer],
        schedule: SyncSchedule,
        packing: Packing,
        storage: Storage,
    ) -> None:
        rank: RankContext = manager._parts
        self._rank, self.schedule, self.packing = rank, schedule, packing
        self._refuse_unfit(inner_optimizer, outer_optimizers)
        self.plan = {
            "algorithm": self.algorithm,
            "sync_every": schedule.sync_every,
            "fragments": schedule.fragments,
            "fragment_sync_delay": schedule.delay,
            "weighted": packing.is_weighted,
            **self._settings(),
        }
        self.shared = SharedState(
            rank.state.registered, fragments, outer_optimizers, self.plan, storage
        )
        self.outer = list(outer_optimizers)
        self.phase: LocalPhase = manager._parts.paradigm.new_phase(schedule.fragments)
        self.is_launched = False
        self._due: Fragment | None = None
        """The fragment that the open txn synchronizes."""
        self._contribution: Contribution | None = None
        """The contribution of this group to the open txn, or None before it is computed."""
        manager._parts.paradigm.synchronize_by(self)

    def _refuse_unfit(
        self, inner: torch.optim.Optimizer, outer: Sequence[torch.optim.Optimizer]
    ) -> None:
        rank, features = self._rank, [self.feature]
        if self.schedule.fragments > 1 or self.schedule.delay:
            features.append(Feature.FRAGMENTS)
        if self.packing.is_weighted:
            features.append(Feature.WEIGHTED)
        rank.features.use(*features)
        if rank.state.registered_state is None or not rank.state.updates.has(inner):
            raise FftError(
                f"call manager.register(model, inner_optimizer, …) before {self.name}(…), so "
                "that a failed inner step can be rolled back"
            )
        if any(map(rank.state.updates.has, outer)):
            raise FftError(
                "the outer optimizer is registered, so it would be stepped after every inner step: "
                f"give it to {self.name} alone"
            )

    def _settings(self) -> dict[str, Any]:
        """Return algorithm-specific settings that must be equal in all groups."""
        return {}

    @property
    def name(self) -> str:
        """The class name in scripts."""
        return f"fft.{type(self).__name__}"

    def describe(self) -> str:
        """Describe the settings that must be equal in all groups."""
        told = ", ".join(f"{key}={value}" for key, value in self.plan.items())
        return f"by {self.name} ({told})"

    # --- state dicts and checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Return the shared state of the last synchronization as live tensors and plain data."""
        self.shared.take()
        return self.shared.export()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict` before the loop starts.

        The local parameters are set to the shared values, and the inner optimizers are reset.

        Raises:
            StateMismatch: The state does not match this job; the message names the difference.
        """
        self.shared.take()
        self.load(state, keep_gradients=False)

    def export_own(self) -> dict[str, Any]:
        """Export the local state of this group at the end of a window.

        The caller must copy the tensors before the next inner step.
        """
        own = self._rank.state.registered.export(copy_mutable=True)
        del own["buffers"]
        return {"state": own, "weights": list(self.phase.weights)}

    def load_own(self, own: Mapping[str, Any], buffers: Mapping[str, torch.Tensor]) -> None:
        """Restore the result of `export_own`, after `load_state_dict`."""
        self._rank.state.registered.load_checkpoint({**own["state"], "buffers": buffers})
        self.phase.weights = list(own["weights"])

    # --- a txn of the job ---

    def begin(self, plan: StartTxn) -> None:
        """Begin a txn of the job.

        The group keeps its local steps if they belong to this txn. Otherwise it restarts from the
        last synchronization.
        """
        self.is_launched = False
        phase = self.phase
        if phase.lease is not None and not phase.continues(plan):
            self.start_over()
        if phase.lease is None:  # a joiner reduces a contribution without a lease
            self._contribution = None
        phase.enter(plan)
        self._due = self.shared.fragments[plan.step % len(self.shared.fragments)]

    def start_over(self) -> None:
        """Discard the local steps since the last synchronization."""
        reshard(self._rank.state.models)
        self.shared.start_over()
        self._forget_phase()

    def begin_anew(self, plan: StartTxn, cause: str, **at: Any) -> None:
        """Restart from the last synchronization with the same lease, after a step lost its state.

        Args:
            plan: The open txn of the job.
            cause: The reason, for the trace.
            at: Further fields for the trace entry.
        """
        job = self._rank.job
        job.note("inner_torn", {"token": list(plan.token), **at, "cause": cause})
        if self.is_launched:  # the reduction in progress is invalid
            text = f"a group begins anew: {cause}"
            job.post(Fault(plan.token, text, CauseCode.SCOPE_RESET, "inner"))
        self.start_over()
        self.phase.lease = plan.lease

    @property
    def has_contribution(self) -> bool:
        """Whether this group has computed a contribution that no committed txn includes."""
        return self._contribution is not None

    def load(self, state: Mapping[str, Any], keep_gradients: bool) -> None:
        """Load the shared state of another group, and discard the local steps.

        Args:
            state: The exported shared state of that group.
            keep_gradients: Keep the contribution to this txn, which belongs to that state.
        """
        self.take_over(state)
        contribution = self._contribution if keep_gradients else None
        self._forget_phase()
        self._contribution = contribution

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Load the shared state of another group, and keep this group's contribution."""
        self.shared.load(state)
        reshard(self._rank.state.models)
        self._rank.state.updates.loaded()  # scheduler positions were restored

    def _forget_phase(self) -> None:
        updates = self._rank.state.updates
        updates.loaded()
        updates.forget()  # gradients count as scaled again
        if self.phase.position:
            void = {"slice": self.phase.lease, "inner_steps": self.phase.position}
            self._rank.job.note("inner_void", void)
        self.phase.void()
        self._contribution = None

    def stepped(self, weight: float | None) -> None:
        """Record a committed local step.

        Args:
            weight: The weight that the script passed to ``txn.weigh``, or None.

        Raises:
            FftError: A weight is given although the packing is not weighted, or vice versa.
        """
        if (weight is not None) != self.packing.is_weighted:
            given = "was called" if weight is not None else "was not called"
            raise FftError(
                f"txn.weigh() {given}, and this {type(self).__name__} has "
                f"weighted={self.packing.is_weighted}: call it in every inner step of a weighted "
                "one, and else never"
            )
        self.phase.stepped(weight or 0.0)

    def launch(self) -> None:
        """Start the reduction of the contribution; each attempt reduces the same values."""
        assert self._due is not None, "a txn is open"
        self.is_launched = True
        self._due.refuse_thawed()
        text = f"{self.plan}{self._due.name}"
        self.prepare().launch(self._rank.reductions.reduce_gradients, text)

    def prepare(self) -> Contribution:
        """Return the contribution of this group, which is computed once for all attempts."""
        assert self._due is not None, "a txn is open, or was"
        if self._contribution is None:
            with torch.no_grad():
                values = self._values(self._due)
            weight = self.phase.take_weight(self.shared.fragments.index(self._due))
            self._contribution = Contribution(values, self.packing, weight)
        return self._contribution

    def finish(self) -> None:
        """Wait for the reduction.

        Raises:
            TxnAborted: The reduction failed.
            FftError: This group has discarded its contribution in the meantime.
        """
        if self._contribution is None:
            raise FftError(
                "the pending reduction is void, because this group has discarded its contribution"
            )
        self._contribution.wait()
        self._rank.reductions.raise_if_failed()

    def reduced(self) -> list[torch.Tensor]:
        """Return the averages that the open txn commits, in buckets; empty if there are none."""
        return [] if self._contribution is None else self._contribution.reduced()

    # --- the commit of a txn ---

    def apply(self) -> None:
        """Update the shared parameters from the averaged contributions."""
        assert self._due is not None, "a txn is open"
        assert self._contribution is not None, "nothing was reduced"
        mean = {}
        for name, value in self._contribution.means():
            own = local_of(self._due.parameters[name])
            mean[name] = value.view_as(own).to(own.dtype)
        reshard(self._rank.state.models)  # an unsharded copy would hide the new values
        with torch.no_grad():
            self._step(self._due, mean)
        self._end_phase()

    def skip(self) -> None:
        """End the window without an update of the shared parameters."""
        self._end_phase()

    def done(self) -> None:  # noqa: B027 - nothing is left to do
        """Do nothing, because functions of ``manager.on_commit`` run after each inner step."""

    def _end_phase(self) -> None:
        self.phase.end()
        self._contribution = None
        self.is_launched = False
        self.shared.note_progress()

    # --- the algorithm ---

    @abstractmethod
    def _values(self, fragment: Fragment) -> dict[str, torch.Tensor]:
        """Return this group's contribution to the average as new tensors by parameter name."""

    @abstractmethod
    def _step(self, fragment: Fragment, mean: dict[str, torch.Tensor]) -> None:
        """Update the shared and local parameters from the average."""


def _after(history: str, event: str) -> str:
    """Return the digest of a rank's history extended by ``event``."""
    return hashlib.blake2b(f"{history}|{event}".encode(), digest_size=8).hexdigest()

"""The synchronization of groups that take local steps, whatever it averages.

Each synchronization is one transaction of the job. A group computes its contribution once from its
parameters and keeps it until the decision, so that a repeated attempt reduces the same. Main
thread; touches the modules and optimizers that it was given.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed import ReduceOp
from torchft.manager import Manager

from fft.errors import FftError
from fft.messages.causes import CauseCode
from fft.messages.effects import StartTxn
from fft.messages.protocol import Fault
from fft.train.local_tensors import local_of
from fft.train.paradigms.periodic.contribution import Contribution, Packing
from fft.train.paradigms.periodic.shared_state import Fragment, SharedState, Storage
from fft.train.rank_context import RankContext
from fft.train.state.sharded import reshard

_ANEW = "a new beginning"


@dataclass(frozen=True)
class SyncSchedule:
    """After how many local steps fragments are synchronized, one after the other in turn.

    Attributes:
        sync_every: Local steps between two synchronizations of one fragment.
        fragments: Number of fragments.
        delay: Local steps that are made while a reduction is under way.

    Raises:
        FftError: the numbers do not fit.
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
        """Local steps from one synchronization to the next."""
        return self.sync_every // self.fragments

    @property
    def launch_at(self) -> int:
        """Number of local steps after which the reduction begins."""
        return self.steps - self.delay


class LocalPhase:
    """The steps that a group has taken by itself since its last synchronization.

    Attributes:
        lease: The slice of the data that they take; None: none yet.
        position: Their number.
        weights: Sum of the weights of the steps that are in no reduction yet, by fragment.
    """

    lease: int | None

    def __init__(self, fragments: int) -> None:
        self.lease, self.position = None, 0
        self.weights = [0.0] * fragments
        self._history = _ANEW

    def continues(self, plan: StartTxn) -> bool:
        """Return whether its steps are a contribution to the txn of ``plan``."""
        return self.lease == plan.lease

    def enter(self, plan: StartTxn) -> None:
        """Continue in the txn of ``plan``, or begin in it if there is no lease."""
        self.lease = plan.lease

    def stepped(self, weight: float) -> None:
        """Count a committed step of this weight."""
        self._history = _after(self._history, f"{self.lease}.{self.position}")
        self.position += 1
        self.weights = [sum_ + weight for sum_ in self.weights]

    def take_weight(self, fragment: int) -> float:
        """Return the weight of the steps for a reduction; what comes is in the next one."""
        weight, self.weights[fragment] = self.weights[fragment], 0.0
        return weight

    def end(self) -> None:
        """End with a synchronization."""
        self._history = _after(self._history, "synchronised")
        self.lease, self.position = None, 0

    def void(self) -> None:
        """End without one: the steps count for nothing."""
        self.lease, self.position = None, 0
        self.weights = [0.0] * len(self.weights)
        self._history = _ANEW

    def standing(self) -> str:
        """Return a text that is equal on ranks of a group whose states belong together."""
        return f"inner step {self.position} of slice {self.lease}, after {self._history}"

    def traced(self) -> dict[str, int]:
        """Return what the trace contains of it when its synchronization is committed."""
        return {"inner_steps": self.position}


class Synchronizer(ABC):
    """The common part of LocalSGD and DiLoCo. Made after ``manager.register``, before the loop.

    Attributes:
        schedule: After how many local steps groups synchronize.
        packing: How contributions are put into buckets.
        plan: The settings that must be equal in all groups, by name.
        shared: The state that the groups have in common.
        outer: The optimizers that a COMMIT of the job steps.
        phase: The local steps since the last synchronization.
        is_launched: The reduction of this attempt is under way.
    """

    algorithm: ClassVar[str]

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
        rank: RankContext = manager._parts.rank
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
        """This group's to the open txn; None until it is time to reduce."""
        manager._parts.paradigm.synchronize_by(self)

    def _refuse_unfit(
        self, inner: torch.optim.Optimizer, outer: Sequence[torch.optim.Optimizer]
    ) -> None:
        rank = self._rank
        if not rank.settings.spec.is_periodic:
            raise FftError(
                f"{self.name} needs ManagerFFT(…, spec={self.algorithm!r}), not spec="
                f"{rank.settings.spec.name!r}, by which all groups step together"
            )
        rank.manager._parts.paradigm.refuse_synchronizer(self)
        if rank.state.step is None or not rank.state.updates.has(inner):
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
        """Return the settings of this algorithm alone that must be equal in all groups."""
        return {}

    @property
    def name(self) -> str:
        """The class as scripts name it."""
        return f"fft.{type(self).__name__}"

    def describe(self) -> str:
        """Return in words what must be equal in all groups."""
        told = ", ".join(f"{key}={value}" for key, value in self.plan.items())
        return f"by {self.name} ({told})"

    # --- checkpoints of the user's ---

    def state_dict(self) -> dict[str, Any]:
        """What the groups share, as the last synchronisation left it: live tensors, plain data."""
        self.shared.take()
        return self.shared.export()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin where a `state_dict` was taken; before the loop. This group's own parameters take
        the job's values, and inner optimizers begin anew.

        Raises StateMismatch: it is that of another job; names what differs.
        """
        self.shared.take()
        self.load(state, keep_gradients=False)

    def export_own(self) -> dict[str, Any]:
        """At the end of a window: this group's own. Copy its tensors before the next inner step."""
        own = self._rank.state.registered.export(copy_mutable=True)
        del own["buffers"]
        return {"state": own, "weights": list(self.phase.weights)}

    def load_own(self, own: Mapping[str, Any], buffers: Mapping[str, torch.Tensor]) -> None:
        """Go on as the group that has exported it, after `load_state_dict`."""
        self._rank.state.registered.load({**own["state"], "buffers": buffers})
        self.phase.weights = list(own["weights"])

    # --- a txn of the job ---

    def begin(self, plan: StartTxn) -> None:
        """Begin a txn: continue where this group was, or anew if its lease is another one."""
        self.is_launched = False
        phase = self.phase
        if phase.lease is not None and not phase.continues(plan):
            self.start_over()
        if phase.lease is None:  # a joiner that was fetching has reduced what counts for no lease
            self._contribution = None
        phase.enter(plan)
        self._due = self.shared.fragments[plan.step % len(self.shared.fragments)]

    def start_over(self) -> None:
        """The progress since the last synchronisation is void."""
        reshard(self._rank.state.models)
        self.shared.start_over()
        self._forget_phase()

    def begin_anew(self, plan: StartTxn, cause: str, **at: Any) -> None:
        """The state of a step is lost: take what was synchronised last, with the same lease.

        ``at``: what the trace tells of the step besides.
        """
        job = self._rank.job
        job.note("inner_torn", {"token": list(plan.token), **at, "cause": cause})
        if self.is_launched:  # what is being reduced is void
            text = f"a group begins anew: {cause}"
            job.post(Fault(plan.token, text, CauseCode.SCOPE_RESET, "inner"))
        self.start_over()
        self.phase.lease = plan.lease

    @property
    def has_contribution(self) -> bool:
        """Whether the contribution of this group is computed, and no synchronization has it."""
        return self._contribution is not None

    def load(self, state: Mapping[str, Any], keep_gradients: bool) -> None:
        """Take over the shared state of another group, and begin anew.

        Args:
            state: The result of `export` of that group's shared state.
            keep_gradients: The reductions of this txn belong to that state.
        """
        self.take_over(state)
        contribution = self._contribution if keep_gradients else None
        self._forget_phase()
        self._contribution = contribution

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Take over the shared state of another group, and keep this group's contribution."""
        self.shared.load(state)
        reshard(self._rank.state.models)
        self._rank.state.updates.loaded()  # schedules are where they were

    def _forget_phase(self) -> None:
        updates = self._rank.state.updates
        updates.loaded()
        updates.forget()  # no gradient is unscaled
        if self.phase.position:
            void = {"slice": self.phase.lease, "inner_steps": self.phase.position}
            self._rank.job.note("inner_void", void)
        self.phase.void()
        self._contribution = None

    def stepped(self, weight: float | None) -> None:
        """Count a committed local step.

        Args:
            weight: The script's, from ``txn.weigh``.

        Raises:
            FftError: there is a weight and must be none, or the reverse.
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
        """Begin to reduce this group's contribution, for the first time or in a new attempt."""
        assert self._due is not None, "a txn is open"
        self.is_launched = True
        self._due.refuse_thawed()
        reduce = partial(self._rank.manager.reduce_gradients, op=ReduceOp.AVG)
        self.prepare().launch(reduce, f"{self.plan}{self._due.name}")

    def prepare(self) -> Contribution:
        """Return the contribution of this group, computed once for all attempts."""
        assert self._due is not None, "a txn is open, or was"
        if self._contribution is None:
            with torch.no_grad():
                values = self._values(self._due)
            weight = self.phase.take_weight(self.shared.fragments.index(self._due))
            self._contribution = Contribution(values, self.packing, weight)
        return self._contribution

    def finish(self) -> None:
        """Wait for the reduction. Raises TxnAborted: it failed; FftError: it is void."""
        if self._contribution is None:
            raise FftError("what was being reduced is void: this group has begun anew meanwhile")
        self._contribution.wait()
        self._rank.manager.raise_if_failed()

    # --- what a COMMIT does ---

    def apply(self) -> None:
        """The job's parameters take the step."""
        assert self._due is not None, "a txn is open"
        assert self._contribution is not None, "nothing was reduced"
        mean = {}
        for name, value in self._contribution.means():
            own = local_of(self._due.parameters[name])
            mean[name] = value.view_as(own).to(own.dtype)
        reshard(self._rank.state.models)  # what was gathered would hide the new values
        with torch.no_grad():
            self._step(self._due, mean)
        self._end_phase()

    def skip(self) -> None:
        """The window is over without a step of the job's parameters."""
        self._end_phase()

    def done(self) -> None:  # noqa: B027 - nothing is left to do
        """The user's functions follow the inner steps."""

    def _end_phase(self) -> None:
        self.phase.end()
        self._contribution = None
        self.is_launched = False
        self.shared.note_progress()

    # --- what is reduced ---

    @abstractmethod
    def _values(self, fragment: Fragment) -> dict[str, torch.Tensor]:
        """Return this group's contribution to the average, by parameter: new tensors."""

    @abstractmethod
    def _step(self, fragment: Fragment, mean: dict[str, torch.Tensor]) -> None:
        """Step the job's parameters, and this group's, by the average."""


def _after(history: str, event: str) -> str:
    """Return a digest of everything that a rank has been through."""
    return hashlib.blake2b(f"{history}|{event}".encode(), digest_size=8).hexdigest()

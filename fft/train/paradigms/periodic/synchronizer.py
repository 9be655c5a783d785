"""What groups that step alone do when they synchronise, whatever is averaged then.

Each synchronisation is one transaction of the job. What a group reduces in it is computed from its
parameters once and kept until the decision, so that a repeated attempt reduces the same. Main
thread; touches the modules and optimizers that it was given.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import Work
from torchft.manager import Manager, WorldSizeMode

from fft.errors import FftError
from fft.messages.causes import CauseCode
from fft.messages.effects import StartTxn
from fft.messages.protocol import Fault
from fft.protocol.apart import is_brought
from fft.train.local_tensors import local_of
from fft.train.paradigms.periodic.shared_state import Fragment, SharedState
from fft.train.rank import Rank
from fft.train.state.sharded import reshard

BUCKET_MB = 1024.0
"""MiB that are reduced at once, as in torchft."""
_ANEW = "a new beginning"


@dataclass
class _Bucket:
    """Values that lie behind each other, and their sum over the groups where it is under way."""

    names: list[str]
    own: torch.Tensor
    """What this group contributes; with weights, the last one is the weight."""
    reduced: torch.Tensor
    work: Work | None = None


class Synchronizer(ABC):
    """What LocalSGD and DiLoCo have in common. Made after ``manager.register``, before the loop.

    Attributes:
        steps: inner steps, from one synchronisation to the next.
        delay: inner steps that are made while the reduction is under way.
        position: inner steps since the last synchronisation.
        lease: the slice of the data that they take; None: none yet.
        is_launched: the reduction of this attempt is under way.
    """

    algorithm: ClassVar[str]
    lease: int | None

    def __init__(
        self,
        manager: Manager,
        fragments: Sequence[nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizers: Sequence[torch.optim.Optimizer],
        sync_every: int,
        plan: dict[str, Any],
        delay: int = 0,
        device: torch.device | None = None,
        pin: bool = True,
        bucket_cap_mb: float | None = None,
        weighted: bool = False,
    ) -> None:
        rank: Rank = manager._parts.rank
        self._rank = rank
        self._refuse_unfit(inner_optimizer, outer_optimizers)
        if not fragments:
            raise FftError(f"{self._name}: no model to synchronise")
        if sync_every < 1 or sync_every % len(fragments):
            raise FftError(
                f"sync_every={sync_every} with {len(fragments)} fragments: give a multiple of "
                "their number, for they are synchronised in turn, after equal numbers of steps"
            )
        self.steps, self.delay = sync_every // len(fragments), delay
        if rank.settings.spec.bound and (len(fragments) > 1 or delay):
            raise FftError(
                f"{self._name}: groups that do not wait for each other synchronise the whole model "
                "at once, and compute nothing meanwhile: give one fragment, and no delay"
            )
        if not 0 <= delay < self.steps:
            raise FftError(
                f"a fragment is synchronised {self.steps} steps after the one before it, and "
                f"fragment_sync_delay={delay}: give less"
            )
        state = rank.state
        if weighted and rank.world > 1:
            raise FftError(
                "weighted=True with several ranks in a replica group: each would average its shard "
                "by the weight of its own samples; leave it out, and give all ranks equally many"
            )
        assert state.step is not None, "looked at above"
        own = {"algorithm": self.algorithm, "sync_every": sync_every, "fragments": len(fragments)}
        self.plan = {**own, "fragment_sync_delay": delay, "weighted": weighted, **plan}
        self.shared = SharedState(state.step, fragments, outer_optimizers, self.plan, device, pin)
        self._cap = int((BUCKET_MB if bucket_cap_mb is None else bucket_cap_mb) * 2**20)
        self.position, self.lease, self.is_launched = 0, None, False
        self.bound = rank.settings.spec.bound
        """Of an asynchronous job: by how many steps of it a contribution may be behind; else 0."""
        self.base = 0
        """The same: the job's step that this group's own steps began from."""
        self.outer = list(outer_optimizers)
        """What is stepped with a COMMIT of the job."""
        self._turn = 0
        self._due: Fragment | None = None
        """What the open txn synchronises."""
        self._buckets: list[_Bucket] = []
        """Of it; empty until it is time to reduce."""
        self._is_weighted = weighted
        self._weights = [0.0] * len(fragments)
        """Of the steps that are not in a reduction of the fragment yet."""
        self._history = _ANEW
        manager._parts.paradigm.synchronize_by(self)

    def _refuse_unfit(
        self, inner: torch.optim.Optimizer, outer: Sequence[torch.optim.Optimizer]
    ) -> None:
        rank = self._rank
        if not rank.settings.spec.is_periodic:
            raise FftError(
                f"{self._name} needs ManagerFFT(…, spec={self.algorithm!r}), not spec="
                f"{rank.settings.spec.name!r}, by which all groups step together"
            )
        if rank.settings.spec.bound and (why := self._unfit_for_bounds()):
            raise FftError(f"{self._name} by spec={rank.settings.spec.name!r}: {why}")
        if rank.state.step is None or not rank.state.updates.has(inner):
            raise FftError(
                f"call manager.register(model, inner_optimizer, …) before {self._name}(…), so "
                "that a failed inner step can be rolled back"
            )
        if any(map(rank.state.updates.has, outer)):
            raise FftError(
                "the outer optimizer is registered, so it would be stepped after every inner step: "
                f"give it to {self._name} alone"
            )

    def _unfit_for_bounds(self) -> str:
        """Why the groups of this job cannot go on without each other; empty: they can."""
        if self.algorithm != "diloco":
            return (
                "the groups' parameters cannot be averaged from different bases; use fft.DiLoCo, "
                "which averages how far they have come: with an outer SGD of lr=1 it is the same"
            )
        if self._rank.world > 1:
            return "a replica group is one rank; give it --ranks 1"
        if self._rank.manager._torchft.replica_world_size_mode == WorldSizeMode.FIXED_WITH_SPARES:
            return "there are no spares where any number of groups synchronise; use DYNAMIC"
        if self._rank.settings.config.membership == "lighthouse":
            return 'a lighthouse\'s quorum waits for all groups; leave membership="lighthouse" out'
        return ""

    @property
    def _name(self) -> str:
        return f"fft.{type(self).__name__}"

    def describe(self) -> str:
        """What must be alike in all groups, in words."""
        told = ", ".join(f"{key}={value}" for key, value in self.plan.items())
        return f"by {self._name} ({told})"

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
        step = self._rank.state.step
        assert step is not None, "it is registered"
        own = step.export(across_body=True)
        del own["buffers"]
        return {"state": own, "weights": list(self._weights)}

    def load_own(self, own: Mapping[str, Any], buffers: Mapping[str, torch.Tensor]) -> None:
        """Go on as the group that has exported it, after `load_state_dict`."""
        step = self._rank.state.step
        assert step is not None, "it is registered"
        step.load({**own["state"], "buffers": buffers})
        self._weights = list(own["weights"])

    # --- a txn of the job ---

    def begin(self, plan: StartTxn) -> None:
        """A txn begins: go on where this group was, or anew if its lease is another one."""
        self.is_launched = False
        goes_on = self.lease is not None and self._goes_on(plan)
        if self.lease is not None and not goes_on:
            self.start_over()
        if not goes_on:
            self.base = plan.step
        if self.lease is None:  # what was reduced without one, as by who learns, is nothing of it
            self._buckets = []
        self.lease = plan.lease
        self._turn = plan.step % len(self.shared.fragments)
        self._due = self.shared.fragments[self._turn]

    def _goes_on(self, plan: StartTxn) -> bool:
        """Whether what this group has computed is what it brings to the txn."""
        if not self.bound or self.position == 0:
            return self.lease == plan.lease
        job = self._rank.job
        epoch = None if job.local is None else job.local.epoch
        assert job.engine is not None, "a txn has begun"
        config = job.engine.participant.config
        return is_brought(epoch, config, (self.lease, self.base), plan.lease)

    def start_over(self) -> None:
        """The progress since the last synchronisation is void."""
        reshard(self._rank.state.models)
        self.shared.start_over()
        self._forget_window()

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
        self.lease = plan.lease

    def load(self, state: Mapping[str, Any], keep_gradients: bool) -> None:
        """Take over what the groups share from another one, and begin anew.

        ``keep_gradients``: what this txn has reduced belongs to the state that comes.
        """
        self.shared.load(state)
        reshard(self._rank.state.models)
        if self.bound and self._buckets:  # what this group brings was computed before
            self._rank.state.updates.loaded()
            return
        buckets = self._buckets if keep_gradients else []
        self._forget_window()
        self._buckets = buckets

    def _forget_window(self) -> None:
        updates = self._rank.state.updates
        updates.loaded()  # schedules are where they were
        updates.forget()  # no gradient is unscaled
        if self.position:
            void = {"slice": self.lease, "inner_steps": self.position}
            self._rank.job.note("inner_void", void)
        self.lease, self.position, self._buckets = None, 0, []
        self._weights = [0.0] * len(self._weights)
        self._history = _ANEW

    def stepped(self, weight: float | None) -> None:
        """An inner step was committed, of which so much counts.

        Raises FftError: a weight where there are none, or none where there are.
        """
        if (weight is not None) != self._is_weighted:
            given = "was called" if weight is not None else "was not called"
            raise FftError(
                f"txn.weigh() {given}, and this {type(self).__name__} has "
                f"weighted={self._is_weighted}: call it in every inner step of a weighted one, and "
                "else never"
            )
        self._history = _after(self._history, f"{self.lease}.{self.position}")
        self.position += 1
        self._weights = [sum_ + (weight or 0.0) for sum_ in self._weights]

    def standing(self) -> str:
        """Where this rank stands: equal on ranks of a group whose states belong together."""
        return f"inner step {self.position} of slice {self.lease}, after {self._history}"

    def launch(self) -> None:
        """Begin to reduce: for the first time, or what the attempt before this has reduced."""
        assert self._due is not None, "a txn is open"
        self.is_launched = True
        self._due.refuse_thawed()
        self.prepare()
        for bucket in self._buckets:
            bucket.reduced = bucket.own.clone()
            layout = f"{self.plan}{self._due.name}{bucket.names}"
            bucket.work = self._rank.manager.reduce_gradients(bucket.reduced, layout, ReduceOp.AVG)

    def prepare(self) -> None:
        """Compute what this group brings, unless it is computed: once for all attempts."""
        assert self._due is not None, "a txn is open, or was"
        if self._buckets:
            return
        with torch.no_grad():
            values = self._contribution(self._due)
        self._buckets = list(self._in_buckets(values, self._weights[self._turn]))
        self._weights[self._turn] = 0.0  # what comes is in the next one

    def finish(self) -> None:
        """Wait for the reduction. Raises TxnAborted: it failed; FftError: it is void."""
        if not self._buckets:
            raise FftError("what was being reduced is void: this group has begun anew meanwhile")
        for bucket in self._buckets:
            assert bucket.work is not None, "it was launched"
            bucket.work.wait()
        self._rank.manager.reduced()

    # --- what a COMMIT does ---

    def apply(self) -> None:
        """The job's parameters take the step."""
        assert self._due is not None, "a txn is open"
        assert self._buckets, "nothing was reduced"
        mean = {}
        for bucket in self._buckets:
            for name, value in zip(bucket.names, self._parted(bucket), strict=True):
                own = local_of(self._due.parameters[name])
                mean[name] = value.view_as(own).to(own.dtype)
        reshard(self._rank.state.models)  # what was gathered would hide the new values
        with torch.no_grad():
            self._step(self._due, mean)
        self._end_window()

    def skip(self) -> None:
        """The window is over without a step of the job's parameters."""
        self._end_window()

    def done(self) -> None:  # noqa: B027 - nothing is left to do
        """The user's functions follow the inner steps."""

    def _end_window(self) -> None:
        self._history = _after(self._history, "synchronised")
        self.lease, self.position, self._buckets = None, 0, []
        self.is_launched = False
        self.shared.note_progress()

    # --- what is reduced ---

    @abstractmethod
    def _contribution(self, fragment: Fragment) -> dict[str, torch.Tensor]:
        """What this group brings to the average, by parameter: new tensors."""

    @abstractmethod
    def _step(self, fragment: Fragment, mean: dict[str, torch.Tensor]) -> None:
        """Carry the average into the job's parameters, and this group's."""

    def _in_buckets(self, values: dict[str, torch.Tensor], weight: float) -> Iterator[_Bucket]:
        """All of ``values``, in order: as many of one type in a bucket as go into it."""
        open_: list[str] = []
        size = 0
        for name, value in values.items():
            other = open_ and values[open_[0]].dtype != value.dtype
            if open_ and (other or size + value.nbytes > self._cap):
                yield self._bucket(open_, values, weight)
                open_, size = [], 0
            open_.append(name)
            size += value.nbytes
        yield self._bucket(open_, values, weight)

    def _bucket(self, names: list[str], values: dict[str, torch.Tensor], weight: float) -> _Bucket:
        parts = [values[name].reshape(-1) for name in names]
        if self._is_weighted:
            if parts[0].dtype in (torch.float16, torch.bfloat16):  # too short for products
                parts = [part.float() for part in parts]
            parts = [*(part * weight for part in parts), parts[0].new_full((1,), weight)]
        own = torch.cat(parts)
        return _Bucket(list(names), own, own)

    def _parted(self, bucket: _Bucket) -> list[torch.Tensor]:
        """The averages in it, flat."""
        assert self._due is not None, "a txn is open"
        sizes = [local_of(self._due.parameters[name]).numel() for name in bucket.names]
        if not self._is_weighted:
            return list(torch.split(bucket.reduced, sizes))
        *parts, total = torch.split(bucket.reduced, [*sizes, 1])
        return [part / total for part in parts]


def _after(history: str, event: str) -> str:
    """What a rank has been through, as a digest."""
    return hashlib.blake2b(f"{history}|{event}".encode(), digest_size=8).hexdigest()

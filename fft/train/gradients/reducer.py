"""Gradient reduction across the replica groups during backward.

When backward returns, the gradients are averaged. Contract and design follow torch's
DistributedDataParallel (Li et al., "PyTorch Distributed", VLDB 2020). Parameters are assigned to
buckets, in the reverse of their order in the model. A bucket whose gradients are complete is
reduced while backward continues, and the end of backward waits for all buckets. All ranks issue the
buckets in the same order.

There are two differences from DDP. First, buckets are never rebuilt in the order in which gradients
arrived, because a joining group does not have that order. Second, each bucket carries one flag per
parameter, which is nonzero if at least one group had a gradient for it. Parameters that no group
used therefore keep ``grad = None`` without a second reduction.

The reducer runs on the thread of the autograd engine that runs the hooks, and accesses dense
gradients through its buckets.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed import ReduceOp
from torch.nn.parameter import is_lazy

from fft.errors import FftError, GradientMissing
from fft.train.gradients.buckets import (
    BUCKET_MB,
    Bucket,
    CommHook,
    GradBucket,
    Slot,
    describe,
    fill,
    sparse_parameters,
)
from fft.train.gradients.reductions import Reductions

Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Layout:
    """The assignment of a model's gradients to buckets, for the current set of trained parameters.

    Attributes:
        trained: The parameters whose gradients are reduced, as an ordered set.
        frozen: The other parameters, with their names.
        sparse: The parameters of ``trained`` with sparse gradients, which are in no bucket.
        buckets: The buckets in the order of reduction.
        digest: Digest of the layout; different layouts have different digests.
    """

    trained: dict[torch.Tensor, None]
    frozen: Named
    sparse: Named
    buckets: list[Bucket]
    digest: str

    @cached_property
    def slots(self) -> dict[torch.Tensor, tuple[Bucket, Slot]]:
        """Parameter → its bucket and its slot, for each gradient in a bucket."""
        return {slot.parameter: (b, slot) for b in self.buckets for slot in b.slots}


class ModelParameters:
    """The parameters of a model in two classes: initially trainable, and initially frozen.

    Initially trainable parameters keep their place in the buckets even if they are frozen later.
    Initially frozen parameters are in buckets while they are trainable. The layout therefore
    depends on the current set of frozen parameters, not on its history, which a joiner lacks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trained: Named = []
        self._frozen: Named = []
        self._seen: list[tuple[object, ...]] | None = None
        """The properties of the parameters that the layout depends on; None before ``update``."""

    def update(self) -> bool:
        """Read the model's current parameters. Names that were read before keep their class.

        Returns:
            Whether any parameter was added, removed, replaced or converted.

        Raises:
            FftError: No parameter requires a gradient, or one is not initialized.
        """
        now: list[tuple[object, ...]] = [
            (id(p), p.dtype, p.device, None if is_lazy(p) else p.shape)
            for p in self._model.parameters()
        ]
        if now == self._seen:
            return False
        named = list(self._model.named_parameters())
        if lazy := [name for name, p in named if is_lazy(p)]:
            raise FftError(
                f"sync_gradients(model): parameter {lazy[0]!r} has no shape yet, because its lazy "
                "module has not seen an input: run model(batch) once before this call"
            )
        known = {name for name, _ in self._frozen}
        frozen = {name for name, p in named if name in known or not p.requires_grad}
        frozen -= {name for name, _ in self._trained}
        self._trained = [(n, p) for n, p in named if n not in frozen]
        self._frozen = [(n, p) for n, p in named if n in frozen]
        if not self._trained:
            raise FftError(
                "sync_gradients(model): no parameter of the model needs a gradient; call it when "
                "the model is complete"
            )
        self._seen = now
        return True

    def are_other_than(self, trained: Collection[torch.Tensor]) -> bool:
        """Return whether the parameters that belong in buckets now differ from ``trained``."""
        return any(p.requires_grad != (p in trained) for _, p in self._frozen)

    def describe(self, options: str) -> str:
        """Describe all parameters, with a digest that also depends on ``options``."""
        named = self._trained + self._frozen
        text = f"{describe(named)}|{options}"
        digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        numbers = sum(p.numel() for _, p in named)
        return f"{len(named)} parameters with {numbers} numbers ({digest})"

    def lay_out(self, index: int, cap_mb: float, dtype: torch.dtype | None) -> Layout:
        """Return the layout of the parameters that belong in buckets now.

        Args:
            index: Index of the model.
            cap_mb: See `fill`.
            dtype: See `fill`.
        """
        more = [(n, p) for n, p in self._frozen if p.requires_grad]
        trained, sparse = self._trained + more, sparse_parameters(self._model)
        inwards = [*reversed(self._trained), *reversed(more)]
        buckets = fill([(n, p) for n, p in inwards if p not in sparse], cap_mb, dtype)
        text = f"{index}|{describe(trained)}|{[b.size for b in buckets]}|{dtype}"
        return Layout(
            dict.fromkeys(p for _, p in trained),
            [(n, p) for n, p in self._frozen if not p.requires_grad],
            [(n, p) for n, p in trained if p in sparse],
            buckets,
            hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        )


@dataclass(frozen=True)
class Backward:
    """A backward that has reached a parameter of the model.

    Attributes:
        task: Id of the autograd graph task.
        thread: Id of the thread that runs the hooks.
        at_end: Weak reference to the end-of-backward callback. It returns None once autograd has
            released the callback, which is after backward.
    """

    task: int
    thread: int
    at_end: Callable[[], Any]


class Reducer:
    """The reducer of one model's gradients, active in each backward that reaches its parameters.

    Args:
        model: A plain model, or an FSDP2 model (``fully_shard``), whose sharded gradients are
            reduced.
        reductions: Executes the reductions.
        bucket_mb: Maximum size of a bucket in MiB, in the dtype of the reduction.
        dtype: The dtype of the reduction, such as ``torch.bfloat16``; None keeps the gradient's.
        index: Index of the model among the reduced models; the same in all groups.
        finds_unused: See `finds_unused`.

    Attributes:
        finds_unused: Whether a rank may have no gradient for a parameter that others have one for.

    Raises:
        FftError: No parameter requires a gradient, or one is not initialized.
    """

    def __init__(
        self,
        model: nn.Module,
        reductions: Reductions,
        bucket_mb: float = BUCKET_MB,
        dtype: torch.dtype | None = None,
        index: int = 0,
        finds_unused: bool = False,
    ) -> None:
        self.finds_unused = finds_unused
        self._model = model
        self._index = index
        self._reductions, self._txn = reductions, reductions.txn
        self._cap = bucket_mb
        self._dtype = dtype
        self._hook: tuple[Any, CommHook] | None = None
        self._handles: dict[torch.Tensor, Any] = {}
        """Parameter → the handle of its hook."""
        self._parameters = ModelParameters(model)
        self._is_quiet = False
        self._quiet_at_begin: bool | None = None
        """`_is_quiet` at the start of the step function; None after a rollback has restored it."""
        self._backward: Backward | None = None
        """The backward at whose end the remaining buckets are reduced."""
        self._refused: str | None = None
        """Why a backward of this step was rejected, so that gradients are incomplete, or None."""
        self._next = 0
        """Index of the bucket that is issued next."""
        self._flags: torch.Tensor | None = None
        self._is_unreduced = False
        """Whether gradients were accumulated after the last reduction."""
        self._is_reduced = False
        """Whether gradients were reduced in this step function."""
        self._is_eager = True
        """Whether buckets are issued while backward is running."""
        self._parameters.update()
        self._lay_out()

    @property
    def model(self) -> str:
        """A description of all parameters, with a digest; the same in all groups."""
        return self._parameters.describe(f"{self._cap}|{self._dtype}")

    # --- called by the manager ---

    def begin(self) -> None:
        """Reset the state of earlier backwards and update the layout, for a step function."""
        self.update_layout()
        self._come_last()
        self._forget()
        self._quiet_at_begin = self._is_quiet
        for bucket in self._layout.buckets:
            bucket.detach_if_shared()
        self._is_unreduced, self._refused, self._is_reduced = False, None, False

    def reset(self) -> None:
        """Reset after a rollback.

        Buffers are dropped, because an aborted reduction may still write to them. A flag such as
        ``require_backward_grad_sync`` is restored if the step function changed it.
        """
        self._forget()
        if self._quiet_at_begin is not None:
            self._is_quiet, self._quiet_at_begin = self._quiet_at_begin, None
        for bucket in self._layout.buckets:
            bucket.drop()

    def covers(self, model: nn.Module) -> bool:
        """Return whether this reducer covers any parameter of ``model``."""
        return not set(self.parameters()).isdisjoint(model.parameters())

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters of the model, including frozen ones."""
        return list(self._model.parameters())

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def quiet(self, quiet: bool) -> bool:
        """Set whether backward only accumulates, without reduction; return the previous setting."""
        before, self._is_quiet = self._is_quiet, quiet
        return before

    def reduce(self) -> None:
        """Reduce all gradients now, for callers that disabled the reduction in backward (`quiet`).

        Raises if a reduction failed and the step function must end.
        """
        self._start_over()
        self._reduce_rest(nested=False)

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let ``hook(state, bucket)`` reduce each bucket; it must return a Future of the result."""
        if self._hook is not None:
            raise FftError("a communication hook is registered already; DDP takes one, too")
        self._hook = state, hook

    @property
    def unfinished(self) -> str | None:
        """Why the gradients are not averaged, or None if they are."""
        if self._refused is not None:
            return self._refused
        if self._backward is not None:
            return "a backward() was begun and has not come to its end (an exception was caught?)"
        if self._is_unreduced:
            return (
                "gradients were accumulated in no_sync() and never reduced, or a loop over "
                "txn.batches was left early"
            )
        return None

    # --- layout ---

    def update_layout(self) -> None:
        """Recompute the layout if parameters were added, replaced, converted or unfrozen."""
        if self._parameters.update() or self._parameters.are_other_than(self._layout.trained):
            self._lay_out()

    def _lay_out(self) -> None:
        self._layout = self._parameters.lay_out(self._index, self._cap, self._dtype)
        for parameter in [p for p in self._handles if p not in self._layout.trained]:
            self._handles.pop(parameter).remove()
        for parameter in self._layout.trained:
            if parameter not in self._handles:
                self._hook_on(parameter)

    def _hook_on(self, parameter: Any) -> None:  # torch does not type this method
        handle = parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self._handles[parameter] = handle

    def _come_last(self) -> None:
        """Move the hooks behind those of the user, which may have been registered later."""
        for parameter, handle in list(self._handles.items()):
            is_last = next(reversed(hooks_of(parameter)), None) == handle.id
            if parameter.requires_grad and not is_last:
                handle.remove()
                self._hook_on(parameter)

    # --- during backward ---

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._is_quiet:
            self._is_unreduced = True
            return
        self._arm()
        if (place := self._layout.slots.get(parameter)) is None:
            return  # sparse gradients are reduced at the end
        bucket, slot = place
        bucket.touched = True
        if bucket.work is not None or (slot.in_place and slot not in bucket.missing):
            self._came_late(bucket, slot)
            return
        if not self._is_eager:
            return
        bucket.take(slot)
        bucket.missing.discard(slot)
        buckets = self._layout.buckets
        while self._next < len(buckets) and not buckets[self._next].missing:
            self._issue(buckets[self._next])
            self._next += 1

    def _came_late(self, bucket: Bucket, slot: Slot) -> None:
        """Handle a second gradient of a parameter in one backward, after the first was copied."""
        if not slot.in_place:  # FSDP2, if a module ran twice
            bucket.again = True
            return
        self._is_eager = False
        raise FftError(
            f"the gradient of {slot.name!r} arrived in two parts in one backward. This happens if "
            "a parameter is used inside and outside a checkpoint with use_reentrant=True. From now "
            "on, gradients are reduced at the end of backward; use_reentrant=False restores the "
            "overlap"
        )

    def _arm(self) -> None:
        task = torch._C._current_graph_task_id()
        if self._backward is not None and self._backward.task == task:
            return
        nested = is_nested()
        self._check(nested)
        if self._backward is None:
            self._start_over()

        # Queue one callback per graph task. A checkpoint with use_reentrant=True is a nested task,
        # which ends before the outer one. The outer task may reach no parameter of the model, so
        # each task reduces the touched buckets at its end.
        def finish() -> None:
            self._finish(nested)

        self._backward = Backward(task, threading.get_ident(), weakref.ref(finish))
        Variable._execution_engine.queue_callback(finish)

    def _check(self, nested: bool) -> None:
        """Raise FftError for a backward whose gradients cannot be reduced."""
        if self._txn.plan is None:
            raise FftError(
                f"backward() of a {type(self._model).__name__} outside of a transaction: "
                "sync_gradients(model) reduces its gradients across the groups, and no group takes "
                "part in that here. Move the call into the step function (`with txn:`); for "
                "gradients of this rank alone use torch.autograd.grad(), or backward() within "
                "`with manager.no_sync():` and zero_grad() after it"
            )
        if torch.is_grad_enabled():
            self._refused = (
                "backward(create_graph=True): averaging across the groups would drop the graph of "
                "the gradients, and values computed from .grad would have none. Compute a penalty "
                "on gradients from torch.autograd.grad(loss, parameters, create_graph=True), add "
                "it to the loss, and call backward() once on the sum"
            )
            raise FftError(self._refused)
        if self._backward is None or self._backward.at_end() is None:  # no backward is running
            return
        within = threading.get_ident() == self._backward.thread or not is_pythons_thread()
        if not (nested and within):
            self._refused = (
                "two threads were in backward() of one model at the same time, which would mix "
                "their gradients in one reduction; let one thread call backward(), for example on "
                "the sum of the losses"
            )
            raise FftError(self._refused)

    def _start_over(self) -> None:
        self._next = 0
        groups, fixed = self._txn.participants, self._txn.fixed_slices
        if fixed and self._is_reduced:
            self._refuse_another()
        # a communication hook does the whole averaging, as in DDP
        share = 1.0 / (fixed or groups) if self._hook is None else self._weight
        for bucket in self._layout.buckets:
            bucket.share = share
            bucket.missing = set(bucket.slots)
            bucket.touched = bucket.again = False
            bucket.work = None

    @property
    def _weight(self) -> float:
        """Factor for this rank's gradients before they are averaged over the groups.

        It makes that average the mean over the batches of a step.
        """
        fixed = self._txn.fixed_slices
        return self._txn.participants / fixed if fixed else 1.0

    def _refuse_another(self) -> None:
        """Raise FftError: with ``global_batch=`` it would weight gradients again."""
        self._refused = (
            "gradients were reduced twice in a step with global_batch=, which "
            "weights them: call backward() once for each of txn.batches, inside the loop over it "
            "(for the sum of several losses, or earlier ones within `with manager.no_sync():`), "
            "and use use_reentrant=False in activation checkpointing"
        )
        raise FftError(self._refused)

    def _issue(self, bucket: Bucket) -> None:
        flat = bucket.flat()
        used = bucket.gather()
        if self._hook is None:
            tail = flat[bucket.size :]
            if all(used):
                tail.fill_(1)
            else:
                tail.copy_(torch.tensor(used, dtype=flat.dtype))
            bucket.work = self._reductions.reduce_gradients(flat, self._layout.digest, ReduceOp.SUM)
            return
        state, hook = self._hook
        # before the hook changes them
        self._reductions.recomputation.before_reduction(flat, self._layout.digest)
        flags = torch.tensor(used, dtype=torch.float32, device=flat.device)
        self._flags = flags if self._flags is None else torch.cat([self._flags, flags])
        bucket.work = hook(state, GradBucket(bucket, bucket.index + 1 == len(self._layout.buckets)))

    # --- at the end of backward ---

    def _finish(self, nested: bool) -> None:
        # otherwise a nested task has reduced all gradients, and none arrived after that
        if self._backward is not None:
            self._reduce_rest(nested)

    def _reduce_rest(self, nested: bool) -> None:
        due = [b for b in self._layout.buckets if b.work is None and (b.touched or not nested)]
        for bucket in due:
            self._issue(bucket)
        self._complete([b for b in self._layout.buckets if b.work is not None])
        late = [b for b in self._layout.buckets if b.again]
        if late and self._txn.fixed_slices:
            self._is_eager = False
            raise FftError(
                "a module ran twice in one backward, so its gradients came in two parts; from now "
                "on gradients are reduced when all have come"
            )
        for bucket in late:
            bucket.missing = set(bucket.slots)
            self._issue(bucket)
        self._complete(late)
        self._reduce_sparse()
        self._refuse_unknown()
        self._is_unreduced, self._is_reduced = self._is_unreduced and nested, True
        if not nested:
            self._reductions.recomputation.results_used()
        self._forget()

    def _complete(self, buckets: list[Bucket]) -> None:
        if self._flags is not None:
            self._reductions.reduce_gradients(self._flags, self._layout.digest).wait()
        for bucket in buckets:
            bucket.wait()
        self._reductions.raise_if_failed()
        offset = 0
        for bucket in buckets:
            flags, count = self._flags, len(bucket.slots)
            tail = bucket.flat()[bucket.size :] if flags is None else flags[offset : offset + count]
            bucket.scatter(tail, None if self._permits_missing else _refuse_missing)
            offset += count
        self._flags = None

    @property
    def _permits_missing(self) -> bool:
        """Whether a gradient of this rank may be missing: a joiner's first one does not count."""
        return self.finds_unused or not self._txn.contributes

    def _reduce_sparse(self) -> None:
        """Reduce sparse gradients one by one. Gloo reduces their entries, not their shapes."""
        works, missing = [], []
        for name, parameter in self._layout.sparse:
            grad = parameter.grad
            if grad is None:
                missing.append((name, parameter))
                grad = torch.zeros_like(parameter).to_sparse(1)  # rows, as of an embedding
            grad = grad.coalesce()
            grad = parameter.grad = grad if self._weight == 1.0 else grad * self._weight
            works.append(self._reductions.reduce_gradients(grad, self._layout.digest))
        for work in works:
            work.wait()
        if works:
            self._reductions.raise_if_failed()
        for name, parameter in [] if self._permits_missing else missing:
            if parameter.grad is not None and parameter.grad._nnz() > 0:
                _refuse_missing(name)

    def _refuse_unknown(self) -> None:
        for name, parameter in self._layout.frozen:
            if parameter.grad is not None:
                raise FftError(
                    f"parameter {name!r} got a gradient, but it was frozen when this txn began, so "
                    "it is not reduced across the groups; set requires_grad between two txns"
                )

    def _forget(self) -> None:
        self._backward, self._flags = None, None
        for bucket in self._layout.buckets:
            bucket.work = None


class Reducers(list[Reducer]):
    """The reducers of a rank, in the order in which the models were given.

    Their hooks reference the manager in a cycle that the garbage collector cannot see; `close`
    breaks it.
    """

    @property
    def models(self) -> str:
        """Names of the models that the reducers reduce."""
        return ", ".join(reducer.model for reducer in self)

    def begin(self) -> None:
        """Prepare the reducers for a step function."""
        for reducer in self:
            reducer.begin()

    def reset(self) -> None:
        """Reset the reducers after a rollback."""
        for reducer in self:
            reducer.reset()

    def close(self) -> None:
        """Take the reducers' hooks off the parameters. Idempotent."""
        for reducer in self:
            reducer.close()
        self.clear()


def _refuse_missing(name: str) -> NoReturn:
    raise GradientMissing(
        f"parameter {name!r} got no gradient on this rank, but on others: zeros would be averaged "
        "in its place. Let the loss depend on it on all ranks (requires_grad alike, no branch by "
        "the batch), or permit it: sync_gradients(model, find_unused_parameters=True), "
        "FFTStrategy(find_unused_parameters=True), or ddp_find_unused_parameters=True of a Trainer"
    )


def hooks_of(parameter: torch.Tensor) -> dict[int, Any]:
    """Return the post-accumulate-grad hooks of a parameter, in the order of their calls."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


def is_nested() -> bool:
    """Return whether the running backward is nested, as for a checkpoint with use_reentrant=True.

    A thread of the autograd engine has a call of the engine on its stack only in a nested backward.
    A Python thread has one such call in an outer backward and two in a nested one.
    """
    calls, frame = 0, sys._getframe()
    while frame is not None:
        calls += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back  # type: ignore[assignment]
    return calls > (1 if is_pythons_thread() else 0)


def is_pythons_thread() -> bool:
    """Return whether this thread was started by Python, not by the autograd engine."""
    thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    return thread is not None and not isinstance(thread, threading._DummyThread)

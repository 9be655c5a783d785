"""Proxy between a torchft process group and its backend, which tracks every op.

The process groups of torchft and FFT forward each op to an object, here a `TrackedBackend`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed.distributed_c10d import Work

from fft.train.guard.unsafe_places import guarded
from fft.train.process_groups.op_errors import CollectiveFailed, GroupAborted
from fft.train.process_groups.works import (
    CollectiveWork,
    Generation,
    PeerWork,
    ScatterWork,
    forget_ended,
)

COLLECTIVES = (
    "_allgather_base",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "scatter",
)
PEER_OPS = ("recv", "recv_anysource", "send")
_NEW_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""torch's newer names for ops."""
SCATTERS = ("_reduce_scatter_base", "reduce_scatter", "reduce_scatter_tensor_coalesced")


class TrackedBackend:
    """A backend that tracks every op in `generation`, and refuses ops once that is aborted.

    Args:
        native: The backend, or None if it is gone and every op is refused.
        generation: The configuration that the backend belongs to.
        gloo: The backend is gloo, whose waits FFT must free.
        around: Returns the context to enter around every wait.
    """

    def __init__(
        self,
        native: Any,
        generation: Generation,
        gloo: bool = False,
        around: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._native = native
        self._generation = generation
        self._gloo = gloo
        self._around = around

    def size(self) -> int:
        """Return the number of members that the group has, or had before an abort."""
        return self._generation.world_size

    def rank(self) -> int:
        """Return this member's rank."""
        return self._generation.rank

    def abort(self) -> None:
        """Abort the backend, if there is one."""
        if self._native is not None:
            self._native.abort()

    def shutdown(self) -> None:
        """Shut down the backend, if there is one."""
        if self._native is not None:
            self._native.shutdown()

    def __getattr__(self, name: str) -> Any:
        if self._native is not None:
            return getattr(self._native, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refusal()

    def _refusal(self, place: str = "") -> GroupAborted:
        return GroupAborted(
            self._generation.cause or "the process group is being configured", place
        )

    @guarded  # no interrupt between issuing an op and tracking it
    def _issue(self, op: str, args: tuple[Any, ...]) -> Any:
        generation, mark = self._generation, object()
        try:
            generation.entering.add(
                mark
            )  # before the check of the cause, so that quiesce() waits for us
            if generation.cause is not None or self._native is None:
                raise self._refusal(generation.place(op, args))
            try:
                if self._gloo and op in SCATTERS:
                    return self._scatter(op, args)
                return self._track(getattr(self._native, op)(*args), op, args)
            except RuntimeError as error:
                if generation.cause is not None:
                    raise GroupAborted(generation.cause, generation.place(op, args)) from error
                raise CollectiveFailed(generation.place(op, args), error) from error
        finally:
            generation.entering.discard(mark)

    def _track(self, work: Any, op: str, args: tuple[Any, ...]) -> Any:
        generation = self._generation
        if self._gloo:
            assert self._around is not None
            kind = PeerWork if op in PEER_OPS else CollectiveWork
            work = kind(work, generation, op, args, self._around())
        with generation.lock:
            forget_ended(generation.works)
            generation.works.append(work)
        return work

    def _scatter(self, op: str, args: tuple[Any, ...]) -> Work:
        """Issue a reduce-scatter as all-reduces of copies, as gloo does, on abortable Works."""
        outputs, inputs = args[:2]
        if op == "_reduce_scatter_base":
            outputs, inputs = [outputs], [[inputs]]
        elif op == "reduce_scatter_tensor_coalesced":
            inputs = [[tensor] for tensor in inputs]
        copies = [torch.cat([t.detach().reshape(-1) for t in parts]) for parts in inputs]
        starts = [_part(op, self._generation, *pair) for pair in zip(outputs, inputs, strict=True)]
        reduce = AllreduceOptions()
        reduce.reduceOp = args[2].reduceOp

        def keep() -> None:
            for output, copy, start in zip(outputs, copies, starts, strict=True):
                part = copy.narrow(0, start, output.numel())
                output.detach().copy_(part.view(output.shape))

        works = [self._track(self._native.allreduce([c], reduce), op, args) for c in copies]
        return ScatterWork(works, keep, outputs)


def _part(op: str, generation: Generation, output: torch.Tensor, inputs: list[torch.Tensor]) -> int:
    """Return the offset of this rank's part, for `output`, in the concatenated `inputs`."""
    sizes = [t.numel() for t in inputs]
    if op != "reduce_scatter":
        sizes = [output.numel()] * generation.world_size
    if len(sizes) != generation.world_size or sum(sizes) != sum(t.numel() for t in inputs):
        raise ValueError(
            f"{op}: {len(inputs)} inputs of {sum(t.numel() for t in inputs)} elements are not "
            f"{generation.world_size} parts of {output.numel()}, one for each rank"
        )
    if sizes[generation.rank] != output.numel():
        raise ValueError(
            f"{op}: rank {generation.rank} receives {sizes[generation.rank]} elements, but its "
            f"output has {output.numel()}"
        )
    return sum(sizes[: generation.rank])


def _method(op: str) -> Callable[..., Any]:
    def issue(self: TrackedBackend, *args: Any) -> Any:
        return self._issue(op, args)

    issue.__name__ = op
    return issue


for _op in (*COLLECTIVES, *PEER_OPS, *SCATTERS):
    setattr(TrackedBackend, _op, _method(_op))
for _name, _op in _NEW_NAMES.items():
    setattr(TrackedBackend, _name, _method(_op))

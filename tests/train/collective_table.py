"""The operations that FFT's process groups support, as users call them: one `Row` for each.

There are two ranks. Rank 1 is the one that cannot proceed alone. Rank ``r`` contributes ``x(r)``;
the results are written out, so that they need no other implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._C._distributed_c10d import (
    AllgatherOptions,
    GatherOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

RANKS = 2
X = ([0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0])
SUM = [10.0, 12.0, 14.0, 16.0]


def x(rank: int) -> torch.Tensor:
    return torch.tensor(X[rank])


def empty(*size: int) -> torch.Tensor:
    return torch.zeros(size or (4,))


@dataclass
class Place:
    """The place where an op is called: one rank's group and its surroundings."""

    pg: Any
    rank: int
    name: str
    mesh: Any = None
    outputs: list[torch.Tensor] = field(default_factory=list)
    """Outputs of the op in progress, recorded before any wait for it."""

    def out(self, *size: int) -> torch.Tensor:
        self.outputs.append(empty(*size))
        return self.outputs[-1]

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        self.outputs.append(tensor)
        return tensor


Result = list[torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One way to call one operation."""

    name: str
    run: Callable[[Place], Result]
    """Call it, wait for it, and return the result."""
    want: tuple[list[list[float]], list[list[float]]]
    """The flattened results on rank 0 and on rank 1."""
    shard_only: bool = False
    """Whether torchft's gloo group does not support it, or it needs a mesh."""
    world: bool = False
    """Whether torch takes this rank's number from the default process group."""


ROWS: dict[str, Row] = {}


def row(
    want: Any, shard_only: bool = False, world: bool = False
) -> Callable[[Callable[[Place], Result]], Callable[[Place], Result]]:
    """Decorate a function as a row.

    ``want`` holds one result for both ranks, or a tuple with one each.
    """

    def note(run: Callable[[Place], Result]) -> Callable[[Place], Result]:
        wants = want if isinstance(want, tuple) else (want, want)
        ROWS[run.__name__] = Row(run.__name__, run, wants, shard_only, world)
        return run

    return note


GATHERED = X[0] + X[1]
HALVES = ([SUM[:2]], [SUM[2:]])
EXCHANGED = ([[0.0, 1.0, 10.0, 11.0]], [[2.0, 3.0, 12.0, 13.0]])


# -- c10d


@row([SUM])
def all_reduce(at: Place) -> Result:
    dist.all_reduce(t := at.note(x(at.rank)), group=at.pg)
    return [t]


@row([[half / 2 for half in SUM]])
def all_reduce_average(at: Place) -> Result:
    dist.all_reduce(t := at.note(x(at.rank)), dist.ReduceOp.AVG, group=at.pg)
    return [t]


@row([SUM])
def all_reduce_async(at: Place) -> Result:
    work = dist.all_reduce(t := at.note(x(at.rank)), group=at.pg, async_op=True)
    work.wait()
    return [t]


@row([SUM])
def all_reduce_by_its_future(at: Place) -> Result:
    work = dist.all_reduce(t := at.note(x(at.rank)), group=at.pg, async_op=True)
    work.get_future().wait()
    return [t]


@row([SUM, SUM])
def all_reduce_coalesced(at: Place) -> Result:
    tensors = [at.note(x(at.rank)), at.note(x(at.rank))]
    at.pg.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()
    return tensors


@row([SUM, SUM])
def coalescing_manager(at: Place) -> Result:
    tensors = [at.note(x(at.rank)), at.note(x(at.rank))]
    with dist._coalescing_manager(group=at.pg, async_ops=True) as coalesced:
        for tensor in tensors:
            dist.all_reduce(tensor, group=at.pg)
    coalesced.wait()
    return tensors


@row([X[0]])
def broadcast(at: Place) -> Result:
    dist.broadcast(t := at.note(x(at.rank)), group=at.pg, group_src=0)
    return [t]


@row(([[]], [SUM]), shard_only=True)
def reduce(at: Place) -> Result:
    dist.reduce(t := at.note(x(at.rank)), group=at.pg, group_dst=1)
    return [t if at.rank == 1 else empty(0)]


@row([X[0], X[1]])
def all_gather(at: Place) -> Result:
    dist.all_gather(outs := [at.out(), at.out()], x(at.rank), group=at.pg)
    return outs


@row([GATHERED], shard_only=True)
def all_gather_into_tensor(at: Place) -> Result:
    dist.all_gather_into_tensor(out := at.out(8), x(at.rank), group=at.pg)
    return [out]


@row([GATHERED, GATHERED])
def all_gather_into_tensor_coalesced(at: Place) -> Result:
    outs, ins = [at.out(8), at.out(8)], [x(at.rank), x(at.rank)]
    at.pg.allgather_into_tensor_coalesced(outs, ins, AllgatherOptions()).wait()
    return outs


@row([X[0], X[1]], shard_only=True)
def all_gather_coalesced(at: Place) -> Result:
    outs = [at.out(), at.out()]
    at.pg.allgather_coalesced([[out] for out in outs], [x(at.rank)]).wait()
    return outs


@row(([[], []], [X[0], X[1]]), shard_only=True)
def gather(at: Place) -> Result:
    outs = [at.out(), at.out()] if at.rank == 1 else None
    dist.gather(x(at.rank), outs, group=at.pg, group_dst=1)
    return outs or [empty(0), empty(0)]


@row(([X[0]], [X[1]]), shard_only=True)
def scatter(at: Place) -> Result:
    ins = [x(0), x(1)] if at.rank == 0 else None
    dist.scatter(out := at.out(), ins, group=at.pg, group_src=0)
    return [out]


@row(HALVES, shard_only=True)
def reduce_scatter(at: Place) -> Result:
    dist.reduce_scatter(out := at.out(2), list(x(at.rank).split(2)), group=at.pg)
    return [out]


@row(HALVES, shard_only=True)
def reduce_scatter_tensor(at: Place) -> Result:
    dist.reduce_scatter_tensor(out := at.out(2), x(at.rank), group=at.pg)
    return [out]


@row(([[5.0, 6.0]], [[7.0, 8.0]]), shard_only=True)
def reduce_scatter_tensor_average(at: Place) -> Result:
    dist.reduce_scatter_tensor(out := at.out(2), x(at.rank), dist.ReduceOp.AVG, group=at.pg)
    return [out]


@row(([SUM[:2], [10.0]], [SUM[2:], [12.0]]), shard_only=True)
def reduce_scatter_tensor_coalesced(at: Place) -> Result:
    outs, ins = [at.out(2), at.out(1)], [x(at.rank), x(at.rank)[:2]]
    at.pg.reduce_scatter_tensor_coalesced(outs, ins, ReduceScatterOptions()).wait()
    return outs


@row(EXCHANGED, shard_only=True)
def all_to_all(at: Place) -> Result:
    outs = [at.out(2), at.out(2)]
    dist.all_to_all(outs, list(x(at.rank).split(2)), group=at.pg)
    return [torch.cat(outs)]


@row(EXCHANGED)
def all_to_all_single(at: Place) -> Result:
    dist.all_to_all_single(out := at.out(), x(at.rank), group=at.pg)
    return [out]


@row([[]])
def barrier(at: Place) -> Result:
    at.pg.barrier(dist.BarrierOptions()).wait()
    return [empty(0)]


@row(([X[1]], [[]]))
def send(at: Place) -> Result:
    if at.rank == 0:
        at.pg.recv([out := at.out()], 1, 0).wait()
        return [out]
    at.pg.send([x(1)], 0, 0).wait()
    return [empty(0)]


@row(([[]], [X[0]]))
def recv(at: Place) -> Result:
    if at.rank == 1:
        at.pg.recv([out := at.out()], 0, 0).wait()
        return [out]
    at.pg.send([x(0)], 1, 0).wait()
    return [empty(0)]


@row(([[]], [X[0]]), shard_only=True)
def send_and_recv_of_dist(at: Place) -> Result:
    if at.rank == 1:
        dist.recv(out := at.out(), group=at.pg, group_src=0)
        return [out]
    dist.send(x(0), group=at.pg, group_dst=1)
    return [empty(0)]


@row(([[]], [[*X[0], 0.0]]), shard_only=True)
def recv_from_any(at: Place) -> Result:
    if at.rank == 1:
        source = dist.recv(out := at.out(), group=at.pg)
        return [torch.cat([out, torch.tensor([float(source)])])]
    dist.send(x(0), group=at.pg, group_dst=1)
    return [empty(0)]


@row(([X[1]], [X[0]]), shard_only=True)
def batch_isend_irecv(at: Place) -> Result:
    other, out = 1 - at.rank, at.out()
    ops = [
        dist.P2POp(dist.isend, x(at.rank), group=at.pg, group_peer=other),
        dist.P2POp(dist.irecv, out, group=at.pg, group_peer=other),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [out]


# -- functional collectives, which find the group by its name, and wait in native code

raw = torch.ops._c10d_functional
wait = funcol.wait_tensor


@row([SUM])
def functional_all_reduce(at: Place) -> Result:
    return [wait(at.note(raw.all_reduce(x(at.rank), "sum", at.name)))]


@row([SUM])
def functional_all_reduce_in_place(at: Place) -> Result:
    return [wait(raw.all_reduce_(at.note(x(at.rank)), "sum", at.name))]


@row([SUM, SUM])
def functional_all_reduce_coalesced(at: Place) -> Result:
    outs = raw.all_reduce_coalesced([x(at.rank), x(at.rank)], "sum", at.name)
    return [wait(at.note(out)) for out in outs]


@row([GATHERED])
def functional_all_gather(at: Place) -> Result:
    return [wait(at.note(raw.all_gather_into_tensor(x(at.rank), RANKS, at.name)))]


@row([GATHERED, GATHERED])
def functional_all_gather_coalesced(at: Place) -> Result:
    outs = raw.all_gather_into_tensor_coalesced([x(at.rank), x(at.rank)], RANKS, at.name)
    return [wait(at.note(out)) for out in outs]


@row(HALVES, shard_only=True)
def functional_reduce_scatter(at: Place) -> Result:
    return [wait(at.note(raw.reduce_scatter_tensor(x(at.rank), "sum", RANKS, at.name)))]


@row(([SUM[:2], [10.0]], [SUM[2:], [12.0]]), shard_only=True)
def functional_reduce_scatter_coalesced(at: Place) -> Result:
    ins = [x(at.rank), x(at.rank)[:2]]
    outs = raw.reduce_scatter_tensor_coalesced(ins, "sum", RANKS, at.name)
    return [wait(at.note(out)) for out in outs]


@row(EXCHANGED)
def functional_all_to_all(at: Place) -> Result:
    return [wait(at.note(raw.all_to_all_single(x(at.rank), [2, 2], [2, 2], at.name)))]


@row([X[0]])
def functional_broadcast(at: Place) -> Result:
    return [wait(at.note(raw.broadcast(x(at.rank), 0, at.name)))]


@row(([[]], [X[0]]))
def functional_isend_irecv(at: Place) -> Result:
    if at.rank == 1:
        return [wait(at.note(raw.irecv(at.out(), 0, 0, at.name)))]
    wait(raw.isend(x(0), 1, 0, at.name))
    return [empty(0)]


@row([SUM], shard_only=True)
def async_collective_tensor(at: Place) -> Result:
    return [funcol.all_reduce(x(at.rank), "sum", at.mesh) + 0]


@row([[0.0, 1.0, 10.0, 11.0, 2.0, 3.0, 12.0, 13.0]], shard_only=True)
def all_gather_tensor(at: Place) -> Result:
    return [funcol.all_gather_tensor(x(at.rank).view(2, 2), 1, at.mesh).T.contiguous().T + 0]


@row(HALVES, shard_only=True)
def reduce_scatter_tensor_functional(at: Place) -> Result:
    return [funcol.reduce_scatter_tensor(x(at.rank), "sum", 0, at.mesh) + 0]


@row(([[0.0, 2.0, 4.0, 6.0]], [[20.0, 22.0, 24.0, 26.0]]), shard_only=True)
def autograd_all_gather(at: Place) -> Result:
    """The gradient of the gathered values, weighted by themselves, comes back summed."""
    leaf = x(at.rank).requires_grad_()
    out = funcol.all_gather_tensor_autograd(leaf, 0, at.mesh)
    (out * out.detach()).sum().backward()
    return [leaf.grad]


@row([SUM * 2], shard_only=True)
def autograd_reduce_scatter(at: Place) -> Result:
    leaf = torch.cat([x(at.rank), x(at.rank)]).requires_grad_()
    out = funcol.reduce_scatter_tensor_autograd(leaf, "sum", 0, at.mesh)
    (out * out.detach()).sum().backward()
    return [leaf.grad]


@row(([X[0]], [X[1]]), shard_only=True)
def autograd_all_to_all(at: Place) -> Result:
    leaf = x(at.rank).requires_grad_()
    out = all_to_all_single_autograd(leaf, [2, 2], [2, 2], at.mesh)
    (out * out.detach()).sum().backward()
    return [leaf.grad]


# -- DTensor


def sharded(at: Place) -> DTensor:
    return DTensor.from_local(x(at.rank).view(2, 2), at.mesh, [Shard(0)], run_check=False)


def partial(at: Place) -> DTensor:
    return DTensor.from_local(x(at.rank), at.mesh, [Partial()], run_check=False)


@row([GATHERED], shard_only=True)
def dtensor_gathered(at: Place) -> Result:
    return [sharded(at).redistribute(at.mesh, [Replicate()]).to_local() + 0]


@row([GATHERED], shard_only=True)
def dtensor_full_tensor(at: Place) -> Result:
    return [sharded(at).full_tensor()]


@row([SUM], shard_only=True)
def dtensor_reduced(at: Place) -> Result:
    return [partial(at).full_tensor()]


@row(HALVES, shard_only=True)
def dtensor_reduce_scattered(at: Place) -> Result:
    return [partial(at).redistribute(at.mesh, [Shard(0)]).to_local() + 0]


@row(([[0.0, 2.0, 10.0, 12.0]], [[1.0, 3.0, 11.0, 13.0]]), shard_only=True, world=True)
def dtensor_sharded_otherwise(at: Place) -> Result:
    return [sharded(at).redistribute(at.mesh, [Shard(1)]).to_local() + 0]


@row(([X[0][:2]], [X[0][2:]]), shard_only=True, world=True)
def dtensor_distributed(at: Place) -> Result:
    return [distribute_tensor(x(at.rank), at.mesh, [Shard(0)]).to_local() + 0]


@row([X[0]], shard_only=True)
def dtensor_replicated(at: Place) -> Result:
    return [distribute_tensor(x(at.rank), at.mesh, [Replicate()]).to_local() + 0]


GRADIENT = torch.tensor([3.0, 0.0, 0.0, 4.0])


def _clipped() -> list[float]:
    """Return the gradient as one process clips it."""
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = GRADIENT.clone()
    nn.utils.clip_grad_norm_([parameter], 1.0)
    clipped: list[float] = parameter.grad.tolist()
    return clipped


@row(([[5.0, *_clipped()[:2]]], [[5.0, *_clipped()[2:]]]), shard_only=True)
def clip_grad_norm(at: Place) -> Result:
    def shard(local: torch.Tensor) -> DTensor:
        return DTensor.from_local(local, at.mesh, [Shard(0)], run_check=False)

    parameter = nn.Parameter(shard(torch.zeros(2)))
    parameter.grad = shard(GRADIENT.split(2)[at.rank].clone())
    norm = nn.utils.clip_grad_norm_([parameter], 1.0).full_tensor()  # type: ignore[attr-defined]
    return [torch.cat([norm.view(1), parameter.grad.to_local()])]


@torch.compile(backend="aot_eager", fullgraph=True)
def _compiled(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return funcol.all_reduce(tensor * 2, "sum", name) / 2


@row([SUM])
def compiled(at: Place) -> Result:
    return [_compiled(x(at.rank), at.name) + 0]


# -- unsupported calls, and their errors


@dataclass(frozen=True)
class Refusal:
    """A call that must be refused when it is made, with nothing left pending."""

    call: Callable[[Place], Any]
    kind: type[BaseException]
    text: str


NO_BACKEND = (RuntimeError, "No backend type associated with device type cpu")
NO_WORLD = (ValueError, "Default process group has not been initialized")
_NO_SCATTER = (RuntimeError, "ProcessGroupGloo does not support reduce_scatter_tensor_coalesced")


def _batch_p2p(at: Place) -> None:
    raw.batch_p2p_ops(["isend"], [1 - at.rank], [0], [x(at.rank)], at.name)


def _gather_out(at: Place) -> Result:
    out = at.note(empty(8))
    return [wait(raw.all_gather_into_tensor_out(x(at.rank), RANKS, at.name, out=out))]


REFUSED: dict[str, dict[str, Refusal]] = {
    "shard": {
        "monitored_barrier": Refusal(
            lambda at: at.pg.monitored_barrier(), NotImplementedError, "use barrier()"
        ),
        # native code of torch's that no Python process group can serve
        "functional_batch_p2p": Refusal(_batch_p2p, *NO_BACKEND),
        "functional_all_gather_out": Refusal(_gather_out, *NO_BACKEND),
        # torch asks a default process group for them; see the rows with `world`
        "permute_tensor": Refusal(
            lambda at: funcol.permute_tensor(x(at.rank), [1, 0], at.mesh), KeyError, "Shard"
        ),
        "dtensor_distributed": Refusal(
            lambda at: distribute_tensor(x(at.rank), at.mesh, [Shard(0)]), *NO_WORLD
        ),
        "get_rank": Refusal(lambda at: dist.get_rank(at.pg), *NO_WORLD),
    },
    "replicate": {
        "functional_batch_p2p": Refusal(_batch_p2p, *NO_BACKEND),
        "functional_all_gather_out": Refusal(_gather_out, *NO_BACKEND),
        # not supported by torchft's group
        "all_gather_into_tensor": Refusal(all_gather_into_tensor, *NO_BACKEND),
        "all_gather_coalesced": Refusal(
            lambda at: at.pg.allgather_coalesced(
                [[at.out(), at.out()]], [x(at.rank)], AllgatherOptions()
            ),
            *NO_BACKEND,
        ),
        "all_to_all": Refusal(all_to_all, *NO_BACKEND),
        "gather": Refusal(lambda at: at.pg.gather([], [x(1)], GatherOptions()), *NO_BACKEND),
        "monitored_barrier": Refusal(lambda at: at.pg.monitored_barrier(), *NO_BACKEND),
        "recv_from_any": Refusal(lambda at: at.pg.recv_anysource([at.out()], 0), *NO_BACKEND),
        "reduce": Refusal(reduce, *NO_BACKEND),
        "reduce_scatter": Refusal(
            reduce_scatter, RuntimeError, "ProcessGroupGloo does not support reduce_scatter"
        ),
        "reduce_scatter_tensor": Refusal(reduce_scatter_tensor, *NO_BACKEND),
        "functional_reduce_scatter": Refusal(functional_reduce_scatter, *_NO_SCATTER),
        "scatter": Refusal(lambda at: at.pg.scatter([x(1)], [], ScatterOptions()), *NO_BACKEND),
    },
}

if torch.__version__ >= (2, 14):
    del REFUSED["shard"]["functional_all_gather_out"]
    row([GATHERED], shard_only=True)(_gather_out)
if torch.__version__ < (2, 12):
    no_list = "Backend gloo does not support alltoall"
    REFUSED["shard"]["all_to_all"] = Refusal(ROWS.pop("all_to_all").run, RuntimeError, no_list)
    for unsupported in REFUSED.values():
        del unsupported["functional_batch_p2p"]  # torch has no such op, and none of the next
    del ROWS["functional_isend_irecv"]

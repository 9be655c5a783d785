"""A tiny transformer with tensor parallelism and FSDP2 on one mesh, for test_meshes.py.

``mesh_script.py FORM STEPS OUT`` leaves the final bits of each rank in ``OUT``. Under `fft run` it
trains on the mesh of the manager; elsewhere on the mesh of ``init_device_mesh``, in one group. The
forms of a model are the functions in ``FORMS``. With a further argument ``shares`` each rank passes
a loader over the share of its batches, and with ``unequal`` the last one begins a batch later.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import LIMIT
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchft import ProcessGroupGloo

import fft

WIDTH, WORDS, LENGTH, BATCH = 16, 11, 4, 2
NOTHING: dict[str, Any] = {}


class Block(nn.Module):
    """A transformer block; ``q``, ``k``, ``v`` and ``up`` are split by columns, the others by
    rows."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.heads = heads
        self.attend = partial(F.scaled_dot_product_attention, is_causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        q, k, v = (
            each(h).unflatten(-1, (-1, WIDTH // self.heads)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        mixed = self.attend(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Form:
    """A way to spread the model over a mesh."""

    names: tuple[str, ...] = ("fsdp", "tp")
    shape: tuple[int, ...] = (2, 2)
    data: tuple[str, ...] = ("fsdp",)
    """Dimensions with a batch for each rank."""

    def build(self, mesh: DeviceMesh, whole: DeviceMesh | None) -> nn.Module:
        """Return the model on ``mesh``. ``whole`` has one dimension over the same ranks."""
        model = Model()
        split = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        for block in model.blocks:
            parallelize_module(
                block, mesh["tp"], {**split, "out": RowwiseParallel(), "down": RowwiseParallel()}
            )
            fully_shard(block, mesh=mesh["fsdp"])
        return fully_shard(model, mesh=mesh["fsdp"])

    def loss(self, model: nn.Module, words: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    def clip(self, model: nn.Module) -> float | None:
        """Clip the gradients, and return their norm before, if this form can."""
        return None


class Sequence(Form):
    """Each parameter is a DTensor over both dimensions, so that torch can clip their norm."""

    def build(self, mesh: DeviceMesh, whole: DeviceMesh | None) -> nn.Module:
        model, split = Model(), ("q", "k", "v", "up")
        rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        columns = {name: ColwiseParallel(input_layouts=Shard(1)) for name in split}
        norm = SequenceParallel(use_local_output=False)
        for block in model.blocks:
            plan: dict[str, Any] = {"before": norm, "between": norm, "out": rows, "down": rows}
            parallelize_module(block, mesh["tp"], {**plan, **columns})
        embedding = RowwiseParallel(
            input_layouts=torch.distributed.tensor.Replicate(),
            output_layouts=Shard(1),
            use_local_output=False,
        )
        head = ColwiseParallel(
            input_layouts=Shard(1), output_layouts=torch.distributed.tensor.Replicate()
        )
        parallelize_module(model, mesh["tp"], {"words": embedding, "norm": norm, "head": head})
        for each in (*model.blocks, model):
            fully_shard(each, mesh=mesh["fsdp"])
        return model

    def clip(self, model: nn.Module) -> float:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class Context(Form):
    """The ranks along ``cp`` split the sequence, and gather keys and values by hand."""

    names, shape, data = ("cp", "fsdp", "tp"), (2, 2, 1), ("fsdp",)

    def build(self, mesh: DeviceMesh, whole: DeviceMesh | None) -> nn.Module:
        self.group = mesh["cp"].get_group()
        self.rank, self.parts = self.group.rank(), self.group.size()
        model = Model()
        for block in model.blocks:
            block.attend = self.attend
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
            fully_shard(block, mesh=mesh["cp", "fsdp"])
        return fully_shard(model, mesh=mesh["cp", "fsdp"])

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (
            all_gather_tensor_autograd(each.contiguous(), 2, self.group) + 0 for each in (k, v)
        )
        length, first = q.shape[2], self.rank * q.shape[2]
        mask = torch.arange(first, first + length)[:, None] >= torch.arange(keys.shape[2])
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    def loss(self, model: nn.Module, words: torch.Tensor) -> torch.Tensor:
        inputs, labels = (
            each.chunk(self.parts, dim=1)[self.rank] for each in (words[:, :-1], words[:, 1:])
        )
        return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())


class Expert(nn.Module):
    """The experts of one rank, to which all ranks along ``ep`` send tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, made = group, torch.Generator().manual_seed(20 + group.rank())
        self.expert = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=made) / 4)
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [x.shape[0] // self.group.size()] * self.group.size()
        got = all_to_all_single_autograd(x.contiguous(), parts, parts, self.group)
        done = (got + 0) @ self.expert
        back = all_to_all_single_autograd(done.contiguous(), parts, parts, self.group)
        return x + (back + 0) * self.gate(x)


class Experts(Form):
    """A module with two parameter groups of FSDP: experts along ``fsdp``, the rest on all ranks."""

    names, shape, data = ("fsdp", "ep"), (2, 2), ("fsdp", "ep")

    def build(self, mesh: DeviceMesh, whole: DeviceMesh | None) -> nn.Module:
        assert whole is not None
        experts, all_ranks = FSDPMeshInfo(mesh["fsdp"], 0), FSDPMeshInfo(whole, 0)
        model = Model()
        for block in model.blocks:
            block.up = Expert(mesh["ep"].get_group())
            block.down = nn.Identity()
            expert = block.up.expert
            fully_shard(
                block,
                mesh=whole,
                shard_placement_fn=lambda p, e=expert: ShardPlacementResult(
                    Shard(0), experts if p is e else all_ranks
                ),
            )
        return fully_shard(model, mesh=whole)


FORMS: dict[str, Callable[[], Form]] = {
    "tensor": Form,
    "sequence": Sequence,
    "context": Context,
    "experts": Experts,
}


def batches(count: int) -> list[torch.Tensor]:
    """Return the batches of the job, equal in every process."""
    made = torch.Generator().manual_seed(7)
    return [torch.randint(WORDS, (BATCH, LENGTH + 1), generator=made) for _ in range(count)]


def share_of(form: Form, mesh: DeviceMesh) -> tuple[int, int]:
    """Return the number of this rank's batch in a step of its group, and that of all batches."""
    number, each = 0, 1
    for name in form.data:
        number = number * mesh[name].size() + mesh[name].get_local_rank()
        each *= mesh[name].size()
    return number, each


class Share:
    """A stateful loader of the batches of one share."""

    def __init__(self, items: list[torch.Tensor]) -> None:
        self._items, self._at = items, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self._at < len(self._items):
            self._at += 1
            yield self._items[self._at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


def built(form: Form, mesh: DeviceMesh, whole: DeviceMesh | None) -> tuple[nn.Module, Any]:
    """Return the model with its optimizer."""
    torch.manual_seed(3)
    model = form.build(mesh, whole)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of this rank's part of the parameters and the optimizer state."""
    hasher = hashlib.sha256()
    states = [optimizer.state[p] for p in model.parameters()]
    tensors: Iterable[Any] = [
        *model.parameters(),
        *(t for state in states for _, t in sorted(state.items())),
    ]
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        hasher.update(local.detach().contiguous().numpy().tobytes())
    return hasher.hexdigest()


def plain(form: Form, steps: int, rank: int, out: Path) -> dict[str, Any]:
    """Train one group on torch's own mesh."""
    store = dist.FileStore(str(out / "store"), math.prod(form.shape))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=math.prod(form.shape))
    whole = init_device_mesh("cpu", (math.prod(form.shape),), mesh_dim_names=("shard",))
    mesh = init_device_mesh("cpu", form.shape, mesh_dim_names=form.names)
    model, optimizer = built(form, mesh, whole)
    number, each = share_of(form, mesh)
    data, norms = batches(each * steps), []
    for step in range(steps):
        form.loss(model, data[each * step + number]).backward()
        norms.append(form.clip(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    dist.destroy_process_group()
    return {"bits": bits(model, optimizer), "norms": norms}


def once(model: nn.Module, faults: list[dict[str, Any]], rank: int, groups: Any) -> Any:
    """Return a function that plans the faults of a step in the middle of a forward."""
    planned: list[str] = []

    def fail(*_: Any) -> None:
        kind = planned.pop() if planned else ""
        if kind == "raise":
            raise RuntimeError("a fault on one side of the collective that follows")
        for line in groups._lines if kind == "cut" else ():
            line.cut()

    model.blocks[1].up.register_forward_hook(fail)

    def plan(step: int) -> None:
        due = [f for f in faults if (f["step"], f["rank"]) == (step, rank)]
        for fault in [f for f in due if f["kind"] != "cut at the end"]:
            faults.remove(fault)
            planned.append(fault["kind"])

    return plan


def trained(form: Form, steps: int, groups: int, rank: int) -> dict[str, Any]:
    """Train under `fft run`."""
    shard_pg = fft.ShardProcessGroupGloo(timeout=LIMIT)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        shard_pg=shard_pg,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=groups,
        init_sync=False,
        timeouts={"join_window": 30.0, "quorum": 60.0},
        config=fft.ManagerConfig(digest="commit"),
    )
    try:
        mesh = manager.mesh(form.names, form.shape)
        model, optimizer = built(form, mesh, manager.shard_mesh())
        manager.register(model, optimizer)
        manager.sync_gradients(model)
        norms: list[float | None] = []
        seen: list[float] = []
        manager.veto(lambda result: seen.append(result.grad_norm))
        faults = json.loads(os.environ.get("MESH_FAULTS", "[]"))
        plan = once(model, faults, rank, manager._parts.groups)
        data: Any = batches(400)
        if "shares" in sys.argv[4:]:
            number, each = share_of(form, mesh)
            is_odd = "unequal" in sys.argv[4:] and rank == 3
            data = fft.Loader(Share(data[number + each * is_odd :: each]), sharded="rank")
        for txn in manager.transactions(data, max_steps=steps):
            with txn:
                plan(txn.step)
                form.loss(model, txn.batch).backward()
                norm = form.clip(model)
                if {"step": txn.step, "rank": rank, "kind": "cut at the end"} in faults:
                    faults.clear()
                    manager._parts.groups.shard.cut()  # before FFT adds up the norm
            if txn.committed:
                norms.append(norm)
        return {"bits": bits(model, optimizer), "norms": norms, "seen": seen[-len(norms) :]}
    finally:
        manager.shutdown()
        shard_pg.unregister()


def main() -> None:
    """Train to the end; one group trains on torch's own mesh first, if it is asked to."""
    name, steps, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    group, rank = os.environ["REPLICA_GROUP_ID"], int(os.environ["RANK"])
    groups, found = int(os.environ["NUM_REPLICA_GROUPS"]), {}
    if "plain" in sys.argv[4:]:
        found["plain"] = plain(FORMS[name](), steps, rank, out)
    found |= trained(FORMS[name](), steps, groups, rank)
    (out / f"final-{group}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

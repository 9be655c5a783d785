"""Tests that a reducer does not carry state of one bucket, backward or step function to the next.

Real groups run in threads, over gloo, as in ``test_reducer.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stage import Member, aborts, batch_of, job, records
from test_reducer import Net, alone, assert_equal, in_order, one_backward, reduced
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from fft.errors import FftError, StateMismatch
from fft.train.gradients.buckets import fill
from fft.train.state.plain_state import with_layout_of

ONE_EACH = 64 / 2**20
"""Cap of a bucket in MiB, too small for two layers of 8 × 8."""


def averaged(manager: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average, as the default without a communication hook."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    flat = bucket.buffer().clone()
    manager.allreduce(flat).wait()
    done.set_result(flat)
    return done


class Layers(nn.Module):
    """Five layers: all groups use the first and the last; 1 and 3 are of one group each, 2 of none.

    So neighbouring buckets differ in which groups have a gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = batch_of(numbers)
        for i in (0, 1 if int(numbers[0]) % 2 else 3, 4):
            x = self.layers[i](x)
        return x.square().mean()


def test_hook_buckets_carry_their_own_usage_flags(tmp_path: Path) -> None:
    """Otherwise a group keeps ``grad = None`` where another has a gradient, and their weights
    differ."""

    def prepare(manager: Any, model: nn.Module) -> None:
        manager.sync_gradients(model, bucket_cap_mb=ONE_EACH, find_unused_parameters=True)
        manager.register_comm_hook(manager, averaged)

    found, numbers = reduced(tmp_path, Layers(), one_backward, prepare)
    wanted = alone(Layers(), one_backward, numbers)
    assert [wanted[f"layers.{i}.weight"] is None for i in range(5)] == [i == 2 for i in range(5)]
    for mine in found:
        assert_equal(mine, wanted)
    assert aborts(tmp_path) == []


def test_a_hook_may_return_the_future_of_an_all_reduce(tmp_path: Path) -> None:
    """The hook returns torchft's future with a callback on its result, and does not wait for the
    work."""

    def hook(manager: Any, bucket: Any) -> Any:
        work = manager.allreduce(bucket.buffer())
        return work.get_future().then(lambda future: future.value() * 1.0)

    def prepare(manager: Any, model: nn.Module) -> None:
        manager.sync_gradients(model, bucket_cap_mb=ONE_EACH, find_unused_parameters=True)
        manager.register_comm_hook(manager, hook)

    found, numbers = reduced(tmp_path, Layers(), one_backward, prepare)
    for mine in found:
        assert_equal(mine, alone(Layers(), one_backward, numbers))
    assert aborts(tmp_path) == []


class Twice(nn.Module):
    """A model with ``shared`` in two parts of the gradient in the first call, and in one in later
    ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.shared = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls = 0

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.first(batch_of(numbers))
        if self.calls == 1:
            x = checkpoint(self.shared, x, use_reentrant=True)
        return self.shared(torch.tanh(x)).square().mean()


def test_bucket_reduced_again_in_a_backward_is_reduced_once_next_time(
    tmp_path: Path,
) -> None:
    """A new joiner would reduce it once, and its vote would not match."""
    issued: dict[Any, list[int]] = {}
    managers: dict[int, Any] = {}
    backwards: dict[Any, list[list[int]]] = {}

    def hook(manager: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        issued.setdefault(manager, []).append(bucket.index())
        return averaged(manager, bucket)

    def prepare(manager: Any, model: nn.Module) -> None:
        managers[id(model)] = manager
        # copied into the buffer, as FSDP2's gradients are, which may arrive again
        manager.sync_gradients(model, bucket_cap_mb=ONE_EACH, reduce_dtype=torch.bfloat16)
        manager.register_comm_hook(manager, hook)

    def body(model: nn.Module, numbers: torch.Tensor) -> None:
        manager = managers[id(model)]
        for _ in range(2):
            model.zero_grad()
            issued[manager] = []
            model(numbers).backward()
            backwards.setdefault(manager, []).append(issued[manager])

    reduced(tmp_path, Twice(), body, prepare)
    assert len(backwards) == 2
    for first, second in backwards.values():
        assert len(first) > len(set(first)), "a bucket was reduced once more"
        assert second == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_backward_that_was_refused_does_not_refuse_the_replay(tmp_path: Path) -> None:
    tries = []

    def work(member: Member) -> None:
        model = Net()
        member.manager.register(model, torch.optim.SGD(model.parameters(), lr=0.0))
        member.manager.sync_gradients(model)
        for txn in member.manager.transactions(in_order(), max_steps=2):
            tries.append(txn.step)
            with txn:
                model(txn.batch).backward(create_graph=len(tries) == 1)

    with job(tmp_path, 1) as made:
        made.run(work, register=False, digest="never", max_body_failures=3)
    assert tries == [0, 0, 1]
    assert [r["step"] for r in records(tmp_path) if r["kind"] == "commit"] == [1, 2]


def test_nested_backward_reduces_only_its_own_gradients(tmp_path: Path) -> None:
    """The other gradients are still those of this group alone, and must not be committed."""

    def work(member: Member) -> None:
        model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        member.manager.register(model, torch.optim.SGD(model.parameters(), lr=0.1))
        member.manager.sync_gradients(model, bucket_cap_mb=ONE_EACH)
        for txn in member.manager.transactions(in_order(), max_steps=1):
            with txn:
                x = batch_of(txn.batch).requires_grad_()
                with member.manager.no_sync():
                    model[0](x).square().mean().backward()
                checkpoint(model[1], x, use_reentrant=True).square().mean().backward()

    with job(tmp_path, 1) as made, pytest.raises(FftError) as caught:
        made.run(work, register=False, digest="never", max_body_failures=1)
    assert "accumulated in no_sync() and never reduced" in str(caught.value.__cause__)


def test_unreduced_gradients_of_a_failed_attempt_are_not_replayed(
    tmp_path: Path,
) -> None:
    """Here the replay uses another model, as a step function may choose by what has failed."""
    tries = []

    def work(member: Member) -> None:
        one, other = Net(), Net()
        optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.0)
        member.manager.register([one, other], optimizer)
        for model in (one, other):
            member.manager.sync_gradients(model)
        for txn in member.manager.transactions(in_order(), max_steps=2):
            tries.append(txn.step)
            with txn:
                if len(tries) == 1:
                    with member.manager.no_sync():
                        one(txn.batch).backward()
                    raise RuntimeError("before they are reduced")
                other(txn.batch).backward()

    with job(tmp_path, 1) as made:
        made.run(work, register=False, digest="never")
    assert tries == [0, 0, 1]


def test_ranks_with_unlike_shards_of_one_model_have_the_same_buckets() -> None:
    """A rank whose shard is smaller, or empty, issues as many reductions as its mates."""

    def buckets_of(rank: int) -> list[list[str]]:
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        try:
            mesh = DeviceMesh("cpu", [0, 1])
            named = []
            for i in range(4):  # three rows: two on the one rank, one on the other
                local = torch.zeros(2 - rank, 8)
                shape, stride = torch.Size((3, 8)), (8, 1)
                whole = DTensor.from_local(
                    local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
                )
                named.append((f"p{i}", nn.Parameter(whole)))
            cap = 2 * 3 * 8 * 4 / 2**20  # of two of them
            return [[slot.name for slot in bucket.slots] for bucket in fill(named, cap, None)]
        finally:
            dist.destroy_process_group()

    assert buckets_of(0) == buckets_of(1) == [["p0", "p1"], ["p2", "p3"]]


def test_part_of_another_shape_is_refused_by_its_path_in_extra() -> None:
    """The tensor belongs to a sharded object that is registered as ``extra``."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        local = torch.zeros(2, 8)
        mine = {"shadow": [DTensor.from_local(local, DeviceMesh("cpu", [0, 1]), [Shard(0)])]}
        found = with_layout_of({"shadow": [torch.ones(2, 8)], "n": 1}, mine, "extra[ema]")
        assert isinstance(found["shadow"][0], DTensor) and found["n"] == 1
        with pytest.raises(StateMismatch, match=r"extra\[ema\]\['shadow'\]\[0\]"):
            with_layout_of({"shadow": [torch.ones(3, 8)]}, mine, "extra[ema]")
    finally:
        dist.destroy_process_group()

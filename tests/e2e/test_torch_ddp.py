"""Tests that models in DistributedDataParallel, torch's and torchft's, train as the bare model."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stage import WIDTH, Member, aborts, batch_of, job, records, weights
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torchft import ddp as torchft_ddp
from torchft.process_group import ProcessGroupDummy

import fft
from fft.errors import FftError

STEPS = 5
FAULT_STEP = 2


class Net(nn.Module):
    """A model with batch norm, and a layer whose backward can fail between those of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.middle, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.unused = nn.Linear(2, 2)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.on_backward: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.middle(self.norm(self.first(x))))
        if x.requires_grad:
            x.register_hook(lambda grad: self.on_backward())
        return self.last(x).square().mean()


def bare(member: Member, model: nn.Module) -> nn.Module:
    member.manager.sync_gradients(model)
    return model


def of_torch(member: Member, model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, process_group=ProcessGroupDummy(0, 1))


def as_nanogpt(member: Member, model: nn.Module) -> nn.Module:
    """Accumulate by an attribute of the wrapper, and not by `no_sync`."""
    ddp = of_torch(member, model)

    @contextmanager
    def no_sync() -> Iterator[None]:
        ddp.require_backward_grad_sync = False
        yield
        ddp.require_backward_grad_sync = True

    wrapped = Compiled(ddp)
    vars(wrapped)["no_sync"] = no_sync
    return wrapped


def of_torch_and_named(member: Member, model: nn.Module) -> nn.Module:
    """Use torch's wrapper, synced by name, with small buckets whose views are the gradients."""
    pg = ProcessGroupDummy(0, 1)
    model = DistributedDataParallel(
        model, process_group=pg, gradient_as_bucket_view=True, find_unused_parameters=True
    )
    member.manager.sync_gradients(model, bucket_cap_mb=64 / 2**20)
    return model


def around(member: Member, model: nn.Module) -> nn.Module:
    """Register and sync only the wrapped model, and call the wrapper."""
    member.manager.sync_gradients(model)
    member.manager.register(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return of_torch(member, model)


def inner_by_name(member: Member, model: nn.Module) -> nn.Module:
    """Register the wrapper, and sync the wrapped model by name."""
    member.manager.sync_gradients(model)
    return of_torch(member, model)


class Compiled(nn.Module):
    """A module around the wrapper, as `torch.compile` creates."""

    def __init__(self, ddp: nn.Module) -> None:
        super().__init__()
        self.ddp = ddp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ddp(x)

    def no_sync(self) -> Any:
        return self.ddp.no_sync()


def within(member: Member, model: nn.Module) -> nn.Module:
    return Compiled(of_torch(member, model))


def of_torchft(member: Member, model: nn.Module) -> nn.Module:
    return torchft_ddp.DistributedDataParallel(member.manager, model)


Wrap = Callable[[Member, nn.Module], nn.Module]


def trained(traces: Path, wrap: Wrap, fails: bool) -> tuple[list[str], int]:
    """Return digests of both groups' weights after some steps, and the number of rollbacks."""
    found: dict[str, str] = {}

    def work(member: Member) -> None:
        net, manager = Net(), member.manager
        model = wrap(member, net)
        if not manager._parts.state.models:
            manager.register(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        left = ["a fault"] if fails and member.group == "1" else []
        loader = fft.CursorLoader(Numbers(), batch_size=8, seed=2)
        for txn in manager.transactions(loader, max_steps=STEPS):

            def fail(step: int = txn.step) -> None:
                if step == FAULT_STEP and left:
                    left.clear()
                    raise RuntimeError("in the middle of backward")

            with txn:
                one, other = batch_of(txn.batch).chunk(2)
                quiet = manager.no_sync if model is net else model.no_sync
                with quiet():
                    model(one).backward()
                net.on_backward = fail
                model(other).backward()
                net.on_backward = lambda: None
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                assert net.unused.weight.grad is None
        found[member.group] = weights(net)

    with job(traces, 2) as made:
        made.run(work, register=False)
        made.audit()
    return [found["0"], found["1"]], len(aborts(traces))


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The result of the bare model, undisturbed."""
    digests, rollbacks = trained(tmp_path_factory.mktemp("bare"), bare, False)
    assert rollbacks == 0
    return digests


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fails", [False, True], ids=["calm", "fails in backward"])
@pytest.mark.parametrize(
    "wrap", [of_torch, as_nanogpt, of_torch_and_named, inner_by_name, around, within, of_torchft]
)
def test_a_wrapped_model_is_trained_as_the_bare_one(
    tmp_path: Path, wanted: list[str], wrap: Wrap, fails: bool
) -> None:
    """This also holds after an interrupted backward, which leaves a reducer of torch's unusable."""
    digests, rollbacks = trained(tmp_path, wrap, fails)
    assert digests == wanted
    assert rollbacks == int(fails)


def test_wrapper_synced_by_name_is_not_adopted_again_by_the_loop(
    tmp_path: Path,
) -> None:
    """Its class would grow with each loop, and its switch would lead to another reducer."""
    found: list[tuple[type, Any]] = []

    def work(member: Member) -> None:
        model = of_torch(member, Net())
        member.manager.register(model, torch.optim.SGD(model.parameters(), lr=0.1))
        member.manager.sync_gradients(model)
        found.append((type(model), vars(model)["no_sync"]))
        for txn in member.manager.transactions(fft.CursorLoader(Numbers(), batch_size=8), 1):
            with txn:
                model(batch_of(txn.batch)).backward()
        found.append((type(model), vars(model)["no_sync"]))

    with job(tmp_path, 1) as made:
        made.run(work, register=False)
    assert found[0] == found[1]


def refused(tmp_path: Path, wrap: Wrap) -> str:
    """Return the error about the model when it is registered and trained."""

    def work(member: Member) -> None:
        model = wrap(member, nn.Linear(WIDTH, 1))
        member.manager.register(model, torch.optim.SGD(model.parameters(), lr=0.1))
        member.train(1)

    with job(tmp_path, 1) as made, pytest.raises(FftError) as error:
        made.run(work, register=False)
    return str(error.value)


def test_torchfts_pure_wrapper_is_refused_with_the_fix(tmp_path: Path) -> None:
    pure = lambda member, model: torchft_ddp.PureDistributedDataParallel(member.manager, model)  # noqa: E731
    assert "call manager.sync_gradients(model.module)" in refused(tmp_path, pure)


def test_a_hook_that_reduces_over_another_group_is_refused_by_name(tmp_path: Path) -> None:
    def hooked(member: Member, model: nn.Module) -> nn.Module:
        ddp = DistributedDataParallel(model, process_group=ProcessGroupDummy(0, 1))
        ddp.register_comm_hook(None, fp16_compress_hook)
        return ddp

    output = refused(tmp_path, hooked)
    assert "fp16_compress_hook" in output and "manager.register_comm_hook(state, hook)" in output


def test_a_hook_on_a_wrapper_that_is_taken_over_is_refused(tmp_path: Path) -> None:
    def hooked(member: Member, model: nn.Module) -> nn.Module:
        ddp = of_torch(member, model)
        member.manager.sync_gradients(ddp)
        assert isinstance(ddp, DistributedDataParallel)
        ddp.register_comm_hook(None, fp16_compress_hook)
        return ddp

    assert "manager.register_comm_hook(state, hook)" in refused(tmp_path, hooked)


def test_a_process_group_of_several_ranks_is_refused(tmp_path: Path) -> None:
    class Pair(ProcessGroupDummy):
        """A process group that looks like one of two ranks to DDP, and must not reduce."""

        def size(self) -> int:
            return 2

    def of_two(member: Member, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, process_group=Pair(0, 1))

    output = refused(tmp_path, of_two)
    assert "2 ranks" in output and "--ranks 1" in output


def test_a_static_graph_is_refused_with_the_fix(tmp_path: Path) -> None:
    def static(member: Member, model: nn.Module) -> nn.Module:
        pg = ProcessGroupDummy(0, 1)
        return DistributedDataParallel(model, process_group=pg, static_graph=True)

    assert "remove static_graph" in refused(tmp_path, static)


def test_ddp_over_a_world_of_one_is_averaged_over_groups(tmp_path: Path) -> None:
    """`init_process_group()` under `fft run --ranks 1` creates it, and DDP uses it by default."""

    def by_default(member: Member, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    store: Any = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, group_name=uuid.uuid4().hex)
    try:
        calm, _ = trained(tmp_path / "bare", bare, False)
        digests, rollbacks = trained(tmp_path / "ddp", by_default, True)
    finally:
        dist.destroy_process_group()
    assert digests == calm and rollbacks == 1


def test_register_with_arguments_in_wrong_order_is_refused(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        net = nn.Linear(WIDTH, 1)
        member.manager.register(torch.optim.SGD(net.parameters(), lr=0.1), net)  # type: ignore[arg-type]

    with job(tmp_path, 1) as made, pytest.raises(FftError, match="expected the model first"):
        made.run(work, register=False)


@pytest.mark.parametrize("joins", [False, True])
def test_all_groups_take_the_statistics_of_the_first_as_ddp_does(
    tmp_path: Path, joins: bool
) -> None:
    own: dict[tuple[str, int], torch.Tensor] = {}
    taken: dict[tuple[str, int], torch.Tensor] = {}
    left, started = ["a fault"], []
    settings = {"register": False, "learners": "always", "digest": "never"}

    def work(member: Member) -> None:
        manager, group, net = member.manager, member.group, Net()
        manager.register(net, torch.optim.SGD(net.parameters(), lr=0.1))
        manager.sync_gradients(net)
        steps = 60 if joins else 6
        for txn in manager.transactions(fft.CursorLoader(Numbers(), batch_size=8), steps):
            with txn:
                net(batch_of(txn.batch)).backward()
                own[group, txn.step] = net.norm.running_var.clone()
                if group == "0" and txn.step == 4 and left:
                    left.clear()
                    raise RuntimeError("after forward")
            if txn.committed:
                taken[group, txn.step] = net.norm.running_var.clone()
            if joins and group == "0" and txn.step == 5:
                started.append(made.member("1", **settings).start(work))

    with job(tmp_path, 1 if joins else 2) as made:
        made.run(work, **settings)
        for member in started:
            member.end()
            assert member.error is None, repr(member.error)
        made.audit()
    assert aborts(tmp_path)
    learned = [r["learners"] for r in records(tmp_path) if r["kind"] == "epoch" and r["learners"]]
    assert learned == ([["1"]] if joins else [])
    both = [step for group, step in taken if group == "1"]
    assert len(both) > 3
    for step in both:
        assert torch.equal(taken["0", step], own["0", step])
        assert torch.equal(taken["1", step], own["0", step])
        assert not torch.equal(own["1", step], own["0", step]), "each group has other samples"

"""Tests that gradients are reduced when ``backward()`` returns: real groups, in threads, over gloo.

The ``.grad`` in each group's step function is compared, bit by bit, with the mean of the gradients
that the groups compute by themselves. With two groups that mean is exact: a sum of two, and its
half.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import Member, Numbers, aborts, batch_of, job, notes, parameters, records
from torch import nn
from torch.utils.checkpoint import checkpoint

import fft
from fft.errors import FftError, GradientLayoutMismatch, StepRetriesExceeded

Gradients = dict[str, torch.Tensor | None]
Body = Callable[[nn.Module, torch.Tensor], None]
"""The forward and backward of one group, with its sample numbers."""


class Net(nn.Module):
    """A model with a tied weight, an unused one, one that only odd samples use, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.hidden = nn.Linear(8, 8)
        self.odd = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(()))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.hidden(self.embed(numbers % 64)))
        if int(numbers[0]) % 2:
            x = self.odd(x)
        return (self.gain * self.head(x)).square().mean()


def gradients(model: nn.Module) -> Gradients:
    """Return copies of all gradients."""
    return {
        n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()
    }


def alone(model: nn.Module, body: Body, numbers: list[torch.Tensor]) -> Gradients:
    """Return the mean of the groups' gradients, computed here."""
    found = []
    for part in numbers:
        single = copy.deepcopy(model)
        body(single, part)
        found.append(gradients(single))
    mean: Gradients = {}
    for name in found[0]:
        parts = [g[name] for g in found if g[name] is not None]
        dense = [p.to_dense() if p.is_sparse else p for p in parts]
        mean[name] = sum(dense) / len(found) if parts else None
    return mean


def in_order() -> fft.CursorLoader:
    """Return sample numbers in order: group 0 begins with an even one, group 1 with an odd one."""
    return fft.CursorLoader(Numbers(), batch_size=3, shuffle=False)


def reduced(
    traces: Path,
    model: nn.Module,
    body: Body,
    prepare: Callable[[Any, nn.Module], None],
    groups: int = 2,
) -> tuple[list[Gradients], list[torch.Tensor]]:
    """Return the gradients of one step inside each group's step function, after it, and their
    samples."""
    seen: dict[str, tuple[Gradients, torch.Tensor]] = {}

    def work(member: Member) -> None:
        own = copy.deepcopy(model)
        member.manager.register(own, torch.optim.SGD(own.parameters(), lr=0.0))
        prepare(member.manager, own)
        for txn in member.manager.transactions(in_order(), max_steps=1):
            with txn:
                body_of(member, own, txn.batch)
                seen[member.group] = gradients(own), txn.batch

    def body_of(member: Member, own: nn.Module, batch: torch.Tensor) -> None:
        bodies[member.group] = member.manager
        body(own, batch)

    bodies: dict[str, Any] = {}
    with job(traces, groups) as made:
        made.run(work, register=False, digest="never")
        made.audit()
    found = [seen[str(group)] for group in range(groups)]
    return [gradients for gradients, _ in found], [numbers for _, numbers in found]


def _add_a_layer(model: nn.Sequential) -> None:
    model.append(nn.Linear(4, 1))


def _convert_to_float32(model: nn.Sequential) -> None:
    model.float()


def _replace_the_first_layer(model: nn.Sequential) -> None:
    model[0] = nn.Linear(1, 4)


@pytest.mark.parametrize("change", [_add_a_layer, _convert_to_float32, _replace_the_first_layer])
@pytest.mark.parametrize("moment", ["before the first step", "between two steps"])
def test_model_changed_after_sync_gradients_is_averaged_as_changed(
    change: Callable[[nn.Sequential], None], moment: str, tmp_path: Path
) -> None:
    """Both groups apply the same gradient, though each computes a different one."""

    def work(member: Member) -> None:
        model = models[member.group]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        member.manager.register(model, optimizer)
        member.manager.sync_gradients(model)
        if moment == "before the first step":
            changed(model, optimizer)
        for txn in member.manager.transactions(in_order(), max_steps=3):
            with txn:
                x = txn.batch.to(next(model.parameters()).dtype).reshape(-1, 1) + 1
                model(x).square().mean().backward()
                seen[member.group, txn.step] = gradients(model)
            if txn.step == 0 and moment == "between two steps":
                changed(model, optimizer)

    def changed(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        change(model)
        known = {p for group in optimizer.param_groups for p in group["params"]}
        if more := [p for p in model.parameters() if p not in known]:
            optimizer.add_param_group({"params": more})

    models = {g: copy.deepcopy(nn.Sequential(nn.Linear(1, 4))).double() for g in ("0", "1")}
    if change is not _convert_to_float32:
        models = {g: m.float() for g, m in models.items()}
    models["1"].load_state_dict(models["0"].state_dict())
    seen: dict[tuple[str, int], Gradients] = {}
    with job(tmp_path, 2) as made:
        made.run(work, register=False, digest="never", check_replicas=0)
    own, other = seen["0", 2], seen["1", 2]
    assert own.keys() == other.keys() == dict(models["0"].named_parameters()).keys()
    for name, gradient in own.items():
        assert gradient is not None and torch.equal(gradient, other[name]), name


def test_lazy_module_without_input_is_refused_by_name(tmp_path: Path) -> None:
    with job(tmp_path, 1) as made:
        manager = made.member("0", register=False).manager
        model = nn.Sequential(nn.LazyLinear(2))
        with pytest.raises(FftError, match=r"parameter '0\.weight' has no shape yet.*run model"):
            manager.sync_gradients(model)
        model(torch.ones(1, 3))
        manager.sync_gradients(model)


def assert_equal(got: Gradients, wanted: Gradients) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        mine = got[name]
        assert (mine is None) == (value is None), name
        if value is not None and mine is not None:
            dense = mine.to_dense() if mine.is_sparse else mine
            assert torch.equal(dense, value), name


def sync(manager: Any, model: nn.Module, **how: Any) -> None:
    is_branched = hasattr(model, "odd")
    manager.sync_gradients(model, find_unused_parameters=is_branched, **how)


def one_backward(model: nn.Module, numbers: torch.Tensor) -> None:
    model(numbers).backward()


def test_gradients_are_the_mean_when_backward_returns(tmp_path: Path) -> None:
    found, numbers = reduced(tmp_path, Net(), one_backward, sync)
    wanted = alone(Net(), one_backward, numbers)
    assert wanted["unused.weight"] is None, "nobody used it"
    assert wanted["odd.weight"] is not None, "one group did"
    assert any(int(part[0]) % 2 for part in numbers) != all(int(part[0]) % 2 for part in numbers)
    for mine in found:
        assert_equal(mine, wanted)


def test_small_buckets_give_the_same_bits(tmp_path: Path) -> None:
    def tiny(manager: Any, model: nn.Module) -> None:
        sync(manager, model, bucket_cap_mb=64 / 2**20)

    found, numbers = reduced(tmp_path, Net(), one_backward, tiny)
    for mine in found:
        assert_equal(mine, alone(Net(), one_backward, numbers))


class Branch(nn.Module):
    """A linear layer, and a branch of the given kind that only one group uses at ``step``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.branch = (
            nn.Embedding(64, 8, sparse=True) if kind == "sparse" else nn.Linear(8, 8, bias=False)
        )

    def forward(self, numbers: torch.Tensor, uses_branch: bool) -> torch.Tensor:
        x = self.base(batch_of(numbers))
        if uses_branch:
            is_sparse = isinstance(self.branch, nn.Embedding)
            x = x + self.branch(numbers % 64 if is_sparse else batch_of(numbers))
        return x.square().mean()


def _average(manager: Any, bucket: Any) -> torch.futures.Future[Any]:
    done: torch.futures.Future[Any] = torch.futures.Future()
    manager.allreduce(bucket.buffer()).wait()
    done.set_result(bucket.buffer())
    return done


@pytest.mark.parametrize("kind", ["dense", "sparse", "hook", "bfloat16"])
@pytest.mark.parametrize("declared", [False, True])
def test_gradient_that_only_others_have_ends_the_job_unless_declared(
    kind: str, declared: bool, tmp_path: Path
) -> None:
    """Both groups get the error with the name of the rank and of its parameter; nothing of the step
    is applied."""

    def work(member: Member) -> None:
        model, manager = copy.deepcopy(made_alike), member.manager
        manager.register(model, torch.optim.SGD(model.parameters(), lr=0.1))
        dtype = torch.bfloat16 if kind == "bfloat16" else None
        manager.sync_gradients(model, reduce_dtype=dtype, find_unused_parameters=declared)
        if kind == "hook":
            manager.register_comm_hook(manager, _average)
        for txn in manager.transactions(in_order(), max_steps=4):
            with txn:
                model(txn.batch, txn.step != 2 or member.group == "0").backward()
            assert txn.committed or not declared
            branches[member.group, manager.current_step()] = model.branch.weight.detach().clone()

    branches: dict[tuple[str, int], torch.Tensor] = {}
    torch.manual_seed(1)
    made_alike = Branch(kind)
    with job(tmp_path, 2) as made:
        members = [made.member(str(g), register=False) for g in range(2)]
        for member in members:
            member.start(work)
        for member in members:
            member.end()
    if declared:
        assert [member.error for member in members] == [None, None]
        assert not torch.equal(branches["0", 3], branches["0", 2])
        assert torch.equal(branches["0", 4], branches["1", 4])
        return
    for member in members:
        assert isinstance(member.error, StepRetriesExceeded), member.error
        text = str(member.error)
        assert re.search(r"step 2 .*1/0#\d+: .*'branch\.weight' got no gradient", text), text
        assert member.manager.current_step() == 2
    assert torch.equal(branches["0", 2], branches["1", 2])
    causes = [found["code"] for found in records(tmp_path) if found["kind"] == "abort"]
    assert causes.count("gradient_missing") == 2, causes


@pytest.mark.parametrize("backwards", [1, 2])
def test_three_groups_have_a_third_each(tmp_path: Path, backwards: int) -> None:
    """A third is not a binary fraction, and contributions to a mean have their own third."""

    def body(model: nn.Module, numbers: torch.Tensor) -> None:
        for number in range(backwards):
            model(numbers + 7 * number).backward()

    found, numbers = reduced(tmp_path, Net(), body, sync, groups=3)
    for name, value in alone(Net(), body, numbers).items():
        assert (found[0][name] is None) == (value is None)
        torch.testing.assert_close(found[0][name], value)
    for mine in found[1:]:
        assert_equal(mine, found[0])


def test_mean_covers_the_participants_of_the_txn(tmp_path: Path) -> None:
    """Two groups train, then one of them alone, whose gradients are not halved."""
    found: dict[tuple[str, int], tuple[int, Gradients, torch.Tensor]] = {}

    def work(member: Member) -> None:
        model, manager = Net(), member.manager
        manager.register(model, torch.optim.SGD(model.parameters(), lr=0.0))
        sync(manager, model)
        for txn in manager.transactions(in_order(), max_steps=5):
            if txn.step == 1 and member.group == "1":
                manager.drain()
            with txn:
                model(txn.batch).backward()
                seen = manager.num_participants(), gradients(model), txn.batch
                found[member.group, txn.step] = seen

    with job(tmp_path, 2) as made:
        made.run(work, register=False, digest="never")
        made.audit()
    counts = {key: count for key, (count, _, _) in found.items()}
    assert counts["0", 0] == counts["1", 0] == 2 and counts["0", 4] == 1
    for (_, step), (count, mine, numbers) in found.items():
        parts = [numbers] if count == 1 else [found[g, step][2] for g in "01"]
        wanted = alone(Net(), one_backward, parts)
        assert_equal(mine, wanted)


@pytest.mark.parametrize("quiet", [True, False])
def test_two_backwards_accumulate(tmp_path: Path, quiet: bool) -> None:
    managers: dict[int, Any] = {}

    def prepare(manager: Any, model: nn.Module) -> None:
        sync(manager, model)
        managers[id(model)] = manager

    def twice(model: nn.Module, numbers: torch.Tensor) -> None:
        manager = managers.get(id(model))
        if quiet and manager is not None:
            with manager.no_sync():
                model(numbers).backward()
        else:
            model(numbers).backward()
        model(numbers + 7).backward()

    found, numbers = reduced(tmp_path, Net(), twice, prepare)
    assert_equal(found[0], found[1])
    if quiet:  # reduced once, so the sum is formed as in `alone`
        assert_equal(found[0], alone(Net(), twice, numbers))
    else:  # the mean of the first part is added to, so rounding may differ in the last bit
        for name, value in alone(Net(), twice, numbers).items():
            torch.testing.assert_close(found[0][name], value)


def test_nested_no_sync_does_not_end_the_outer_one(tmp_path: Path) -> None:
    managers: dict[int, Any] = {}
    inside: list[tuple[Gradients, Gradients]] = []

    def prepare(manager: Any, model: nn.Module) -> None:
        sync(manager, model)
        managers[id(model)] = manager

    def nested(model: nn.Module, numbers: torch.Tensor) -> None:
        manager = managers.get(id(model))
        with manager.no_sync() if manager is not None else nullcontext():
            with manager.no_sync() if manager is not None else nullcontext():
                model(numbers).backward()
            model(numbers + 3).backward()
            if manager is not None:
                inside.append((gradients(model), alone(Net(), quiet, [numbers, numbers])))
        model(numbers + 7).backward()

    def quiet(model: nn.Module, numbers: torch.Tensor) -> None:
        model(numbers).backward()
        model(numbers + 3).backward()

    found, numbers = reduced(tmp_path, Net(), nested, prepare)
    assert len(inside) == 2
    for own, wanted in inside:
        assert_equal(own, wanted)  # of this group alone, because nothing is reduced yet
    for mine in found:
        assert_equal(mine, alone(Net(), nested, numbers))


def test_gradients_from_no_sync_backward_only_are_reduced(tmp_path: Path) -> None:
    managers: dict[int, Any] = {}

    def prepare(manager: Any, model: nn.Module) -> None:
        sync(manager, model)
        managers[id(model)] = manager

    def body(model: nn.Module, numbers: torch.Tensor) -> None:
        part = model.odd(model.embed(numbers % 64)).square().mean()
        if (manager := managers.get(id(model))) is None:
            part.backward()
        else:
            with manager.no_sync():
                part.backward()
        model.hidden(model.embed(numbers % 64)).square().mean().backward()

    found, numbers = reduced(tmp_path, Net(), body, prepare)
    for mine in found:
        assert_equal(mine, alone(Net(), body, numbers))


def test_frozen_parameters_are_left_out(tmp_path: Path) -> None:
    model = Net()
    for parameter in [*model.hidden.parameters(), *model.unused.parameters()]:
        parameter.requires_grad = False
    found, numbers = reduced(tmp_path, model, one_backward, sync)
    assert found[0]["hidden.weight"] is None
    for mine in found:
        assert_equal(mine, alone(model, one_backward, numbers))


def test_a_model_without_a_trained_parameter_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with job(tmp_path, 1) as made:
        manager = made.member("0", register=False).manager
        with pytest.raises(FftError, match="no parameter"):
            manager.sync_gradients(model)


def test_sparse_gradients(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(4096, 4, sparse=True), nn.Linear(4, 4))

    def body(net: nn.Module, numbers: torch.Tensor) -> None:
        net(numbers % 5).square().mean().backward()

    found, numbers = reduced(tmp_path, model, body, sync)
    wanted = alone(model, body, numbers)
    assert found[0]["0.weight"] is not None and found[0]["0.weight"].is_sparse
    for mine in found:
        assert_equal(mine, wanted)


def test_reduced_in_another_type(tmp_path: Path) -> None:
    def half(manager: Any, model: nn.Module) -> None:
        sync(manager, model, reduce_dtype=torch.bfloat16)

    found, numbers = reduced(tmp_path, Net(), one_backward, half)
    parts = [alone(Net(), one_backward, [part, part]) for part in numbers]
    for name, value in found[0].items():
        both = [p[name] for p in parts]
        if all(part is None for part in both):
            assert value is None
            continue
        assert value is not None and value.dtype == torch.float32
        rounded = [p.bfloat16() for p in both if p is not None]
        assert torch.equal(value, (sum(rounded) / 2).float()), name  # type: ignore[union-attr]
    assert_equal(found[0], found[1])


def test_a_communication_hook_reduces_each_bucket(tmp_path: Path) -> None:
    buckets: list[tuple[int, int, bool]] = []

    def compress(state: Any, bucket: Any) -> torch.futures.Future[Any]:
        buckets.append((bucket.index(), len(bucket.parameters()), bucket.is_last()))
        small = bucket.buffer().to(torch.bfloat16)
        work = state.allreduce(small)
        work.wait()
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(small.float())
        return done

    def prepare(manager: Any, model: nn.Module) -> None:
        sync(manager, model, bucket_cap_mb=512 / 2**20)
        manager.register_comm_hook(manager, compress)

    found, numbers = reduced(tmp_path / "hook", Net(), one_backward, prepare)
    assert len(buckets) > 2 and sum(last for _, _, last in buckets) == 2
    assert found[0]["unused.weight"] is None

    def half(manager: Any, model: nn.Module) -> None:
        sync(manager, model, reduce_dtype=torch.bfloat16)

    wanted, again = reduced(tmp_path / "type", Net(), one_backward, half)
    assert [n.tolist() for n in numbers] == [n.tolist() for n in again]
    for mine in found:
        assert_equal(mine, wanted[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(tmp_path: Path, reentrant: bool) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(1, 8)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            x = self.first(numbers.float()[:, None] / 64)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x.square().mean()

    torch.manual_seed(1)
    model = Deep()
    found, numbers = reduced(tmp_path, model, one_backward, sync)
    for mine in found:
        assert_equal(mine, alone(model, one_backward, numbers))


def test_memory_formats_are_kept(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def body(net: nn.Module, numbers: torch.Tensor) -> None:
        image = torch.sin(numbers.float())[:, None, None, None].expand(3, 3, 5, 5)
        net(image.contiguous(memory_format=torch.channels_last)).square().mean().backward()

    found, numbers = reduced(tmp_path, model, body, sync)
    for mine in found:
        assert_equal(mine, alone(model, body, numbers))


def test_a_parameter_unfrozen_between_two_txns_is_reduced(tmp_path: Path) -> None:
    seen: dict[str, list[Gradients]] = {"0": [], "1": []}

    def work(member: Member) -> None:
        model = Net()
        model.hidden.requires_grad_(False)
        member.manager.register(model, torch.optim.SGD(model.parameters(), lr=0.0))
        sync(member.manager, model)
        for txn in member.manager.transactions(in_order(), max_steps=2):
            with txn:
                model(txn.batch).backward()
                seen[member.group].append(gradients(model))
            model.hidden.requires_grad_(True)

    with job(tmp_path, 2) as made:
        made.run(work, register=False, digest="never")
    assert seen["0"][0]["hidden.weight"] is None
    assert seen["0"][1]["hidden.weight"] is not None
    assert_equal(seen["0"][1], seen["1"][1])


def test_one_unfrozen_inside_a_body_is_refused_by_name(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        model = Net()
        model.hidden.requires_grad_(False)
        member.manager.register(model, torch.optim.SGD(model.parameters(), lr=0.0))
        member.manager.sync_gradients(model)
        for txn in member.manager.transactions(in_order(), max_steps=2):
            with txn:
                model.hidden.requires_grad_(True)
                model(txn.batch).backward()

    with job(tmp_path, 1) as made, pytest.raises(FftError) as caught:
        made.run(work, register=False, digest="never", max_body_failures=1)
    assert "'hidden.weight' got a gradient, but it was frozen" in str(caught.value.__cause__)


def test_groups_with_different_models_raise_gradient_layout_mismatch(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        model = nn.Linear(8, 4 + int(member.group))
        member.manager.register(model, torch.optim.SGD(model.parameters(), lr=0.0))
        member.manager.sync_gradients(model)
        for txn in member.manager.transactions(in_order(), max_steps=1):
            with txn:
                model(torch.ones(1, 8)).sum().backward()

    with job(tmp_path, 2) as made:
        members = [made.member(str(g), register=False, digest="never") for g in range(2)]
        for member in members:
            member.start(work)
        for member in members:
            member.end()
    # the first one that sees it ends; the other one may see it, too, or continue alone
    reported = [str(m.error) for m in members if isinstance(m.error, GradientLayoutMismatch)]
    assert reported and "2 parameters with 36 numbers" in reported[0]
    assert "2 parameters with 45 numbers" in reported[0]
    assert {type(m.error) for m in members} <= {GradientLayoutMismatch, type(None)}


class Shared(nn.Module):
    """A model with ``shared`` used inside and outside of a checkpoint that another backward
    recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(1, 8), nn.Linear(8, 8)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.first(numbers.float()[:, None] / 64)
        x = checkpoint(self.shared, x, use_reentrant=True)
        return self.shared(torch.tanh(x)).square().mean()


@pytest.mark.parametrize("bucket_mb", [64 / 2**20, 25.0], ids=["issued", "not issued"])
def test_gradient_in_two_parts_fails_once_and_is_then_reduced_whole(
    tmp_path: Path, bucket_mb: float
) -> None:
    """The second part comes when the first is in its bucket; the replay waits for all parts."""

    def prepare(manager: Any, model: nn.Module) -> None:
        manager.sync_gradients(model, bucket_cap_mb=bucket_mb)

    torch.manual_seed(1)
    model = Shared()
    found, numbers = reduced(tmp_path, model, one_backward, prepare)
    wanted = alone(model, one_backward, numbers)
    for mine in found:
        assert_equal(mine, wanted)
    causes = [record["cause"] for record in aborts(tmp_path)]
    assert any("arrived in two parts in one backward" in cause for cause in causes), causes


def test_nested_backward_does_not_reduce_gradients_of_an_earlier_one(
    tmp_path: Path,
) -> None:
    """Groups may use different parameters, so a separate reduction could meet another
    parameter's."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # of equal size, because gloo ends the process if sizes differ
            self.first, self.odd, self.last = (nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, numbers: torch.Tensor, again: bool = False) -> torch.Tensor:
            x = self.first(batch_of(numbers))
            if not again:
                return (self.odd(x) if int(numbers[0]) % 2 else x).square().mean()
            return checkpoint(self.last, x, use_reentrant=True).square().mean()

    def tiny(manager: Any, model: nn.Module) -> None:
        sync(manager, model, bucket_cap_mb=64 / 2**20)

    def twice(model: nn.Module, numbers: torch.Tensor) -> None:
        model(numbers).backward()  # ``odd`` in group 1 only
        model.zero_grad()
        model(numbers, again=True).backward()

    torch.manual_seed(1)
    model = Parts()
    found, numbers = reduced(tmp_path, model, twice, tiny)
    for mine in found:
        assert_equal(mine, alone(model, twice, numbers))
    assert aborts(tmp_path) == []


class Late:
    """A store of the attempt's output tensors, for a write long after the attempt is over."""

    def __init__(self, begun: Callable[[], object]) -> None:
        self.writes: list[Callable[[], object]] = []
        self.begun = begun

    def keep(self, model: nn.Module) -> None:
        """Keep all gradients."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                self.writes.append(partial(parameter.grad.fill_, 1e9))

    def average(self, manager: Any, bucket: Any) -> torch.futures.Future[Any]:
        """Average, as a communication hook that keeps its bucket."""
        wrong = torch.full_like(bucket.buffer(), 1e9)
        self.writes.append(partial(bucket.set_buffer, wrong))
        self.begun()
        done: torch.futures.Future[Any] = torch.futures.Future()
        manager.allreduce(bucket.buffer()).wait()
        done.set_result(bucket.buffer())
        return done


@pytest.mark.parametrize("hooked", [False, True], ids=["gradients", "hook"])
def test_late_writes_of_an_aborted_attempt_do_not_reach_the_replay(
    tmp_path: Path, hooked: bool
) -> None:
    """The write goes through a gradient that was kept, or through the bucket that a hook was
    given."""

    def run(folder: Path, fails: bool) -> list[list[list[float]]]:
        under_way = threading.Event()

        def work(member: Member) -> None:
            def begun(*_: Any) -> None:
                if manager.current_step() == 2:
                    under_way.set()

            model, manager, late = member.model, member.manager, Late(begun)
            manager.register(model, member.optimizer, generators=[model.generator])
            manager.sync_gradients(model, bucket_cap_mb=64 / 2**20)
            # of the parameter that comes last, when the buckets of others are issued
            model.first.weight.register_post_accumulate_grad_hook(begun)
            if hooked:
                manager.register_comm_hook(manager, late.average)
            tries = 0
            for txn in manager.transactions(in_order(), max_steps=4):
                tries += txn.step == 2
                with txn:
                    loss = model(batch_of(txn.batch)).square().mean()
                    if fails and txn.step == 2 and tries == 1 and member.group == "1":
                        assert under_way.wait(20)
                        raise RuntimeError("before its reductions")
                    aborted, late.writes = late.writes, []
                    try:
                        loss.backward()
                    finally:
                        if not hooked:
                            late.keep(model)
                    if txn.step == 2 and tries == 2:
                        struck.append(len(aborted))
                        for write in aborted:
                            write()

        with job(folder, 2) as made:
            members = made.run(work, register=False, digest="commit")
            made.audit()
        assert len(aborts(folder)) == int(fails)
        return [parameters(member.model) for member in members]

    struck: list[int] = []
    calm = run(tmp_path / "calm", False)
    assert struck == []
    assert run(tmp_path / "faulty", True) == calm
    assert max(struck) > 0, "group 0 had reductions under way"


# --- backwards that cannot be reduced as they are -------------------------------------------------


def refused(traces: Path, body: Body) -> str:
    """Return the error that ended a job of two groups with such a step function."""

    def work(member: Member) -> None:
        model = Net()
        member.manager.register(model, torch.optim.SGD(model.parameters(), lr=0.0))
        sync(member.manager, model)
        for txn in member.manager.transactions(in_order(), max_steps=1):
            with txn:
                body(model, txn.batch)

    with job(traces, 2) as made, pytest.raises(StepRetriesExceeded) as caught:
        made.run(work, register=False, digest="never", max_body_failures=1)
    assert not [r for r in records(traces) if r["kind"] == "commit"]
    return str(caught.value.__cause__)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("caught", [True, False])
def test_gradients_with_a_graph_are_refused_and_the_fix_is_named(
    tmp_path: Path, caught: bool
) -> None:
    """Reduced gradients have no graph, so a penalty on them would silently have no effect."""

    def body(model: nn.Module, numbers: torch.Tensor) -> None:
        model(numbers).backward()
        with suppress(FftError) if caught else nullcontext():
            model(numbers).backward(create_graph=True)

    output = refused(tmp_path, body)
    assert "backward(create_graph=True)" in output and "torch.autograd.grad(" in output


def test_a_penalty_on_gradients_by_the_way_that_is_named(tmp_path: Path) -> None:
    def body(model: nn.Module, numbers: torch.Tensor) -> None:
        loss = model(numbers)
        used = [model.embed.weight, *model.hidden.parameters()]
        found = torch.autograd.grad(loss, used, create_graph=True)
        (loss + sum(g.square().sum() for g in found)).backward()

    found, numbers = reduced(tmp_path, Net(), body, sync)
    wanted, without = alone(Net(), body, numbers), alone(Net(), one_backward, numbers)
    assert not torch.equal(wanted["hidden.weight"], without["hidden.weight"])  # type: ignore[arg-type]
    for mine in found:
        assert_equal(mine, wanted)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_gradients_that_are_not_reduced_yet_is_kept(tmp_path: Path) -> None:
    managers: dict[int, Any] = {}

    def prepare(manager: Any, model: nn.Module) -> None:
        sync(manager, model)
        managers[id(model)] = manager

    def body(model: nn.Module, numbers: torch.Tensor) -> None:
        manager = managers.get(id(model))
        with manager.no_sync() if manager is not None else nullcontext():
            model(numbers).backward(create_graph=True)
        model.hidden.weight.grad.square().sum().backward()

    found, numbers = reduced(tmp_path, Net(), body, prepare)
    for mine in found:
        assert_equal(mine, alone(Net(), body, numbers))


def test_two_threads_in_backward_of_one_model_are_refused(tmp_path: Path) -> None:
    """Nothing of it is committed, though the step function catches the error and ends well."""
    errors: list[BaseException] = []

    def body(model: nn.Module, numbers: torch.Tensor) -> None:
        inside, over = threading.Event(), threading.Event()

        def meanwhile(_: torch.Tensor) -> None:
            inside.set()
            assert over.wait(30), "the other thread's backward has not ended"

        def elsewhere() -> None:
            assert inside.wait(30), "the first backward has not come to its middle"
            try:
                model(numbers + 1).backward()
            except FftError as error:
                errors.append(error)
            finally:
                over.set()

        other = threading.Thread(target=elsewhere)
        other.start()
        try:
            middle = model.embed(numbers % 64)
            middle.register_hook(meanwhile)
            model.hidden(middle).square().mean().backward()
        finally:
            inside.set()
            other.join(30)

    assert "two threads were in backward()" in refused(tmp_path, body)
    assert all("two threads were in backward()" in str(error) for error in errors) and errors


def test_backward_in_another_thread_after_the_first_is_allowed(tmp_path: Path) -> None:
    def body(model: nn.Module, numbers: torch.Tensor) -> None:
        for part in (numbers, numbers + 7):
            other = threading.Thread(target=lambda p=part: model(p).backward())
            other.start()
            other.join(30)

    def twice(model: nn.Module, numbers: torch.Tensor) -> None:
        model(numbers).backward()
        model(numbers + 7).backward()

    found, numbers = reduced(tmp_path, Net(), body, sync)
    assert_equal(found[0], found[1])
    for name, value in alone(Net(), twice, numbers).items():
        torch.testing.assert_close(found[0][name], value)


def test_parameters_stepped_without_averaging_are_traced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(member: Member) -> None:
        model, head = nn.Linear(4, 1), nn.Linear(4, 3)
        both = [*model.parameters(), *head.parameters()]
        member.manager.register(model, torch.optim.SGD(both, lr=0.1))
        member.manager.sync_gradients(model)
        for txn in member.manager.transactions(in_order(), max_steps=1):
            with txn:
                one_backward(model, torch.ones(1, 4))

    with job(tmp_path, 1) as made:
        made.run(work, register=False)
    (note,) = notes(tmp_path, "not_averaged")
    assert note["data"] == {
        "warning": "2 parameters of the optimizers are in no model of sync_gradients(), so their "
        "gradients are not averaged across the groups; shapes: [(3, 4), (3,)]"
    }
    assert note["data"]["warning"] in caplog.text


def test_gradients_of_two_models_are_never_taken_for_each_other(tmp_path: Path) -> None:
    """By a data-dependent branch, one group trains one model, and one the other."""

    def work(member: Member) -> None:
        pair = [nn.Linear(8, 8), nn.Linear(8, 8)]
        parameters = [p for model in pair for p in model.parameters()]
        for parameter in parameters:
            nn.init.ones_(parameter)
        member.manager.register(pair, torch.optim.SGD(parameters, lr=0.1))
        for model in pair:
            member.manager.sync_gradients(model)
        for txn in member.manager.transactions(in_order(), max_steps=2):
            with txn:
                pair[int(member.group)](torch.ones(1, 8)).sum().backward()
            assert not txn.committed

    with job(tmp_path, 2) as made:
        members = [made.member(str(g), register=False, digest="never") for g in range(2)]
        for member in members:
            member.start(work)
        for member in members:
            member.end()
    reported = [m.error.__cause__ for m in members if isinstance(m.error, StepRetriesExceeded)]
    assert reported and all(
        "Does a branch depend on the batch?" in str(error) for error in reported
    )


def test_gradient_kept_by_the_user_does_not_change(tmp_path: Path) -> None:
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    buffers: list[int] = []

    def work(member: Member) -> None:
        model = Net()
        member.manager.register(model, torch.optim.SGD(model.parameters(), lr=0.1))
        member.manager.sync_gradients(model)
        (reducer,) = member.manager._parts.reducers
        for txn in member.manager.transactions(in_order(), max_steps=4):
            with txn:
                model(txn.batch).backward()
                gradient = model.hidden.weight.grad
                assert gradient is not None
                if txn.step < 2:
                    kept.append((gradient.detach(), gradient.clone()))
                buffers.append(reducer._layout.buckets[0].flat().data_ptr())

    with job(tmp_path, 1) as made:
        made.run(work, register=False, digest="never")
    assert all(torch.equal(now, then) for now, then in kept)
    assert buffers[2] == buffers[3], "it is used again where nobody has kept anything"

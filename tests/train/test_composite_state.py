"""Tests that tensor subclasses and DTensors of any layout in the state are carried over bit for
bit."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fft.errors import StateMismatch
from fft.train.checkpoint.contents import packed, unpacked
from fft.train.process_groups import ShardProcessGroupGloo
from fft.train.state.step_state import StepState


class Quantized(torch.Tensor):
    """One byte for each number, and a scale, as torchao's 8-bit optimizer states keep them."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: bool, dtype: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: bool, dtype: Any) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.signed, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inside: Any, metadata: Any, size: Any, stride: Any) -> Any:
        return cls(inside["codes"], inside["scale"], *metadata)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten.view.default):
            names, metadata = args[0].__tensor_flatten__()
            inside = {name: getattr(args[0], name) for name in names}
            if func is aten.clone.default:
                inside = {name: tensor.clone() for name, tensor in inside.items()}
            return cls.__tensor_unflatten__(inside, metadata, None, None)
        raise NotImplementedError(f"{func} of a {cls.__name__}")

    @classmethod
    def of(cls, value: torch.Tensor, signed: bool = True) -> Quantized:
        scale = value.abs().max().clamp(min=1e-8) / 100
        return cls((value / scale + 128).round().to(torch.uint8), scale, signed, value.dtype)

    def value(self) -> torch.Tensor:
        return (self.codes.to(self.dtype) - 128) * self.scale


class Twice(torch.Tensor):
    """A subclass around a subclass, whose metadata is not plain."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, metadata: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor, metadata: Any) -> None:
        self.inner, self.metadata = inner, metadata

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], self.metadata

    @classmethod
    def __tensor_unflatten__(cls, inside: Any, metadata: Any, size: Any, stride: Any) -> Any:
        return cls(inside["inner"], metadata)

    __torch_dispatch__ = Quantized.__torch_dispatch__


class Closed(torch.Tensor):
    """A subclass that does not name its inner tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    __torch_dispatch__ = Quantized.__torch_dispatch__


class Momentum(torch.optim.Optimizer):
    """SGD whose momentum is quantized: ``of`` makes the state of a new momentum."""

    def __init__(self, parameters: Any, of: Any = Quantized.of) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.of = of

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                before = state["momentum"].value() if state else torch.zeros_like(p)
                state["momentum"] = self.of(0.9 * before + p.grad)
                p.sub_(state["momentum"].value(), alpha=group["lr"])


def trained(steps: int, seed: int = 0) -> tuple[nn.Module, Momentum, StepState]:
    torch.manual_seed(seed)
    model = nn.Linear(6, 3)
    optimizer = Momentum(model.parameters())
    step(model, optimizer, steps)
    return model, optimizer, StepState([model], [optimizer])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for i in range(steps):
        model(torch.arange(12.0).reshape(2, 6) + i).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_heal(state: Any) -> Any:
    """Carry a state as `fft.train.state.transfer` does, without executing any of it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def by_file(state: Any) -> Any:
    """Carry a state as a checkpoint does."""
    data, tensors = packed(state)
    assert all(type(tensor) is torch.Tensor for tensor in tensors.values())
    return unpacked(json.loads(json.dumps(data)), tensors)


@pytest.mark.parametrize("carry", [by_heal, by_file])
@pytest.mark.parametrize("steps_here", [0, 2])
def test_state_of_a_subclass_continues_with_the_same_bits(carry: Any, steps_here: int) -> None:
    model, optimizer, state = trained(3)
    other, its_optimizer, its = trained(steps_here, seed=1)
    here = its_optimizer.state.get(other.weight, {}).get("momentum")
    its.load(carry(state.export()))
    taken = its_optimizer.state[other.weight]["momentum"]
    assert type(taken) is Quantized and taken.signed and taken.dtype is torch.float32
    assert here is None or taken is here, "an entry that is here keeps its identity"
    assert its.digest() == state.digest() and its.fingerprint() == state.fingerprint()
    for one, two in ((model, optimizer), (other, its_optimizer)):
        step(one, two, 2)
    assert its.digest() == state.digest()


def test_comparison_sees_each_tensor_inside_a_subclass() -> None:
    _, optimizer, state = trained(2)
    (momentum, *_) = [values["momentum"] for values in optimizer.state.values()]
    for inside in (momentum.codes, momentum.scale):
        before = state.fingerprint(), state.digest()
        inside.view(-1)[0] += 1
        assert state.fingerprint() != before[0] and state.digest() != before[1]


def test_metadata_that_differs_replaces_the_entry() -> None:
    _, _, state = trained(2)
    other, its_optimizer, its = trained(0)
    its_optimizer.of = lambda value: Quantized.of(value, signed=False)
    step(other, its_optimizer, 1)
    its.load(by_heal(state.export()))
    assert its_optimizer.state[other.weight]["momentum"].signed
    assert its.digest() == state.digest()


def with_quantized_weight() -> tuple[nn.Module, StepState]:
    model = nn.Linear(2, 2)
    weight = Quantized.of(torch.randn(2, 2))
    model.weight = nn.Parameter(weight, requires_grad=False)
    model.register_buffer("table", Twice(Quantized.of(torch.randn(3)), (1, "a")))
    return model, StepState([model], [])


def test_rollback_and_heal_carry_parameters_and_buffers_of_subclasses() -> None:
    model, state = with_quantized_weight()
    _, other = with_quantized_weight()
    state.capture()
    before = state.digest()
    model.weight.codes.add_(1)
    model.table.inner.scale.add_(1)
    assert state.digest() != before
    state.restore()
    assert state.digest() == before != other.digest()
    other.load(by_heal(state.export()))
    assert other.digest() == before


def test_edits_inside_a_subclass_are_kept_from_then_on() -> None:
    model, state = with_quantized_weight()
    state.capture()
    model.weight.scale.mul_(2)
    state.note_edits()
    assert state.edited == {"model0.weight"}


def test_metadata_of_a_parameter_that_differs_is_refused() -> None:
    _, state = with_quantized_weight()
    model, other = with_quantized_weight()
    model.table.metadata = (2, "a")
    before = other.digest()
    with pytest.raises(StateMismatch, match=r"buffers\[model0.table\]: expected metadata"):
        other.load(by_heal(state.export()))
    assert other.digest() == before


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (Closed, "momentum.* without __tensor_flatten__"),
        (lambda value: Twice(Quantized.of(value), Partial()), "momentum.* Partial.* metadata"),
        (lambda value: Twice(value, object()), "momentum.* holds a object"),
    ],
)
def test_state_that_cannot_be_rebuilt_is_refused_by_name(of: Any, message: str) -> None:
    model, optimizer, state = trained(0)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.state[model.weight]["momentum"] = of(torch.ones(3, 6))
    with pytest.raises(TypeError, match=message):
        state.export()


@pytest.mark.parametrize(
    "name", ["os.system", "torch.Tensor", "test_composite_state.Missing", "builtins.eval"]
)
def test_a_class_that_is_no_subclass_of_this_process_is_refused(name: str) -> None:
    """The name in a state is compared with existing classes; it is never imported or called."""
    _, _, state = trained(1)
    _, its_optimizer, its = trained(0)
    came = by_file(state.export())
    came["optimizers"][0]["state"]["model0.weight"]["momentum"]["$class"] = name
    before = its.digest()
    with pytest.raises(StateMismatch, match=f"subclass named {name} in this process, found 0"):
        its.load(came)
    assert its.digest() == before and not its_optimizer.state


def test_another_class_than_the_one_here_is_refused() -> None:
    _, _, state = trained(1)
    other, its_optimizer, its = trained(1)
    its_optimizer.state[other.weight]["momentum"] = torch.zeros(3, 6)
    with pytest.raises(StateMismatch, match=r"\[model0.weight\]\[momentum\]: expected .*Quantized"):
        its.load(by_heal(state.export()))


class Averages:
    """An object that a user registers as extra."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"nested": [self.value]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.value,) = state["nested"]


def test_extra_of_a_subclass_comes_back_as_that_subclass() -> None:
    one, other = Averages(Quantized.of(torch.ones(3))), Averages(Quantized.of(torch.zeros(3)))
    state, its = StepState([], [], extra={"a": one}), StepState([], [], extra={"a": other})
    its.load(by_file(state.export()))
    assert type(other.value) is Quantized and torch.equal(other.value.codes, one.value.codes)  # type: ignore[attr-defined]
    its.capture()
    other.value.codes.zero_()
    its.restore()
    assert torch.equal(other.value.codes, one.value.codes)  # type: ignore[attr-defined]


# -- DTensors


def sharded(mesh: DeviceMesh) -> tuple[Any, torch.optim.Optimizer, StepState]:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 6, bias=False), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[attr-defined]
    return model, optimizer, StepState([model], [optimizer])


def spread(local: torch.Tensor, mesh: DeviceMesh, placement: Any, shape: Any) -> DTensor:
    size, stride = torch.Size(shape), torch.empty(shape).stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=size, stride=stride)


def entries(mesh: DeviceMesh) -> dict[str, Any]:
    """Return the layouts that optimizers give the state of a (6, 4) parameter of two ranks."""
    return {
        "as the parameter": spread(torch.randn(3, 4), mesh, Shard(0), (6, 4)),
        "rows": spread(torch.randn(3), mesh, Shard(0), (6,)),
        "columns": spread(torch.randn(4), mesh, Partial("avg"), (4,)),
        "whole": spread(torch.randn(6, 4), mesh, Replicate(), (6, 4)),
        "by columns": spread(torch.randn(6, 2), mesh, Shard(1), (6, 4)),
        "quantized": spread(Quantized.of(torch.randn(3, 4)), mesh, Shard(0), (6, 4)),
        "plain, of the size of a part": torch.randn(3, 4),
        "plain": torch.randn(2),
        "nested": {"list": [torch.randn(2), spread(torch.randn(3), mesh, Shard(0), (6,)), 7]},
    }


def kinds(value: Any) -> Any:
    """Return every property of the state's entries except their bits."""
    if isinstance(value, DTensor):
        local = type(value._local_tensor)
        return (value.shape, value.stride(), value.placements, value.device_mesh, local)
    if isinstance(value, torch.Tensor):
        return value.shape, type(value)
    if isinstance(value, dict):
        return {key: kinds(each) for key, each in value.items()}
    return [kinds(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("carry", [by_heal, by_file])
@pytest.mark.parametrize("is_here", [False, True])
def test_optimizer_state_keeps_its_layout(mesh: DeviceMesh, carry: Any, is_here: bool) -> None:
    model, optimizer, state = sharded(mesh)
    optimizer.state[model.weight] = entries(mesh)
    other, its_optimizer, its = sharded(mesh)
    if is_here:
        its_optimizer.state[other.weight] = entries(mesh)
    its.load(carry(state.export()))
    assert kinds(its_optimizer.state[other.weight]) == kinds(optimizer.state[model.weight])
    assert its.digest() == state.digest() and its.fingerprint() == state.fingerprint()


def test_another_layout_than_the_one_here_is_refused(mesh: DeviceMesh) -> None:
    model, optimizer, state = sharded(mesh)
    optimizer.state[model.weight] = {"rows": spread(torch.randn(3), mesh, Shard(0), (6,))}
    other, its_optimizer, its = sharded(mesh)
    its_optimizer.state[other.weight] = {"rows": spread(torch.randn(6), mesh, Replicate(), (6,))}
    with pytest.raises(StateMismatch, match=r"\[rows\]: expected the layout .*shard"):
        its.load(by_file(state.export()))


def test_state_on_another_mesh_than_its_parameter_is_refused(mesh: DeviceMesh) -> None:
    model, optimizer, state = sharded(mesh)
    group = ShardProcessGroupGloo()
    group.use_fake_backend(0, 2)
    optimizer.state[model.weight] = {"rows": spread(torch.randn(3), group.mesh(), Shard(0), (6,))}
    with pytest.raises(TypeError, match=r"\[model0.weight\]\[rows\] is a DTensor over"):
        state.export()
    group.unregister()


def test_copied_exports_do_not_follow_the_state() -> None:
    """State that a step function may change is sent to a joiner as a copy, including buffers of
    subclasses."""
    model, state = with_quantized_weight()
    sent = state.export(copy_mutable=True)
    kept = copy.deepcopy(sent["buffers"])
    model.table.inner.codes.zero_()
    inside = sent["buffers"]["model0.table"]["tensors"]["inner"]["tensors"]["codes"]
    assert torch.equal(inside, kept["model0.table"]["tensors"]["inner"]["tensors"]["codes"])

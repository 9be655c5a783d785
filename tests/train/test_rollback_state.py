"""Tests of StepState on plain modules: what is restored, what is transferred, what is refused."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from fft.errors import StateMismatch
from fft.train.state.step_state import StepState, TornState


class Model(nn.Module):
    """A model with buffers that are changed in place, replaced, filled late, or not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("replaced", torch.zeros(4))
        self.register_buffer("late", None)
        self.register_buffer("hidden", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.replaced = self.replaced + 1
        self.late = torch.ones(2)
        self.hidden.add_(1)
        if "made" not in self._buffers:
            self.register_buffer("made", torch.ones(1))
        x = nn.functional.dropout(self.norm(self.linear(x)), 0.5)
        return x + random.random() + float(numpy.random.rand()) + self.replaced


class Counter:
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"n": 0, "list": [1]}

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


class Setup:
    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        self.adam = torch.optim.AdamW(self.model.linear.parameters(), lr=torch.tensor(0.1))
        self.sgd = torch.optim.SGD(self.model.norm.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.sgd, 0.5)
        self.counter = Counter()
        self.state = StepState(
            [self.model], [self.adam, self.sgd], [self.schedule], {"counter": self.counter}
        )

    def compute(self) -> torch.Tensor:
        out = self.model(torch.arange(12.0).reshape(3, 4)).square().sum()
        out.backward()
        return out.detach()

    def step(self) -> None:
        self.compute()
        for optimizer in (self.adam, self.sgd):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        self.counter.seen["n"] += 1


def test_restore_makes_the_next_attempt_the_same_as_the_first() -> None:
    run = Setup()
    run.step()
    run.state.capture()
    replaced = run.model.replaced
    before = run.state.digest()
    first = run.compute()
    for _ in range(2):  # idempotent, and restored values may be changed
        run.schedule.step()
        run.counter.seen["n"] = 99
        run.counter.seen["list"].append(2)
        run.state.restore()
        assert run.state.digest() == before
        assert run.model.replaced is replaced
        assert run.counter.seen == {"n": 1, "list": [1]}
        assert run.sgd.param_groups[0]["lr"] == 0.05
        assert all(p.grad is None for p in run.model.parameters())
        assert torch.equal(run.compute(), first)


def test_body_cut_in_evaluation_or_with_a_frozen_part_is_restored() -> None:
    """``model.eval()`` has no ``finally``; a GAN freezes one network while it trains the other."""
    setup = Setup()
    setup.model.norm.eval()
    setup.model.norm.weight.requires_grad_(False)
    setup.state.capture()
    setup.model.eval()
    setup.model.norm.train()
    for parameter in setup.model.parameters():
        parameter.requires_grad_(not parameter.requires_grad)
    setup.state.restore()
    assert setup.model.training and setup.model.linear.training and not setup.model.norm.training
    assert [n for n, p in setup.model.named_parameters() if not p.requires_grad] == ["norm.weight"]


class Counting(nn.Module):
    """Registers its running sum at its first use, and had no buffer before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "seen" not in self._buffers:
            self.register_buffer("seen", torch.zeros(1))
        self.seen += x.sum().detach()
        return self.linear(x)


def test_rollback_removes_the_first_buffer_of_a_module() -> None:
    model = Counting()
    state = StepState([model], [torch.optim.SGD(model.parameters(), 0.1)])
    state.capture()
    model(torch.ones(3, 2)).sum().backward()
    state.restore()
    assert not model._buffers
    model(torch.ones(3, 2)).sum().backward()
    assert model.seen.item() == 6.0


def test_buffers_made_or_filled_since_go_away() -> None:
    run = Setup()
    run.state.capture()
    run.compute()
    run.state.restore()
    assert "made" not in run.model._buffers
    assert run.model.late is None
    assert run.model.hidden.item() == 0
    assert run.model.norm.num_batches_tracked.item() == 0


def test_only_the_given_generators_are_put_back() -> None:
    generator = torch.Generator().manual_seed(5)
    state = StepState([], [], generators=[generator])
    state.capture()
    mine, process = torch.rand(3, generator=generator), torch.rand(3)
    state.restore()
    assert torch.equal(torch.rand(3, generator=generator), mine)
    assert not torch.equal(torch.rand(3), process)


def test_restore_without_capture_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="before the first capture"):
        StepState([], []).restore()


def carried(run: Setup) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(run.state.export(), buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def test_export_and_load_carry_everything_over() -> None:
    source, fresh = Setup(1), Setup(2)
    for run in (source, fresh):
        run.model(torch.zeros(2, 4))  # creates the late buffers
    for _ in range(3):
        source.step()
    rate = fresh.adam.param_groups[0]["lr"]
    count = fresh.state.load(carried(source))
    assert count > sum(p.nbytes for p in source.model.parameters())
    assert fresh.state.digest() == source.state.digest()
    assert fresh.adam.param_groups[0]["lr"] is rate
    assert fresh.sgd.param_groups[0]["lr"] == source.sgd.param_groups[0]["lr"]
    assert fresh.counter.seen == source.counter.seen
    rngs = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    source.step()
    torch.set_rng_state(rngs[0])
    random.setstate(rngs[1])
    numpy.random.set_state(rngs[2])
    fresh.step()
    assert fresh.state.digest() == source.state.digest()


def test_load_forgets_optimizer_state_that_the_source_does_not_have() -> None:
    source, target = Setup(1), Setup(1)
    for run in (source, target):
        run.model(torch.zeros(2, 4))
    target.step()
    target.state.load(carried(source))
    assert not target.adam.state
    assert target.state.digest() == source.state.digest()


def test_rollback_after_a_fetch_keeps_the_fetched_state() -> None:
    """The joiner's step function begins with its old state, and its vote waits for the job's
    state."""
    source, learner = Setup(1), Setup(2)
    for run in (source, learner):
        run.step()
    learner.state.capture()
    learner.compute()
    learner.state.load(carried(source), keep_gradients=True)
    if learner.state.captured:  # as the main thread checks when it rolls back
        learner.state.restore()
    assert learner.state.digest() == source.state.digest()


MISFITS = {
    "a missing parameter": (
        lambda s: s["parameters"].pop("model0.linear.bias"),
        "parameters: the received state lacks 'model0.linear.bias'",
    ),
    "an unknown buffer": (
        lambda s: s["buffers"].update(other=torch.zeros(1)),
        "buffers: the received state has 'other'",
    ),
    "another shape": (
        lambda s: s["parameters"].update({"model0.linear.bias": torch.zeros(5)}),
        r"linear.bias\]: expected shape .*, got torch.Size\(\[5\]\)",
    ),
    "another dtype of a moment": (
        lambda s: s["optimizers"][0]["state"]["model0.linear.bias"].update(
            exp_avg=torch.zeros(4, dtype=torch.float64)
        ),
        r"linear.bias\]\[exp_avg\]: expected dtype torch.float32, got torch.float64",
    ),
    "state of a parameter of another optimizer": (
        lambda s: s["optimizers"][0]["state"].update({"model0.norm.bias": {}}),
        r"optimizers\[0\].state: 'model0.norm.bias' in the received state is not",
    ),
    "an optimizer of another kind": (
        lambda s: s["optimizers"][0].update(kind="RAdam"),
        r"optimizers\[0\]: expected the state of AdamW, got that of RAdam",
    ),
    "a missing optimizer": (lambda s: s["optimizers"].pop(), "optimizers: expected 2, got 1"),
    "a missing schedule": (lambda s: s["lr_schedulers"].pop(), "lr_schedulers: expected 1, got 0"),
    "a missing extra": (lambda s: s["extra"].pop("counter"), "extra: .* lacks 'counter'"),
    "a missing section": (lambda s: s.pop("extra"), "state: .* lacks 'extra'"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_state_that_does_not_fit_changes_nothing(name: str) -> None:
    change, message = MISFITS[name]
    source, target = Setup(1), Setup(2)
    for run in (source, target):
        run.step()
    state = carried(source)
    change(state)
    before, counter = target.state.digest(), copy.deepcopy(target.counter.seen)
    with pytest.raises(StateMismatch, match=message):
        target.state.load(state)
    assert target.state.digest() == before
    assert target.counter.seen == counter


def test_setting_unknown_to_an_older_torch_keeps_its_value() -> None:
    source, target = Setup(1), Setup(2)
    for run in (source, target):
        run.step()
    state = carried(source)
    del state["optimizers"][1]["param_groups"][0]["nesterov"]
    target.state.load(state)
    assert target.sgd.param_groups[0]["nesterov"] is False
    assert target.state.digest() == source.state.digest()
    target.step()


def test_non_plain_state_is_named() -> None:
    run = Setup()
    run.counter.seen["bad"] = {"deep": [object()]}
    with pytest.raises(TypeError, match=r"extra\[counter\]\['bad'\]\['deep'\]\[0\] is a object"):
        run.state.export()


def test_digest_sees_every_part() -> None:
    run = Setup()
    run.step()
    seen = {run.state.digest()}
    with torch.no_grad():
        run.model.linear.weight[0, 0] += 1
    seen.add(run.state.digest())
    run.model.norm.num_batches_tracked += 1
    seen.add(run.state.digest())
    run.adam.state[run.model.linear.weight]["exp_avg"][0, 0] += 1
    seen.add(run.state.digest())
    run.adam.state[run.model.linear.weight]["step"] += 1
    seen.add(run.state.digest())
    run.sgd.state[run.model.norm.weight]["momentum_buffer"] += 1
    seen.add(run.state.digest())
    assert len(seen) == 6
    assert len(next(iter(seen))) == 32
    halves = StepState([nn.Linear(2, 2).bfloat16()], [])
    assert halves.digest() == halves.digest()


# --- bodies that edit parameters ------------------------------------------------------------------


def test_first_edit_in_a_rolled_back_step_is_tracked_afterwards() -> None:
    run = Setup()
    weight, bias = run.model.linear.weight, run.model.linear.bias
    run.state.capture()
    run.state.note_edits()  # the first body edits nothing
    run.state.capture()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(TornState, match=r"changed model0\.linear\.weight for the first time"):
        run.state.restore()
    run.state.restore()  # nothing was edited since
    before = [p.detach().clone() for p in (weight, bias)]
    for _ in range(2):
        run.state.capture()
        for _ in range(2):
            with torch.no_grad():
                weight.add_(1)
            run.state.restore()
            assert torch.equal(weight, before[0])
        run.state.note_edits()  # a step function without edits does not reset that
        run.state.forget()
    run.state.capture()
    with torch.no_grad():
        bias.add_(1)
        weight.add_(1)
    with pytest.raises(TornState, match=r"changed model0\.linear\.bias for"):
        run.state.restore()
    assert torch.equal(weight, before[0]), "the rest is put back all the same"


def test_parameter_edit_of_a_successful_body_is_kept() -> None:
    run = Setup()
    weight, bias = run.model.linear.weight, run.model.norm.bias
    for edited in (weight, bias):
        run.state.capture()
        with torch.no_grad():
            edited.add_(1)
        run.state.note_edits()
        run.state.forget()
    before = [p.detach().clone() for p in (weight, bias)]
    run.state.capture()
    with torch.no_grad():
        weight.zero_()
        bias.fill_(7)
    run.state.restore()
    assert torch.equal(weight, before[0]) and torch.equal(bias, before[1])


# --- gradients ------------------------------------------------------------------------------------


def test_parameter_added_between_steps_is_restored_and_fingerprinted() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    state = StepState([model], [torch.optim.SGD(model.parameters(), lr=0.1)])
    state.capture()
    state.note_edits()
    state.forget()
    model.append(nn.Linear(2, 1))
    state.capture()
    before = model[1].weight.detach().clone()
    seen = state.fingerprint()
    with torch.no_grad():
        model[1].weight.add_(1)
    assert state.fingerprint() != seen
    state.restore()
    assert torch.equal(model[1].weight, before)
    assert state.fingerprint() == seen


def test_parameter_replaced_under_its_name_between_two_steps_is_restored() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = StepState([model], [optimizer])
    state.capture()
    state.note_edits()
    state.forget()
    model.weight = nn.Parameter(torch.ones(2, 2))
    optimizer.param_groups[0]["params"][0] = model.weight
    state.capture()
    with torch.no_grad():
        model.weight.add_(1)
    state.restore()
    assert torch.equal(model.weight, torch.ones(2, 2))


def test_rollback_drops_gradients_of_optimizer_only_parameters() -> None:
    model, loose = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    state = StepState([model], [torch.optim.SGD([loose], lr=0.1)])
    every = [*model.parameters(), loose]  # the model's are in no optimizer
    for drop in (state.unwind, state.restore):
        state.capture()
        for parameter in every:
            parameter.grad = torch.ones_like(parameter)
        drop()
        assert all(p.grad is None for p in every)


@pytest.mark.parametrize("keeps", [False, True])
def test_loaded_state_drops_gradients_unless_they_are_kept(keeps: bool) -> None:
    source, target = Setup(1), Setup(2)
    for parameter in target.model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    how = {"keep_gradients": True} if keeps else {}
    target.state.load(carried(source), **how)
    for parameter in target.model.parameters():
        assert (parameter.grad is not None) == keeps
        assert parameter.grad is None or bool((parameter.grad == 3.0).all())


# --- what a source gives away ---------------------------------------------------------------------


def _memory(value: Any) -> set[int]:
    """Return where the tensors in nested containers are stored."""
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr()}
    if isinstance(value, dict):
        value = list(value.values())
    return set().union(*map(_memory, value)) if isinstance(value, list | tuple) else set()


def test_exported_state_shares_no_memory_with_the_step_function() -> None:
    run = Setup()
    run.counter.seen["tensor"] = torch.ones(3)
    run.step()
    exported = run.state.export(copy_mutable=True)
    mine = {t.untyped_storage().data_ptr() for t in run.model.buffers()}
    mine |= {run.counter.seen["tensor"].untyped_storage().data_ptr()}
    for part in ("buffers", "lr_schedulers", "extra"):
        assert not _memory(exported[part]) & mine, part
    assert len(_memory(exported["buffers"])) == len(list(run.model.buffers()))
    before: Any = copy.deepcopy(exported)
    with torch.no_grad():
        for buffer in run.model.buffers():
            buffer.add_(1)
    run.counter.seen["tensor"].add_(1)
    run.counter.seen["list"].append(2)
    run.schedule.step()
    for name, value in before["buffers"].items():
        assert torch.equal(exported["buffers"][name], value), name  # type: ignore[index]
    assert torch.equal(exported["extra"]["counter"]["tensor"], torch.ones(3))  # type: ignore[index]
    assert exported["extra"]["counter"]["list"] == [1]  # type: ignore[index]
    assert exported["lr_schedulers"] == before["lr_schedulers"]
    live = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
    assert _memory(exported["parameters"]) == live, "these a body does not change: no copies"


# --- fingerprints ---------------------------------------------------------------------------------


def test_fingerprint_covers_parameters_and_optimizers_but_no_buffer() -> None:
    run = Setup()
    before = run.state.fingerprint()
    run.step()
    assert run.state.fingerprint() != before, "moments have come into being"
    state = [v for o in (run.adam, run.sgd) for values in o.state.values() for v in values.values()]
    tensors = [*run.model.parameters(), *(v for v in state if torch.is_tensor(v))]
    assert len(tensors) == 4 + 2 * 3 + 2
    for captured in (False, True):
        if captured:
            run.state.capture()
        before = run.state.fingerprint()
        for i, tensor in enumerate(tensors):
            for place in (0, -1):
                values = tensor.detach().view(-1)
                kept = values[place].item()
                values[place] += 1
                assert run.state.fingerprint() != before, (i, place)
                values[place] = kept
                assert run.state.fingerprint() == before
        for buffer in run.model.buffers():
            buffer.add_(1)
        assert run.state.fingerprint() == before, "replicas need not have buffers in common"

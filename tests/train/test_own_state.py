"""State besides parameters and their optimizer entries: an optimizer's own state, flags, hooks,
buffers and registered objects. A rollback restores it, and another process loads it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fft.errors import FftError, StateMismatch
from fft.train.guard.torch_adapter import fsdp_groups, fsdp_state
from fft.train.state.plain_state import refuse_unloadable
from fft.train.state.step_state import StepState


class Counting(torch.optim.Optimizer):
    """An optimizer whose ``state_dict()`` has entries besides ``state`` and ``param_groups``."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5})
        self.count, self.mean = 0, torch.zeros(2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.mean = self.mean + self.count
        self.state["seen"] = self.state.get("seen", 0) + 10
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("m", torch.ones(2, dtype=torch.float64))
            momentum.mul_(1 + 1e-12)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        self.count, self.mean = state.pop("count"), state.pop("mean")
        super().load_state_dict(state)


def counting() -> tuple[Counting, StepState]:
    model = nn.Linear(2, 1, bias=False)
    optimizer = Counting(model.parameters())
    return optimizer, StepState([model], [optimizer])


def test_optimizer_own_state_is_loaded_by_another_process() -> None:
    (donor, state), (joiner, other) = counting(), counting()
    donor.step()
    donor.step()
    before = other.digest(), other.fingerprint()
    exported = copy.deepcopy(state.export())
    group = joiner.param_groups[0]
    other.load(exported)
    assert (joiner.count, joiner.state["seen"]) == (2, 20)
    assert torch.equal(joiner.mean, torch.full((2,), 3.0))
    (momentum,) = (v["m"] for k, v in joiner.state.items() if isinstance(k, torch.Tensor))
    (wanted,) = (v["m"] for k, v in donor.state.items() if isinstance(k, torch.Tensor))
    assert momentum.dtype == torch.float64, "torch's load_state_dict would have rounded it"
    assert torch.equal(momentum, wanted)
    assert joiner.param_groups[0]["lr"] == group["lr"]
    assert (other.digest(), other.fingerprint()) == (state.digest(), state.fingerprint()) != before


def test_rollback_restores_optimizer_own_state() -> None:
    optimizer, state = counting()
    optimizer.step()
    state.capture()
    optimizer.step()
    optimizer.state["new"] = 1
    state.restore()
    assert (optimizer.count, optimizer.state["seen"]) == (1, 10)
    assert "new" not in optimizer.state
    assert torch.equal(optimizer.mean, torch.ones(2))


def test_own_state_alone_changes_digest_and_fingerprint() -> None:
    optimizer, state = counting()
    optimizer.step()
    before = state.digest(), state.fingerprint()
    optimizer.mean = optimizer.mean + 1
    after = state.digest(), state.fingerprint()
    assert before[0] != after[0] and before[1] != after[1]


def test_groups_that_a_script_holds_stay_those_of_the_optimizer() -> None:
    optimizer, state = counting()
    optimizer.step()
    group, entries = optimizer.param_groups[0], optimizer.state
    state.capture()
    group["lr"] = 7.0
    state.restore()
    assert optimizer.param_groups[0] is group and optimizer.state is entries
    assert group["lr"] != 7.0
    state.load(copy.deepcopy(state.export()))
    assert optimizer.param_groups[0] is group and optimizer.state is entries


def test_progress_of_local_steps_includes_optimizer_own_state() -> None:
    optimizer, state = counting()
    optimizer.step()
    progress = state.progress()
    optimizer.step()
    state.start_over(progress)
    assert (optimizer.count, dict(optimizer.state)) == (1, {"seen": 10})


def test_optimizer_entry_that_is_not_loaded_is_refused_by_name() -> None:
    class Saves(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "temperature": 1.0}

    class Fails(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            raise NotImplementedError("use another method")

    parameters = [nn.Parameter(torch.ones(1))]
    with pytest.raises(FftError, match=r"Saves.*'temperature'.*override load_state"):
        refuse_unloadable(Saves(parameters))
    with pytest.raises(FftError, match=r"Fails.state_dict\(\) raised NotImpl"):
        refuse_unloadable(Fails(parameters))
    refuse_unloadable(torch.optim.Adam(parameters))
    hooked = Saves(parameters)
    hooked.register_load_state_dict_pre_hook(lambda _, state: state)
    refuse_unloadable(hooked)


def test_optimizer_state_of_a_foreign_tensor_is_refused_by_name() -> None:
    optimizer, state = counting()
    optimizer.state[torch.ones(3)] = {"m": torch.ones(3)}
    with pytest.raises(TypeError, match=r"optimizers\[0\] \(Counting\).*shape \(3,\)"):
        state.export()


# --- flags


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 1))


class Forgetful:
    """Registered as ``extra``; it loads only one of its two entries."""

    def __init__(self) -> None:
        self.kept, self.lost = 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"kept": self.kept, "lost": self.lost}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.kept = state["kept"]


def test_entry_of_a_checkpoint_that_extra_does_not_load_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def registered(extra: Forgetful) -> StepState:
        model = nn.Linear(2, 1)
        return StepState([model], [torch.optim.SGD(model.parameters())], extra={"mine": extra})

    saved, resumed = Forgetful(), Forgetful()
    saved.kept = saved.lost = 3
    registered(resumed).load_checkpoint(copy.deepcopy(registered(saved).export()))
    assert resumed.kept == 3
    assert [r.getMessage().partition(" differs")[0] for r in caplog.records] == [
        "extra['mine']: lost"
    ]


def test_flags_are_loaded_by_another_process(caplog: pytest.LogCaptureFixture) -> None:
    donor, joiner = network(), network()
    for model in (donor, joiner):
        model[0].requires_grad_(False)
    other = StepState([joiner], [])
    donor[0].weight.requires_grad_(True)
    donor[1].eval()
    other.load(copy.deepcopy(StepState([donor], []).export()))
    assert joiner[0].weight.requires_grad and not joiner[0].bias.requires_grad
    assert [module.training for module in joiner.modules()] == [True, True, False, True]
    assert "requires_grad of model0.0.weight differed" in caplog.text


def test_settings_of_fsdp_are_loaded_by_another_process(mesh: DeviceMesh) -> None:
    donor, joiner = (network() for _ in range(2))
    for model in (donor, joiner):
        model[2].requires_grad_(False)
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    donor(torch.ones(1, 2))  # runs FSDP2's lazy initialization
    donor.reshard()
    donor[2].requires_grad_(True)
    donor[0].set_gradient_divide_factor(3.0)
    donor.set_requires_gradient_sync(False, recurse=False)
    sent = copy.deepcopy(StepState([donor], []).export())
    state = StepState([joiner], [])
    state.load(sent)
    assert state.export()["flags"] == sent["flags"], "also what the first forward has changed"
    inner, root = (fsdp_groups(fsdp_state(m))[0] for m in (joiner[0], joiner))
    assert (inner.gradient_divide_factor, inner.reduce_grads) == (3.0, True)
    assert (root.gradient_divide_factor, root.reduce_grads) == (None, False)
    assert all(p.requires_grad for p in joiner.parameters())
    joiner(torch.ones(1, 2)).sum().backward()


class Choice(Enum):
    TREE = 1
    RING = 2


SENT = {
    "flag": True,
    "number": 3,
    "factor": 0.5,
    "text": "ring",
    "list": [1, [2.0, None]],
    "tuple": (1, (2,)),
    "dict": {"depth": {"of": [1]}},
}
"""Values of a made-up setter that a state holds."""
REFUSED: dict[str, tuple[Any, str]] = {
    "function": (math.sqrt, r"math\.sqrt"),
    "object": (SimpleNamespace(depth=1), r"types\.SimpleNamespace"),
    "objects": ([SimpleNamespace()], r"types\.SimpleNamespace"),
    "set": ({3}, "3"),
    "keys": ({1: 2}, "2"),
    "dtype": (torch.bfloat16, r"torch\.bfloat16"),
    "tensor": (torch.tensor(2.0), "a tensor"),
    "choice": (Choice.RING, r"test_own_state\.Choice\.RING"),
}
"""Other values, and their texts in the error."""


def two_sharded(mesh: DeviceMesh) -> Iterator[Any]:
    for _ in range(2):
        model = network()
        fully_shard(model[0], mesh=mesh)
        yield fully_shard(model, mesh=mesh)


def things_of(model: nn.Module) -> dict[str, Any]:
    fsdp = fsdp_state(model[0])
    group = fsdp_groups(fsdp)[0]
    return {"state": fsdp, "context": fsdp._state_ctx, "group": group} | {
        "parameter": group.fsdp_params[0]
    }


@pytest.mark.parametrize("of", ["state", "context", "group"])
@pytest.mark.parametrize("kind", SENT)
@pytest.mark.parametrize("there", [True, False])
def test_setting_of_an_unknown_setter_is_loaded_by_another_process(
    mesh: DeviceMesh, kind: str, of: str, there: bool
) -> None:
    """The joiner has the attribute with its default, or does not have it."""
    donor, joiner = two_sharded(mesh)
    for model in (donor, joiner) if there else ():
        things_of(model)[of].something = None
    state, its = StepState([donor], []), StepState([joiner], [])
    its.load(copy.deepcopy(state.export()))
    donor(torch.ones(1, 2)).sum().backward()
    state.unwind()
    things_of(donor)[of].something = SENT[kind]
    sent = copy.deepcopy(state.export())
    its.load(sent)
    assert things_of(joiner)[of].something == SENT[kind]
    assert its.export()["flags"] == sent["flags"]


def test_loaded_settings_are_copies_and_replace_no_objects(mesh: DeviceMesh) -> None:
    """An object here, such as an event, is not replaced by the None or the value from there."""
    donor, joiner = two_sharded(mesh)
    state, its = StepState([donor], []), StepState([joiner], [])
    event = torch.Event(device="cpu")
    joiner.set_post_optim_event(event)
    things_of(donor)["group"].something = [1]
    things_of(donor)["parameter"].offload_to_cpu = True
    sent = copy.deepcopy(state.export())
    its.load(sent)
    assert things_of(joiner)["context"].post_optim_event is event
    assert things_of(joiner)["parameter"].offload_to_cpu, "a bool of a parameter"
    things_of(joiner)["group"].something.append(2)
    its.load(sent)
    assert things_of(joiner)["group"].something == [1]


@pytest.mark.parametrize("of", ["state", "context", "group", "parameter"])
@pytest.mark.parametrize("kind", REFUSED)
def test_setting_that_cannot_be_sent_is_refused_by_place(
    mesh: DeviceMesh, kind: str, of: str
) -> None:
    """The same setting before the job, on both, is accepted."""
    value, text = REFUSED[kind]
    donor, joiner = two_sharded(mesh)
    state, its = StepState([donor], []), StepState([joiner], [])
    state.export()
    things_of(donor)[of].something = value
    if (kind, of) == ("tensor", "parameter"):
        return  # tensors of a parameter hold its values
    with pytest.raises(StateMismatch, match=rf"settings of model0[.0]* .*something\) .*: {text}\)"):
        its.load(copy.deepcopy(state.export()))
    donor, joiner = two_sharded(mesh)
    state, its = StepState([donor], []), StepState([joiner], [])
    for model in (donor, joiner):
        things_of(model)[of].something = value
    for model, each in ((donor, state), (joiner, its)):
        each.export()
        with torch.no_grad():
            model(torch.ones(1, 2))  # an evaluation leaves no difference
    its.load(copy.deepcopy(state.export()))


def test_number_of_a_parameter_that_changed_is_refused_by_place(mesh: DeviceMesh) -> None:
    donor, joiner = two_sharded(mesh)
    state, its = StepState([donor], []), StepState([joiner], [])
    state.export()
    things_of(donor)["parameter"].scale = 0.5
    with pytest.raises(StateMismatch, match=r"settings of model0\.0 \(FSDPParam\.scale\) .*: 0\.5"):
        its.load(copy.deepcopy(state.export()))


def test_hook_of_fsdp_set_during_the_job_is_refused_by_place(mesh: DeviceMesh) -> None:
    donor, joiner = two_sharded(mesh)
    state, its = StepState([donor], []), StepState([joiner], [])
    state.export()
    donor[0].set_all_reduce_hook(_double)
    with pytest.raises(
        StateMismatch, match=r"Group\._all_reduce_hook\) .*: test_own_state\._double"
    ):
        its.load(copy.deepcopy(state.export()))
    joiner[0].set_all_reduce_hook(_double)
    its.load(copy.deepcopy(state.export()))


def _double(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


class Hooks:
    """A registered object that registers the hook of its state as it is loaded."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter, self.is_on = parameter, False

    def state_dict(self) -> dict[str, bool]:
        return {"is_on": self.is_on}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        if state["is_on"] and not self.is_on:
            self.parameter.register_hook(_double)
        self.is_on = state["is_on"]


@pytest.mark.parametrize("fixed", [False, True])
def test_hooks_added_during_the_job_are_refused_by_place(fixed: bool) -> None:
    """The fix that the error names works: an object in ``extra`` registers the hook again."""
    models = [network(), network()]
    hooks = [Hooks(model[2].bias) for model in models]
    states = [
        StepState([m], [], extra={"hooks": h} if fixed else {})
        for m, h in zip(models, hooks, strict=True)
    ]
    models[0][0].register_forward_hook(lambda *_: None)  # a logger, before the job, on one rank
    states[0].export()
    hooks[0].load_state_dict({"is_on": True})
    exported = copy.deepcopy(states[0].export())
    if fixed:
        states[1].load(exported)
        return
    with pytest.raises(
        StateMismatch, match=r"hooks or settings of model0.2.bias .*test_own_state._double"
    ):
        states[1].load(exported)


def test_buffer_of_another_initial_shape_is_refused() -> None:
    """A buffer that a forward has resized fits; one that another configuration made does not."""
    donor, joiner, grown, other = (nn.Module() for _ in range(4))
    for module, size in ((donor, 1), (joiner, 1), (grown, 2), (other, 3)):
        module.register_buffer("mask", torch.zeros(size))
    modules = donor, joiner, grown, other
    state, its, alike, theirs = (StepState([each], []) for each in modules)
    donor.get_buffer("mask").resize_(2).fill_(7.0)
    sent = copy.deepcopy(state.export())
    kept = joiner.get_buffer("mask")
    its.load(sent)
    assert joiner.get_buffer("mask") is kept and torch.equal(kept, torch.full((2,), 7.0))
    alike.load(sent)  # and from there a rank with the first shape can load it
    assert its.export()["flags"] == alike.export()["flags"] == sent["flags"]
    with pytest.raises(StateMismatch, match=r"buffers\[model0.mask\]: expected shape .*\[3\]"):
        theirs.load(sent)


def test_buffer_of_a_resized_rank_alone_is_removed_on_loading() -> None:
    donor, loading = nn.Module(), nn.Module()
    state, its = StepState([donor], []), StepState([loading], [])
    loading.register_buffer("cache", torch.ones(2))
    its.load(copy.deepcopy(state.export()))
    assert "cache" not in loading._buffers


class Counts(nn.Module):
    """A module with state besides parameters and buffers."""

    seen = 0

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state


def test_modules_of_several_models_keep_their_own_state() -> None:
    models, others = ([Counts(), Counts()] for _ in range(2))
    state = StepState(models, [])
    models[0].seen, models[1].seen = 1, 2
    state.capture()
    models[0].seen, models[1].seen = 3, 4
    state.restore()
    assert [each.seen for each in models] == [1, 2]
    StepState(others, []).load(copy.deepcopy(state.export()))
    assert [each.seen for each in others] == [1, 2]


def test_statistics_of_all_normalization_layers_are_shared_and_not_compared() -> None:
    """They are those that torch keeps for an evaluation; other buffers are equal on all groups."""
    layers = nn.BatchNorm1d(2), nn.InstanceNorm1d(3, track_running_stats=True), nn.Dropout()
    model = nn.Sequential(*layers)
    model.register_buffer("table", torch.zeros(4))
    state = StepState([model], [])
    assert [t.numel() for t in state.statistics()] == [2, 2, 1, 3, 3, 1]
    before = state.compared_digests(), state.fingerprint(buffers=True)
    for tensor in state.statistics():
        tensor.add_(1)
    assert (state.compared_digests(), state.fingerprint(buffers=True)) == before
    model.get_buffer("table").add_(1)
    assert state.compared_digests() != before[0]
    assert state.fingerprint(buffers=True) != before[1]


class Shown:
    """An object whose state is that of a list."""

    def __init__(self, shown: list[int]) -> None:
        self.shown = shown

    def state_dict(self) -> dict[str, Any]:
        return {"shown": list(self.shown)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shown[:] = state["shown"]


def test_object_in_extra_that_no_one_else_holds_is_named_only_if_it_does_not_change() -> None:
    changes: list[int] = []
    held = Shown([])
    state = StepState([], [], extra={"held": held, "moves": Shown(changes), "stays": Shown([])})
    assert state.unheld() == ""
    changes.append(1)
    assert state.unheld() == "extra['stays']"


def test_second_rollback_of_a_resized_buffer_restores_its_first_value() -> None:
    module = nn.Module()
    module.register_buffer("cache", torch.zeros(1))
    cache, state = module.get_buffer("cache"), StepState([module], [])
    state.capture()
    for _ in range(2):
        cache.fill_(3.0)
        cache.data = torch.ones(2)
        state.restore()
        assert cache.tolist() == [0.0]


@pytest.mark.parametrize("is_saved", [True, False])
def test_buffer_that_a_forward_has_registered_is_registered_alike_as_it_is_loaded(
    is_saved: bool,
) -> None:
    donor, joiner = nn.Module(), nn.Module()
    state, its = StepState([donor], []), StepState([joiner], [])
    donor.register_buffer("cache", torch.ones(2), persistent=is_saved)
    its.load(copy.deepcopy(state.export()))
    assert torch.equal(joiner.get_buffer("cache"), torch.ones(2))
    assert ("cache" in joiner.state_dict()) is is_saved


def test_rollback_removes_parameter_groups_that_the_step_function_has_added() -> None:
    model = network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    state = StepState([model], [optimizer])
    state.capture()
    for _ in range(2):  # the attempt that is rolled back, and the replay
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
        state.restore()
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ([["0.weight", "0.bias"]], r"param_groups\[0\]: expected 2 parameters .*, got 1 par"),
        ([["0.weight"], ["0.bias"], ["2.weight"]], r"\[2\]: expected 1 .*got no such group"),
        ([["0.weight"], ["2.weight"]], r"\[1\]: expected 1 .*2.weight.*, got 1 .*0.bias"),
    ],
)
def test_other_parameter_groups_are_refused_by_number(
    split: list[list[str]], expected: str
) -> None:
    def state_of(split: list[list[str]]) -> StepState:
        model = network()
        groups = [{"params": [model.get_parameter(n) for n in names]} for names in split]
        return StepState([model], [torch.optim.SGD(groups, lr=0.1)])

    sent = copy.deepcopy(state_of([["0.weight"], ["0.bias"]]).export())
    with pytest.raises(StateMismatch, match=expected):
        state_of(split).load(sent)
    its = state_of([["0.weight"]])
    its.load(sent)
    assert its.export()["optimizers"] == sent["optimizers"]

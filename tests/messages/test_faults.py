"""Tests of the fault plan: refused plans and their messages; which faults fire, where, how
often."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fft.errors import ConfigError
from fft.messages.fault_plans import FaultPlan, load_plan
from fft.train.guard.injector import InjectedFault, Injector

GOOD = """
faults:
  - {name: a, kind: exception, step: 3, group: 1, rank: 1, phase: backward}
  - {name: b, kind: one_sided, step: 5, group: "0"}
  - {name: c, kind: kill, step: 7, group: 1, phase: vote, with_groups: 2, settled_steps: 4}
  - {name: d, kind: drain, step: 9, group: 1, return_after_steps: 20}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return path


def plan_of(*faults: dict[str, Any]) -> FaultPlan:
    return FaultPlan.model_validate({"faults": list(faults)})


class Claims:
    """The claims of a job: True for the first call with a key."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def __call__(self, key: str) -> bool:
        self.taken.append(key)
        return self.taken.count(key) == 1


def injector(
    plan: FaultPlan,
    claims: Claims,
    group: str = "0",
    rank: int = 0,
    ranks: int = 2,
    on_inject: Callable[[InjectedFault], None] = lambda fault: None,
) -> Injector:
    return Injector(plan, group, rank, ranks, claims, on_inject)


@pytest.fixture
def drained() -> Iterator[list[int]]:
    """Signals that asked this process to drain."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


# --- reading ---------------------------------------------------------------------------


def test_a_good_plan_is_read_from_yaml_and_from_json(tmp_path: Path) -> None:
    plan = load_plan(write(tmp_path, GOOD), groups=2, ranks=2)
    assert [fault.kind for fault in plan.faults] == ["exception", "one_sided", "kill", "drain"]
    assert plan.faults[0].group == "1"
    as_json = tmp_path / "plan.json"
    as_json.write_text(plan.model_dump_json(exclude_none=True))
    assert load_plan(as_json, groups=2, ranks=2) == plan
    assert load_plan(write(tmp_path, json.dumps({"faults": []}))).faults == []


@pytest.mark.parametrize(
    ("text", "place", "mend"),
    [
        ("- 1", "a fault plan is a mapping", "begin it with `faults:`"),
        ("faults: [", "line 1", "not readable as YAML"),
        ("faults: []\nfaults: []", "line 2", "occurs twice"),
        ("fault: []", "faults:", "is missing"),
        ("faults: 3", "faults:", "valid list"),
        ("faults: [{name: a, step: 1, group: 0}]", "faults[0]:", "needs a `kind`, one of"),
        ("faults: [{name: a, kind: boom}]", "faults[0]:", "needs a `kind`, one of"),
        (
            "faults: [{name: a, kind: kill, step: 1, group: 0, phase: vote, ranks: 1}]",
            "faults[0].ranks:",
            "remove it or correct its spelling",
        ),
        (
            "faults: [{name: a, kind: exception, step: 1, group: 0, phase: vote}]",
            "faults[0].rank:",
            "is missing; add `rank:`",
        ),
        (
            "faults: [{name: a, kind: kill, step: 1, group: 0, phase: lunch}]",
            "faults[0].phase:",
            "'forward', 'backward'",
        ),
        (
            "faults: [{name: a, kind: kill, step: '1', group: 0, phase: vote}]",
            "faults[0].step:",
            "found '1'",
        ),
        (
            "faults: [{name: a, kind: drain, step: -1, group: 0}]",
            "faults[0].step:",
            "greater than or equal to 0",
        ),
        (
            "faults: [{name: a b, kind: drain, step: 1, group: 0}]",
            "faults[0].name:",
            "found 'a b'",
        ),
        (
            "faults: [{name: a, kind: drain, step: 1, group: true}]",
            "faults[0].group:",
            "found True",
        ),
        (
            "faults:\n- {name: a, kind: drain, step: 1, group: 0}\n"
            "- {name: a, kind: drain, step: 2, group: 0}",
            "faults[1].name:",
            "is faults[0]'s; give each its own name",
        ),
        (
            "faults: [{name: a, kind: drain, step: 1, group: 2}]",
            "faults[0].group:",
            "the groups are 0, 1",
        ),
        (
            "faults: [{name: a, kind: kill, step: 1, group: 1, rank: 2, phase: vote}]",
            "faults[0].rank:",
            "use 0 to 1",
        ),
        (
            "faults: [{name: a, kind: drain, step: 1, group: 1, with_groups: 3}]",
            "faults[0].with_groups:",
            "use at most 2",
        ),
    ],
)
def test_a_bad_plan_names_file_place_and_fix(
    tmp_path: Path, text: str, place: str, mend: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_plan(path, groups=2, ranks=2)
    output = str(caught.value)
    assert output.startswith(f"{path}: ") and place in output and mend in output, output
    assert "\n" not in output


def test_a_plan_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the fault plan"):
        load_plan(tmp_path / "none.yaml")


# --- firing ----------------------------------------------------------------------------

RAISE = {"name": "x", "kind": "exception", "step": 3, "group": 0, "rank": 0, "phase": "vote"}


def test_an_exception_fires_at_its_step_and_phase_once_per_job() -> None:
    claims, reported = Claims(), []
    one = injector(plan_of(RAISE), claims, on_inject=reported.append)
    one.begin(2, 1, 0)
    one.at("vote")
    one.begin(4, 1, 0)  # the first txn at or after step 3
    one.at("forward")
    with pytest.raises(InjectedFault) as caught:
        one.at("vote")
    assert reported == [caught.value]
    assert (reported[0].name, reported[0].kind, reported[0].phase, reported[0].step) == (
        "x",
        "exception",
        "vote",
        4,
    )
    one.at("vote")
    one.begin(4, 1, 0)  # retried
    one.at("vote")
    again = injector(plan_of(RAISE), claims, on_inject=reported.append)  # the process was restarted
    again.begin(5, 1, 0)
    again.at("vote")
    assert len(reported) == 1


def test_others_are_left_alone() -> None:
    claims = Claims()
    for group, rank in (("0", 1), ("1", 0)):
        other = injector(plan_of(RAISE), claims, group, rank)
        other.begin(3, 1, 0)
        other.at("vote")
    assert claims.taken == []


def test_conditions_delay_a_fault() -> None:
    fault = {**RAISE, "with_groups": 2, "settled_steps": 3}
    one = injector(plan_of(fault), Claims())
    for groups, commits in ((1, 9), (2, 2)):
        one.begin(9, groups, commits)
        one.at("vote")
    one.begin(9, 2, 3)
    with pytest.raises(InjectedFault):
        one.at("vote")


def test_a_one_sided_fault_hits_one_rank_once() -> None:
    claims, reported = Claims(), []
    plan = plan_of({"name": "x", "kind": "one_sided", "step": 3, "group": 0})
    both = [injector(plan, claims, rank=rank, on_inject=reported.append) for rank in (0, 1)]
    for one in both:
        one.begin(3, 1, 0)
        one.at("after_allreduce")  # a one-sided fault does not occur here
    assert [one.fails_after_allreduce() for one in both] == [True, False]
    for one in both:  # the replay
        one.begin(3, 1, 0)
    assert not any(one.fails_after_allreduce() for one in both)
    assert [fault.kind for fault in reported] == ["one_sided"]


def test_drain_reaches_every_rank_of_the_group_at_the_vote_once(drained: list[int]) -> None:
    claims = Claims()
    plan = plan_of({"name": "x", "kind": "drain", "step": 3, "group": 0})
    both = [injector(plan, claims, rank=rank) for rank in (0, 1)]
    for one in both:
        one.begin(3, 1, 0)
    for number, one in enumerate(both, 1):
        one.at("vote")
        assert drained == [signal.SIGTERM] * number
    back = injector(plan, claims, rank=1)
    back.begin(9, 1, 0)
    back.at("vote")
    assert len(drained) == 2


def test_group_fault_does_not_fire_late_on_a_rank_that_had_not_begun(drained: list[int]) -> None:
    claims = Claims()
    plan = plan_of({"name": "x", "kind": "drain", "step": 3, "group": 0})
    first = injector(plan, claims, rank=0)
    first.begin(3, 1, 0)
    first.at("vote")
    restarted = injector(plan, claims, rank=1)
    restarted.begin(4, 1, 0)
    restarted.at("vote")
    assert len(drained) == 1


KILLED = """
import sys
from fft.messages.fault_plans import FaultPlan
from fft.train.guard.injector import Injector
plan = FaultPlan.model_validate({"faults": [
    {"name": "x", "kind": sys.argv[1], "step": 0, "group": 0,
     **({"phase": "vote"} if sys.argv[1] == "kill" else {})}]})
say = lambda fault: print("told", fault.kind, flush=True)
one = Injector(plan, "0", 0, 1, lambda key: True, say)
one.begin(0, 1, 0)
one.at("vote")
print("still here")
"""


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("drain", signal.SIGTERM)])
def test_kill_and_drain_are_real_signals_announced_before(kind: str, number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, kind], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -number, done.stderr
    assert done.stdout == f"told {kind}\n"


# --- in a model ------------------------------------------------------------------------


class Blocks(nn.Module):
    """A stack of blocks that records which of them ran forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(*[nn.Linear(4, 4) for _ in range(7)])
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.before(value)
        for block in self.blocks:
            value = block(value)
        return value


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_model_fault_hits_the_middle_of_the_pass_once(phase: str) -> None:
    model = Blocks()
    one = injector(plan_of({**RAISE, "phase": phase}), Claims())
    one.attach(model)
    ran: list[int] = []
    for index, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, index=index: ran.append(index))

    def step(number: int) -> None:
        one.begin(number, 1, 0)
        ran.clear()
        model.zero_grad(set_to_none=True)
        model(torch.ones(2, 4)).sum().backward()

    step(2)
    with pytest.raises(InjectedFault):
        step(3)
    graded = [block.weight.grad is not None for block in model.blocks]
    if phase == "forward":
        assert ran == [0, 1] and graded == [False] * 4
    else:
        assert ran == [0, 1, 2, 3] and graded[3] and not graded[0]
    step(3)
    one.detach()
    assert all(not block._forward_pre_hooks for block in model.blocks)


def test_no_hook_is_set_without_need() -> None:
    model = Blocks()
    injector(plan_of(RAISE), Claims()).attach(model)
    modules = list(model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in modules)


def test_the_environment_names_the_participant(tmp_path: Path) -> None:
    env = {"FFT_FAULTS": str(write(tmp_path, GOOD)), "REPLICA_GROUP_ID": "1", "RANK": "1"}
    env |= {"WORLD_SIZE": "2", "NUM_REPLICA_GROUPS": "2"}
    claims = Claims()
    one = Injector.from_env(claims, lambda fault: None, env=env)
    assert one is not None
    one.begin(3, 2, 0)
    with pytest.raises(InjectedFault):
        one.at("backward")
    assert claims.taken == ["faults/a/1/1"]
    assert Injector.from_env(claims, lambda fault: None, env={}) is None
    with pytest.raises(ConfigError, match="no group '1'"):
        Injector.from_env(claims, lambda fault: None, env={**env, "NUM_REPLICA_GROUPS": "1"})


def test_reading_a_plan_loads_no_torch() -> None:
    code = "import sys, fft.messages.fault_plans; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=60).returncode == 0

"""Tests of the injector's hangs, stops, delays and commanded faults, besides raising and
killing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo
import yaml
from torch import nn

from fft.messages.fault_plans import MODELS, Fault, FaultPlan, load_plan
from fft.messages.protocol import GroupEntry, Peer, RankEntry, Record
from fft.operate import inject
from fft.operate.client import JobState, OperatorError
from fft.train.guard.injector import InjectedFault, Injector, hang, stop_this_process

LIMIT_S = 60.0


def fault(kind: str, **fields: Any) -> Fault:
    entry = {"name": kind, "kind": kind, "step": 3, "group": "0", **fields}
    made = FaultPlan.model_validate({"faults": [entry]}).faults[0]
    assert isinstance(made, Fault)
    return made


class ConnectionFaults:
    def __init__(self) -> None:
        self.did: list[str] = []

    def cut_network(self) -> None:
        self.did.append("cut_network")

    def lose_bus(self) -> None:
        self.did.append("lose_bus")


def no_claim(key: str) -> bool:
    raise AssertionError(f"{key} was claimed")


def injector(*planned: Fault, hands: ConnectionFaults | None = None) -> Injector:
    plan = FaultPlan(faults=list(planned))  # type: ignore[arg-type]
    return Injector(plan, "0", 0, 1, lambda key: True, lambda reported: None, hands)


# --- commanded -----------------------------------------------------------------------------


def test_commanded_fault_fires_in_the_open_txn_without_a_claim() -> None:
    one = Injector(FaultPlan(faults=[]), "0", 0, 1, no_claim, lambda reported: None)
    one.begin(7, 2, 0)
    one.at("forward")
    one.add(fault("exception", rank=0, phase="next"))
    with pytest.raises(InjectedFault, match="exception at backward, step 7"):
        one.at("backward")
    one.begin(7, 2, 0)
    one.at("backward")


def test_a_commanded_fault_waits_for_its_step_and_its_place() -> None:
    one = injector()
    one.add(fault("exception", rank=0, phase="vote", step=9))
    for step in (7, 8):
        one.begin(step, 1, 0)
        one.at("vote")
    one.begin(9, 1, 0)
    one.at("forward")
    with pytest.raises(InjectedFault):
        one.at("vote")


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("point", ["before_allreduce", "vote"])
def test_fault_in_a_model_fires_without_a_registered_model(
    place: str, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    reported: list[InjectedFault] = []
    plan = FaultPlan(faults=[fault("exception", rank=0, phase=place)])
    one = Injector(plan, "0", 0, 1, lambda key: True, reported.append)
    one.begin(3, 1, 0)
    with pytest.raises(InjectedFault, match=f"exception at {point}, step 3"):
        one.at(point)
    assert [each.phase for each in reported] == [point]
    assert f"not in {place}: no model is registered; call manager.register(" in caplog.text
    one.at(point)


def test_fault_in_a_registered_model_fires_in_the_model_only() -> None:
    one = injector(fault("exception", rank=0, phase="backward"))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    one.attach(model)
    one.begin(3, 1, 0)
    one.at("before_allreduce")
    one.at("vote")
    with pytest.raises(InjectedFault, match="exception at backward"):
        model(torch.ones(1, 2)).sum().backward()
    one.detach()


def test_next_is_never_the_optimizer_step() -> None:
    one = injector(fault("exception", rank=0, phase="next"))
    one.begin(3, 1, 0)
    one.at("apply")
    with pytest.raises(InjectedFault):
        one.at("forward")


def test_a_commanded_kill_of_a_group_needs_no_claim() -> None:
    reported: list[InjectedFault] = []

    def tell(injected: InjectedFault) -> None:
        reported.append(injected)
        raise KeyboardInterrupt  # before it kills this process

    one = Injector(FaultPlan(faults=[]), "0", 0, 2, no_claim, tell)
    one.add(fault("kill", phase="vote"))
    one.begin(3, 1, 0)
    with pytest.raises(KeyboardInterrupt):
        one.at("vote")
    assert [injected.kind for injected in reported] == ["kill"]


def test_connections_are_closed_by_their_owners() -> None:
    hands = ConnectionFaults()
    faults = [fault(kind, rank=0, phase="vote") for kind in ("network_cut", "bus_loss")]
    one = injector(*faults, hands=hands)
    one.begin(3, 1, 0)
    one.at("vote")
    assert hands.did == ["cut_network", "lose_bus"]


def test_gradient_is_poisoned_once_at_the_requested_place() -> None:
    one = injector(fault("nan_gradient", rank=0, where="after"))
    one.begin(3, 1, 0)
    assert [one.poisons("before"), one.poisons("after"), one.poisons("after")] == [
        False,
        True,
        False,
    ]


def test_a_straggler_is_late_once_in_each_of_its_steps() -> None:
    one = injector(fault("slow", rank=0, seconds=0.05, steps=2))
    late = []
    for step in range(2, 7):
        one.begin(step, 1, 0)
        began = time.monotonic()
        one.at("before_allreduce")
        late.append(time.monotonic() - began >= 0.05)
        one.at("after_allreduce")
    assert late[1:3] == [True, True]
    assert one._delays == 0


# --- in models ------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Three blocks, of which the middle one is hooked."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def wrapped(model: nn.Module) -> Callable[..., torch.Tensor]:
    return torch.compile(model, backend="aot_eager")


def in_place(model: nn.Module) -> Callable[..., torch.Tensor]:
    model.compile(backend="aot_eager")
    return model


def a_function(model: nn.Module) -> Callable[..., torch.Tensor]:
    return torch.compile(lambda x: model(x) * 2, backend="aot_eager")


def compiled_with(model: nn.Module, how: Callable[..., Any]) -> tuple[dict[str, int], int]:
    """Return Dynamo's counters for three steps: graphs, breaks and others."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = how(model)
    for _ in range(3):
        run(torch.ones(2, 4)).sum().backward()
    found = torch._dynamo.utils.counters
    return dict(found["stats"]), sum(found["graph_break"].values())


@pytest.mark.parametrize(
    "how", [wrapped, *(pytest.param(how, marks=pytest.mark.long) for how in (in_place, a_function))]
)
def test_a_compiled_model_has_the_graphs_of_a_run_without_faults(how: Callable[..., Any]) -> None:
    plain = compiled_with(Blocks(), how)
    assert plain[0]["unique_graphs"] == 1 and plain[1] == 0
    for planned in ([], [fault("exception", rank=0, phase="forward", step=1000)]):
        model, one = Blocks(), injector(*planned)
        one.open = not planned
        one.attach(model)
        one.begin(3, 1, 0)
        assert compiled_with(model, how) == plain


@pytest.mark.one_in(4)
@pytest.mark.parametrize("how", [None, wrapped, in_place, a_function])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_model_faults_fire_once_in_eager_and_compiled_models(
    phase: str, how: Callable[..., Any] | None
) -> None:
    torch._dynamo.reset()
    model, one = Blocks(), injector(fault("exception", rank=0, phase=phase))
    one.attach(model)
    run = model if how is None else how(model)
    for step in (2, 3, 4):
        one.begin(step, 1, 0)
        place = phase if how is None else "backward"  # in a graph only gradients show the phase
        expected = pytest.raises(InjectedFault, match=f"at {place}, step 3")
        with expected if step == 3 else nullcontext():
            loss = run(torch.ones(2, 4)).sum()
            model.zero_grad()
            loss.backward()
    one.detach()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


# --- hanging and stopping ------------------------------------------------------------------

TICKS = """
import sys, threading, time
from fft.train.guard.injector import hang
count, end = 0, threading.Event()
def tick():
    global count
    while not end.wait(0.01):
        count += 1
thread = threading.Thread(target=tick)
thread.start()
hang(0.05)
before = count
hang(0.6, holding_gil=sys.argv[1] == "holding")
print(count - before)
end.set()
thread.join()
"""


@pytest.mark.parametrize("how", ["holding", "releasing"])
def test_other_threads_run_on_unless_the_lock_is_held(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TICKS, how], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    ticks = int(done.stdout)
    assert ticks <= 1 if how == "holding" else ticks >= 2


def test_a_signal_does_not_shorten_a_hang_that_holds_the_lock() -> None:
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        began = time.monotonic()
        hang(0.3, holding_gil=True)
        assert time.monotonic() - began >= 0.3
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


STOPPED = """
from fft.train.guard.injector import stop_this_process
stop_this_process({seconds})
print("woken", flush=True)
"""


def test_a_stopped_process_is_woken_and_nothing_is_left() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPED.format(seconds=0.3)], stdout=subprocess.PIPE, text=True
    )
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
    out, _ = child.communicate(timeout=LIMIT_S)
    assert out == "woken\n" and child.returncode == 0


def test_waker_ends_with_a_process_killed_while_stopped() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPED.format(seconds=3600)], stderr=subprocess.PIPE
    )
    os.waitpid(child.pid, os.WUNTRACED)
    child.kill()
    # the waker has inherited the other end of this pipe, which closes with its last holder
    assert b"Traceback" not in child.communicate(timeout=LIMIT_S)[1]  # torchft's nightly warns


def test_stopping_leaves_no_descriptor_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    stop_this_process(0.05)
    assert len(os.listdir("/proc/self/fd")) == before


# --- drawing a plan ------------------------------------------------------------------------


def job(step: int, ranks: int = 2) -> JobState:
    entries = tuple(
        GroupEntry(g, "s:1", tuple(RankEntry(r, 1, True, "t", 1, "h") for r in range(ranks)))
        for g in "01"
    )
    head = Record(4, "epoch", 1, 0, step, "l", 0, 0, Peer("0", 0, 1), entries)
    return JobState(head, head)


def test_seed_draws_the_same_plan_and_its_file_runs(tmp_path: Any) -> None:
    plan = inject.drawn(job(5), "any", 7, 30, 4, None, {})
    assert plan == inject.drawn(job(5), "any", 7, 30, 4, None, {})
    assert plan != inject.drawn(job(5), "any", 8, 30, 4, None, {})
    assert [f.step for f in plan.faults] == list(range(6, 126, 4))
    assert {f.kind for f in plan.faults} == set(inject.SURVIVED)
    path = tmp_path / "plan.yaml"
    path.write_text(inject.as_yaml(plan))
    assert load_plan(path, groups=2, ranks=2) == plan
    assert yaml.safe_load(path.read_text())["faults"][0]["name"] == "seed-7-0"


def test_drawn_plan_respects_the_given_options() -> None:
    plan = inject.drawn(job(5), "stop", 1, 9, 1, 40, {"group": "1", "seconds": 2.0})
    assert {(f.kind, f.group, f.seconds) for f in plan.faults} == {("stop", "1", 2.0)}  # type: ignore[union-attr]
    assert {f.rank for f in plan.faults} == {0, 1}  # type: ignore[union-attr]
    with pytest.raises(OperatorError, match="no kind 'boom'"):
        inject.drawn(job(5), "boom", 1, 1, 1, None, {})


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_every_fault_kind_can_be_requested_by_its_name(kind: str) -> None:
    is_of_group = issubclass(MODELS[kind], Fault)
    plan = inject.single(job(5), kind, None, {"group": "1"} if is_of_group else {})
    assert plan.faults[0].kind == kind and plan.faults[0].step == 0

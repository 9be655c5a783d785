"""Tests of joiners whose step functions, or whose donors' step functions, change the state."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from forked_run import fft as run_fft
from stage import Member, Noisy, Numbers, batch_of, job, parameters, records

import fft
from fft.messages.causes import CauseCode
from fft.trace.audit import audit_dir, read_lines
from fft.train.session.rank_state import FetchedStateDiffers
from fft.train.state import transfer

SCRIPT = Path(__file__).with_name("joiner_script.py")
KINDS = ["rate", "clamp", "perturb", "buffer", "extra"]


class Value:
    """A registered object that step functions change."""

    def __init__(self, forgets: bool = False, counts: bool = False) -> None:
        self.value, self.forgets = 0.0, forgets
        self._counts, self._calls = counts, itertools.count()

    def state_dict(self) -> dict[str, Any]:
        calls = {"calls": next(self._calls)} if self._counts else {}
        return {"value": self.value, **calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.forgets:
            self.value = state["value"]


class Counting(Noisy):
    """A model with a buffer that is equal on all groups."""

    def __init__(self, group: str) -> None:
        super().__init__(group)
        self.register_buffer("count", torch.zeros(1))


class StepOf(NamedTuple):
    """The step of a loop without transactions."""

    step: int


@torch.no_grad()
def change(member: Member, txn: fft.Transaction | StepOf, kind: str, extra: Value) -> None:
    """Change a part of the state before the forward pass, equally on all groups."""
    if kind == "rate":
        member.optimizer.param_groups[0]["lr"] = 0.01 * (1 + txn.step)
    elif kind == "clamp":
        for parameter in member.model.parameters():
            parameter.clamp_(-0.1, 0.1)
    elif kind == "perturb":
        for parameter in member.model.parameters():
            parameter.add_(0.5)
    elif kind == "buffer":
        member.model.get_buffer("count").add_(1)
    else:
        extra.value += 1


@torch.no_grad()
def restore(member: Member, kept: list[torch.Tensor]) -> None:
    for parameter, value in zip(member.model.parameters(), kept, strict=True):
        parameter.copy_(value)


def state_of(member: Member, extra: Value) -> tuple[Any, ...]:
    """Return everything that is equal on all groups."""
    rate = member.optimizer.param_groups[0]["lr"]
    count = member.model.get_buffer("count").item()
    return parameters(member.model), rate, count, extra.value


perturbed = threading.Event()
"""Set while a step function holds perturbed parameters."""


@pytest.fixture(autouse=True)
def slow_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send a state only while a step function perturbs parameters, or after half a second."""
    perturbed.clear()
    save = transfer._streaming_save  # type: ignore[attr-defined]

    def slowly(state: Any, out: Any) -> None:
        if isinstance(out, transfer._FrameWriter):
            perturbed.wait(0.5)
        save(state, out)

    monkeypatch.setattr(transfer, "_streaming_save", slowly)


def run(
    traces: Path,
    body: Callable[[Member, fft.Transaction, Value], None],
    extra: Callable[[str], Value | None] = lambda _: None,
    veto: Callable[[Member], Any] | None = None,
    **settings: Any,
) -> tuple[list[tuple[Any, ...]], Member, Member]:
    """Let group 1 join a job of group 0; return their states at the end, and both groups."""
    started: list[Member] = []
    values = {group: extra(group) or Value() for group in "01"}
    settings = {"register": False, "digest": "commit", **settings}

    def work(member: Member) -> None:
        mine = values[member.group]
        member.manager.register(
            member.model,
            member.optimizer,
            extra={"value": mine} if extra(member.group) else {},
            generators=[member.model.generator],
        )
        member.manager.sync_gradients(member.model)
        if veto is not None:
            member.manager.veto(veto(member))
        loader = fft.CursorLoader(Numbers(), batch_size=4, seed=1)
        for txn in member.manager.transactions(loader, max_steps=40):
            with txn:
                body(member, txn, mine)
                member.model(batch_of(txn.batch)).square().mean().backward()
                time.sleep(0.02)  # so that the other group joins before the end
            if member.group == "0" and txn.step == 5 and not started:
                started.append(made.member("1", model=Counting("1"), **settings).start(work))

    with job(traces, 1) as made:
        first = made.member("0", model=Counting("0"), **settings).start(work)
        first.end()
        started[0].end()
        return [state_of(m, values[m.group]) for m in (first, started[0])], first, started[0]


def refusals(traces: Path) -> list[str]:
    """Return the causes of the txns that were rolled back because states differed."""
    return [r["cause"] for r in records(traces) if r["code"] == CauseCode.REPLICAS_DIFFER]


def changing(kind: str) -> Callable[[Member, fft.Transaction, Value], None]:
    def body(member: Member, txn: fft.Transaction, value: Value) -> None:
        kept = [p.detach().clone() for p in member.model.parameters()]
        change(member, txn, kind, value)
        if kind == "perturb":
            if member.group == "0":
                perturbed.set()
            time.sleep(0.1)  # the time of a forward with perturbed parameters
            perturbed.clear()
            restore(member, kept)

    return body


@pytest.mark.parametrize("learners", ["auto", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_joiner_has_the_peers_state_when_step_functions_change_values(
    tmp_path: Path, kind: str, learners: Any
) -> None:
    """A false declaration by ``learners`` costs a rollback, and no committed step."""
    extra = (lambda _: Value()) if kind == "extra" else (lambda _: None)
    digest = "commit" if learners == "auto" else "never"
    ends, *members = run(tmp_path, changing(kind), extra, learners=learners, digest=digest)
    assert [m.error for m in members] == [None, None]
    assert ends[0] == ends[1]
    # parameters that the donor has clamped before it sends them are those of its vote
    differs = learners == "always" and kind != "clamp"
    assert len(refusals(tmp_path)) == differs
    assert audit_dir(tmp_path).ok
    joined = [r for r in records(tmp_path) if r["kind"] == "epoch" and len(r["members"]) == 2]
    assert bool(joined[0]["learners"]) is (learners == "always")


def test_change_made_in_the_first_steps_ends_its_process_by_name(tmp_path: Path) -> None:
    """Its rate differs in each attempt, so that a second fetch cannot help."""

    def body(member: Member, txn: fft.Transaction, _: Value) -> None:
        if member.group == "1":
            member.optimizer.param_groups[0]["lr"] = 0.5

    _, first, late = run(tmp_path, body)
    assert first.error is None
    assert isinstance(late.error, FetchedStateDiffers), late.error
    assert str(late.error).count("optimizers[0].lr") == 2
    assert "0/0#1" in str(late.error) and "1/0#1" in str(late.error)
    assert len(refusals(tmp_path)) == 2


def test_modes_and_caches_may_differ_in_the_first_step_with_a_joiner(tmp_path: Path) -> None:
    """A validation that only one group runs leaves its model in evaluation mode, with a cache."""

    def body(member: Member, txn: fft.Transaction, _: Value) -> None:
        member.model.train(member.group == "1")
        if member.group == "1":
            member.model.register_buffer("cache", torch.zeros(1), persistent=False)

    ends, *members = run(tmp_path, body)
    assert [m.error for m in members] == [None, None]
    assert ends[0] == ends[1] and refusals(tmp_path) == []


@pytest.mark.parametrize(
    ("fault", "entry"), [({"forgets": True}, "value"), ({"counts": True}, "calls")]
)
def test_unloadable_extra_ends_its_rank_by_name_after_a_second_fetch(
    tmp_path: Path, fault: dict[str, bool], entry: str
) -> None:
    def body(member: Member, txn: fft.Transaction, value: Value) -> None:
        if member.group == "0":
            value.value = 3.0

    _, first, late = run(tmp_path, body, lambda group: Value(**(fault if group == "1" else {})))
    assert first.error is None
    assert isinstance(late.error, FetchedStateDiffers), late.error
    text = str(late.error)
    assert f"extra['value'][{entry!r}] of this rank differs from that of group 0" in text
    assert "state_dict() must leave out what changes by itself (a clock, a count of calls)" in text
    failed = [line for line in read_lines(tmp_path) if (line.get("event") or {}).get("torn")]
    assert len([f for f in failed if f["event"]["type"] == "heal_failed"]) == 2


def test_veto_of_a_joiner_without_its_state_is_not_called(tmp_path: Path) -> None:
    """Its loss is that of weights which are not the job's."""
    judged: list[tuple[str, int]] = []
    begun: list[tuple[int, bool]] = []

    def body(member: Member, txn: fft.Transaction, _: Value) -> None:
        if not member.manager._parts.results.vetoes:
            raise AssertionError("no veto is registered")
        if member.group == "1":
            begun.append((txn.step, txn.contributes))

    def veto(member: Member) -> Callable[[Any], None]:
        return lambda result: judged.append((member.group, result.step))

    _, first, late = run(tmp_path, body, veto=veto, learners="always", digest="never")
    assert [first.error, late.error] == [None, None]
    rehearsed, (step, contributes) = begun[:2]
    assert not rehearsed[1] and ("1", rehearsed[0]) not in judged
    assert not contributes and ("0", step) in judged and ("1", step) not in judged
    assert ("1", step + 1) in judged


def test_joiner_of_a_torchft_loop_has_the_rate_set_by_its_peers(
    tmp_path: Path,
) -> None:
    """The loop sets a rate by the step and clamps the weights, before each backward pass."""
    started: list[Member] = []
    settings: dict[str, Any] = {"register": False, "digest": "never", "check_replicas": 1}

    def work(member: Member) -> None:
        manager, model = member.manager, member.model
        manager.register(model, member.optimizer, generators=[model.generator])
        while manager.current_step() < 40:
            manager.start_quorum()
            for name in ("rate", "clamp"):
                change(member, StepOf(manager.current_step()), name, Value())
            member.optimizer.zero_grad()
            model(batch_of(torch.arange(4))).square().mean().backward()
            for parameter in model.parameters():
                manager.allreduce(parameter.grad).wait()
            time.sleep(0.02)  # so that the other group joins before the end
            if manager.should_commit():
                member.optimizer.step()
            if member.group == "0" and manager.current_step() == 5 and not started:
                started.append(made.member("1", model=Counting("1"), **settings).start(work))
        found[member.group] = state_of(member, Value())

    found: dict[str, tuple[Any, ...]] = {}
    with job(tmp_path, 1) as made:
        first = made.member("0", model=Counting("0"), **settings).start(work)
        first.end()
        started[0].end()
        assert [m.error for m in made.members] == [None, None]
    assert found["0"] == found["1"]
    assert any(len(r["members"]) == 2 for r in records(tmp_path) if r["kind"] == "epoch")
    assert refusals(tmp_path) == []
    assert audit_dir(tmp_path).is_sound


@pytest.mark.multiprocess
@pytest.mark.parametrize(("kind", "ranks"), [("rate", 1), ("clamp", 1), ("fsdp", 2)])
def test_killed_group_returns_with_the_state_of_the_others(
    tmp_path: Path, kind: str, ranks: int
) -> None:
    command = ["run", "--groups", "2", "--ranks", str(ranks), "--trace-dir", str(tmp_path / "run")]
    command += ["--timeout", "100", str(SCRIPT), kind, str(tmp_path)]
    done = run_fft(*command, folder=tmp_path, within=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "back").exists()
    for rank in range(ranks):
        ends = [(tmp_path / f"end-{group}{rank}").read_text() for group in "01"]
        assert ends[0] == ends[1]
    assert audit_dir(tmp_path / "run").ok


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "kind",
    ["thaw", "late_sync", *(pytest.param(k, marks=pytest.mark.long) for k in ("always", "fsdp"))],
)
def test_layer_thawed_between_two_steps_is_trained_by_a_group_that_returns(
    tmp_path: Path, kind: str
) -> None:
    """The weights are those of the undisturbed run; a joiner without the gradients of the layer
    does not change them."""
    ends = {}
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "undisturbed":
            (folder / "killed").touch()
        command = ["run", "--groups", "2", "--ranks", "2" if kind == "fsdp" else "1"]
        command += ["--trace-dir", str(folder / "run"), "--timeout", "100", str(SCRIPT), kind]
        done = run_fft(*command, str(folder), folder=folder, within=120)
        assert done.returncode == 0, done.stdout + done.stderr
        ends[name] = {path.name: path.read_text() for path in sorted(folder.glob("end-*"))}
        assert audit_dir(folder / "run").is_sound
        causes = {r["code"] for r in records(folder / "run") if r["kind"] == "abort"}
        assert ("died" in causes) == (name == "killed") and "gradient_missing" not in causes
    assert ends["killed"] == ends["undisturbed"]
    assert len(ends["killed"]) == (4 if kind == "fsdp" else 2)
    assert ends["killed"]["end-00"] == ends["killed"]["end-10"]

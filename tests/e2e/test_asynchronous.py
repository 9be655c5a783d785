"""Tests of asynchronous groups: how far ahead they may be, what is held, and what counts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import WIDTH, Job, Member, Numbers, batch_of, job, parameters, records, slices
from torch import nn
from waiting import wait_until

import fft
from fft.errors import FftError
from fft.messages.protocol import decode_record
from fft.operate.job_view import APART, IN_EPOCH, JobModel
from fft.trace.audit import read_lines

EVERY = 2
"""Inner steps between two synchronizations."""
LIMIT_S = 40.0
"""Time limit for required events; only a bug uses all of it."""
SPEC = """
name: bounded
doc: As async, with another bound.
include: [async.yaml]
policies:
  bound: {bound}
"""


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path / "traces", 3) as it:
        yield it


def _spec(folder: Path, bound: int) -> str:
    path = folder / "bounded.yaml"
    path.write_text(SPEC.format(bound=bound))
    return str(path)


def _members(made: Job, folder: Path, bound: int = 4, **settings: Any) -> list[Member]:
    """Return three groups that wait for others only briefly."""
    spec = _spec(folder, bound)
    return [_member(made, str(g), spec, **settings) for g in range(made.groups)]


def _member(
    made: Job,
    group: str,
    spec: str,
    outer_lr: float = 0.7,
    inner: type[torch.optim.Optimizer] = torch.optim.AdamW,
    synchronised: bool = True,
    **settings: Any,
) -> Member:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))
    model.generator = torch.Generator()
    values = {"register": False, "model": model, "digest": "commit", "timeouts": TIMES, **settings}
    member = made.member(group, spec=spec, optimizer=inner, **values)
    member.manager.register(member.model, member.optimizer)
    if not synchronised:
        return member
    outer = torch.optim.SGD(model.parameters(), lr=outer_lr)
    member.shared = fft.DiLoCo(member.manager, [model], member.optimizer, outer, EVERY)  # type: ignore[attr-defined]
    return member


TIMES = {"join_interval": 0.1, "join_window": 0.3, "apart_window": 3.0}
Body = Callable[[Member, fft.Transaction], None]


def _train(member: Member, steps: int, body: Body) -> None:
    loader = fft.CursorLoader(Numbers(), batch_size=4, seed=1)
    for txn in member.manager.transactions(loader, steps):
        with txn:
            body(member, txn)
            member.model(batch_of(txn.batch)).square().mean().backward()


def _run(members: list[Member], steps: int, body: Body) -> None:
    for member in members:
        member.start(lambda member: _train(member, steps, body))
    for member in members:
        member.end()
    for member in members:
        if member.error is not None:
            raise member.error


def _late(record: dict[str, Any]) -> dict[str, int]:
    """Return how many steps each member's contribution to an epoch is behind."""
    held = {lease[1] for lease in record["leases"]}
    inside = {entry["group"] for entry in record["members"]} & held
    found = {at[0]["group"]: record["step"] + 1 - at[1] for at in record["standing"]}
    return {group: late for group, late in found.items() if group in inside}


def _synchronisations(made: Job) -> dict[int, dict[str, int]]:
    """Return the contributors of each committed step, and how far behind they were."""
    found: dict[int, dict[str, int]] = {}
    before: dict[str, Any] = {}
    for record in records(made.traces):
        if record["kind"] == "commit" and not record["skip"]:
            found[record["step"]] = _late(before)
        before = record
    return found


def _assert_exactly_once(made: Job) -> None:
    """Check that each granted slice was consumed by one group in one txn, or is not consumed
    yet."""
    (consumed,) = slices(made.traces).values()
    last = records(made.traces)[-1]
    held = [lease[0] for lease in last["leases"]] + last["returned"]
    assert sorted(consumed + held) == list(range(last["cursor"]))


def test_a_slow_group_does_not_hold_the_others_up_within_the_bound(
    made: Job, tmp_path: Path
) -> None:
    """If the others waited for it, the step that its step function waits for would never come."""
    come = threading.Event()

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "0" and txn.step == 4:
            come.set()
        if member.group == "2" and txn.step == 1:
            assert come.wait(LIMIT_S)

    members = _members(made, tmp_path)
    _run(members, 7, body)
    steps = _synchronisations(made)
    assert [set(steps[n]) for n in (1, 2, 3, 4)] == [{"0", "1", "2"}, *3 * [{"0", "1"}]]
    assert max(late for counts in steps.values() for late in counts.values()) == 4, (
        "it came, and counts"
    )
    assert made.audit().findings
    _assert_exactly_once(made)
    final = [member for member in members if member.manager.current_step() == 7]
    assert len(final) >= 2
    assert len({str(parameters(member.model)) for member in final}) == 1


def test_ready_group_at_the_bound_waits_and_names_the_slow_group(made: Job, tmp_path: Path) -> None:
    def waits_for_the_slow_one(member: Member) -> bool:
        engine = member.manager._parts.job.engine
        return engine is not None and engine.local.awaits == {"2"} and engine.local.step == 2

    members = _members(made, tmp_path, bound=2)

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "2" and txn.step == 1:
            wait_until(
                lambda: all(map(waits_for_the_slow_one, members[:2])), "both are held", LIMIT_S
            )

    _run(members, 4, body)
    steps = _synchronisations(made)
    assert steps[2] == {"0": 1, "1": 1}
    assert steps[3] == {"0": 1, "1": 1, "2": 2}, "it was waited for, and counts"
    causes = [line.get("cause") or "" for line in read_lines(made.traces)]
    assert any("step 3 is held for 2 (at step 1): nobody may be 2 behind it" in c for c in causes)
    made.audit()
    _assert_exactly_once(made)


def test_average_counts_each_contribution_from_its_own_base(made: Job, tmp_path: Path) -> None:
    """The numbers are simple: each group moves its parameters by a fixed amount in every step."""
    by = {"0": 1.0, "1": 10.0, "2": 100.0}
    members = _members(made, tmp_path, outer_lr=1.0, inner=_Moves)
    for member in members:
        member.optimizer.by = by[member.group]  # type: ignore[attr-defined]
    start = parameters(members[0].model)[0][0]
    come = threading.Event()

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "0" and txn.step == 3:
            come.set()
        if member.group == "2" and txn.step == 1:
            assert come.wait(LIMIT_S)

    _run(members, 6, body)
    expected = start
    for groups in _synchronisations(made).values():
        expected += sum(EVERY * by[group] for group in groups) / len(groups)
    final = max(members, key=lambda member: member.manager.current_step())
    assert parameters(final.model)[0][0] == pytest.approx(expected, rel=1e-5)
    made.audit()


class _Moves(torch.optim.SGD):
    """An optimizer that adds the same amount to every parameter."""

    by = 0.0

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(self.by)


def test_failed_synchronization_is_repeated_without_recomputing_steps(
    made: Job, tmp_path: Path
) -> None:
    """No inner step is recomputed, and no other group loses a step."""
    members = _members(made, tmp_path)
    failed: list[int] = []

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "1" and txn.step == 2 and txn.inner_step == 0:
            launch = member.shared.launch  # type: ignore[attr-defined]

            def fails() -> None:
                member.shared.launch = launch  # type: ignore[attr-defined]
                failed.append(txn.step)
                raise RuntimeError("boom in the synchronisation")

            member.shared.launch = fails  # type: ignore[attr-defined]

    _run(members, 5, body)
    assert failed == [2]
    notes = [line["note"] for line in read_lines(made.traces) if line["kind"] == "note"]
    assert "inner_void" not in notes
    aborts = [r["cause"] for r in records(made.traces) if r["kind"] == "abort"]
    assert any("boom in the synchronisation" in cause for cause in aborts)
    made.audit()
    _assert_exactly_once(made)


def test_excluded_group_fetches_the_state_and_then_contributes(made: Job, tmp_path: Path) -> None:
    """Its monitor reports that its main thread does not move, so no other group waits for it."""
    members = _members(made, tmp_path, bound=2)
    gone = threading.Event()

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "0" and txn.step == 4:
            gone.set()
        if member.group == "2" and txn.step == 1 and not gone.is_set():
            mine = member.manager._parts.job  # its engine may still be at the last commit
            wait_until(lambda: mine.local is not None and mine.local.role == "apart", "it is apart")
            member.manager._parts.handle_hang("planted")
            assert gone.wait(LIMIT_S)

    _run(members, 8, body)
    steps = _synchronisations(made)
    assert set(steps[4]) == {"0", "1"}, "further than the bound"
    back = [r for r in records(made.traces) if r["kind"] == "epoch" and r["step"] >= 4]
    first = next(r for r in back if "2" in {entry["group"] for entry in r["members"]})
    assert "2" not in {lease[1] for lease in first["leases"]}, "weight 0"
    made.audit()
    _assert_exactly_once(made)


def test_operator_sees_groups_in_their_local_phase(made: Job, tmp_path: Path) -> None:
    _run(_members(made, tmp_path), 3, lambda member, txn: None)
    seen: list[set[str]] = []
    model = JobModel()
    for line in read_lines(made.traces):
        if line["group"] == "0" and (record := (line.get("event") or {}).get("record")):
            model.see(decode_record(json.dumps(record).encode()), 0.0)
            seen.append({row.state() for row in model.rows()})
    assert seen[0] == {IN_EPOCH}
    assert {APART} in seen


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda m, o: fft.LocalSGD(m.manager, m.model, m.optimizer, 2), "use fft.DiLoCo"),
        (
            lambda m, o: fft.DiLoCo(m.manager, [m.model[0], m.model[2]], m.optimizer, o, 2),
            "give one fragment, and no delay",
        ),
        (
            lambda m, o: fft.DiLoCo(m.manager, [m.model], m.optimizer, o, 2, fragment_sync_delay=1),
            "give one fragment, and no delay",
        ),
    ],
)
def test_group_that_cannot_step_locally_is_refused(
    made: Job, tmp_path: Path, make: Callable[[Any, Any], Any], expected: str
) -> None:
    member = _member(made, "0", "async", synchronised=False)
    outer = torch.optim.SGD(member.model.parameters(), lr=0.7)
    with pytest.raises(FftError, match=expected):
        make(member, outer)

"""Tests of the update after a commit, which is done once and completely or loses the state.

They also test what a step function may do. Real groups run in threads, over gloo; the traces show
what was applied and what was fetched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stage import Member, Numbers, aborts, batch_of, events, fetches, job, parameters, records
from torchft.optim import OptimizerWrapper

import fft
from fft.errors import FftError
from fft.train.state.updates import Updates

STEPS = 6


def _loader() -> fft.CursorLoader:
    return fft.CursorLoader(Numbers(), batch_size=4, seed=1)


def _loss(member: Member, numbers: torch.Tensor) -> torch.Tensor:
    x = batch_of(numbers)
    return member.model(x).sub(x.mean(1, keepdim=True)).square().mean()


# --- several optimizers, schedules and a scaler ---------------------------------------------------


def _scaled(gradients: list[float]) -> tuple[list[torch.Tensor], list[Any], Any, Updates]:
    """Return one weight of 1 for each gradient, each with an optimizer (rate 1) and a schedule."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(torch.ones(1))  # creates its tensors at the first use
    weights = [torch.ones(2, requires_grad=True) for _ in gradients]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = torch.tensor([1.0, gradient])
    return weights, schedules, scaler, Updates(optimizers, schedules, scaler)


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_overflow_of_any_optimizer_skips_the_step_of_all(bad: int, value: float) -> None:
    weights, schedules, scaler, updates = _scaled([value if i == bad else 1.0 for i in range(3)])
    assert updates.must_skip()
    assert updates.must_skip(), "asked again, it unscales nothing twice"
    updates.skip()
    assert scaler.get_scale() == 2.0
    assert all(weight.tolist() == [1.0, 1.0] and weight.grad is None for weight in weights)
    assert [s.last_epoch for s in schedules] == [0, 0, 0]
    updates.close()


def test_steps_before_a_skipped_one_do_not_count_for_scale_growth() -> None:
    """``GradScaler.update()`` behaves like this; the rank that has found the inf itself calls
    it."""
    weights, schedules, scaler, updates = _scaled([1.0])
    scaler.set_growth_interval(3)
    scales = []
    for value in (1.0, 1.0, float("inf"), 1.0, 1.0, 1.0):
        weights[0].grad = torch.tensor([1.0, value])
        if updates.must_skip():
            updates.skip()
        else:
            updates.apply()
        scales.append(scaler.get_scale())
    assert scales == [4.0, 4.0, 2.0, 2.0, 2.0, 4.0]
    assert schedules[0].last_epoch == 5
    updates.close()


def test_step_without_overflow_steps_all_optimizers_and_schedules() -> None:
    weights, schedules, scaler, updates = _scaled([1.0, 2.0, -2.0])
    calls: list[int] = []
    updates.on_commit(lambda: calls.append(1))
    updates.on_commit(lambda: calls.append(2))
    assert not updates.must_skip()
    updates.apply()
    updates.done()
    assert [w.tolist() for w in weights] == [[0.75, 0.75], [0.75, 0.5], [0.75, 1.5]]
    assert all(weight.grad is None for weight in weights)
    assert [s.last_epoch for s in schedules] == [1, 1, 1]
    assert [s.get_last_lr() for s in schedules] == [[0.5]] * 3
    assert scaler.get_scale() == 8.0 and calls == [1, 2]
    updates.close()


# --- FFT's loop -----------------------------------------------------------------------------------


def test_a_checkpoint_right_after_a_commit_is_of_that_commit(tmp_path: Path) -> None:
    taken: list[dict[str, Any]] = []

    def work(member: Member) -> None:
        for txn in member.manager.transactions(_loader(), max_steps=40):
            with txn:
                _loss(member, txn.batch).backward()
            if member.group == "0":
                taken.append(member.manager.state_dict())

    with job(tmp_path, 2) as made:
        made.run(work)
    commits = {r["step"]: r for r in records(tmp_path) if r["kind"] == "commit"}
    assert len(taken) == 40
    for state in taken:
        record = commits[state["step"]]
        assert (state["lineage"], state["cursor"]) == (record["lineage"], record["cursor"])


def test_stepping_the_optimizer_in_the_body_is_refused_with_the_fix(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        for txn in member.manager.transactions(_loader(), max_steps=2):
            with txn:
                _loss(member, txn.batch).backward()
                member.optimizer.step()

    with job(tmp_path, 1) as made, pytest.raises(FftError) as caught:
        made.run(work, max_body_failures=1)
    assert "remove the call" in str(caught.value.__cause__)


def test_on_commit_runs_once_per_step(tmp_path: Path) -> None:
    seen: dict[str, list[int]] = {"0": [], "1": []}

    def work(member: Member) -> None:
        average = torch.optim.swa_utils.AveragedModel(member.model)

        def after() -> None:
            average.update_parameters(member.model)
            seen[member.group].append(member.manager.current_step())

        member.manager.on_commit(after)  # before register(), which keeps it
        member.manager.register(member.model, member.optimizer, extra={"ema": average})
        failed = False
        for txn in member.manager.transactions(_loader(), max_steps=STEPS):
            with txn:
                _loss(member, txn.batch).backward()
                if txn.step == 3 and member.group == "1" and not failed:
                    failed = True
                    raise RuntimeError("once")
        averages.append([p.tolist() for p in average.module.parameters()])

    averages: list[Any] = []
    with job(tmp_path, 2) as made:
        made.run(work)
        made.audit()
    assert seen["0"] == seen["1"] == list(range(1, STEPS + 1))
    assert averages[0] == averages[1]


def test_extra_optimizer_stepped_by_the_step_function_is_rolled_back(
    tmp_path: Path,
) -> None:
    def run(folder: Path, fails: bool) -> list[Any]:
        def work(member: Member) -> None:
            own = torch.optim.Adam(member.model.parameters(), 0.1)
            noise = [member.model.generator]
            member.manager.register(member.model, [], extra={"own": own}, generators=noise)
            pending = {0, 3} if fails else set()
            for txn in member.manager.transactions(_loader(), max_steps=STEPS):
                with txn:
                    for _ in range(2):  # as a GAN steps twice
                        own.zero_grad()
                        _loss(member, txn.batch).backward()
                        own.step()
                    if member.group == "1" and txn.step in pending:
                        pending.remove(txn.step)
                        raise RuntimeError("after the steps")

        with job(folder, 2) as made:
            members = made.run(work)
            made.audit()
        assert parameters(members[0].model) == parameters(members[1].model)
        return parameters(members[0].model)

    assert run(tmp_path / "faults", fails=True) == run(tmp_path / "none", fails=False)


def test_a_body_that_changes_parameters_is_rolled_back_with_them(tmp_path: Path) -> None:
    """The change is weight clamping as in WGAN, and through ``.data`` as in older code."""

    def run(folder: Path, fails: bool, by_data: bool) -> list[Any]:
        def work(member: Member) -> None:
            pending = {0, 3} if fails else set()
            for txn in member.manager.transactions(_loader(), max_steps=STEPS):
                with txn:
                    first = member.model.first.weight
                    if by_data:
                        first.data.mul_(0.9)
                    else:
                        with torch.no_grad():
                            first.mul_(0.9)
                    _loss(member, txn.batch).backward()
                    if member.group == "1" and txn.step in pending:
                        pending.remove(txn.step)
                        raise RuntimeError("after the change")

        with job(folder, 2) as made:
            members = made.run(work)
            made.audit()
        assert len(aborts(folder)) >= 2 * fails
        assert fetches(folder) == []
        return [parameters(member.model) for member in members]

    for by_data in (False, True):
        undisturbed = run(tmp_path / f"quiet{by_data}", False, by_data)
        assert run(tmp_path / f"faults{by_data}", True, by_data) == undisturbed


def test_a_parameter_changed_late_and_rolled_back_is_fetched_again(tmp_path: Path) -> None:
    """The previous value was not kept; its state is lost, which is reported and healed."""

    def work(member: Member) -> None:
        failed = False
        for txn in member.manager.transactions(_loader(), max_steps=STEPS):
            with txn:
                if txn.step == 3 and member.group == "1" and not failed:
                    failed = True
                    with torch.no_grad():
                        member.model.first.weight.mul_(0.5)
                    raise RuntimeError("after the change")
                _loss(member, txn.batch).backward()

    with job(tmp_path, 2) as made:
        members = made.run(work)
        made.audit()
    assert [(f[0], f[4]) for f in fetches(tmp_path)] == [("1", "0")]
    assert parameters(members[0].model) == parameters(members[1].model)
    (torn,) = [e["event"] for e in events(tmp_path, "restored") if e["event"]["torn"]]
    assert "model0.first.weight" in torn["cause"]


def test_schedule_fetched_with_the_state_is_not_stepped_again(tmp_path: Path) -> None:
    """The step that failed here has advanced the schedule of the others."""

    def work(member: Member) -> None:
        for txn in member.manager.transactions(_loader(), max_steps=STEPS):
            with txn:
                _loss(member, txn.batch).backward()
                if txn.step == 2 and member.group == "1":
                    member.optimizer.error = RuntimeError("half way")  # type: ignore[attr-defined]

    with job(tmp_path, 2) as made:
        members = made.run(work, optimizer=Moody)
        made.audit()
    assert [(f[0], f[4]) for f in fetches(tmp_path)] == [("1", "0")]
    causes = [record["cause"] for record in aborts(tmp_path)]
    assert causes and all("half way" in cause for cause in causes), "nothing but the step failed"
    assert [member.schedule.last_epoch for member in members] == [STEPS, STEPS]
    assert parameters(members[0].model) == parameters(members[1].model)


def _failing(failing: set[str], step: int, seen: list[tuple[str, int, int]]) -> Any:
    """Return the work of a member whose update of ``step`` fails in the groups ``failing``.

    ``seen`` gets (group, step, step of the schedule) for each transaction that it sees committed.
    """

    def work(member: Member) -> None:
        for txn in member.manager.transactions(_loader(), max_steps=STEPS):
            with txn:
                _loss(member, txn.batch).backward()
                if txn.step == step and member.group in failing:
                    member.optimizer.error = RuntimeError("half way")  # type: ignore[attr-defined]
            if txn.committed:
                seen.append((member.group, txn.step, member.schedule.last_epoch))

    return work


@pytest.mark.parametrize("groups", [1, 2])
def test_update_that_fails_on_all_groups_raises_its_error_at_once(
    tmp_path: Path, groups: int
) -> None:
    """No code after the transaction sees a commit whose update was not made."""
    seen: list[tuple[str, int, int]] = []
    work = _failing({"0", "1"}, 2, seen)
    with job(tmp_path, groups) as made:
        members = [made.member(str(g), optimizer=Moody) for g in range(groups)]
        for member in members:
            member.start(work)
        for member in members:
            member.end(15)  # the limit for an epoch is 20 s
            assert isinstance(member.error, RuntimeError)
            assert "half way" in str(member.error)
            assert "no process holds the state of the job at step 3" in str(member.error.__notes__)
    assert {step for _, step, _ in seen} == {0, 1}


def test_update_that_fails_on_one_group_is_no_commit_there(tmp_path: Path) -> None:
    """Its peer's state includes what the peer's script did after the commit; nothing is done twice.

    The digests of the update and of the state after that belong to different states.
    """
    seen: list[tuple[str, int]] = []

    def work(member: Member) -> None:
        failed = False
        for txn in member.manager.transactions(_loader(), max_steps=STEPS):
            with txn:
                _loss(member, txn.batch).backward()
                if txn.step == 2 and member.group == "1":
                    member.optimizer.error = RuntimeError("half way")  # type: ignore[attr-defined]
                if txn.step == 4 and member.group == "0" and not failed:
                    failed = True
                    raise RuntimeError("transient")
            if txn.committed:
                seen.append((member.group, txn.step))
                with torch.no_grad():
                    for parameter in member.model.parameters():
                        parameter.mul_(0.9)

    with job(tmp_path, 2) as made:
        members = made.run(work, optimizer=Moody)
        made.audit()
    assert len(aborts(tmp_path)) >= 2
    assert parameters(members[0].model) == parameters(members[1].model)
    assert sorted(seen) == sorted(
        (group, step) for group in "01" for step in range(STEPS) if (group, step) != ("1", 2)
    )


def test_update_failing_at_the_last_commit_of_a_drain_raises_error(
    tmp_path: Path,
) -> None:
    """A drain does not let the code after the loop run without the update of the last step."""

    def work(member: Member) -> None:
        for txn in member.manager.transactions(_loader(), max_steps=STEPS):
            with txn:
                _loss(member, txn.batch).backward()
                if txn.step == 2:
                    member.optimizer.error = RuntimeError("half way")  # type: ignore[attr-defined]
                    member.manager.drain()

    with job(tmp_path, 1) as made:
        member = made.member("0", optimizer=Moody)
        member.start(work).end()
        assert isinstance(member.error, RuntimeError) and "half way" in str(member.error)


# --- torchft's loop -------------------------------------------------------------------------------


class Moody(torch.optim.SGD):
    """An optimizer that fails once, half way through its step, when requested."""

    error: BaseException | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.error is not None:
            error, self.error = self.error, None
            self.param_groups[0]["params"][0].add_(1.0)
            raise error
        super().step(closure)


def _by_hand(member: Member, step: int) -> bool:
    """Run forward, backward and vote, as torchft's users write it."""
    manager = member.manager
    manager.start_quorum()
    member.optimizer.zero_grad()
    _loss(member, torch.arange(4) + 8 * step + 4 * int(member.group)).backward()
    for parameter in member.model.parameters():
        manager.allreduce(parameter.grad).wait()
    return bool(manager.should_commit())


def _registered(member: Member) -> None:
    member.manager.register(member.model, member.optimizer)


def test_a_step_that_failed_and_was_caught_is_not_taken_for_applied(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        _registered(member)
        while (step := member.manager.current_step()) < STEPS:
            if _by_hand(member, step):
                if step == 2 and member.group == "1":
                    member.optimizer.error = RuntimeError("half way")  # type: ignore[attr-defined]
                try:
                    member.optimizer.step()
                except RuntimeError as error:
                    assert str(error) == "half way"

    with job(tmp_path, 2) as made:
        members = made.run(work, register=False, optimizer=Moody, digest="commit")
        made.audit()
    assert parameters(members[0].model) == parameters(members[1].model)
    assert [(f[0], f[4]) for f in fetches(tmp_path)] == [("1", "0")]


def test_an_interrupt_in_the_step_then_shutdown_is_a_torn_state(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        _registered(member)
        while (step := member.manager.current_step()) < 3:
            if _by_hand(member, step):
                if step == 2:
                    member.optimizer.error = KeyboardInterrupt()  # type: ignore[attr-defined]
                member.optimizer.step()

    with job(tmp_path, 1) as made:
        member = made.member("0", register=False, optimizer=Moody)
        member.start(work).end()
        assert isinstance(member.error, KeyboardInterrupt)
    assert len(events(tmp_path, "applied")) == 2
    assert len(events(tmp_path, "apply_failed")) == 1


def test_a_second_optimizer_that_fails_tears_the_state_too(tmp_path: Path) -> None:
    """This holds even if the loss was averaged between the steps, so that the first counts as the
    update."""

    def work(member: Member) -> None:
        _registered(member)
        second = Moody(member.model.parameters(), lr=1e-3)
        while (step := member.manager.current_step()) < STEPS:
            if _by_hand(member, step):
                member.optimizer.step()
                member.manager.allreduce(torch.ones(1)).wait()
                if step == 2 and member.group == "1":
                    second.error = RuntimeError("half way")
                try:
                    second.step()
                except RuntimeError as error:
                    assert str(error) == "half way"

    with job(tmp_path, 2) as made:
        members = made.run(work, register=False, digest="never")
        made.audit()
    assert parameters(members[0].model) == parameters(members[1].model)
    assert [(f[0], f[4]) for f in fetches(tmp_path)] == [("1", "0")]


def test_metrics_that_fail_after_the_step_cost_nothing(tmp_path: Path) -> None:
    lost: list[str] = []

    def work(member: Member) -> None:
        _registered(member)
        while (step := member.manager.current_step()) < STEPS:
            if not _by_hand(member, step):
                continue
            member.optimizer.step()
            if step == 2 and member.group == "1":
                member.manager._parts.groups.replicate.cut()  # as a network failure would
            member.manager.allreduce(torch.ones(1)).wait()
            if member.manager.errored() is not None:
                lost.append(member.group)

    with job(tmp_path, 2) as made:
        members = made.run(work, register=False, digest="commit")
        made.audit()
    assert lost, "the average of step 2 failed"
    assert fetches(tmp_path) == []
    assert events(tmp_path, "apply_failed") == []
    assert parameters(members[0].model) == parameters(members[1].model)


def test_the_wrapper_of_torchft_is_watched_too(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        _registered(member)
        wrapped = OptimizerWrapper(member.manager, member.optimizer)
        while (step := member.manager.current_step()) < STEPS:
            wrapped.zero_grad()
            _loss(member, torch.arange(4) + 8 * step + 4 * int(member.group)).backward()
            for parameter in member.model.parameters():
                member.manager.allreduce(parameter.grad).wait()
            if step == 2 and member.group == "0":
                member.optimizer.error = RuntimeError("half way")  # type: ignore[attr-defined]
            try:
                wrapped.step()
            except RuntimeError as error:
                assert str(error) == "half way"

    with job(tmp_path, 2) as made:
        members = made.run(work, register=False, optimizer=Moody, digest="commit")
        made.audit()
    assert parameters(members[0].model) == parameters(members[1].model)
    assert [(f[0], f[4]) for f in fetches(tmp_path)] == [("0", "1")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("group", ["0", "1"])
@pytest.mark.parametrize("scale", ["none", "the scaler skips another one"])
def test_exception_between_decision_and_step_is_found_at_next_vote(
    tmp_path: Path, group: str, scale: str
) -> None:
    """The loop catches it. A commit that all groups leave without a step, as by a scaler, is none.

    So no group loses its state for it, even if both come one after the other. There are no digests,
    because an audit would report that the states differed in between.
    """

    def work(member: Member) -> None:
        _registered(member)
        failed = False
        while (step := member.manager.current_step()) < STEPS:
            try:
                if _by_hand(member, step):
                    if step == 2 and member.group == group and not failed:
                        failed = True
                        raise ValueError("not of FFT's making")
                    if step not in (1, 4) or scale == "none":
                        member.optimizer.step()
            except ValueError as error:
                assert str(error) == "not of FFT's making"

    with job(tmp_path, 2) as made:
        members = made.run(work, register=False, digest="never", check_replicas=0)
        made.audit()
    assert parameters(members[0].model) == parameters(members[1].model)
    other = "1" if group == "0" else "0"
    assert [(f[0], f[4]) for f in fetches(tmp_path)] == [(group, other)]
    (torn,) = [e["event"]["cause"] for e in events(tmp_path, "restored") if e["event"]["torn"]]
    assert (
        "should_commit() returned True in step 2, but this rank called no optimizer.step()" in torn
    )


def test_overflow_in_the_plain_loop_reduces_the_scale_once(tmp_path: Path) -> None:
    """``should_commit()`` returns False because the commit was a skip; the next attempt has the
    scale."""
    scales: dict[str, list[float]] = {"0": [], "1": []}

    def work(member: Member) -> None:
        manager, optimizer = member.manager, member.optimizer
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        manager.register(member.model, optimizer, scaler=scaler)
        overflows = member.group == "0"
        while (step := manager.current_step()) < 4:
            manager.start_quorum()
            optimizer.zero_grad()
            numbers = torch.arange(4) + 8 * step + 4 * int(member.group)
            scaler.scale(_loss(member, numbers)).backward()
            for parameter in member.model.parameters():
                if overflows and step == 2:
                    parameter.grad[...] = float("inf")
                manager.allreduce(parameter.grad).wait()
            overflows = overflows and step != 2
            if manager.should_commit():
                scaler.step(optimizer)
                scaler.update()
            scales[member.group].append(scaler.get_scale())

    with job(tmp_path, 2) as made:
        members = made.run(work, register=False, digest="commit")
        made.audit()
    assert scales == {group: [4.0, 4.0, 2.0, 2.0, 2.0] for group in "01"}
    assert parameters(members[0].model) == parameters(members[1].model)
    assert fetches(tmp_path) == []

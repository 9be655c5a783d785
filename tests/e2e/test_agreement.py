"""Tests of joint decisions of all ranks: skipping a step, and whether replicas are still equal."""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import (
    PG_TIMEOUT,
    Member,
    Numbers,
    aborts,
    batch_of,
    events,
    fetches,
    job,
    parameters,
    records,
)
from torch import nn
from torchft import ProcessGroupGloo
from torchft.optim import OptimizerWrapper

import fft
from fft.errors import Diverged, FftError, StepRetriesExceeded
from fft.trace.audit import audit_dir, read_lines
from fft.util.error_places import place_of

STEPS = 6
Scaler = torch.amp.GradScaler


def _loader() -> fft.CursorLoader:
    return fft.CursorLoader(Numbers(), batch_size=4, seed=1)


def _loss(member: Member, numbers: torch.Tensor) -> torch.Tensor:
    x = batch_of(numbers)
    return member.model(x).sub(x.mean(1, keepdim=True)).square().mean()


def _skips(traces: Path) -> list[bool]:
    return [r["skip"] for r in records(traces) if r["kind"] == "commit"]


# --- skipped steps --------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [True, False])
def test_a_scaler_drives_the_transactions_and_backs_off_on_all_ranks(
    tmp_path: Path, unscale: bool
) -> None:
    states: dict[str, Any] = {}

    def work(member: Member) -> None:
        scaler = Scaler("cpu", init_scale=2.0**8, growth_interval=3)
        schedule = torch.optim.lr_scheduler.StepLR(member.optimizer, 2, 0.5)
        member.manager.register(member.model, member.optimizer, schedule, scaler=scaler)
        for txn in member.manager.transactions(_loader(), max_steps=STEPS):
            with txn:
                loss = _loss(member, txn.batch)
                if txn.attempt in (2, 4) and member.group == "1":
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
                if unscale:
                    scaler.unscale_(member.optimizer)
                    nn.utils.clip_grad_norm_(member.model.parameters(), 1.0)
            assert txn.committed and txn.skipped == (txn.attempt in (2, 4))
        states[member.group] = scaler.state_dict(), schedule.last_epoch

    with job(tmp_path, 2) as made:
        members = made.run(work)
        made.audit()
    assert _skips(tmp_path) == [False, True, False, True] + [False] * 4
    assert aborts(tmp_path) == []
    assert states["0"] == states["1"]
    assert states["0"][0]["scale"] == 2.0**8 / 4 * 2  # grown once, after three good steps
    assert states["0"][1] == STEPS, "a skipped step is none of the schedule's"
    assert parameters(members[0].model) == parameters(members[1].model)


def test_overflow_on_one_shard_skips_the_step_on_all_ranks(
    tmp_path: Path,
) -> None:
    """Each rank of a group has only its shard, and does not see the overflows of the others."""
    scales: dict[str, float] = {}

    def work(member: Member) -> None:
        scaler = Scaler("cpu", init_scale=2.0**8)
        member.manager.register(member.model, member.optimizer, scaler=scaler)
        for txn in member.manager.transactions(_loader(), max_steps=3):
            before = parameters(member.model)
            with txn:
                scaler.scale(_loss(member, txn.batch)).backward()
                if txn.attempt == 2 and member.name == "0.1":
                    member.model.last.weight.grad[0, 0] = torch.inf  # reduced, and then its own
            assert txn.skipped == (txn.attempt == 2)
            assert (parameters(member.model) == before) == txn.skipped
        scales[member.name] = scaler.get_scale()

    with job(tmp_path, 2) as made:
        for group in "01":
            made.ranks(group, [{"shard_pg": ProcessGroupGloo(PG_TIMEOUT)} for _ in range(2)])
        for member in made.members:
            member.start(work)
        for member in made.members:
            member.end()
            assert member.error is None, repr(member.error)
        made.audit()
    assert _skips(tmp_path) == [False, True, False, False]
    assert aborts(tmp_path) == []
    assert scales == dict.fromkeys(("0.0", "0.1", "1.0", "1.1"), 2.0**7)


def test_overflow_of_the_second_optimizer_skips_the_step_of_both(tmp_path: Path) -> None:
    epochs: dict[str, list[int]] = {}

    def work(member: Member) -> None:
        scaler, model = Scaler("cpu", init_scale=2.0**8), member.model
        body = torch.optim.SGD([*model.first.parameters(), *model.norm.parameters()], lr=1e-2)
        head = torch.optim.SGD(model.last.parameters(), lr=1e-2)
        both = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (body, head)]
        member.manager.register(model, [body, head], both, scaler=scaler)
        for txn in member.manager.transactions(_loader(), max_steps=3):
            before = parameters(model)
            with txn:
                scaler.scale(_loss(member, txn.batch)).backward()
                if txn.attempt == 2:
                    model.last.weight.grad[0, 0] = torch.inf  # reduced: the same on all
            assert txn.skipped == (txn.attempt == 2)
            assert (parameters(model) == before) == txn.skipped
        epochs[member.group] = [schedule.last_epoch for schedule in both]

    with job(tmp_path, 2) as made:
        made.run(work)
        made.audit()
    assert _skips(tmp_path) == [False, True, False, False]
    assert epochs == {"0": [3, 3], "1": [3, 3]}


def test_a_skipped_last_step_is_not_the_last(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        scaler = Scaler("cpu", init_scale=2.0**8)
        member.manager.register(member.model, member.optimizer, scaler=scaler)
        for txn in member.manager.transactions(_loader(), max_steps=3):
            with txn:
                loss = _loss(member, txn.batch)
                loss = loss * torch.inf if txn.attempt == 3 else loss
                scaler.scale(loss).backward()

    with job(tmp_path, 2) as made:
        made.run(work)
        made.audit()
    assert _skips(tmp_path) == [False, False, True, False]


def test_rolled_back_scaled_step_leaves_no_trace(tmp_path: Path) -> None:
    def run(folder: Path, fails: bool) -> list[Any]:
        def work(member: Member) -> None:
            scaler = Scaler("cpu", init_scale=2.0**8)
            member.manager.register(
                member.model,
                member.optimizer,
                scaler=scaler,
                generators=[member.model.generator],
            )
            pending = {0, 3} if fails else set()
            for txn in member.manager.transactions(_loader(), max_steps=STEPS):
                with txn:
                    scaler.scale(_loss(member, txn.batch)).backward()
                    scaler.unscale_(member.optimizer)
                    if member.group == "1" and txn.step in pending:
                        pending.remove(txn.step)
                        raise RuntimeError("after unscaling")

        with job(folder, 2) as made:
            return [parameters(member.model) for member in made.run(work)]

    assert run(tmp_path / "faults", True) == run(tmp_path / "quiet", False)


def test_a_scaler_that_skips_in_torchfts_loop_skips_on_all_groups(tmp_path: Path) -> None:
    """The overflow is in one group's loss; the reduced gradients have it everywhere."""
    tries: dict[str, int] = {}

    def work(member: Member) -> None:
        scaler = Scaler("cpu", init_scale=2.0**8)
        manager, model = member.manager, member.model
        wrapped = OptimizerWrapper(manager, member.optimizer)
        while (step := manager.current_step()) < STEPS:
            tries[member.group] = count = tries.get(member.group, 0) + 1
            wrapped.zero_grad()
            loss = _loss(member, torch.arange(4) + 8 * step + 4 * int(member.group))
            if count % 3 == 0 and member.group == "1":
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            for parameter in model.parameters():
                manager.allreduce(parameter.grad).wait()
            scaler.unscale_(wrapped)
            scaler.step(wrapped)
            scaler.update()

    with job(tmp_path, 2) as made:
        members = made.run(work, register=False, digest="never")
        made.audit()
    assert tries == {"0": 8, "1": 8}
    assert sum(_skips(tmp_path)) == 2
    assert aborts(tmp_path) == []
    assert parameters(members[0].model) == parameters(members[1].model)


def test_step_skipped_before_its_reductions_takes_the_next_batch(tmp_path: Path) -> None:
    tries: dict[str, int] = {}

    def work(member: Member) -> None:
        manager = member.manager
        wrapped = OptimizerWrapper(manager, member.optimizer)
        while (step := manager.current_step()) < STEPS:
            tries[member.group] = count = tries.get(member.group, 0) + 1
            wrapped.zero_grad()
            if count % 2 and member.group == "1":
                continue  # `if not loss.isfinite(): continue`
            _loss(member, torch.arange(4) + 8 * step + 4 * int(member.group)).backward()
            for parameter in member.model.parameters():
                manager.allreduce(parameter.grad).wait()
            wrapped.step()

    with job(tmp_path, 2) as made:
        members = made.run(work, register=False, digest="never")
        made.audit()
    assert tries == {"0": STEPS, "1": 2 * STEPS}
    assert aborts(tmp_path) == []
    assert parameters(members[0].model) == parameters(members[1].model)


# --- equal replicas -------------------------------------------------------------------------------


def _corrupted(member: Member, at: int, who: str) -> None:
    """Train; one bit of group ``who``'s weights is flipped before a step, as by bad memory."""
    done = False
    for txn in member.manager.transactions(_loader(), max_steps=STEPS):
        with txn:
            _loss(member, txn.batch).backward()
        if txn.committed and member.manager.current_step() == at and member.group == who:
            if not done:
                weight = member.model.first.weight.data.view(-1)
                weight.view(torch.int32)[3] ^= 1
            done = True


def test_one_flipped_bit_stops_the_job_by_default(tmp_path: Path) -> None:
    with job(tmp_path, 2) as made:
        members = [made.member(str(g), check_replicas=2, digest="never") for g in range(2)]
        for member in members:
            member.start(lambda m: _corrupted(m, 3, "1"))
        for member in members:
            member.end()
        for member in members:
            assert isinstance(member.error, Diverged), member.error
            assert "1/0#1" in str(member.error) and "step 4" in str(member.error)
    report = audit_dir(tmp_path)
    assert not report.ok and "replicas differ after step 4" in report.divergences[-1]
    assert "on 0/0#1; " in report.divergences[-1] and "on 1/0#1; " in report.divergences[-1]


def test_the_odd_replica_of_three_is_healed_if_that_is_asked_for(tmp_path: Path) -> None:
    with job(tmp_path, 3) as made:
        members = made.run(
            lambda m: _corrupted(m, 3, "2"), check_replicas=1, on_divergence="heal", digest="never"
        )
    assert [fetch[0] for fetch in fetches(tmp_path)] == ["2"]
    assert parameters(members[0].model) == parameters(members[1].model)
    assert parameters(members[0].model) == parameters(members[2].model)


def test_replica_comparison_interval_depends_on_its_cost(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        for txn in member.manager.transactions(_loader(), max_steps=70):
            with txn:
                _loss(member, txn.batch).backward()

    with job(tmp_path, 2) as made:
        made.run(work, digest="never")
        made.audit()
    taken = [e["event"] for e in events(tmp_path, "prepared") if e["event"]["digest"]]
    assert len(taken) >= 4, "at the steps 0, 16, …, on two ranks"
    with job(tmp_path / "bad", 1) as made, pytest.raises(FftError, match="power of 2"):
        made.member("0", check_replicas=3)


# --- learners -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("learners", "waits"), [("auto", True), ("always", False)])
def test_joiner_applies_gradients_edited_by_weights_correctly(
    tmp_path: Path, learners: Any, waits: bool
) -> None:
    """With manual decay the gradients depend on the weights, and a joiner's weights are not yet the
    job's."""
    started: list[Member] = []
    settings = {"learners": learners, "digest": "commit" if waits else "never"}

    def body(member: Member, by_weights: bool) -> None:
        for parameter in member.model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach() if by_weights else parameter.grad, alpha=0.1)

    def work(member: Member) -> None:
        loader = _loader()
        for txn in member.manager.transactions(loader, max_steps=60):
            with txn:
                _loss(member, txn.batch).backward()
                body(member, by_weights=waits)
            if member.group == "0" and txn.step == 5:
                started.append(made.member("1", **settings).start(work))

    with job(tmp_path, 1) as made:
        first = made.member("0", **settings).start(work)
        first.end()
        started[0].end()
        for member in (first, started[0]):
            if member.error is not None:
                raise member.error
        made.audit()
    assert parameters(first.model) == parameters(started[0].model)
    learned = [r["learners"] for r in records(tmp_path) if r["kind"] == "epoch" and r["learners"]]
    assert learned == ([] if waits else [["1"]])
    assert any(line.get("note") == "consumed" for line in read_lines(tmp_path))


# --- the end --------------------------------------------------------------------------------------


def test_a_last_txn_that_is_rolled_back_is_not_the_last(tmp_path: Path) -> None:
    """The leavers of that txn vote again; a group that dies in it loses no sample."""
    seen: dict[str, list[int]] = {}

    def work(member: Member) -> None:
        with suppress(KeyboardInterrupt):
            train(member)

    def train(member: Member) -> None:
        loader = fft.CursorLoader(_Few(10), batch_size=1, shuffle=False, data_epochs=1)
        for txn in member.manager.transactions(loader):
            with txn:
                if member.group == "2" and txn.step == 2:
                    raise KeyboardInterrupt  # it leaves without a message, in the last txn of all
                _loss(member, txn.batch.repeat(4)).backward()
            if txn.committed and txn.contributes:
                seen.setdefault(member.group, []).extend(txn.batch.tolist())

    with job(tmp_path, 3) as made:
        made.run(work)
        made.audit()
    assert sorted(chain.from_iterable(seen.values())) == list(range(10))


def test_all_groups_see_the_end_of_a_pass_at_the_same_txn(tmp_path: Path) -> None:
    """One step is skipped and one is rolled back; there are 7 batches in a data epoch, 2 at a time.

    The last data epoch has one too few for both groups. Batches of the skipped step are not
    counted.
    """
    seen: dict[str, list[tuple[int, int]]] = {"0": [], "1": []}

    def work(member: Member) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        member.manager.register(member.model, member.optimizer, scaler=scaler)
        member.manager.sync_gradients(member.model)
        loader = fft.CursorLoader(_Few(14), batch_size=2, data_epochs=3)
        for tries, txn in enumerate(member.manager.transactions(loader)):
            with txn:
                if tries == 2 and member.group == "1":
                    raise ValueError("once")
                loss = member.model(batch_of(txn.batch)).square().mean()
                scaler.scale(loss * torch.inf if tries == 1 else loss).backward()
            if txn.committed and txn.ends_data_epoch:
                seen[member.group].append((member.manager.batches_committed(), txn.data_epoch))

    with job(tmp_path, 2) as made:
        made.run(work, register=False, digest="never")
        made.audit()
    assert seen["0"] == seen["1"] == [(6, 1), (12, 2), (18, 3)]
    commits = [r for r in records(tmp_path) if r["kind"] == "commit"]
    assert sum(r["skip"] for r in commits) == 1 and len(commits) == 10


def test_data_without_epochs_refuse_ends_data_epoch(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        for txn in member.manager.transactions([torch.arange(4)] * 4, max_steps=1):
            with txn:
                _loss(member, txn.batch).backward()
            with pytest.raises(FftError, match=r"no data epochs; pass an fft"):
                txn.ends_data_epoch  # noqa: B018

    with job(tmp_path, 1) as made:
        made.run(work)


class _Few(Numbers):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count


def test_transactions_after_the_end_raise_an_error(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        for txn in member.manager.transactions(_loader(), max_steps=2):
            with txn:
                _loss(member, txn.batch).backward()
        with pytest.raises(FftError, match=r"ended at step 2.*Call transactions\(\) once"):
            next(iter(member.manager.transactions(_loader(), max_steps=4)))

    with job(tmp_path, 2) as made:
        made.run(work)


# --- mistakes -------------------------------------------------------------------------------------


def _fails(tmp_path: Path, body: Any, prepare: Any = None) -> str:
    def work(member: Member) -> None:
        if prepare is not None:
            prepare(member)
        for txn in member.manager.transactions(_loader(), max_steps=3):
            with txn:
                body(member, txn)

    with job(tmp_path, 2) as made, pytest.raises(StepRetriesExceeded) as caught:
        made.run(work)
    return str(caught.value.__cause__)


def test_a_body_that_leaves_before_its_backward_is_a_mistake(tmp_path: Path) -> None:
    def body(member: Member, txn: fft.Transaction) -> None:
        if txn.step < 1:
            _loss(member, txn.batch).backward()

    assert "reduced no gradient across the groups" in _fails(tmp_path, body)


def test_a_backward_that_failed_and_was_caught_is_never_committed(tmp_path: Path) -> None:
    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of memory")

    def body(member: Member, txn: fft.Transaction) -> None:
        x = batch_of(txn.batch)
        _loss(member, txn.batch).backward()
        with suppress(RuntimeError):
            member.model.last(Boom.apply(member.model.first(x))).sum().backward()

    assert "has not come to its end" in _fails(tmp_path, body)


def test_gradients_left_in_no_sync_are_never_committed(tmp_path: Path) -> None:
    def body(member: Member, txn: fft.Transaction) -> None:
        _loss(member, txn.batch).backward()
        with member.manager.no_sync():
            _loss(member, txn.batch).backward()

    assert "never reduced" in _fails(tmp_path, body)


def test_a_scheduler_stepped_in_the_body_is_refused(tmp_path: Path) -> None:
    schedules: dict[str, Any] = {}

    def prepare(member: Member) -> None:
        schedule = torch.optim.lr_scheduler.StepLR(member.optimizer, 2)
        schedules[member.group] = schedule
        member.manager.register(member.model, member.optimizer, schedule)

    def body(member: Member, txn: fft.Transaction) -> None:
        _loss(member, txn.batch).backward()
        schedules[member.group].step()

    assert "remove the call" in _fails(tmp_path, body, prepare)


def test_a_scheduler_stepped_between_two_txns_is_refused(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        schedule = torch.optim.lr_scheduler.StepLR(member.optimizer, 2)
        member.manager.register(member.model, member.optimizer, schedule)
        for txn in member.manager.transactions(_loader(), max_steps=3):
            with txn:
                _loss(member, txn.batch).backward()
            schedule.step()

    with job(tmp_path, 1) as made, pytest.raises(FftError, match=r"remove scheduler\.step"):
        made.run(work)


def test_gradients_dropped_after_backward_are_a_mistake(tmp_path: Path) -> None:
    def body(member: Member, txn: fft.Transaction) -> None:
        _loss(member, txn.batch).backward()
        member.optimizer.zero_grad()

    assert "no parameter of a registered optimizer has one" in _fails(tmp_path, body)


@pytest.mark.parametrize("how", ["break", "continue", "return"])
def test_step_function_left_before_backward_raises_in_the_loop(tmp_path: Path, how: str) -> None:
    """Python ignores the exceptions of an iterator that a loop drops, so the error comes before
    that."""
    tries: list[int] = []

    def work(member: Member) -> None:
        for txn in member.manager.transactions(_loader(), max_steps=3):
            with txn:
                tries.append(txn.step)
                if txn.step == 1:
                    if how == "break":
                        break
                    if how == "continue":
                        continue
                    return
                _loss(member, txn.batch).backward()

    with job(tmp_path, 1) as made, pytest.raises(StepRetriesExceeded) as caught:
        made.run(work)
    assert tries == [0, 1], "a replay would end the same way"
    place = place_of(caught.value)
    assert place.type == "FftError" and place.where.split(":")[0] == __file__
    assert "`break`" in place.message and "Leave the loop between two" in place.text


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_backward_outside_of_a_transaction_is_refused(tmp_path: Path, when: str) -> None:
    def evaluate(member: Member, now: str) -> None:
        if now == when:
            with pytest.raises(FftError, match=r"backward\(\) of a Noisy outside of a transaction"):
                _loss(member, torch.arange(4)).backward()
            with member.manager.no_sync():
                _loss(member, torch.arange(4)).backward()
            member.optimizer.zero_grad()

    def work(member: Member) -> None:
        evaluate(member, "before")
        for txn in member.manager.transactions(_loader(), max_steps=2):
            with txn:
                _loss(member, txn.batch).backward()
            evaluate(member, "between")
        evaluate(member, "after")

    with job(tmp_path, 2) as made:
        members = made.run(work)
        made.audit()
    assert parameters(members[0].model) == parameters(members[1].model)


def test_a_mistake_is_placed_at_the_with_statement(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        for txn in member.manager.transactions(_loader(), max_steps=3):
            with txn:
                pass

    with job(tmp_path, 1) as made, pytest.raises(StepRetriesExceeded) as caught:
        made.run(work)
    place = place_of(caught.value)
    assert place.where.split(":")[0] == __file__ and place.where.endswith(" work")
    assert "with txn:" in place.text


def test_unregistered_optimizer_that_steps_in_a_body_is_refused(tmp_path: Path) -> None:
    def body(member: Member, txn: fft.Transaction) -> None:
        _loss(member, txn.batch).backward()
        torch.optim.SGD(member.model.parameters(), lr=0.1).step()

    assert "an unregistered optimizer" in _fails(tmp_path, body)


def test_a_foreign_optimizer_of_other_parameters_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(member: Member) -> None:
        own = nn.Parameter(torch.zeros(2))
        other, known = torch.optim.SGD([own], lr=0.1), torch.optim.Adam([own], lr=0.1)
        extra = {"known": known}
        member.manager.register(member.model, member.optimizer, extra=extra)
        for txn in member.manager.transactions(_loader(), max_steps=3):
            with txn:
                _loss(member, txn.batch).backward()
            own.grad = torch.ones(2)
            known.step()
            other.step()

    with job(tmp_path, 1) as made:
        made.run(work)
    output = [
        r.getMessage() for r in caplog.records if "of an unregistered optimizer" in r.getMessage()
    ]
    assert len(output) == 1 and output[0].startswith("SGD.step()")


def test_suspended_loop_of_a_closed_manager_checks_no_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(member: Member) -> None:
        txns = member.manager.transactions(_loader(), max_steps=3)
        with next(txns) as txn:
            _loss(member, txn.batch).backward()
        member.manager.shutdown()
        torch.optim.SGD(member.model.parameters(), lr=0.1).step()

    with job(tmp_path, 1) as made:
        made.run(work)
    assert not any("unregistered optimizer" in r.getMessage() for r in caplog.records)


def test_replicas_are_compared_in_the_last_txn_without_being_due(tmp_path: Path) -> None:
    with job(tmp_path, 2) as made:
        members = [made.member(str(g), check_replicas=64, digest="never") for g in range(2)]
        for member in members:
            member.start(lambda m: _corrupted(m, STEPS - 2, "1"))
        for member in members:
            member.end()
            assert isinstance(member.error, Diverged), member.error


def test_unsteppable_or_unsendable_state_is_refused_at_the_start(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"a": object()}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    with job(tmp_path, 1) as made:
        member = made.member("0", register=False)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(member.optimizer)
        with pytest.raises(FftError, match=r"ReduceLROnPlateau.step\(\) needs an argument"):
            member.manager.register(member.model, member.optimizer, plateau)
        lbfgs = torch.optim.LBFGS(member.model.parameters())
        with pytest.raises(FftError, match=r"LBFGS.step\(\) needs an .*step\(closure\)"):
            member.manager.register(member.model, lbfgs)
        member.manager.register(member.model, member.optimizer, extra={"odd": Odd()})
        with pytest.raises(FftError, match=r"cannot be sent.*extra\[odd\]"):
            next(iter(member.manager.transactions(_loader())))


def test_a_mistake_on_commit_is_raised(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        member.manager.on_commit(lambda: {}["missing"])
        for txn in member.manager.transactions(_loader(), max_steps=3):
            with txn:
                _loss(member, txn.batch).backward()

    with job(tmp_path, 1) as made, pytest.raises(KeyError, match="missing"):
        made.run(work)


# --- learners, again ------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["data", "unscale"])
def test_edits_unseen_by_torch_are_detected_for_a_joiner(tmp_path: Path, how: str) -> None:
    started: list[Member] = []

    def work(member: Member) -> None:
        # a joiner's scale is not the job's until its state has arrived
        scaler = Scaler("cpu", init_scale=2.0 ** (4 + 4 * int(member.group)), enabled=how != "data")
        member.manager.register(
            member.model, member.optimizer, scaler=scaler, generators=[member.model.generator]
        )
        for txn in member.manager.transactions(_loader(), max_steps=60):
            with txn:
                scaler.scale(_loss(member, txn.batch)).backward()
                if how == "unscale":
                    scaler.unscale_(member.optimizer)
                else:
                    for parameter in member.model.parameters():
                        assert parameter.grad is not None
                        parameter.grad.data.add_(parameter.data, alpha=0.1)
            if member.group == "0" and txn.step == 5:
                started.append(made.member("1", check_replicas=1).start(work))

    with job(tmp_path, 1) as made:
        first = made.member("0", check_replicas=1).start(work)
        first.end()
        started[0].end()
        for member in (first, started[0]):
            if member.error is not None:
                raise member.error
        made.audit()
    assert parameters(first.model) == parameters(started[0].model)

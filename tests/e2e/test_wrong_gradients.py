"""Tests of gradients that a fault changes after their reduction: no commit applies them.

Real groups run in threads over gloo. One bit of a gradient is flipped in the memory of one rank,
which then votes like the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import Job, Member, Numbers, aborts, batch_of, job, parameters, records

import fft
from fft.errors import Diverged, FftError, GradientsDiffer, StepRetriesExceeded
from fft.messages.protocol import decode_record
from fft.trace.course import named_by_all
from fft.trace.history import History

STEPS, BAD = 6, 3
QUICK = {"pause": 0.01}


def history_of(*found: dict[str, Any]) -> History:
    """Return the history of these records."""
    history = History()
    for record in found:
        history.take_record(decode_record(json.dumps(record).encode()), 0.0)
    return history


def _flip(tensor: torch.Tensor, bit: int = 12) -> None:
    """Flip one bit of the first element, unseen by torch's version counters."""
    tensor.data.view(torch.int32).reshape(-1)[0] ^= 1 << bit


def _train(member: Member, is_wrong: Callable[[Member, int], bool]) -> None:
    loader = fft.CursorLoader(Numbers(), batch_size=4, seed=1)
    for txn in member.manager.transactions(loader, STEPS):
        with txn:
            x = batch_of(txn.batch)
            member.model(x).sub(x.mean(1, keepdim=True)).square().mean().backward()
            if is_wrong(member, txn.step):
                _flip(member.model.first.weight.grad)


def _run(made: Job, is_wrong: Callable[[Member, int], bool]) -> list[BaseException | None]:
    given = {"check_replicas": 1, "timeouts": QUICK}
    members = [made.member(str(g), **given) for g in range(made.groups)]
    for member in members:
        member.start(lambda member: _train(member, is_wrong))
    for member in members:
        member.end()
    return [member.error for member in members]


def test_flipped_gradient_of_two_groups_is_replayed_to_the_same_bits(tmp_path: Path) -> None:
    left = [1]

    def once(member: Member, step: int) -> bool:
        is_due = member.group == "1" and step == BAD and bool(left[0])
        left[0] -= is_due
        return is_due

    with job(tmp_path / "undisturbed", 2) as made:
        assert _run(made, lambda member, step: False) == [None, None]
        expected = [parameters(member.model) for member in made.members]
        assert not aborts(made.traces)
    with job(tmp_path / "flipped", 2) as made:
        assert _run(made, once) == [None, None]
        assert [parameters(member.model) for member in made.members] == expected
        (abort,) = aborts(made.traces)
        made.audit()
    assert (abort["code"], abort["accused"], abort["step"]) == ("gradients_differ", [], BAD)
    assert "0/0#1" in abort["cause"] and "1/0#1" in abort["cause"]


def test_lasting_difference_between_two_groups_ends_both_and_names_neither(tmp_path: Path) -> None:
    with job(tmp_path, 2) as made:
        for error in _run(made, lambda member, step: member.group == "1" and step == BAD):
            assert isinstance(error, StepRetriesExceeded), repr(error)
            assert isinstance(error.__cause__, GradientsDiffer)
            assert "the reduced gradients of replicas differ" in str(error)
    found = [r for r in records(tmp_path) if r["code"] == "gradients_differ"]
    assert len(found) == 8 and not any(r["accused"] for r in found)


def test_one_of_two_groups_that_cannot_repeat_its_gradients_is_named(tmp_path: Path) -> None:
    attempts = [0]

    def is_wrong(member: Member, step: int) -> bool:
        if member.group != "1" or step != BAD:
            return False
        attempts[0] += 1
        _flip(member.model.first.weight.grad, bit=attempts[0])
        return False

    with job(tmp_path, 2) as made:
        good, bad = _run(made, is_wrong)
        assert good is None and made.members[0].manager.current_step() == STEPS
        assert isinstance(bad, StepRetriesExceeded) and isinstance(bad.__cause__, GradientsDiffer)
        made.audit()
    first, second, *later = [r for r in records(tmp_path) if r["code"] == "gradients_differ"]
    assert first["accused"] == second["accused"] == [] and len(later) == 6
    assert all([who[0] for who in r["accused"]] == ["1"] for r in later)
    assert "1/0#1 could not repeat its own" in later[0]["cause"]
    history = history_of(first, second, *later[:2])
    assert named_by_all(history.course.run, 3) == ("1", 0), (
        "the diagnosis starts after four rollbacks"
    )


def test_groups_that_both_compute_other_gradients_each_time_are_not_named(tmp_path: Path) -> None:
    """The step function is not reproducible, and group 1 is wrong in the same way each time."""
    noise = iter(range(1, 1000))

    def work(member: Member) -> None:
        loader = fft.CursorLoader(Numbers(), batch_size=4, seed=1)
        for txn in member.manager.transactions(loader, STEPS):
            with txn:
                part = next(noise) * 1e-3 if txn.step == BAD else 0.0
                loss = member.model(batch_of(txn.batch)).square().mean()
                (loss + part * sum(p.sum() for p in member.model.parameters())).backward()
                if member.group == "1" and txn.step == BAD:
                    for parameter in member.model.parameters():
                        parameter.grad.fill_(1.0)

    with job(tmp_path, 2) as made:
        for group in range(2):
            made.member(str(group), check_replicas=1, timeouts=QUICK).start(work)
        for member in made.members:
            member.end()
            assert isinstance(member.error, StepRetriesExceeded), repr(member.error)
    found = [r for r in records(tmp_path) if r["code"] == "gradients_differ"]
    assert [r["accused"] for r in found] == [[]] * 8


def test_divergent_rank_of_three_is_named_and_the_others_continue(tmp_path: Path) -> None:
    with job(tmp_path, 3) as made:
        errors = _run(made, lambda member, step: member.group == "1" and step == BAD)
        assert errors[0] is errors[2] is None
        assert isinstance(errors[1], StepRetriesExceeded), repr(errors[1])
        assert parameters(made.members[0].model) == parameters(made.members[2].model)
        made.audit()
    wrong = [r for r in records(tmp_path) if r["code"] == "gradients_differ"]
    history = history_of(*wrong)
    assert len(wrong) == 8
    assert all(rollback.named == {("1", 0)} for rollback in history.course.run), "for the diagnosis"


@pytest.mark.parametrize("is_buffer", [False, True], ids=["parameter", "buffer"])
def test_flipped_bit_of_the_state_ends_the_job_at_the_next_vote(
    is_buffer: bool, tmp_path: Path
) -> None:
    """A majority of two does not exist, so no rank fetches."""

    def work(member: Member) -> None:
        member.model.register_buffer("scale", torch.ones(4))

        def spoil() -> None:
            if member.group == "1" and member.manager.current_step() == BAD:
                _flip(member.model.scale if is_buffer else member.model.first.weight)

        member.manager.on_commit(spoil)
        _train(member, lambda member, step: False)

    with job(tmp_path, 2) as made:
        given = {"check_replicas": 1, "check_buffers": is_buffer, "digest": "never"}
        members = [made.member(str(g), **given) for g in range(2)]
        for member in members:
            member.start(work)
        for member in members:
            member.end()
            assert isinstance(member.error, Diverged), repr(member.error)
    assert max(r["step"] for r in records(tmp_path)) == BAD, "no step was committed after it"


def test_gradients_changed_alike_by_all_groups_commit(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        loader = fft.CursorLoader(Numbers(), batch_size=4, seed=1)
        for txn in member.manager.transactions(loader, STEPS):
            with txn:
                member.model(batch_of(txn.batch)).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(member.model.parameters(), 0.01)

    with job(tmp_path, 2) as made:
        made.run(work, check_replicas=1)
        made.audit()
    assert not aborts(tmp_path)


def test_gradients_changed_by_the_batch_of_a_group_are_refused(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        loader = fft.CursorLoader(Numbers(), batch_size=4, seed=1)
        for txn in member.manager.transactions(loader, STEPS):
            with txn:
                x = batch_of(txn.batch)
                member.model(x).square().mean().backward()
                for parameter in member.model.parameters():
                    parameter.grad.mul_(x.mean())

    with job(tmp_path, 2) as made, pytest.raises(FftError, match="differs between the groups"):
        made.run(work, check_replicas=1, timeouts=QUICK)

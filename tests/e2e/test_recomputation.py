"""Tests of steps that are computed twice: gradients that differ before their reduction are found.

Real groups run in threads over gloo. A wrong gradient is a term that only some attempts add to the
loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import Job, Member, Numbers, aborts, batch_of, job, parameters

import fft
from fft.errors import ConfigError, GradientsNotReproducible, StepRetriesExceeded
from fft.messages.effects import StartTxn
from fft.messages.protocol import Token
from fft.trace.run import Run
from fft.train.gradients.recomputation import Recomputation, Recompute

STEPS, EVERY = 5, 2
DUE = [0, 2, 4]


def train(made: Job, wrong: dict[int, Sequence[int]] | None = None, **settings: Any) -> None:
    """Train all groups; group 1 computes the attempts ``wrong[step]`` with a wrong gradient."""
    attempts: Counter[int] = Counter()

    def work(member: Member) -> None:
        loader = fft.CursorLoader(Numbers(), batch_size=4, seed=1)
        for txn in member.manager.transactions(loader, STEPS):
            with txn:
                x = batch_of(txn.batch)
                loss = member.model(x).sub(x.mean(1, keepdim=True)).square().mean()
                if member.group == "1":
                    attempts[txn.step] += 1
                    if attempts[txn.step] in (wrong or {}).get(txn.step, ()):
                        # the wrong bit is another one each time
                        part = attempts[txn.step] * 1e-3
                        loss = loss + part * sum(p.sum() for p in member.model.parameters())
                loss.backward()

    for group in range(made.groups):
        made.member(str(group), recompute_every=EVERY, **settings)
    for member in made.members:
        member.start(work)
    for member in made.members:
        member.end()


def final(made: Job) -> list[list[float]]:
    """Return the parameters, which are equal on all groups without an error."""
    assert not any(member.error for member in made.members), [m.error for m in made.members]
    first, *others = [parameters(member.model) for member in made.members]
    assert all(each == first for each in others)
    return first


def codes(made: Job) -> list[tuple[int, str, int]]:
    """Return step, code and number of accused ranks of each rollback."""
    return [(r["step"], r["code"], len(r["accused"])) for r in aborts(made.traces)]


def undisturbed(folder: Path) -> list[list[float]]:
    """Return the parameters after a run without recomputation."""
    with job(folder, 2) as made:
        made.run(lambda member: member.train(STEPS))
        return final(made)


def test_recomputed_steps_have_the_bits_of_a_run_without_and_are_no_faults(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "plain")
    with job(tmp_path / "recomputed", 2) as made:
        train(made)
        assert final(made) == expected
        assert sorted({(step, code) for step, code, _ in codes(made)}) == [
            (step, "recomputed") for step in DUE
        ]
        made.audit()
        assert not Run(made.traces).course.faults


@pytest.mark.parametrize("attempt", [1, 2])
def test_one_wrong_gradient_is_found_before_the_commit_and_names_its_rank(
    attempt: int, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path / "plain")
    with job(tmp_path / "wrong", 2) as made:
        train(made, {2: [attempt]})
        assert final(made) == expected
        (found,) = [r for r in aborts(made.traces) if r["code"] == "not_reproducible"]
        assert found["step"] == 2 and [who[0] for who in found["accused"]] == ["1"]
        made.audit()


@pytest.mark.long
def test_rank_with_irreproducible_gradients_stops_and_others_continue(
    tmp_path: Path,
) -> None:
    with job(tmp_path, 2) as made:
        train(made, {2: range(1, 100)})
        good, bad = made.members
        assert good.error is None and good.manager.current_step() == STEPS
        assert isinstance(bad.error, StepRetriesExceeded)
        assert isinstance(bad.error.__cause__, GradientsNotReproducible)
        assert "not deterministic" in str(bad.error.__cause__)
        made.audit()


def test_recomputation_is_refused_where_groups_take_local_steps(tmp_path: Path) -> None:
    with job(tmp_path, 1) as made, pytest.raises(ConfigError, match="recompute_every=…"):
        made.member("0", recompute_every=EVERY, spec="local_sgd", register=False)


# --- the comparison alone ---


def plan(txn: int, members: tuple[str, ...] = ("0", "1")) -> StartTxn:
    """Return attempt ``txn`` at step 4."""
    index = members.index("0")
    return StartTxn(Token(txn, 1), 4, "x", 8, index, len(members), members, 0)


def attempt(of: Recomputation, at: StartTxn, *buckets: float) -> None:
    """Compute an attempt whose buckets hold one value each."""
    of.begin(at)
    for number, value in enumerate(buckets):
        of.before_reduction(torch.full((4,), value), f"bucket {number}")


def test_attempt_that_was_cut_short_is_not_compared() -> None:
    each = Recomputation(2)
    attempt(each, plan(1), 1.0)
    attempt(each, plan(2), 1.0, 2.0)
    with pytest.raises(Recompute):
        each.compare()
    attempt(each, plan(3), 1.0, 2.0)
    each.compare()


def test_attempts_with_other_members_are_not_compared() -> None:
    each = Recomputation(2)
    attempt(each, plan(1), 1.0)
    attempt(each, plan(2, ("0",)), 2.0)
    with pytest.raises(Recompute):
        each.compare()


def test_attempts_that_differ_name_the_number_of_buckets() -> None:
    each = Recomputation(2)
    attempt(each, plan(1), 1.0, 2.0)
    attempt(each, plan(2), 1.0, 3.0)
    with pytest.raises(GradientsNotReproducible, match="1 of 2 buckets"):
        each.compare()


def test_kernels_that_may_vary_are_refused() -> None:
    each = Recomputation(2)
    each.begin(plan(1))
    with pytest.raises(ConfigError, match="use_deterministic_algorithms"):
        each.before_reduction(torch.empty(4, device="meta"), "a bucket")


def test_attempt_equals_any_earlier_one() -> None:
    each = Recomputation(2)
    attempt(each, plan(1), 1.0)
    attempt(each, plan(2), 3.0)
    with pytest.raises(GradientsNotReproducible):
        each.compare()
    attempt(each, plan(3), 1.0)
    each.compare()


def test_gradients_that_use_other_results_accuse_no_rank() -> None:
    each = Recomputation(2)
    for txn, second in ((1, 1.0), (2, 2.0)):
        attempt(each, plan(txn), 1.0)
        each.results_used()
        each.before_reduction(torch.full((4,), second), "a later bucket")
        with pytest.raises(Recompute):
            each.compare()
    for txn in range(3, 9):
        attempt(each, plan(txn), 1.0)
        each.before_reduction_by_script(torch.full((4,), float(txn)))
        with pytest.raises(GradientsNotReproducible if txn in (3, 8) else Recompute):
            each.compare()


def test_whole_attempts_that_reduce_other_tensors_are_not_computed_forever() -> None:
    each = Recomputation(2)
    attempt(each, plan(1), 1.0)
    with pytest.raises(Recompute):
        each.compare()
    attempt(each, plan(2), 1.0, 2.0)
    with pytest.raises(GradientsNotReproducible, match="different tensors"):
        each.compare()


def repeated(of: Recomputation, at: StartTxn, result: str, *buckets: float) -> bool | None:
    """Compute an attempt that follows a refused one, and return whether it repeats that."""
    of.repeat()
    attempt(of, at, *buckets)
    of.compare()
    return of.repeats(result)


def test_attempt_after_a_refused_one_is_compared_by_inputs_and_result() -> None:
    each = Recomputation(0)
    each.is_supported = True
    attempt(each, plan(1), 1.0)
    assert each.repeats("a") is None
    assert repeated(each, plan(2), "a", 1.0) is None, "the inputs of the first are not known"
    assert repeated(each, plan(3), "a", 1.0) is True
    assert repeated(each, plan(4), "a", 2.0) is False, "another input with the same result"
    assert repeated(each, plan(5), "b", 2.0) is False
    assert repeated(each, plan(6), "b", 2.0) is True
    assert repeated(each, plan(7, ("0",)), "b", 2.0) is None, "other members"
    attempt(each, plan(8, ("0",)), 2.0)
    assert each.repeats("b") is None, "the attempt before was not refused for its gradients"


def test_kernels_that_may_vary_are_not_compared_with_a_refused_attempt() -> None:
    each = Recomputation(0)
    each.is_supported = True
    attempt(each, plan(1), 1.0)
    each.repeats("a")
    for txn in (2, 3):
        each.repeat()
        each.begin(plan(txn))
        each.before_reduction(torch.empty(4, device="meta"), "a bucket")
        each.compare()
        assert each.repeats("b") is None


@pytest.mark.parametrize(
    "other",
    [
        {"slice": 9},
        {"participants": 3},
        {"members": ("0", "2")},
        {"step": 6},
    ],
    ids=["slice", "participants", "members", "step"],
)
def test_attempts_at_other_work_are_not_compared(other: dict[str, Any]) -> None:
    def changed() -> StartTxn:
        at = plan(2)
        if "slice" in other:
            return replace(at, cursor=other["slice"])
        return replace(at, **other)

    each = Recomputation(2)
    attempt(each, plan(1), 1.0)
    with pytest.raises(Recompute):
        each.compare()
    attempt(each, changed(), 2.0)
    with pytest.raises(Recompute):
        each.compare()


def test_accumulation_without_no_sync_accuses_the_wrong_rank_only(tmp_path: Path) -> None:
    """The second reduction of a step contains the result of the first one."""
    attempts: Counter[int] = Counter()

    def work(member: Member) -> None:
        loader = fft.CursorLoader(Numbers(), batch_size=4, seed=1)
        for txn in member.manager.transactions(loader, STEPS):
            with txn:
                attempts[txn.step] += member.group == "2"
                is_wrong = member.group == "2" and txn.step == 2 and attempts[2] == 2
                for part in range(2):
                    x = batch_of(txn.batch)
                    loss = member.model(x).square().mean()
                    if is_wrong and part == 0:
                        loss = loss + 1e-3 * sum(p.sum() for p in member.model.parameters())
                    loss.backward()

    with job(tmp_path, 3) as made:
        made.run(work, recompute_every=EVERY)
        found = [r["accused"] for r in aborts(made.traces) if r["code"] == "not_reproducible"]
        assert all(who[0] == "2" for accused in found for who in accused), found
        final(made)


def test_wrong_gradient_is_found_before_a_communication_hook(tmp_path: Path) -> None:
    attempts: Counter[int] = Counter()

    def work(member: Member) -> None:
        def hook(state: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            return (
                member.manager.allreduce(bucket.buffer())
                .get_future()
                .then(lambda _: bucket.buffer())
            )

        member.manager.register_comm_hook(None, hook)
        loader = fft.CursorLoader(Numbers(), batch_size=4, seed=1)
        for txn in member.manager.transactions(loader, STEPS):
            with txn:
                attempts[txn.step] += member.group == "1"
                loss = member.model(batch_of(txn.batch)).square().mean()
                if member.group == "1" and txn.step == 2 and attempts[2] == 2:
                    loss = loss + 1e-3 * sum(p.sum() for p in member.model.parameters())
                loss.backward()

    with job(tmp_path, 2) as made:
        made.run(work, recompute_every=EVERY)
        (found,) = [r for r in aborts(made.traces) if r["code"] == "not_reproducible"]
        assert [who[0] for who in found["accused"]] == ["1"]
        final(made)

"""Tests of ``global_batch=``: each step has the same samples and gradient for any number of groups.

The groups are threads of one process, as in test_manager.py.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import Job, Member, Numbers, aborts, batch_of, job, notes, records
from torch import nn
from torchft.manager import WorldSizeMode

import fft
from fft.errors import FftError, OtherSettings, StepRetriesExceeded

BATCH, SLICES = 2, 3
GLOBAL_BATCH = BATCH * SLICES
"""Three batches for two groups: one of them takes two."""


class Plain(nn.Sequential):
    """A small model without randomness; all instances begin with the same weights."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.generator = torch.Generator()  # not used
        noise = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=noise) * 0.3)


def loss_of(model: nn.Module, indexes: torch.Tensor) -> torch.Tensor:
    x = batch_of(indexes)
    return model(x).sub(x.mean(1, keepdim=True)).square().mean()


def loader(samples: int | None = GLOBAL_BATCH) -> fft.CursorLoader:
    return fft.CursorLoader(Numbers(), batch_size=BATCH, seed=1, global_batch=samples)


class Trained:
    """The weights and mean losses of the steps that one group has committed."""

    def __init__(self) -> None:
        self.weights: dict[int, list[torch.Tensor]] = {}
        self.losses: dict[int, float] = {}

    def train(self, member: Member, body: Any = None, steps: int | None = None) -> None:
        for txn in member.manager.transactions(loader(), steps):
            with txn:
                losses = []
                for indexes in txn.batches:
                    if body is not None:
                        body(member, txn, len(losses))
                    losses.append(loss_of(member.model, indexes))
                    losses[-1].backward()
                mean = txn.mean(torch.stack(losses).mean().detach())
            if txn.committed:
                now = [p.detach().clone() for p in member.model.parameters()]
                self.weights[txn.step + 1], self.losses[txn.step + 1] = now, float(mean)


def dealt(traces: Path) -> dict[int, list[list[int]]]:
    """Return the items of each step, by the notes: those of group 0 first, then of group 1."""
    found: dict[int, dict[str, list[int]]] = {}
    for note in notes(traces, "consumed"):
        if note["data"]["slice"] is not None:
            found.setdefault(note["data"]["step"] + 1, {})[note["group"]] = note["data"]["items"]
    return {step: [items[g] for g in sorted(items)] for step, items in sorted(found.items())}


def reference(
    steps: dict[int, list[list[int]]], slices: int = SLICES
) -> Iterator[tuple[int, nn.Module, float]]:
    """Train in one process: the same items, in the same order of additions.

    A group adds the gradients of its batches; then the sums, each divided by the number of batches,
    are added. So the bits are those of the job: two numbers have one order of addition.
    """
    model, data = Plain(), loader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step, by_group in steps.items():
        sums, losses = [], []
        for items in by_group:
            model.zero_grad()
            for item in items:
                losses.append(loss_of(model, data[item]))
                losses[-1].backward()
            sums.append([p.grad * (1.0 / slices) for p in model.parameters()])  # type: ignore[operator]
        for parameter, *parts in zip(model.parameters(), *sums, strict=True):
            parameter.grad = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        optimizer.step()
        schedule.step()
        yield step, model, sum(x.item() for x in losses) / len(losses)


def assert_as_reference(traces: Path, trained: Trained) -> dict[int, list[list[int]]]:
    """Compare each committed step with the reference, bit by bit, and return its items."""
    steps = dealt(traces)
    assert list(steps) == sorted(trained.weights) == list(range(1, len(steps) + 1))
    for step, model, mean in reference(steps):
        for expected, found in zip(model.parameters(), trained.weights[step], strict=True):
            assert torch.equal(expected, found), f"step {step}"
        # three float32 losses, added in another order: 3 roundings of 2**-24 on each side
        assert trained.losses[step] == pytest.approx(mean, rel=6 * 2**-24)
    items = [item for by_group in steps.values() for each in by_group for item in each]
    assert sorted(items) == list(range(SLICES * len(steps)))
    return steps


def commits(traces: Path) -> list[tuple[int, int]]:
    """Return (slices that it took, batches that it counts) of each commit."""
    found, was = [], (0, 0)
    for record in records(traces):
        now = record["cursor"], record["batches"]
        if record["kind"] == "commit":
            found.append((now[0] - was[0], now[1] - was[1]))
        was = now
    return found


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path, 2) as made:
        yield made


class Course:
    """Two groups with two transient faults; group 1 leaves, and comes back as a new process."""

    def __init__(self, made: Job) -> None:
        self.trained = {name: Trained() for name in ("0", "1", "1 again")}
        self._job, self._failed, self._last = made, set[tuple[str, int]](), list[int]()
        self._came_back = threading.Event()

    def run(self) -> None:
        first, leaver = self._start("0"), self._start("1")
        leaver.end()
        again = self._start("1", "1 again")
        self._came_back.set()
        for member in (first, again):
            member.end()
            assert member.error is None, repr(member.error)

    def _start(self, group: str, name: str = "") -> Member:
        member, trained = self._job.member(group, model=Plain()), self.trained[name or group]
        return member.start(lambda m: trained.train(m, self._body))

    def _body(self, member: Member, txn: fft.Transaction, taken: int) -> None:
        now = member.group, txn.step
        if {("0", 2): 1, ("1", 4): 0}.get(now) == taken and now not in self._failed:
            self._failed.add(now)
            raise RuntimeError(f"planned in batch {taken} of group {member.group}")
        if now == ("1", 6):
            member.manager.drain()
        if now == ("0", 10):
            assert self._came_back.wait(60)
        if len(self.trained["1 again"].weights) > 4 and not self._last:
            self._last.append(txn.step + 2)  # a step that no group has begun
        if self._last and txn.step >= self._last[0]:
            member.manager.drain()


def test_steps_keep_batch_and_gradient_while_groups_fail_leave_and_return(two: Job) -> None:
    course = Course(two)
    course.run()
    two.audit()
    assert set(commits(two.traces)) == {(SLICES, SLICES)}
    steps = assert_as_reference(two.traces, course.trained["0"])
    shapes = [[len(items) for items in by_group] for by_group in steps.values()]
    assert shapes[:7] == [[2, 1]] * 7, "a fault that is rolled back changes nothing"
    assert shapes[7] == [3] and shapes[-1] == [2, 1], "the work was spread again"
    assert len(aborts(two.traces)) >= 2
    for step, mine in course.trained["1 again"].weights.items():
        theirs = course.trained["0"].weights[step]
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_two_batches_of_two_groups_have_the_bits_of_one_group() -> None:
    """Two numbers have one order of addition, and a division by two rounds nothing."""
    both = {step: [[2 * step], [2 * step + 1]] for step in range(8)}
    one = {step: [[2 * step, 2 * step + 1]] for step in range(8)}
    for (_, model, _), (_, other, _) in zip(reference(both, 2), reference(one, 2), strict=True):
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
        )


def global_batch(member: Member, samples: int | None, steps: int = 2) -> None:
    """Train with a global batch of so many samples."""
    for txn in member.manager.transactions(loader(samples), steps):
        with txn:
            for indexes in txn.batches:
                loss_of(member.model, indexes).backward()


@pytest.mark.parametrize(
    ("spec", "more", "expected"),
    [
        ("pipeline", {}, "global_batch= with spec='pipeline'"),
        ("hsdp", {"register": False}, "call manager.sync_gradients(model) before"),
        (
            "hsdp",
            {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES},
            "the mode fixes the number of groups",
        ),
    ],
)
def test_a_job_that_cannot_divide_its_steps_refuses_a_global_batch(
    tmp_path: Path, spec: str, more: dict[str, Any], expected: str
) -> None:
    with job(tmp_path, 1) as made:
        member = made.member("0", model=Plain(), spec=spec, **more)
        with pytest.raises(FftError, match=re.escape(expected)):
            global_batch(member, GLOBAL_BATCH)


def test_groups_with_different_global_batches_are_refused(two: Job) -> None:
    running, tried = threading.Event(), threading.Event()

    def waits(member: Member, txn: fft.Transaction, _: int) -> None:
        running.set()
        assert tried.wait(60)

    first = two.member("0", model=Plain(), expected_groups=1)
    first.start(lambda m: Trained().train(m, waits, steps=1))
    assert running.wait(60)
    other = two.member("1", model=Plain(), expected_groups=1)
    try:
        with pytest.raises(OtherSettings, match="slices_of_a_global_batch: 4 here, 3 there"):
            global_batch(other, 8)
    finally:
        tried.set()
    first.end()
    with pytest.raises(FftError, match="this job has begun with another global_batch"):
        global_batch(first, None)


def whole_batch(txn: fft.Transaction, model: nn.Module) -> None:
    loss_of(model, txn.batch).backward()


def twice(txn: fft.Transaction, model: nn.Module) -> None:
    for indexes in list(txn.batches):
        loss_of(model, indexes).backward()


def left_early(txn: fft.Transaction, model: nn.Module) -> None:
    for indexes in txn.batches:
        loss_of(model, indexes).backward()
        break
    txn.mean(1.0)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (whole_batch, "write `for batch in txn.batches:`"),
        (twice, "call backward() once for each of txn.batches, inside the loop"),
        (left_early, "a loop over txn.batches was left early"),
    ],
)
def test_a_step_function_that_would_miss_the_mean_ends_with_the_fix(
    tmp_path: Path, body: Callable[[fft.Transaction, nn.Module], None], expected: str
) -> None:
    with job(tmp_path, 1) as made:
        member = made.member("0", model=Plain())
        with pytest.raises(StepRetriesExceeded) as caught:
            for txn in member.manager.transactions(loader(), 2):
                with txn:
                    body(txn, member.model)
    assert expected in str(caught.value.__cause__)

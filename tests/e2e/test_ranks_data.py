"""Tests of data of groups of two ranks in threads: each sample once, over a resume and a join."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from stage import Job, Member, fetches, job
from waiting import wait_until

import fft
from fft.errors import UnequalData

GROUPS = RANKS = 2
SAVED_AT = 3
"""Step of the checkpoint."""
SAMPLES = 4
"""Samples of an item."""


class Counting:
    """A stateful loader: item ``n`` is samples ``4 n`` to ``4 n + 3``; its state is the next n."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.arange(SAMPLES) + (self.at - 1) * SAMPLES

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def opened(first: int, step: int) -> Iterator[torch.Tensor]:
    """Open the same items at any position."""
    for number in range(first, 2**62, step):
        yield torch.arange(SAMPLES) + number * SAMPLES


def streamed() -> fft.StreamLoader:
    """Return a loader of the same items without state."""
    return fft.StreamLoader(opened)


def _start(
    made: Job, group: str, work: Callable[[Member], None], spec: str = "hsdp"
) -> list[Member]:
    own = [{"spec": spec, "shard_pg": fft.ShardProcessGroupGloo()} for _ in range(RANKS)]
    members = made.ranks(group, own)
    for member in members:
        member.start(work)
    return members


def _end(members: list[Member]) -> list[int]:
    for member in members:
        member.end()
        assert member.error is None, repr(member.error)
    return sorted(sample for member in members for sample in member.consumed)


@pytest.mark.parametrize(
    ("spec", "takers"),
    [("hsdp", RANKS), pytest.param("pipeline", 1, marks=pytest.mark.long)],
    ids=["of their own", "the same"],
)
@pytest.mark.parametrize("loader", [Counting, pytest.param(streamed, marks=pytest.mark.long)])
def test_each_sample_comes_once_when_a_job_resumes_and_a_group_joins(
    tmp_path: Path, loader: Callable[[], Any], spec: str, takers: int
) -> None:
    """If the ranks of a group take the same samples, each rank gets each sample once."""
    times = RANKS // takers
    saved: dict[str, dict[str, Any]] = {}

    def save(member: Member, txn: fft.Transaction) -> None:
        if txn.step == SAVED_AT:
            saved[member.name] = member.manager.state_dict()

    def resumed(member: Member) -> None:
        member.manager.load_state_dict(saved[member.name])
        member.train(None, loader())

    with job(tmp_path / "first", GROUPS) as made:
        first = [
            _start(made, group, lambda m: m.train(SAVED_AT + 2, loader(), save), spec)
            for group in "01"
        ]
        drawn = _end([member for members in first for member in members])
        assert drawn[::times] == list(range((SAVED_AT + 2) * GROUPS * takers * SAMPLES))
        assert drawn[::times] == drawn[times - 1 :: times]
        made.audit()

    with job(tmp_path / "second", 1) as made:
        early = _start(made, "0", resumed, spec)
        wait_until(lambda: len(early[0].consumed) > 4 * SAMPLES, "group 0 goes on")
        late = _start(made, "1", lambda m: m.train(None, loader()), spec)
        wait_until(lambda: len(late[0].consumed) > 4 * SAMPLES, "group 1 takes part")
        for member in made.members:
            member.manager.drain()
        drawn = _end(made.members)
        begin = SAVED_AT * GROUPS * takers * SAMPLES
        assert drawn[::times] == list(range(begin, begin + len(drawn) // times))
        assert drawn[::times] == drawn[times - 1 :: times]
        assert {f[:2] for f in fetches(made.traces)} == {("1", 0), ("1", 1)}
        made.audit()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("odd", ["a group", "a rank of each group"])
def test_ranks_that_draw_different_data_end_before_a_step(tmp_path: Path, odd: str) -> None:
    class Odd(Counting):
        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def __iter__(self) -> Iterator[torch.Tensor]:
            for item in super().__iter__():
                yield item + 1

    def is_odd(member: Member) -> bool:
        return member.group == "1" if odd == "a group" else member.name.endswith(".1")

    with job(tmp_path, GROUPS) as made:
        for group in "01":
            _start(made, group, lambda m: m.train(4, (Odd if is_odd(m) else Counting)()))
        for member in made.members:
            member.end()
            assert isinstance(member.error, UnequalData), repr(member.error)
            text = str(member.error)
            assert "step 0 was not committed: the ranks have drawn different data (" in text
            assert 'fft.Loader(loader, sharded="group")' in text
            assert not member.consumed
        made.audit()


@pytest.mark.parametrize("kind", [pytest.param("group", marks=pytest.mark.long), "rank"])
def test_each_sample_of_a_shard_comes_once_when_a_job_resumes(
    tmp_path: Path, kind: Literal["group", "rank"]
) -> None:
    """A sample is numbered by its shard: group 1 begins at 1000, and its rank 1 at 1100."""
    saved: dict[str, dict[str, Any]] = {}

    class Shard(Counting):
        def __init__(self, member: Member) -> None:
            super().__init__()
            group, _, rank = member.name.partition(".")
            self.begin = 1000 * int(group) + (100 * int(rank) if kind == "rank" else 0)

        def __iter__(self) -> Iterator[torch.Tensor]:
            for item in super().__iter__():
                yield item + self.begin

    def work(member: Member, steps: int) -> None:
        member.train(steps, fft.Loader(Shard(member), sharded=kind), save)

    def save(member: Member, txn: fft.Transaction) -> None:
        if txn.step == SAVED_AT:
            saved.setdefault(member.name, member.manager.state_dict())

    def resumed(member: Member) -> None:
        member.manager.load_state_dict(saved[member.name])
        work(member, SAVED_AT + 2)

    drawn: list[list[int]] = []
    for name, begin in (("first", lambda m: work(m, SAVED_AT + 1)), ("second", resumed)):
        with job(tmp_path / name, GROUPS) as made:
            members = [member for group in "01" for member in _start(made, group, begin)]
            drawn.append(_end(members))
            made.audit()
    begins = [0, 100, 1000, 1100] if kind == "rank" else [0, 1000]
    each = SAMPLES * (1 if kind == "rank" else RANKS)
    steps = [range(SAVED_AT + 1), range(SAVED_AT, SAVED_AT + 2)]
    for found, taken in zip(drawn, steps, strict=True):
        numbers = range(taken.start * each, taken.stop * each)
        assert found == [begin + n for begin in begins for n in numbers]


def test_group_with_an_unrestored_loader_order_trains_no_step(tmp_path: Path) -> None:
    class Off(Counting):
        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"] + 1

    with job(tmp_path, 1) as made:
        early = _start(made, "0", lambda m: m.train(None, Counting()))
        wait_until(lambda: len(early[0].consumed) > SAMPLES, "group 0 trains")
        late = _start(made, "1", lambda m: m.train(None, Off()))
        for member in late:
            member.end()
            assert isinstance(member.error, UnequalData), repr(member.error)
            assert "Off does not continue with the same items" in str(member.error)
            assert not member.consumed
        for member in early:
            member.manager.drain()
        drawn = _end(early)
        assert drawn == list(range(len(drawn))), "group 0 has trained each sample once"
        made.audit()

"""Tests of ``start_quorum(timeout=…)`` and ``should_commit(timeout=…)``: waits that can be resumed.

Real groups run in threads, over gloo. The times belong to waits that end by themselves, and bound
nothing from above.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from stage import Job, Member, fetches, job, parameters
from waiting import wait_until

import fft
from fft.errors import FftError

STEPS = 4
SHORT = timedelta(seconds=0.3)
LIMIT_S = 60.0


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path, 2) as made:
        yield made


def test_start_quorum_names_a_missing_rank_of_its_group(two: Job) -> None:
    member = two.member("0", world_size=2, shard_pg=fft.ShardProcessGroupGloo())
    for _ in range(2):  # the call may be repeated
        with pytest.raises(TimeoutError, match=r"start_quorum\(timeout=0.3 s\).*rank 1 of this"):
            member.manager.start_quorum(timeout=SHORT)
    for _ in range(2):  # also for a monitored manager, as this one is
        member.manager.shutdown()


def test_start_quorum_names_a_missing_group_and_begins_after_it_joins(two: Job) -> None:
    early = two.member("0", min_replica_size=2)
    with pytest.raises(TimeoutError, match=r"only groups 0 of 2 are known"):
        early.manager.start_quorum(timeout=SHORT)
    late = two.member("1", min_replica_size=2)
    for member in (early, late):
        member.start(lambda m: _train(m, lambda: bool(m.manager.should_commit())))
    for member in (early, late):
        member.end()
        assert member.error is None
    two.audit()


@pytest.mark.parametrize("votes", ["yes", "no"])
def test_vote_stands_after_a_decision_timeout_until_the_next_call(two: Job, votes: str) -> None:
    let_go, in_doubt = threading.Event(), threading.Event()

    def patient(member: Member) -> None:
        def commit() -> bool:
            if member.manager.current_step() != 2 or in_doubt.is_set():
                return bool(member.manager.should_commit())
            for _ in range(2):
                with pytest.raises(TimeoutError, match=r"in doubt.*of 1/0#1"):
                    member.manager.should_commit(timeout=SHORT)
                for what in (member.manager.start_quorum, _reduce(member)):
                    with pytest.raises(FftError, match=r"step 2 is not known.*should_commit\(\)"):
                        what()
            in_doubt.set()
            return bool(member.manager.should_commit())

        _train(member, commit)

    def late(member: Member) -> None:
        def commit() -> bool:
            if member.manager.current_step() == 2 and not let_go.is_set():
                assert in_doubt.wait(LIMIT_S)
                let_go.set()
                if votes == "no":
                    member.manager.report_error(RuntimeError("not this time"))
            return bool(member.manager.should_commit())

        _train(member, commit)

    members = [two.member("0").start(patient), two.member("1").start(late)]
    for member in members:
        member.end()
        assert member.error is None
    assert parameters(members[0].model) == parameters(members[1].model)
    assert fetches(two.traces) == []
    two.audit()


def test_skip_resumes_after_a_decision_timeout(two: Job) -> None:
    let_go, skipped = threading.Event(), threading.Event()

    def skips(member: Member) -> None:
        manager = member.manager

        def commit() -> bool:
            if manager.current_step() == 2 and not skipped.is_set():
                for _ in range(2):
                    with pytest.raises(TimeoutError, match="start_quorum"):
                        manager.start_quorum(timeout=SHORT)
                skipped.set()
                let_go.set()
                return False
            return bool(manager.should_commit())

        _train(member, commit)

    def late(member: Member) -> None:
        def commit() -> bool:
            if member.manager.current_step() == 2:
                assert let_go.wait(LIMIT_S)
            return bool(member.manager.should_commit())

        _train(member, commit)

    members = [two.member("0").start(skips), two.member("1").start(late)]
    for member in members:
        member.end()
        assert member.error is None
    assert parameters(members[0].model) == parameters(members[1].model)
    report = two.audit()
    assert report.commits == STEPS + 1, "one of them is the skip"


def test_shutdown_in_doubt_ignores_a_later_decision(two: Job) -> None:
    """The manager has left: the others may commit the step, and it applies nothing."""
    decided = threading.Event()

    def leaves(member: Member) -> None:
        def commit() -> bool:
            if member.manager.current_step() < 2:
                return bool(member.manager.should_commit())
            with pytest.raises(TimeoutError):
                member.manager.should_commit(timeout=SHORT)
            before = parameters(member.model)
            member.manager.shutdown()
            decided.set()
            assert parameters(member.model) == before
            raise EndOfTest

        _train(member, commit)

    def stays(member: Member) -> None:
        def commit() -> bool:
            if member.manager.current_step() == 2:
                assert decided.wait(LIMIT_S)
            return bool(member.manager.should_commit())

        _train(member, commit)

    members = [two.member("0").start(leaves), two.member("1").start(stays)]
    for member in members:
        member.end()
    assert isinstance(members[0].error, EndOfTest) and members[1].error is None
    wait_until(lambda: members[1].manager.current_step() == STEPS, "it went on alone")
    two.audit()


class EndOfTest(Exception):
    """Raised to end the loop of a group."""


def _reduce(member: Member):  # type: ignore[no-untyped-def]
    return lambda: member.manager.allreduce(torch.ones(1))


def _train(member: Member, commit) -> None:  # type: ignore[no-untyped-def]
    """Run torchft's loop by hand, up to ``STEPS``."""
    manager = member.manager
    while manager.current_step() < STEPS:
        manager.start_quorum()
        member.optimizer.zero_grad()
        member.model(torch.ones(4, 8)).sum().backward()
        if commit():
            member.optimizer.step()

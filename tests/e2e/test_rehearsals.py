"""Tests of the first step of a process that joins a running job, which is rehearsed outside it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import JOIN_S, Job, Member, Numbers, batch_of, job, parameters, records, slices
from waiting import wait_until

import fft
from fft.messages.causes import CauseCode
from fft.trace.audit import audit_dir

LATE, ALONE = 5, 10
"""The step after which group 1 starts, and the steps that group 0 must make alone after it."""
LAST = 400
LOCAL = {"spec": "local_sgd", "register": False}

Body = Callable[[Member, fft.Transaction], None]


class Stream:
    """A loader that must be read in order."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < 4096:
            self.at += 1
            yield torch.arange(4) + 4 * self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class LateGroup:
    """A job of group 0 that group 1 joins: each runs ``body`` in its step functions."""

    def __init__(self, made: Job, body: Body, loader: Callable[[], Any], **settings: Any) -> None:
        self.steps = 0
        """Steps that group 0 has committed."""
        self.first: list[tuple[int, bool]] = []
        """Step and ``contributes`` of each transaction of group 1."""
        self.joined = threading.Event()
        self._made, self._body, self._loader, self._settings = made, body, loader, settings
        self.members = [self._start("0")]
        wait_until(lambda: self.steps >= LATE, "group 0 trains", JOIN_S)
        self.members.append(self._start("1"))

    def _start(self, group: str) -> Member:
        member = self._made.member(group, **self._settings)
        prepare(member)
        return member.start(self._work)

    def _work(self, member: Member) -> None:
        for txn in member.manager.transactions(self._loader(), LAST):
            if member.group == "1":
                self.first.append((txn.step, txn.contributes))
            with txn:
                self._body(member, txn)
                member.model(batch_of(txn.batch)).square().mean().backward()
            if member.group == "1" and txn.committed:
                self.joined.set()
            self.steps += member.group == "0" and txn.committed
            if self.joined.is_set() and "spec" in self._settings:
                member.manager.drain()
            elif self.joined.is_set() and member.group == "0" and txn.committed:
                member.manager.stop()

    def goes_on_alone(self) -> None:
        """Wait until group 0 has committed further steps."""
        since = self.steps
        wait_until(lambda: self.steps >= since + ALONE, "group 0 goes on alone", JOIN_S)

    def end(self) -> None:
        for member in self.members:
            member.end()
            assert member.error is None, member.error


def prepare(member: Member) -> None:
    """Let the groups of a job with local steps synchronize after each two."""
    if member.manager._parts.settings.spec.name == "local_sgd":
        member.manager.register(member.model, member.optimizer, generators=[member.model.generator])
        fft.LocalSGD(member.manager, member.model, member.optimizer, sync_every=2)


def numbers() -> Any:
    return fft.CursorLoader(Numbers(), batch_size=4, seed=1)


def rollbacks(traces: Path) -> list[str]:
    """Return the causes of all rollbacks but that of the step in which the job was stopped."""
    aborted = [r for r in records(traces) if r["kind"] == "abort"]
    return [r["cause"] for r in aborted if r["code"] != CauseCode.STOPPED]


@pytest.mark.parametrize(
    ("loader", "settings"),
    [(numbers, {}), (Stream, {}), (numbers, LOCAL)],
    ids=["hsdp", "stream", "local_sgd"],
)
def test_job_goes_on_while_a_joiner_is_in_its_first_step(
    tmp_path: Path, loader: Callable[[], Any], settings: dict[str, Any]
) -> None:
    is_in_step, release = threading.Event(), threading.Event()

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "1" and not release.is_set():
            is_in_step.set()
            assert release.wait(JOIN_S)

    with job(tmp_path, 1) as made:
        late = LateGroup(made, body, loader, **settings)
        assert is_in_step.wait(JOIN_S)
        late.goes_on_alone()
        assert {g["group"] for r in records(tmp_path) for g in r["members"]} == {"0"}
        release.set()
        late.end()
        if not settings:
            assert parameters(late.members[0].model) == parameters(late.members[1].model)
    found = records(tmp_path)
    assert rollbacks(tmp_path) == []
    assert any(len(r["members"]) == 2 for r in found if r["kind"] == "epoch")
    assert not late.first[0][1] and late.first[0][0] < late.first[1][0]
    report = audit_dir(tmp_path)
    assert report.ok, report.render()
    taken = [n for each in slices(tmp_path).values() for n in each]
    assert len(taken) == len(set(taken)), "each slice counts once"


def test_rehearsal_changes_nothing_that_a_rollback_restores(tmp_path: Path) -> None:
    found: list[Any] = []

    def held(member: Member) -> Any:
        generator = member.model.generator
        rate = member.optimizer.param_groups[0]["lr"]
        state = [generator.get_state().tolist(), rate, member.schedule.state_dict()]
        values = {k: v.tolist() for k, v in member.model.state_dict().items()}
        return values, state, [p.grad for p in member.model.parameters()]

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "1" and len(found) == 1:
            found.append(None)
            with torch.no_grad():
                for parameter in member.model.parameters():
                    parameter.add_(1.0)
            member.model.register_buffer("late", torch.zeros(1))
            member.optimizer.param_groups[0]["lr"] = 7.0
            member.manager.stop()
            assert member.manager.current_step() == txn.step
            assert member.manager.num_participants() == 1
            assert txn.mean(3.0) == 3.0, "no other group takes part"

    with job(tmp_path, 1) as made:
        late = None

        class Watched(LateGroup):
            def _start(self, group: str) -> Member:
                if group == "0":
                    return super()._start(group)
                member = self._made.member(group)
                found.append(held(member))
                member.manager.on_join(lambda: found.append(held(member)))
                return member.start(self._work)

        late = Watched(made, body, numbers)
        late.end()
    assert found[0] == found[2]
    assert rollbacks(tmp_path) == []
    assert audit_dir(tmp_path).ok


def test_failed_rehearsal_is_logged_and_costs_the_others_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[int] = []

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "1" and not failed:
            failed.append(txn.step)
            raise ValueError("weights of no job")

    with job(tmp_path, 1) as made:
        LateGroup(made, body, numbers).end()
    assert failed and rollbacks(tmp_path) == []
    assert "before joining has failed: ValueError: weights of no job" in caplog.text
    assert audit_dir(tmp_path).ok


def test_groups_that_start_together_or_are_all_needed_rehearse_nothing(tmp_path: Path) -> None:
    begun: list[tuple[str, int]] = []

    def body(member: Member, txn: fft.Transaction) -> None:
        begun.append((member.group, txn.step))

    with job(tmp_path, 2) as made:
        made.run(lambda member: member.train(3, body=body), min_replica_size=2)
    assert sorted(begun) == [(group, step) for group in "01" for step in range(3)]

"""Tests of what a rank keeps across step functions: exported state, and counts of failures."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import Member, Numbers, batch_of, job, records
from waiting import wait_until

import fft
from fft.checkpoints.files import Checkpoints
from fft.checkpoints.stores import open_store
from fft.errors import StepRetriesExceeded
from fft.messages.protocol import Peer, Record


def _epoch(learners: tuple[str, ...]) -> Record:
    by = Peer("0", 0, 1)
    return Record(1, "epoch", 1, 0, 0, "a", 0, 0, by, learners=learners)


@pytest.mark.parametrize("learners", [(), ("1",)])
def test_state_fetched_during_bodies_is_not_changed_by_the_bodies(
    tmp_path: Path, learners: tuple[str, ...]
) -> None:
    """If no joiner is still fetching, the others wait for the fetch, so that no copy is needed."""
    with job(tmp_path, 1) as made:
        member = made.member("0")
        given = member.manager._parts.state.export(_epoch(learners))["state"]["buffers"]
        before = {name: value.clone() for name, value in given.items()}
        member.model(batch_of(torch.arange(4)))  # its batch norm counts batches, and has means
        same = {name: torch.equal(value, before[name]) for name, value in given.items()}
    assert len(same) == 3 and set(same.values()) == {bool(learners)}


@pytest.mark.parametrize("skips", [True, False])
def test_failures_before_and_after_a_skipped_step_are_not_in_a_row(
    tmp_path: Path, skips: bool
) -> None:
    """A skipped step does not change the step number, but its step function has ended well."""
    tries: list[int] = []

    def work(member: Member) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        member.manager.register(member.model, member.optimizer, scaler=scaler)
        member.manager.sync_gradients(member.model)
        for txn in member.manager.transactions(fft.CursorLoader(Numbers(), batch_size=4), 2):
            tries.append(txn.step)
            with txn:
                if len(tries) == 2 or len(tries) == (4 if skips else 3):
                    raise ValueError("the same each time")
                loss = member.model(batch_of(txn.batch)).square().mean()
                if len(tries) == 3:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()

    with job(tmp_path, 1) as made:
        if skips:
            made.run(work, register=False, digest="never")
        else:
            with pytest.raises(
                StepRetriesExceeded,
                match=r"^ValueError: the same each time; .* 2 times .* same error ",
            ):
                made.run(work, register=False, digest="never")
    commits = [(r["step"], r["skip"]) for r in records(tmp_path) if r["kind"] == "commit"]
    assert commits == ([(1, False), (1, True), (2, False)] if skips else [(1, False)])
    assert tries == ([0, 1, 1, 1, 1] if skips else [0, 1, 1])


def test_checkpoint_waits_for_an_evaluating_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits until the rank requests the next txn, however long that takes, and has its buffers.

    The attempt at the next step fails meanwhile, so that the publishing rank has its own part.
    """
    monkeypatch.setattr("fft.train.checkpoint.writer._WAIT_S", 1.0)
    found, go_on = Checkpoints(open_store(str(tmp_path / "checkpoints"))), threading.Event()
    look, began = Checkpoints.receipts, list[float]()

    def watched(self: Checkpoints, *given: Any) -> Any:
        began.append(time.monotonic())
        if began[-1] - began[0] > 2.0:
            go_on.set()
        return look(self, *given)

    monkeypatch.setattr(Checkpoints, "receipts", watched)

    def work(member: Member) -> None:
        failures = [ValueError("once")] if member.group == "0" else []
        for txn in member.manager.transactions(fft.CursorLoader(Numbers(), batch_size=4), 3):
            with txn:
                if txn.step == 2 and failures:
                    raise failures.pop()
                member.model(batch_of(txn.batch)).square().mean().backward()
            if txn.committed and txn.step == 1 and member.group == "1":
                assert go_on.wait(30), "the one who publishes waits"
            if txn.committed and txn.step == 2:  # before the checkpoint of the end
                wait_until(lambda: found.newest()[0] is not None, "it is published")

    with job(tmp_path / "traces", 2) as made:
        made.run(work, checkpoint=fft.Checkpointing(tmp_path / "checkpoints", every=2, keep=0))
    assert found.verify(2).groups == ("0", "1")

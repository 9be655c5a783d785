"""Tests of what the loop offers to integrations of trainers: position, means, stop, schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stage import Member, Numbers, batch_of, job, parameters, records

import fft
from fft.checkpoints.files import Checkpoints
from fft.checkpoints.stores import open_store


def _train(member: Member, txn: fft.Transaction) -> torch.Tensor:
    """Compute a step, as a framework's training step does."""
    x = batch_of(txn.batch)
    loss = member.model(x).sub(x.mean(1, keepdim=True)).square().mean()
    loss.backward()
    return loss


def test_framework_that_owns_the_loop_sees_position_means_and_data_epochs(tmp_path: Path) -> None:
    """The loop of a framework: begin, run, was it committed? One attempt of step 2 fails."""
    seen: dict[str, list[Any]] = {"0": [], "1": []}

    def work(member: Member) -> None:
        loader = fft.CursorLoader(list(range(24)), 4, shuffle=False, data_epochs=2)
        txns, failed = member.manager.transactions(loader), False
        while (txn := next(txns, None)) is not None:
            with txn:
                loss = _train(member, txn)
                mean, count = txn.mean(loss), txn.mean(int(member.group))
                if txn.step == 2 and member.group == "1" and not failed:
                    failed = True
                    raise ValueError("one attempt")
            if txn.committed:
                own = (loss.item(), mean.item(), count.item())
                seen[member.group].append((txn.items, txn.data_epoch, own))

    with job(tmp_path, 2) as made:
        made.run(work)
        made.audit()
    for found in seen.values():
        assert [items for items, _, _ in found] == [range(n, n + 2) for n in range(0, 12, 2)]
        assert [epoch for _, epoch, _ in found] == [0, 0, 1, 1, 1, 2]
        assert {count for _, _, (_, _, count) in found} == {0.5}
    for (_, _, (one, mean, _)), (_, _, (other, same, _)) in zip(*seen.values(), strict=True):
        assert mean == same
        assert mean == pytest.approx((one + other) / 2)


def test_stop_ends_the_job_after_the_last_commit_with_a_checkpoint(tmp_path: Path) -> None:
    last: dict[str, list[list[float]]] = {}
    scales: list[float] = []

    def work(member: Member) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        member.manager.register(member.model, member.optimizer, scaler=scaler)
        loader = fft.CursorLoader(Numbers(), batch_size=4, seed=1)
        for txn in member.manager.transactions(loader):
            with txn:
                x = batch_of(txn.batch)
                scaler.scale(member.model(x).square().mean()).backward()
            if txn.committed and txn.step == 2:
                last[member.group] = parameters(member.model)
                member.manager.stop()
        assert member.has_left
        assert parameters(member.model) == last[member.group]
        scales.append(scaler.get_scale())

    with job(tmp_path / "traces", 2) as made:
        made.run(work, checkpoint=str(tmp_path / "saved"))
        made.audit()
    commits = [
        (r["step"], r["skip"], r["last"])
        for r in records(tmp_path / "traces")
        if r["kind"] == "commit"
    ]
    assert commits[-1] == (3, True, True) and commits[-2][:2] == (3, False)
    assert scales == [4.0, 4.0]
    saved, _ = Checkpoints(open_store(str(tmp_path / "saved"))).newest()
    assert saved is not None and saved.step == 3


def test_stop_within_a_step_drops_it_on_all_groups_without_a_rollback(tmp_path: Path) -> None:
    last: dict[str, list[list[float]]] = {}
    ended: list[int] = []

    def work(member: Member) -> None:
        for txn in member.manager.transactions(fft.CursorLoader(Numbers(), batch_size=4), 9):
            with txn:
                if txn.step == 2:
                    with member.manager.no_sync():
                        _train(member, txn)
                    member.manager.stop()
                else:
                    _train(member, txn)
            if txn.committed and not txn.skipped:
                last[member.group] = parameters(member.model)
        assert parameters(member.model) == last[member.group]
        ended.append(member.manager.current_step())

    with job(tmp_path / "traces", 3) as made:
        made.run(work, checkpoint=str(tmp_path / "saved"))
        made.audit()
    kinds = [(r["kind"], r["step"], r["skip"]) for r in records(tmp_path / "traces")]
    assert ("commit", 2, True) in kinds and not [k for k, _, _ in kinds if k == "abort"]
    assert ended == [2, 2, 2]
    saved, _ = Checkpoints(open_store(str(tmp_path / "saved"))).newest()
    assert saved is not None and saved.step == 2


@pytest.mark.parametrize("fails", [False, True])
def test_scheduler_that_the_framework_steps_is_rolled_back_and_fetched(
    tmp_path: Path, fails: bool
) -> None:
    """It is registered as extra and stepped after each committed step that is not skipped."""
    rates: dict[str, list[float]] = {"0": [], "1": []}

    def work(member: Member) -> None:
        schedule = torch.optim.lr_scheduler.StepLR(member.optimizer, 1, 0.5)
        member.manager.register(member.model, member.optimizer, extra={"schedule": schedule})
        member.manager.sync_gradients(member.model)
        failed = not fails
        for txn in member.manager.transactions(fft.CursorLoader(Numbers(), batch_size=4), 4):
            with txn:
                _train(member, txn)
                if txn.step == 2 and not failed:
                    failed = True
                    raise ValueError("one attempt")
            if txn.committed and not txn.skipped:
                rates[member.group].append(member.optimizer.param_groups[0]["lr"])
                schedule.step()

    with job(tmp_path, 2) as made:
        made.run(work, register=False, digest="commit")
        made.audit()
    assert rates["0"] == rates["1"] == [1e-2 * 0.5**n for n in range(4)]

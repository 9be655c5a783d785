"""Tests of consecutive loops in a job, FFT's own and torchft's: each txn is judged by its own
loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forged import nth_note, rewrite
from stage import Member, Numbers, aborts, batch_of, job, notes, parameters

import fft
from fft.errors import Drained
from fft.messages.protocol import Death, encode
from fft.trace.audit import audit_dir, trace_files

STEPS = 3
"""Steps of each loop."""


def _loader(seed: int = 1) -> fft.CursorLoader:
    return fft.CursorLoader(Numbers(), batch_size=4, seed=seed)


def _left_by_break(member: Member, until: int, seed: int) -> None:
    for txn in member.manager.transactions(_loader(seed)):
        with txn:
            _fail_once(member, txn.step)
            _loss(member, txn.batch).backward()
        if txn.committed and txn.step + 1 == until:
            break


def _left_by_exception(member: Member, until: int, seed: int) -> None:
    with pytest.raises(ZeroDivisionError):
        for txn in member.manager.transactions(_loader(seed)):
            with txn:
                _loss(member, txn.batch).backward()
            if txn.committed and txn.step + 1 == until:
                raise ZeroDivisionError


def _kept(member: Member, until: int, seed: int) -> None:
    """Train with an iterator that stays alive and is never ended."""
    loop = member.manager.transactions(_loader(seed))
    member.kept = loop  # type: ignore[attr-defined]
    for txn in loop:
        with txn:
            _loss(member, txn.batch).backward()
        if txn.committed and txn.step + 1 == until:
            break


def _torchfts(member: Member, until: int, seed: int) -> None:
    manager = member.manager
    while (step := manager.current_step()) < until:
        manager.start_quorum()
        member.optimizer.zero_grad()
        try:
            _fail_once(member, step)
            _loss(member, torch.arange(4) + 8 * step + 4 * int(member.group)).backward()
        except ValueError as error:
            manager.report_error(error)
        if manager.should_commit():
            member.optimizer.step()


def _loss(member: Member, numbers: torch.Tensor) -> torch.Tensor:
    x = batch_of(numbers)
    loss: torch.Tensor = member.model(x).sub(x.mean(1, keepdim=True)).square().mean()
    return loss


def _fail_once(member: Member, step: int) -> None:
    faults: set[int] = getattr(member, "faults", set())
    if step in faults and member.group == "1":
        faults.discard(step)
        torch.rand(1, generator=member.model.generator)
        raise ValueError(f"in step {step}")


Loop = Callable[[Member, int, int], None]

ORDERS: dict[str, tuple[Loop, ...]] = {
    "break, then torchft's": (_left_by_break, _torchfts),
    "torchft's, then FFT's": (_torchfts, _left_by_break),
    "there and back again": (_left_by_break, _torchfts, _left_by_break, _torchfts),
    "two of FFT's, with unlike loaders": (_left_by_break, _left_by_break),
    "an exception, then torchft's": (_left_by_exception, _torchfts),
    "an iterator that is kept, then torchft's": (_kept, _torchfts),
}


def _run(traces: Path, loops: tuple[Loop, ...], faults: bool) -> list[list[list[float]]]:
    def work(member: Member) -> None:
        if faults:
            member.faults = {STEPS * n + 1 for n in range(len(loops))}  # type: ignore[attr-defined]
        for number, loop in enumerate(loops, 1):
            loop(member, STEPS * number, number)

    with job(traces, 2) as made:
        members = made.run(work)
        made.audit()
    return [parameters(member.model) for member in members]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("order", ORDERS)
def test_each_txn_owes_the_inputs_of_its_own_loop(order: str, tmp_path: Path) -> None:
    loops = ORDERS[order]
    clean = _run(tmp_path / "clean", loops, faults=False)
    assert clean[0] == clean[1]
    assert aborts(tmp_path / "clean") == []
    own = sum(loop is not _torchfts for loop in loops)
    assert len(notes(tmp_path / "clean", "consumed")) == 2 * STEPS * own
    begun = [n["data"]["runs"] for n in notes(tmp_path / "clean", "loop") if n["group"] == "0"]
    assert len(begun) == (1 if own == len(loops) else len(loops))
    path = trace_files(tmp_path / "clean")[0]
    rewrite(path, nth_note("consumed", 1, lambda note: []))
    found = {f.name for f in audit_dir(tmp_path / "clean").findings if f.violation}
    assert found == {"inputs"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("order", list(ORDERS)[:3])
def test_faults_in_loops_that_follow_each_other_change_no_bit(order: str, tmp_path: Path) -> None:
    """The kind of rollback is that of the loop that runs."""
    loops = ORDERS[order]
    assert _run(tmp_path / "faulty", loops, faults=True) == _run(
        tmp_path / "clean", loops, faults=False
    )
    assert len(aborts(tmp_path / "faulty")) == len(loops)


def test_evicted_rank_does_not_run_the_code_behind_its_loop(tmp_path: Path) -> None:
    """The job continues without it; its script would save an old model there."""
    behind: list[str] = []

    def work(member: Member) -> None:
        for txn in member.manager.transactions(_loader(), max_steps=9):
            with txn:
                _loss(member, txn.batch).backward()
            if txn.committed and txn.step == 2 and member.group == "1":
                me = member.manager._parts.job
                config = me.engine.participant.config  # type: ignore[union-attr]
                evicted = Death("1", 0, config.pid, config.host, "operator", "evicted")
                me.bus.broadcast(encode(evicted))
                member.manager.drain()  # as the supervisor's SIGTERM does
        behind.append(member.group)

    with job(tmp_path, 2) as made:
        members = [made.member(str(group)).start(work) for group in range(2)]
        for member in members:
            member.end()
    assert [type(member.error) for member in members] == [type(None), Drained]
    assert behind == ["0"]

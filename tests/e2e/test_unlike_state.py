"""Tests of state that differs between groups but should be equal: named at the start and after a
fault."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import Member, Noisy, job
from torch import nn

import fft
from fft.trace.audit import read_lines


class Value:
    """A registered object."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "tensor": torch.full((2,), self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def unlike(traces: Path) -> list[str]:
    """Return the names in the notes of all groups, once for each group that has the name."""
    notes = (line for line in read_lines(traces) if line.get("note") == "unlike_state")
    return sorted(line["data"]["name"] for line in notes)


def fails_once(at: int) -> Any:
    """Return a step function whose attempt at step ``at`` fails on group 1."""
    failed = threading.Event()

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "1" and txn.step == at and not failed.is_set():
            failed.set()
            raise RuntimeError("transient")

    return body


@pytest.mark.parametrize("drifts", [False, True])
def test_extra_that_drifts_is_named_after_the_first_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, drifts: bool
) -> None:
    def work(member: Member) -> None:
        mean, same = Value(0.0), Value(7.0)
        extra = {"mean": mean, "same": same}
        member.manager.register(member.model, member.optimizer, extra=extra)
        member.manager.sync_gradients(member.model)

        def count() -> None:
            mean.value += 1 + drifts * int(member.group)

        member.manager.on_commit(count)
        member.train(4, body=fails_once(2))

    with job(tmp_path, 2) as made, caplog.at_level(logging.WARNING):
        made.run(work, register=False)
    assert unlike(tmp_path) == (["extra['mean']"] * 2 if drifts else [])
    assert ("extra['mean'] of group 0 and of group 1 differ at step 2" in caplog.text) is drifts


class Routed(Noisy):
    """A model with a router bias that balances the counts of an expert."""

    def __init__(self, group: str) -> None:
        super().__init__(group)
        self.router = nn.Module()
        self.router.register_buffer("bias", torch.zeros(4))
        self.counts = torch.zeros(4)


@pytest.mark.parametrize("by_all", [False, True])
def test_buffers_that_count_locally_are_named_and_reduced_counts_are_not(
    tmp_path: Path, by_all: bool
) -> None:
    """The reduced counts follow the recipe of the guide."""

    def work(member: Member) -> None:
        model: Any = member.model
        member.manager.register(model, member.optimizer)
        member.manager.sync_gradients(model)
        fail = fails_once(2)

        def body(_: Member, txn: fft.Transaction) -> None:
            model.counts = torch.bincount(txn.batch % 4, minlength=4).float()
            if by_all:
                total = torch.distributed.ReduceOp.SUM
                member.manager.allreduce(model.counts, reduce_op=total).wait()
            fail(member, txn)

        def balance() -> None:
            model.router.bias += 0.01 * torch.sign(model.counts.mean() - model.counts)

        member.manager.on_commit(balance)
        loader = fft.CursorLoader(list(range(512)), batch_size=6, seed=1)
        member.train(4, loader=loader, body=body)

    with job(tmp_path, 2) as made:
        members = [made.member(g, model=Routed(g), register=False) for g in "01"]
        for member in members:
            member.start(work)
        for member in members:
            member.end()
            assert member.error is None, member.error
        biases = [member.model.router.bias for member in members]
    assert torch.equal(*biases) is by_all
    assert unlike(tmp_path) == ([] if by_all else ["buffers 'bias'"] * 2)

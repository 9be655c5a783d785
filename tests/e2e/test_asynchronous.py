"""Groups that synchronise without waiting for all: how far they go, what is held, what counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import WIDTH, Job, Member, Numbers, batch_of, job, parameters, records
from torch import nn
from waiting import wait_until

import fft
from fft.messages.protocol import Record

EVERY = 2
"""Inner steps between two synchronisations."""
LIMIT_S = 40.0
"""For what must come; a bug makes it as long."""
SPEC = """
name: bounded
doc: As async, with another bound.
include: [async.yaml]
policies:
  bound: {bound}
"""


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path / "traces", 3) as it:
        yield it


def _spec(folder: Path, bound: int) -> str:
    path = folder / "bounded.yaml"
    path.write_text(SPEC.format(bound=bound))
    return str(path)


def _members(made: Job, folder: Path, bound: int = 4, **settings: Any) -> list[Member]:
    """Three groups; they wait for others no longer than a moment."""
    spec = _spec(folder, bound)
    return [_member(made, str(g), spec, **settings) for g in range(made.groups)]


def _member(made: Job, group: str, spec: str, **settings: Any) -> Member:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))
    model.generator = torch.Generator()
    values = {"register": False, "model": model, "digest": "commit", "timeouts": TIMES, **settings}
    member = made.member(group, spec=spec, **values)
    member.manager.register(member.model, member.optimizer)
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    member.shared = fft.DiLoCo(member.manager, [model], member.optimizer, outer, EVERY)  # type: ignore[attr-defined]
    return member


TIMES = {"join_interval": 0.1, "join_window": 0.3, "apart_window": 3.0}
Body = Callable[[Member, fft.Transaction], None]


def _train(member: Member, steps: int, body: Body) -> None:
    loader = fft.CursorLoader(Numbers(), batch_size=4, seed=1)
    for txn in member.manager.transactions(loader, steps):
        with txn:
            body(member, txn)
            member.model(batch_of(txn.batch)).square().mean().backward()


def _run(members: list[Member], steps: int, body: Body) -> None:
    for member in members:
        member.start(lambda member: _train(member, steps, body))
    for member in members:
        member.end()
    for member in members:
        if member.error is not None:
            raise member.error


def test_a_slow_group_does_not_hold_the_others_up_within_the_bound(
    made: Job, tmp_path: Path
) -> None:
    """If they waited for it, the step that its body waits for would never come."""
    come = threading.Event()

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "0" and txn.step == 4:
            come.set()
        if member.group == "2" and txn.step == 1:
            assert come.wait(LIMIT_S)

    _run(_members(made, tmp_path), 7, body)
    assert made.audit().ok, made.audit().render()

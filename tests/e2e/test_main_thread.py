"""Tests that the manager runs the main thread's table."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from stage import job
from torchft.manager import Manager

from fft.engine.executor import StepExecutor
from fft.errors import ProtocolError
from fft.messages.effects import Apply
from fft.protocol.vocabulary import MAIN_THREAD


def test_event_without_a_row_is_an_error_without_effects(tmp_path: Path) -> None:
    """An update in the middle of a step function would change the inputs of the reductions."""
    with job(tmp_path, 1) as made:
        member = made.member("0")
        member.manager.start_quorum()
        parts = member.manager._parts
        assert parts.job.executor.role == "computing"
        assert parts.job.local is not None and parts.job.local.head is not None
        expected = r"in BODY\.whole, which has no row for 'apply'; expected: finish, prepared"
        with pytest.raises(ProtocolError, match=expected):
            parts.commits.apply(Apply(parts.job.local.head))
        assert parts.job.executor.role == "computing"
        assert parts.job.local.role == "training"


def test_every_effect_of_the_table_is_carried_out(tmp_path: Path) -> None:
    with job(tmp_path, 1) as made:
        work = made.member("0").manager._parts.worker._work
        assert work.keys() | {"refuse_epoch", "refuse_txn"} == MAIN_THREAD.effects


def test_end_of_an_update_is_posted_once() -> None:
    executor, reported = StepExecutor(print, print, threading.Lock()), list[str]()
    for event in ("heal", "healed", "start_txn", "prepared", "apply"):
        executor.transition(event)
    both = threading.Barrier(2)

    def tell(event: str) -> None:
        both.wait(10.0)
        if executor.transition_if("applying", event):
            reported.append(event)

    tellers = [threading.Thread(target=tell, args=(e,)) for e in ("applied", "apply_failed")]
    for teller in tellers:
        teller.start()
    for teller in tellers:
        teller.join(10.0)
    assert len(reported) == 1
    assert executor.role == "idle"


def test_reductions_do_not_pass_through_torchfts_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("torchft's manager reduces")

    monkeypatch.setattr(Manager, "allreduce", refuse)
    monkeypatch.setattr(Manager, "wrap_future", refuse)
    with job(tmp_path, 2) as made:
        members = made.run(lambda member: member.train(4))
        assert [member.manager.current_step() for member in members] == [4, 4]
        made.audit()

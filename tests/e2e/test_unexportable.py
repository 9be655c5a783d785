"""Tests that a rank whose state cannot be sent to a joiner ends, and does not block joiners for
ever."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

from stage import Member, job

import fft
from fft.errors import FftError
from fft.train.step.healing import StateNotExportable

QUORUM = timedelta(seconds=4)


class Odd:
    """A registered object whose value becomes one that a state cannot hold."""

    def __init__(self) -> None:
        self.value: Any = 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_export_that_fails_twice_by_the_same_error_ends_the_rank(tmp_path: Path) -> None:
    is_odd = threading.Event()

    def work(member: Member) -> None:
        odd = Odd()
        member.manager.register(member.model, member.optimizer, extra={"odd": odd})
        member.manager.sync_gradients(member.model)

        def body(_: Member, txn: fft.Transaction) -> None:
            if txn.step == 3 and member.group == "0":
                odd.value = object
                is_odd.set()

        member.train(None, body=body)

    with job(tmp_path, 1) as made:
        first = made.member("0", register=False, quorum_timeout=QUORUM).start(work)
        assert is_odd.wait(60)
        second = made.member("1", register=False, quorum_timeout=QUORUM).start(work)
        first.end()
        second.end()
    assert isinstance(first.error, StateNotExportable), first.error
    assert "two epochs in a row: TypeError: extra[odd]['value'] is a type" in str(first.error)
    assert isinstance(second.error, FftError)

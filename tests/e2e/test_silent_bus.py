"""Tests of a bus whose server stops for longer than an operation waits, and comes back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from forked import Forked, as_main
from stage import Member, job, notes, parameters

import fft

CHILD = Path(__file__).parents[1] / "bus" / "child.py"
STEPS, SILENT_AT = 6, 3
OPERATION_S, SILENCE_S = 1.0, 2.5


@pytest.fixture
def server() -> Iterator[tuple[Forked, str]]:
    """Yield a process that serves a bus, and its address."""
    process = Forked(as_main, str(CHILD), "serve", "0", talks=True)
    try:
        yield process, process.stdout.readline().strip()
        process.signal(signal.SIGCONT)
        process.stdin.close()
        assert process.wait(30) == 0
    finally:
        process.close()


@pytest.mark.long
@pytest.mark.parametrize("when", ["in the body", "before the next txn"])
def test_a_job_outlives_a_server_that_stands_still(
    tmp_path: Path, server: tuple[Forked, str], when: str
) -> None:
    """As under a paused `fft run`, the pause is shorter than ``bus_limit``, and all doubt is
    resolved."""
    process, url = server
    silent: list[threading.Timer] = []

    def stand_still() -> None:
        process.signal(signal.SIGSTOP)
        silent.append(threading.Timer(SILENCE_S, process.signal, (signal.SIGCONT,)))
        silent[0].start()

    def body(member: Member, txn: fft.Transaction) -> None:
        if when == "in the body" and txn.step == SILENT_AT and member.group == "0" and not silent:
            stand_still()

    def work(member: Member) -> None:
        if when != "in the body" and member.group == "0":
            member.manager.on_commit(
                lambda: stand_still() if not silent and step_of(member) == SILENT_AT else None
            )
        member.train(STEPS, body=body)

    with job(tmp_path, 2, url) as made:
        members = made.run(work, connect_timeout=timedelta(seconds=OPERATION_S))
        made.audit()
    silent[0].join()
    assert [m.manager.current_step() for m in members] == [STEPS, STEPS]
    assert parameters(members[0].model) == parameters(members[1].model)
    assert not notes(tmp_path, "crash")


def step_of(member: Member) -> int:
    """Return the step of the next txn."""
    return int(member.manager.current_step())

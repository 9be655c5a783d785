"""Tests of a bus that comes back: its server stopped, or all connections to it were lost."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from forked import Forked, as_main
from stage import Member, job, notes, parameters
from way import Way

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


def test_job_outlives_the_loss_of_all_connections_to_its_bus(
    tmp_path: Path, server: tuple[Forked, str]
) -> None:
    """A switch restarts, and the server lives: the job goes on within a step or two."""
    _, url = server
    host, _, name = url.removeprefix("tcp://").partition("/")
    with closing(Way(int(host.rpartition(":")[2]))) as network:

        def body(member: Member, txn: fft.Transaction) -> None:
            if member.group == "0" and txn.step in (2, 4) and txn.step not in cut:
                cut.append(txn.step)
                network.cut()

        cut: list[int] = []
        began = time.monotonic()
        with job(tmp_path, 2, f"tcp://127.0.0.1:{network.port}/{name}") as made:
            members = made.run(lambda member: member.train(STEPS, body=body))
            made.audit()
    assert cut == [2, 4] and time.monotonic() - began < 25.0, "less than bus_limit"
    assert [m.manager.current_step() for m in members] == [STEPS, STEPS]
    assert parameters(members[0].model) == parameters(members[1].model)
    assert not notes(tmp_path, "crash")


def step_of(member: Member) -> int:
    """Return the step of the next txn."""
    return int(member.manager.current_step())

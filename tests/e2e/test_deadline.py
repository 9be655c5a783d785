"""Tests that a rank with a deadline leaves before it, and the others lose one attempt at most.

The jobs are managers in one process: there no thread is unwound, and only what is blocked ends
early.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from stage import Job, Member, aborts, job, notes
from waiting import wait_until

import fft
from fft.bus import serve_tcp
from fft.errors import Drained, FftError, InDoubt
from fft.train.guard.unsafe_places import Safety, classify
from fft.train.step.preemption import FileNotice

WITHIN_S = 10.0
LIMIT_S = 60.0
STEP = 3
SILENT = """
import sys
from fft.bus import serve_tcp
server = serve_tcp()
print(server.url, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path / "traces", 2) as made:
        yield made


def why(made: Job, group: str = "1") -> str:
    """Return the reason that a group gave when it left in time without a commit."""
    late = [n for n in notes(made.traces, "drain_late") if n["group"] == group]
    assert len(late) == 1 and late[0]["data"]["left"] > 0
    assert not notes(made.traces, "drain_untold")
    text: str = late[0]["data"]["why"]
    return text


def ended_in_time(member: Member, began: float) -> None:
    member.end()
    took = time.monotonic() - began
    assert member.error is None and member.has_left
    print(f"\nwas out {WITHIN_S - took:.1f} s before the deadline")


@pytest.mark.parametrize("peer", ["rolls back", pytest.param("is held up", marks=pytest.mark.long)])
def test_blocked_in_a_collective(two: Job, peer: str) -> None:
    began: list[float] = []
    let_go = threading.Event()

    def body(member: Member, txn: fft.Transaction) -> None:
        if txn.step == STEP and member.group == "0":
            if peer == "is held up" and not let_go.is_set():
                stays.manager._parts.groups.replicate.abort = late  # type: ignore[method-assign]
            assert let_go.wait(LIMIT_S)
        elif txn.step == STEP:
            began.append(time.monotonic())
            member.manager.drain(WITHIN_S, "the machine goes")

    stays, goes = two.member("0"), two.member("1")
    abort: Any = stays.manager._parts.groups.replicate.abort

    def late(cause: str) -> None:
        assert let_go.wait(LIMIT_S)
        abort(cause)

    for member in (stays, goes):
        member.start(lambda m: m.train(9, body=body))
    wait_until(lambda: bool(began), "the step is reached")
    ended_in_time(goes, began[0])
    let_go.set()
    stays.end()
    assert stays.error is None and stays.manager.current_step() == 9
    assert goes.manager.current_step() == STEP
    assert "its main thread has not voted; NORMAL" in why(two)
    assert "1/0#1 left: the machine goes; not out" in aborts(two.traces)[0]["cause"]
    two.audit()


def given_notice_together(
    both: threading.Barrier, began: list[float]
) -> Callable[[Member, fft.Transaction], None]:
    """Return a step function in which each member is given notice when all are there, and record
    the time."""

    def body(member: Member, txn: fft.Transaction) -> None:
        if txn.step == STEP:
            both.wait(LIMIT_S)
            began.append(time.monotonic())
            member.manager.drain(WITHIN_S, "the machine goes")

    return body


@pytest.mark.long
def test_in_doubt_while_the_bus_is_away(tmp_path: Path) -> None:
    bus = serve_tcp()
    both = threading.Barrier(2, action=bus.close)
    began: list[float] = []

    body = given_notice_together(both, began)

    with job(tmp_path / "traces", 2, bus.url) as made:
        limits = {"bus_limit": 60.0}
        members = [made.member(group, timeouts=limits) for group in ("0", "1")]
        for member in members:
            member.start(lambda m: m.train(9, body=body))
        for member in members:
            member.end()
            assert member.error is None and member.has_left
            assert member.manager.current_step() == STEP
        took = time.monotonic() - min(began)
        assert "in doubt: it has voted YES" in why(made) and "out of reach" in why(made)
        made.audit()
    print(f"\nwere out {WITHIN_S - took:.1f} s before the deadline")


def test_leaver_that_stops_in_doubt_has_not_drained(tmp_path: Path) -> None:
    bus = serve_tcp()
    both = threading.Barrier(2, action=bus.close)

    def body(member: Member, txn: fft.Transaction) -> None:
        if txn.step == STEP:
            member.manager.drain(None, "asked to")
            both.wait(LIMIT_S)

    limits = {"timeouts": {"bus_limit": 3.0}, "connect_timeout": timedelta(seconds=1)}
    with job(tmp_path / "traces", 2, bus.url) as made:
        members = [made.member(group, **limits) for group in ("0", "1")]
        for member in members:
            member.start(lambda m: m.train(9, body=body))
        for member in members:
            member.end()
            assert isinstance(member.error, InDoubt), repr(member.error)
            assert "for 3 s or more after an operation on it was given up" in str(member.error)
    assert not notes(made.traces, "drained")
    failed = [line["data"] for line in notes(made.traces, "drain_failed")]
    assert failed == [{"reason": "asked to", "left": None, "error": "InDoubt"}] * 2


@pytest.mark.long
def test_while_the_bus_does_not_answer(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SILENT]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        both = threading.Barrier(2, action=lambda: server.send_signal(signal.SIGSTOP))
        began: list[float] = []

        body = given_notice_together(both, began)

        try:
            with job(tmp_path / "traces", 2, url) as made:
                members = [made.member(group) for group in ("0", "1")]
                for member in members:
                    member.start(lambda m: m.train(9, body=body))
                for member in members:
                    member.end()
                took = time.monotonic() - min(began)
                for member in members:
                    assert isinstance(member.error, InDoubt), repr(member.error)
                    assert "without notifying the other ranks: the machine goes" in str(
                        member.error
                    )
                assert len(notes(made.traces, "drain_untold")) == 2
                for line in notes(made.traces, "drain_late"):
                    # the bus may stop before or after it has answered this participant's vote
                    why = line["data"]["why"]
                    assert "on the bus has had no answer for" in why or "in doubt" in why
                made.audit()
        finally:
            server.kill()
    print(f"\nwere out {WITHIN_S - took:.1f} s before the deadline")


@pytest.mark.long
def test_in_the_barrier_of_an_epoch(two: Job) -> None:
    let_go = threading.Event()
    stays, goes = two.member("0"), two.member("1")
    configure: Any = stays.manager._parts.groups.configure

    def slowly(*args: Any) -> None:
        configure(*args)
        assert let_go.wait(LIMIT_S)

    stays.manager._parts.groups.configure = slowly  # type: ignore[method-assign]
    for member in (stays, goes):
        member.start(lambda m: m.train(5))
    job: Any = goes.manager._parts.job
    wait_until(lambda: job.engine and job.engine.local.healed, "it is in the barrier")
    began = time.monotonic()
    goes.manager.drain(WITHIN_S, "the machine goes")
    ended_in_time(goes, began)
    let_go.set()
    stays.end()
    assert stays.error is None and stays.manager.current_step() == 5
    assert "in the barrier of its epoch" in why(two)
    two.audit()


def test_before_the_first_epoch_there_is_nothing_to_wait_for(two: Job) -> None:
    member = two.member("0", timeouts={"join_window": 60.0, "quorum": 200.0}).start(
        lambda m: m.train(5)
    )
    job: Any = member.manager._parts.job
    wait_until(lambda: job.engine and job.engine.local.head_read, "it asks to join")
    member.manager.drain(1000.0, "the machine goes")
    member.end()
    assert isinstance(member.error, Drained) and member.manager.current_step() == 0
    (left,) = notes(two.traces, "drained")
    assert left["data"]["left"] > 900 and not notes(two.traces, "drain_late")
    two.audit()


@pytest.mark.long
def test_in_the_optimizer_step_of_a_commit(two: Job) -> None:
    began, let_go = threading.Event(), threading.Event()

    class Slow(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            if self is goes.optimizer and goes.manager.current_step() == STEP:
                began.set()
                assert let_go.wait(LIMIT_S)
            return super().step(closure)

    stays, goes = two.member("0"), two.member("1", optimizer=Slow)
    for member in (stays, goes):
        member.start(lambda m: m.train(9))
    assert began.wait(LIMIT_S)
    goes.manager.drain(WITHIN_S, "the machine goes")
    stays.end()  # although that main thread is still busy
    let_go.set()
    goes.end()
    assert (stays.error, goes.error) == (None, None)
    assert (stays.manager.current_step(), goes.manager.current_step()) == (9, STEP)
    assert "still runs the optimizer step" in why(two)
    two.audit()


def test_source_is_polled_until_the_end_and_its_thread_ends(two: Job, tmp_path: Path) -> None:
    path = tmp_path / "gone"
    members = [two.member("0"), two.member("1")]
    members[1].manager.drain(on=FileNotice(path))

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "1" and txn.step == STEP:
            path.touch()
            wait_until(lambda: member.is_asked_to_leave, "the file is read")

    for member in members:
        member.start(lambda m: m.train(9, body=body))
    for member in members:
        member.end()
        assert member.error is None
    assert [m.manager.current_step() for m in members] == [9, STEP + 1]
    assert not aborts(two.traces) and not notes(two.traces, "drain_late")
    assert not [t for t in threading.enumerate() if t.name.startswith(("fft-notice", "fft-drain"))]
    two.audit()


def test_a_signal_with_a_deadline(two: Job) -> None:
    member = two.member("0")
    before = signal.getsignal(signal.SIGUSR1)
    try:
        member.manager.drain(1000.0, on=signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: member.is_asked_to_leave, "the handler runs")
    finally:
        signal.signal(signal.SIGUSR1, before)
    member.start(lambda m: m.train(5))
    member.end()
    assert isinstance(member.error, Drained)
    (left,) = notes(two.traces, "drained")
    assert left["data"]["reason"] == "SIGUSR1" and left["data"]["left"] > 900


def test_no_rollback_cuts_the_handler_of_such_a_signal(two: Job) -> None:
    found: list[Safety] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: found.append(classify(sys._getframe(), None)))
    try:
        two.member("0").manager.drain(on=signal.SIGUSR1)  # calls the previous handler
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [Safety.LATER]


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_setting_that_is_no_time_is_refused(
    two: Job, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    monkeypatch.setenv("FFT_DRAIN_SIGNAL", "SIGUSR1")
    monkeypatch.setenv("FFT_DRAIN_WITHIN", text)
    with pytest.raises(FftError, match="expected a positive number of seconds"):
        two.member("0")
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("fft-")]

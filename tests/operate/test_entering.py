"""Tests of one job after another under one name on a bus: a new process enters the live job, or a
new one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from urllib.parse import urlsplit

import pytest
from engine_job import EngineJob, Rank
from waiting import wait_until

import fft.operate.entering as entering
from fft.bus import open_job_bus, serve_tcp
from fft.bus.base import HEAD
from fft.bus.natsserver import NatsServers
from fft.bus.token import JobToken
from fft.engine.calls import Calls
from fft.messages.commands import RollCall
from fft.messages.exits import gone_register, gone_value
from fft.messages.protocol import Drain, GroupEntry, Peer, RankEntry, Record, encode
from fft.messages.wire import decode_packed
from fft.operate.client import JobClient, JobState
from fft.operate.entering import JobStart, enter

TOKEN = JobToken.fresh()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["memory", "tcp", pytest.param("nats", marks=pytest.mark.long)])
def url(
    request: pytest.FixtureRequest, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    monkeypatch.delenv("FFT_GROUP", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    # No participant here needs that long to answer
    monkeypatch.setattr(entering, "_SILENCE_S", 1.5)
    if request.param == "tcp":
        yield stack.enter_context(serve_tcp()).url
        return
    if request.param == "nats":
        servers = NatsServers("127.0.0.1", 0, None, 1)
        stack.callback(servers.close)
        yield servers.url
        return
    url = f"memory://entering-{uuid.uuid4().hex}"
    with open_job_bus(url, TOKEN):  # kept open during the test, as a server would
        yield url


def job_at(start: JobStart, stack: ExitStack, groups: int = 2, ranks: int = 1) -> EngineJob:
    return EngineJob(stack, start.url, groups, ranks, partial(open_job_bus, token=TOKEN)).start()


def head_at(url: str) -> tuple[int, int]:
    """Return the number and step of the newest record."""
    with open_job_bus(url, TOKEN) as bus:
        record = decode_packed(bus.read(HEAD) or b"").record
        return record.n, record.step


def test_new_process_joins_the_living_job(url: str, stack: ExitStack) -> None:
    first = enter(url, TOKEN)
    assert first == JobStart(url, 1)
    job = job_at(first, stack)
    job.train(2)
    head = head_at(url)
    assert enter(url, TOKEN) == first
    assert head_at(url) == head
    job.train(3)


def test_start_on_a_bus_that_came_back_empty_has_another_name() -> None:
    """The folder of its traces has that name, and is not that of the earlier start."""
    with closing(serve_tcp("127.0.0.1", 0, "job")) as server:
        first, again = enter(server.url, TOKEN), enter(server.url, TOKEN)
        port = urlsplit(server.url).port
    assert first.name == again.name
    with closing(serve_tcp("127.0.0.1", port, "job")) as server:
        second = enter(server.url, TOKEN)
    assert second == first and second.name != first.name


@pytest.mark.one_in(2)
def test_the_same_name_begins_anew_when_all_have_gone(url: str, stack: ExitStack) -> None:
    for number in (1, 2, 3):
        start = enter(url, TOKEN)
        assert start.number == number
        job = job_at(start, stack)
        assert [member.committed for member in job.members] == [[], []]
        job.train(3)
        assert {member.committed[0].step for member in job.members} == {1}
        with JobClient(url, token=TOKEN) as operator:  # finds the newest job by the common name
            assert operator.bus.url == start.url
            assert operator.job().epoch is not None
        for member in job.members:
            member.engine.close()


def test_survivor_of_an_earlier_job_joins_no_other(
    url: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = job_at(enter(url, TOKEN), stack)
    old.train(2)
    for member in old.members:  # alive, but silent for the time that is waited
        monkeypatch.setattr(member.engine._core, "_answer_roll", lambda call: iter(()))
    start = enter(url, TOKEN)
    assert start.number == 2
    new = job_at(start, stack)
    new.train(2)
    for member in old.members:
        member.train(5)
    wait_until(lambda: all(member.ended for member in old.members), "the old ones end")
    assert {member.ended.error for member in old.members if member.ended} == {"JobEnded"}
    assert {len(member.committed) for member in old.members} == {2}
    new.train(4)
    assert not any(member.ended for member in new.members)


def test_processes_started_together_join_one_job(url: str, stack: ExitStack) -> None:
    old = job_at(enter(url, TOKEN), stack)
    old.train(1)
    for member in old.members:
        member.engine.close()
    with ThreadPoolExecutor(4) as pool:
        starts = set(pool.map(lambda _: enter(url, TOKEN), range(4)))
    assert {start.number for start in starts} == {2}
    job_at(starts.pop(), stack).train(2)


def test_one_that_holds_the_state_keeps_the_job(url: str, stack: ExitStack) -> None:
    job = job_at(enter(url, TOKEN), stack)
    job.train(2)
    job.members[0].engine.close()
    wait_until(lambda: job.members[0].ended is not None, "the first one ends")
    assert enter(url, TOKEN).number == 1
    job.train(4)


def test_child_of_fft_run_enters_the_start_from_its_environment(url: str, stack: ExitStack) -> None:
    old = job_at(enter(url, TOKEN), stack)
    old.train(1)
    for member in old.members:
        member.engine.close()
    assert enter(url, TOKEN, env={"FFT_GROUP": "0"}) == JobStart(url, 1)


def test_after_the_last_step_only_a_new_process_begins_a_job(
    url: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that torchelastic restarts then is too late for a job that has all its steps."""
    monkeypatch.setattr(Rank, "says", staticmethod(lambda start: {"last": True}))
    job = job_at(enter(url, TOKEN), stack)
    job.train(1)
    assert enter(url, TOKEN, env={"TORCHELASTIC_RESTART_COUNT": "1"}).number == 1
    assert enter(url, TOKEN, env={"TORCHELASTIC_RESTART_COUNT": "0"}).number == 2


def test_restarted_process_begins_a_new_start_of_an_incomplete_job(
    url: str, stack: ExitStack
) -> None:
    """A restarted process is too late only after the last step; this job lacks steps."""
    job = job_at(enter(url, TOKEN), stack)
    job.train(1)
    for member in job.members:
        member.engine.close()
    assert enter(url, TOKEN, env={"TORCHELASTIC_RESTART_COUNT": "1"}).number == 2


def test_late_answer_keeps_the_job(
    url: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entering, "_AGAIN_S", 0.1)
    monkeypatch.setattr(entering, "_SILENCE_S", 20.0)  # so long it waits for an answer
    job = job_at(enter(url, TOKEN), stack)
    job.train(2)
    calls = []

    def miss_one(answer: Callable[[RollCall], Calls[None]], call: RollCall) -> Calls[None]:
        calls.append(call.id)
        if calls.count(call.id) > len(job.members):
            yield from answer(call)

    for member in job.members:
        answer = partial(miss_one, member.engine._core._answer_roll)
        monkeypatch.setattr(member.engine._core, "_answer_roll", answer)
    assert enter(url, TOKEN).number == 1
    assert len(calls) > len(job.members) and len(set(calls)) == 1
    job.train(3)


def _of(*ranks: tuple[str, int]) -> JobState:
    """Return a job with a group for each (host, process id)."""
    members = tuple(
        GroupEntry(str(g), "a:1", (RankEntry(0, 1, True, "", pid, host),))
        for g, (host, pid) in enumerate(ranks)
    )
    record = Record(1, "epoch", 1, 0, 0, "line", 0, 0, Peer("0", 0, 1), members)
    return JobState(record, record)


def test_processes_are_gone_only_if_none_runs_here_and_others_are_registered(url: str) -> None:
    """A participant that may live on another host, or on this one, is asked for longer."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait(30)
    here, gone, there = socket.gethostname(), ended.pid, os.getppid()
    with open_job_bus(url, TOKEN) as bus:
        are_gone = partial(entering._are_gone, bus=bus, writes=False)
        assert are_gone(_of((here, gone), (here, gone)))
        for others in ([(here, gone), (here, there)], [(here, there), (here, gone)]):
            assert not are_gone(_of(*others))
        for others in ([(here, gone), ("elsewhere", gone)], [("elsewhere", gone)]):
            assert not are_gone(_of(*others))
        assert not are_gone(JobState())
        bus.write(gone_register("1", 0), gone_value(gone, "elsewhere"))
        assert are_gone(_of((here, gone), ("elsewhere", gone)))
        assert not are_gone(_of((here, gone), ("elsewhere", there)))
        assert bus.read(gone_register("0", 0)) is None
        assert entering._are_gone(_of((here, gone), ("elsewhere", gone)), bus, writes=True)
        assert bus.read(gone_register("0", 0)) == gone_value(gone, here)


def test_a_job_that_all_groups_were_drained_from_is_not_asked(
    url: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_at(enter(url, TOKEN), stack)
    job.train(1)
    with open_job_bus(url, TOKEN) as bus:
        bus.broadcast(encode(Drain(groups=("0", "1"), by="test")))
    wait_until(lambda: all(m.engine.local.leaving for m in job.members), "they have heard it")
    for member in job.members:
        member.train(9)
    wait_until(lambda: all(m.ended for m in job.members), "all have left")
    monkeypatch.setattr(entering, "_lives", lambda desk, job: pytest.fail("it asked"))
    assert enter(url, TOKEN).number == 2

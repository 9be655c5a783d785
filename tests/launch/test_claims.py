"""Tests of two supervisors that want the same group of one job: one gets it, and both log that."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from forked import Forked, as_main
from forked_run import FftRun, running
from supervisor_stage import WAIT_S, Actor, Job, Stage
from waiting import wait_until

from fft.bus import open_bus
from fft.bus.base import BusUnreachable
from fft.launch.exit_status import ExitStatus
from fft.launch.services import Services, start_services
from fft.launch.supervisor import Joined, RunConfig, Supervisor, SupervisorError, claims, loop
from fft.launch.supervisor.claims import Claims
from fft.launch.supervisor.groups import Group, why_not_started
from fft.launch.supervisor.spanning import GroupStart, GroupStarts
from fft.messages.fault_plans import FaultPlan

BUS = Path(__file__).parents[1] / "bus" / "child.py"


@pytest.fixture
def services() -> Iterator[Services]:
    made = start_services(with_lighthouse=False)
    yield made
    made.close()


@contextmanager
def other(stage: Stage, bus: str, folder: Path, first: int = 1, **how: Any) -> Iterator[Job]:
    """Run a supervisor in this process that joins with one group."""
    config = RunConfig(
        [str(stage.script)], 1, 1, folder, first_group=first, all_groups=first + 1, **how
    )
    with closing(Job(Supervisor(config, FaultPlan(faults=[]), Joined(bus)), bus, config)) as job:
        yield job


@contextmanager
def joins(stage: Stage, bus: str, folder: Path, *options: str) -> Iterator[FftRun]:
    """Run ``fft run --join --first-group 1`` in its own process."""
    folder.mkdir()
    command = ["run", "--join", "--first-group", "1", "--no-progress", *options]
    command += ["--trace-dir", str(folder / "traces"), str(stage.script)]
    env = {**os.environ, "FFT_BUS": bus}
    with running(*command, folder=folder, env=env) as process:
        yield process


def only(actors: dict[tuple[str, str], Actor]) -> Actor:
    ((place, actor),) = actors.items()
    assert place == ("1", "0")
    return actor


def test_the_second_is_refused_while_the_first_lives(
    services: Services, stage: Stage, tmp_path: Path
) -> None:
    with other(stage, services.bus_url, tmp_path / "first") as first:
        actor = only(stage.enter(1))
        with joins(stage, services.bus_url, tmp_path / "second") as second:
            assert second.wait(WAIT_S) == 4, second.tail()
        assert f"group 1 has a supervisor that lives, fft run with pid {os.getpid()}" in (
            second.stderr_text
        )
        assert "--first-group" in second.stderr_text and "--take-over" in second.stderr_text
        assert stage.nobody(), "it has started a process"
        assert first.heard.empty(), "it has said something to the job"
        actor.order("print still here")
        assert actor.says() == {"printed": "still here"}
        actor.order("exit 0")
        assert first.verdict().ok
    with other(stage, services.bus_url, tmp_path / "third") as third:  # the lease was released
        only(stage.enter(1)).order("exit 0")
        assert third.verdict().ok


def test_adopted_group_leaves_first(services: Services, stage: Stage, tmp_path: Path) -> None:
    with joins(stage, services.bus_url, tmp_path / "first") as first:
        old = only(stage.enter(1))
        with other(stage, services.bus_url, tmp_path / "second", take_over=True) as second:
            assert old.says() == {"heard": "sigterm"}
            assert stage.nobody(), "two processes for one place"
            old.order("exit 0")
            new = only(stage.enter(1))
            assert first.wait(WAIT_S) == 0, first.tail()
            by = f"fft run with pid {os.getpid()}"
            assert f"group 1 was taken over by {by}" in first.stderr_text
            assert all(word["type"] != "drain" for _, word in list(second.heard.queue))
            new.order("exit 0")
            assert second.verdict().ok


def test_a_supervisor_that_was_killed_stands_in_nobodys_way(
    services: Services, stage: Stage, tmp_path: Path
) -> None:
    with joins(stage, services.bus_url, tmp_path / "first") as first:
        old = only(stage.enter(1))
        first.signal(signal.SIGKILL)
        first.wait(WAIT_S)
        old.gone()
    with other(stage, services.bus_url, tmp_path / "second") as second:
        only(stage.enter(1)).order("exit 0")
        assert second.verdict().ok


def test_stopped_supervisor_ends_its_processes_when_continued(
    services: Services, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_SILENCE_S", 1.0)  # applies to the supervisor in this process
    with joins(stage, services.bus_url, tmp_path / "first") as first:
        old = only(stage.enter(1))
        first.signal(signal.SIGSTOP)
        with other(stage, services.bus_url, tmp_path / "second") as second:
            new = only(stage.enter(1))
            first.signal(signal.SIGCONT)
            old.gone()  # by SIGKILL, as a request to leave would also reach the new one
            assert first.wait(WAIT_S) == 0, first.tail()
            assert "group 1 was taken over" in first.stderr_text
            new.order("print still here")
            assert new.says() == {"printed": "still here"}
            new.order("exit 0")
            assert second.verdict().ok


@pytest.fixture
def bus_process() -> Iterator[Forked]:
    """A process that serves a bus, whose URL is its first line."""
    server = Forked(as_main, str(BUS), "serve", "0", talks=True)
    yield server
    server.close()


@pytest.mark.long  # each operation on the silent bus takes its 10 s
@pytest.mark.multiprocess
def test_group_is_started_later_if_its_restart_does_not_reach_the_bus(
    bus_process: Forked, stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with other(stage, bus_process.stdout.readline().strip(), tmp_path / "run") as job:
        first = only(stage.enter(1))
        bus_process.signal(signal.SIGSTOP)
        os.kill(first.pid, signal.SIGKILL)
        text = "group 1 waits for the bus: "
        wait_until(lambda: text in caplog.text, "a start that does not reach the bus", 200)
        bus_process.signal(signal.SIGCONT)
        only(stage.enter(1)).order("exit 0")
        assert job.verdict().ok


@pytest.mark.multiprocess
def test_supervisor_ends_with_a_status_of_its_own_after_a_bus_outage(
    bus_process: Forked, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_BUS_LOST_S", 3.0)  # a shorter limit; bus and processes are real
    with other(stage, bus_process.stdout.readline().strip(), tmp_path / "run") as job:
        child = only(stage.enter(1))
        bus_process.signal(signal.SIGKILL)
        os.kill(child.pid, signal.SIGKILL)
        outcome = job.verdict()
    assert outcome.exit_status == ExitStatus.BUS_LOST and not outcome.ok
    assert any("the bus was out of reach for 3 s" in line for line in outcome.lines)


def test_first_start_without_a_bus_names_its_address_and_no_ulimits() -> None:
    with closing(socket.socket()) as refusing:
        refusing.bind(("127.0.0.1", 0))  # nothing listens at this port
        url = f"tcp://127.0.0.1:{refusing.getsockname()[1]}/job"
        with pytest.raises(BusUnreachable) as found:
            open_bus(url)
    text = why_not_started(Group("1", 1), found.value)
    assert text.startswith(f"group 1 could not be started: the bus at {url} cannot be reached: ")
    assert "can connect to the address" in text and "ulimit" not in text


def test_one_of_two_concurrent_claims_wins(
    services: Services, stage: Stage, tmp_path: Path
) -> None:
    with (
        joins(stage, services.bus_url, tmp_path / "one") as one,
        joins(stage, services.bus_url, tmp_path / "two") as two,
    ):
        actor = only(stage.enter(1))
        wait_until(lambda: not (one.runs and two.runs), "one of them is refused")
        assert stage.nobody()
        actor.order("exit 0")
        assert sorted([one.wait(WAIT_S), two.wait(WAIT_S)]) == [0, 4]


def test_group_is_adopted_only_from_a_silent_supervisor(
    services: Services, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_SILENCE_S", 1.0)
    with closing(open_bus(services.bus_url)) as bus, closing(Claims(bus, lambda: None)) as here:
        assert not here.adopt("1"), "nobody has started it"
        with other(stage, services.bus_url, tmp_path / "lives") as lives:
            actor = only(stage.enter(1))
            assert not here.adopt("1"), "its supervisor lives"
            actor.order("exit 0")
            assert lives.verdict().ok
        assert not here.adopt("1"), "it was let go of on purpose"
        with joins(stage, services.bus_url, tmp_path / "killed") as killed:
            actor = only(stage.enter(1))
            killed.signal(signal.SIGKILL)
            killed.wait(WAIT_S)
            actor.gone()
        assert not here.adopt("1", lambda: True), "there is no room any more"
        assert here.adopt("1") and here.keeps("1")
        assert not here.adopt("1"), "it is ours"


def test_supervisor_does_not_restart_a_group_adopted_by_another(
    services: Services, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut off from the bus for a while, which has ended its listener."""
    monkeypatch.setattr(claims, "_SILENCE_S", 1.0)
    with closing(open_bus(services.bus_url)) as bus, closing(Claims(bus, lambda: None)) as here:
        with other(stage, services.bus_url, tmp_path / "deaf") as deaf:
            actor = only(stage.enter(1))
            deaf.supervisor._links.claims._listener.close()
            assert here.adopt("1")
            actor.order("exit 3")
            verdict = deaf.verdict()
        assert verdict.ok, verdict.lines
        by = f"group 1 was taken over by fft run with pid {os.getpid()}"
        assert any(by in line for line in verdict.lines), verdict.lines
        assert stage.nobody(), "two processes for one place"
        assert here.keeps("1")


def test_supervisor_serving_the_bus_keeps_its_last_group(
    run_job: Any, stage: Stage, tmp_path: Path
) -> None:
    with run_job(groups=1, ranks=1) as job:
        (actor,) = stage.enter(1).values()
        config = RunConfig([str(stage.script)], 1, 1, tmp_path / "there", take_over=True)
        supervisor = Supervisor(config, FaultPlan(faults=[]), Joined(job.bus_url))
        with pytest.raises(SupervisorError, match="serves the job's bus"):
            supervisor.run()
        actor.order("exit 0")
        assert job.verdict().ok


def test_claims_leave_one_entry_for_each_group(services: Services) -> None:
    with closing(open_bus(services.bus_url)) as bus:
        before = bus.key_count()
        for _ in range(3):
            with closing(claims.Claims(bus, lambda: None)) as made:
                made.take(["0", "1"], take_over=False)
        assert bus.key_count() - before <= 2


# --- parts of groups ------------------------------------------------------------------------------


def test_parts_of_a_group_agree_on_its_starts() -> None:
    with closing(open_bus("memory://parts-agree")) as bus:
        starts, served = GroupStarts(bus), iter(["a:1", "b:2", "c:3"])

        def begin(part: int, is_new: bool = False) -> tuple[GroupStart, bool] | None:
            return starts.begin("0", part, lambda: next(served), is_new)

        assert begin(1) is None and starts.read("0") is None, "part 0 serves the store"
        assert begin(0) == (GroupStart(1, "a:1", "a:1", (0,)), False)
        assert begin(1) == (GroupStart(1, "a:1", "a:1", (0, 1)), False)
        # a part that is lost before the group may be re-formed lets all parts start again
        assert begin(1) is None and begin(1) is None
        assert begin(0) == (GroupStart(2, "b:2", "b:2", (0,)), False)
        assert begin(1) == (GroupStart(2, "b:2", "b:2", (0, 1)), False)
        # afterwards it takes its place, and a new part 0 moves the store
        starts.note("0", 1, True)
        starts.note("0", 2, True)
        assert begin(1) == (GroupStart(2, "b:2", "b:2", (0, 1), True), True)
        moved = GroupStart(2, "b:2", "c:3", (0, 1), True)
        assert begin(0) == (moved, True) and begin(1) == (moved, True)
        # a place that was taken in vain is not taken again
        assert begin(1, is_new=True) is None
        assert starts.read("0") == GroupStart(3)


def test_hosts_take_different_parts_of_different_groups() -> None:
    bus = open_bus("memory://parts-differ")
    with (
        closing(bus),
        closing(Claims(bus, lambda: None)) as a,
        closing(Claims(bus, lambda: None)) as b,
    ):
        taken = [[c.take_part(g, 2, lambda: False) for g in ("0", "1")] for c in (a, b)]
        assert taken == [[0, 1], [1, 0]]
        with closing(Claims(bus, lambda: None)) as third, pytest.raises(SupervisorError) as refused:
            third.take_part("0", 2, lambda: False)
        assert "all 2 parts of group 0 have supervisors that live" in str(refused.value)


def test_host_prefers_the_part_of_which_it_has_copies() -> None:
    bus = open_bus("memory://parts-copied")
    with closing(bus), closing(Claims(bus, lambda: None)) as host:
        assert host.take_part("0", 3, lambda: False, has_copies=lambda part: part == 2) == 2
        assert host.take_part("1", 3, lambda: False, has_copies=lambda part: part == 0) == 0


def test_host_that_comes_back_takes_a_part_that_was_lent() -> None:
    bus = open_bus("memory://parts-lent")
    with (
        closing(bus),
        closing(Claims(bus, lambda: None)) as a,
        closing(Claims(bus, lambda: None)) as b,
    ):
        assert a.take_part("0", 2, lambda: False) == 0 and a.take_part("2", 2, lambda: False) == 0
        a.release("2")
        names = ["0", "0 part 1", "2", "2 part 1"]
        assert b.take_lost(names, lambda: False) == "2"
        assert b.take_lost(names, lambda: False) is None, "no part was lost"

"""Tests of the supervisor with real processes: deaths, restarts, drains, and no remaining
processes."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from supervisor_stage import WAIT_S, Actor, Job, Stage, running
from waiting import wait_until

from fft.bus import open_bus
from fft.launch.exit_status import ExitStatus
from fft.launch.services import ServiceError
from fft.launch.supervisor import Joined, RunConfig, Supervisor, SupervisorError, ending
from fft.launch.supervisor.groups import Restarts
from fft.messages.fault_plans import FaultPlan
from fft.messages.protocol import Death, Drain, Suspect, decode, encode
from fft.operate import drain
from fft.operate import inject as injecting
from fft.operate.client import JobClient, OperatorError
from fft.trace.report import fired
from fft.trace.tail import TraceTail

StartJob = Callable[..., AbstractContextManager[Job]]


def supervised_children() -> list[psutil.Process]:
    """Return the children of this process that run a script; other tests may have left others."""
    return [child for child in psutil.Process().children() if _runs_a_script(child)]


def _runs_a_script(child: psutil.Process) -> bool:
    try:
        return "fft/launch/script_runner.py" in " ".join(child.cmdline())
    except psutil.NoSuchProcess:  # psutil raises it for zombies, too
        return False


def record(**fields: Any) -> str:
    return json.dumps(fields) + "\n"


def trace(job: Job, group: int, rank: int, inc: int, *records: str) -> None:
    """Append to the trace of one incarnation, as the child itself would."""
    path = job.trace_dir / f"g{group}r{rank}i{inc}.jsonl"
    with path.open("a") as file:
        file.writelines(records)


def at_work(step: int, epoch: int, members: list[str]) -> str:
    fields = {"step": step, "epoch": epoch, "members": members, "roles": ["voting", "committing"]}
    return record(kind="transition", **{"from": "PREPARED", "to": "COMMIT"}, **fields)


def two_at_work(job: Job, stage: Stage, step: int) -> dict[tuple[str, str], Actor]:
    """Return two groups of one rank that have committed ``step`` together."""
    actors = stage.enter(2)
    for group in (0, 1):
        trace(job, group, 0, 1, at_work(step, 1, ["0", "1"]))
    return actors


def inject(name: str, kind: str, step: int, epoch: int) -> str:
    data = {"name": name, "kind": kind}
    return record(kind="note", note="inject", data=data, step=step, epoch=epoch)


def test_children_get_their_places_and_a_good_end_is_good(
    run_job: StartJob, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FFT_FAULTS", "one that nobody has validated")
    monkeypatch.setenv("FFT_INJECT", "1")
    with run_job(groups=2, ranks=2, arguments=["--steps", "3"]) as job:
        actors = stage.enter(4)
        assert set(actors) == {("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")}
        for actor in actors.values():
            env = actor.env
            assert actor.argv[1:] == ["--steps", "3"]
            assert (env["WORLD_SIZE"], env["NUM_REPLICA_GROUPS"]) == ("2", "2")
            assert env["FFT_BUS"] == job.bus_url
            assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
            assert env["TORCHFT_LIGHTHOUSE"].startswith("http://127.0.0.1:")
            assert env["FFT_TRACE_DIR"] == str(tmp_path / "run")
            assert env["FFT_DRAIN_SIGNAL"] == "SIGTERM" and env["OMP_NUM_THREADS"]
            assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (env["RANK"], "2")
            assert env["GROUP_RANK"] == "0" and env["TORCHELASTIC_RUN_ID"]
            assert env["FFT_DRAIN_WITHIN"] == "60.0"  # the default of --drain-timeout
            assert "FFT_FAULTS" not in env and "FFT_INJECT" not in env
        ports = {actor.place: actor.env["MASTER_PORT"] for actor in actors.values()}
        assert ports["0", "0"] == ports["0", "1"] != ports["1", "0"] == ports["1", "1"]
        actors["0", "1"].order("print hello")
        assert actors["0", "1"].says() == {"printed": "hello"}
        for actor in actors.values():
            actor.order("exit 0")
        verdict = job.verdict()
    assert verdict.ok and verdict.lines == ()
    assert job.heard.empty()
    logs = tmp_path / "run" / "logs"
    assert sorted(path.name for path in logs.iterdir()) == [
        f"g{group}r{rank}-1.log" for group in (0, 1) for rank in (0, 1)
    ]
    assert (logs / "g0r1-1.log").read_text() == "hello\n"
    assert supervised_children() == []


def test_death_is_broadcast_at_once_and_the_group_restarts(
    run_job: StartJob, stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_job(groups=2, ranks=2) as job:
        actors = stage.enter(4)
        victim, mate = actors["1", "1"], actors["1", "0"]
        began = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        heard_at, death = job.heard.get(timeout=WAIT_S)
        with capsys.disabled():
            print(f"\nSIGKILL to death message on the bus: {(heard_at - began) * 1e3:.2f} ms")
        assert death.pop("host")
        assert death == {
            "v": 1,
            "type": "death",
            "group": "1",
            "rank": 1,
            "pid": victim.pid,
            "by": "supervisor",
            "cause": "SIGKILL",
            "replaced": False,
        }
        second = job.message()
        assert (second["rank"], second["pid"]) == (0, mate.pid)
        assert second["cause"] == "SIGKILL by the supervisor, because rank 1 died"
        mate.gone()
        again = stage.enter(2)
        assert set(again) == {("1", "0"), ("1", "1")}
        ports = {actor.env["MASTER_PORT"] for actor in again.values()}
        assert len(ports) == 1 and victim.env["MASTER_PORT"] not in ports
        for actor in [actors["0", "0"], actors["0", "1"], *again.values()]:
            actor.order("exit 0")
        assert job.verdict().ok
        assert job.heard.empty()
        assert (job.trace_dir / "logs" / "g1r0-2.log").exists()


def test_pauses_grow_to_half_a_minute_and_begin_anew_after_progress() -> None:
    restarts = Restarts()
    grown = [restarts.next() for _ in range(10)]
    assert grown == [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    restarts.progressed()
    assert restarts.next() == 0


def test_restarts_after_preemptions_do_not_use_up_those_after_errors() -> None:
    restarts = Restarts()
    for _ in range(4):
        assert not restarts.are_used_up(2, is_error=False)
        restarts.next(is_error=False)
    for _ in range(2):
        assert not restarts.are_used_up(2)
        restarts.next()
    assert restarts.are_used_up(2, is_error=False), "a chain of six without progress"
    restarts.progressed()
    assert not restarts.are_used_up(2) and restarts.are_used_up(0)


@pytest.mark.parametrize("how", ["SIGTERM", "SIGSEGV"])
def test_job_without_a_committed_step_ends_with_a_status_of_its_own(
    run_job: StartJob, stage: Stage, how: str
) -> None:
    """A signal from outside is a preemption, after which more restarts are due."""
    starts = {"SIGTERM": 4, "SIGSEGV": 2}[how]
    with run_job(groups=1, ranks=1, max_restarts=1) as job:
        for _ in range(starts):
            stage.enter(1)["0", "0"].order(f"die {how}")
        outcome = job.verdict()
    assert outcome.exit_status is ExitStatus.NO_PROGRESS
    assert "group 0 was given up after its last restart" in outcome.lines


def test_group_that_is_preempted_while_the_others_commit_is_restarted(
    run_job: StartJob, stage: Stage
) -> None:
    with run_job(groups=2, ranks=1, max_restarts=1) as job:
        actors = two_at_work(job, stage, 5)
        preempted = actors["1", "0"]
        for _ in range(2):
            preempted.order("die SIGTERM")
            preempted = stage.enter(1)["1", "0"]
        for actor in (actors["0", "0"], preempted):
            actor.order("exit 0")
        assert job.verdict().exit_status is ExitStatus.COMPLETE


def test_group_that_keeps_dying_is_dropped_with_the_tail_of_its_log(
    run_job: StartJob, stage: Stage
) -> None:
    with run_job(groups=1, ranks=1, max_restarts=2) as job:
        deaths = []
        for _ in range(3):
            (actor,) = stage.enter(1).values()
            entered = time.monotonic()
            if deaths:
                pauses = entered - deaths[-1]
                assert pauses >= (0, 0.5)[len(deaths) - 1]
            actor.order("raise cut")
            actor.gone()
            deaths.append(time.monotonic())
        verdict = job.verdict()
        assert stage.nobody()
        causes = [job.message() for _ in range(3)]
    assert [message["cause"] for message in causes] == ["exit code 1"] * 3
    assert not verdict.ok
    assert "group 0 was given up" in verdict.lines[0]
    assert f"group 0 rank 0 (pid {actor.pid}, start 3) ended with exit code 1" in verdict.lines[1]
    assert verdict.lines[1].endswith("ConnectionError: cut")


def test_progress_makes_the_next_death_a_first_one(run_job: StartJob, stage: Stage) -> None:
    with run_job(groups=1, ranks=1, max_restarts=1) as job:
        for inc in (1, 2, 3):
            (actor,) = stage.enter(1).values()
            trace(job, 0, 0, inc, at_work(inc, inc, ["0"]))
            actor.order("exit 3")
        (actor,) = stage.enter(1).values()
        actor.order("exit 0")
        assert job.verdict().ok


def test_drain_is_broadcast_and_forwarded_and_ends_without_error(
    run_job: StartJob, stage: Stage
) -> None:
    with run_job(groups=2, ranks=1) as job:
        actors = stage.enter(2)
        job.supervisor.interrupt()
        reported = job.message()
        assert decode(json.dumps(reported).encode()) == Drain(("0", "1"), by="supervisor")
        for actor in actors.values():
            assert actor.says() == {"heard": "sigterm"}
            actor.order("exit 0")
        assert job.verdict().ok


def test_reported_hang_of_a_child_is_forwarded_unchanged(run_job: StartJob, stage: Stage) -> None:
    with run_job(groups=2, ranks=1) as job:
        actors = stage.enter(2)
        actor = actors["1", "0"]
        hangs = Suspect("1", 0, actor.pid, socket.gethostname(), "monitor", "no progress")
        for forged in (replace(hangs, pid=1), replace(hangs, group="0"), replace(hangs, host="x")):
            actor.order(f"tell {encode(forged).decode()}")
        for other in (Drain(("0",), "monitor"), Death("1", 0, actor.pid, hangs.host, "monitor")):
            actor.order(f"tell {encode(other).decode()}")
        actor.order("tell this is no message")
        actor.order(f"tell {encode(hangs).decode()}")
        assert decode(json.dumps(job.message()).encode()) == hangs
        for one in actors.values():
            one.order("exit 0")
        assert job.verdict().ok


def test_a_death_while_draining_is_not_restarted_and_not_good(
    run_job: StartJob, stage: Stage
) -> None:
    with run_job(groups=2, ranks=1) as job:
        actors = stage.enter(2)
        job.supervisor.interrupt()
        for actor in actors.values():
            assert actor.says() == {"heard": "sigterm"}
        actors["0", "0"].order("exit 7")
        actors["1", "0"].order("exit 0")
        verdict = job.verdict()
        assert stage.nobody()
    assert not verdict.ok
    assert len(verdict.lines) == 1 and "ended with exit code 7" in verdict.lines[0]


def test_a_drain_that_takes_too_long_is_ended(run_job: StartJob, stage: Stage) -> None:
    with run_job(groups=1, ranks=2, drain_timeout=0.3) as job:
        actors = stage.enter(2)
        job.supervisor.interrupt()
        verdict = job.verdict()
    assert not any(psutil.pid_exists(actor.pid) for actor in actors.values())
    assert not verdict.ok
    assert verdict.lines[0] == "the job had not drained 0.3 s after it was asked to"
    assert "ended with SIGKILL" in verdict.lines[1]


def test_a_second_interrupt_kills(run_job: StartJob, stage: Stage) -> None:
    with run_job(groups=1, ranks=1) as job:
        (actor,) = stage.enter(1).values()
        job.supervisor.interrupt()
        assert actor.says() == {"heard": "sigterm"}
        job.supervisor.interrupt()
        verdict = job.verdict()
        actor.gone()
    assert verdict.lines[0] == "interrupted a second time"


def test_the_job_has_a_time_limit(run_job: StartJob) -> None:
    with run_job(groups=1, ranks=1, timeout=0.5) as job:
        verdict = job.verdict()
    assert supervised_children() == []
    assert verdict.lines[0] == "the job had not finished within --timeout 0.5 s"


def test_processes_left_by_a_child_end_with_the_child(run_job: StartJob, stage: Stage) -> None:
    with run_job(groups=1, ranks=1) as job:
        (actor,) = stage.enter(1).values()
        actor.order("spawn")
        (helper,) = stage.enter(1).values()
        actor.order("exit 0")
        assert job.verdict().ok
        helper.gone()


def test_a_planned_drain_comes_back_and_the_plan_ends_the_job(
    run_job: StartJob, stage: Stage
) -> None:
    raises = {"name": "x", "kind": "exception", "step": 1, "group": 0, "rank": 0, "phase": "vote"}
    drains = {"name": "d", "kind": "drain", "step": 4, "group": 1, "return_after_steps": 5}
    plan = FaultPlan.model_validate({"faults": [raises, drains]})
    with run_job(plan, groups=2, ranks=1, stop_after_plan=3, min_steps=20) as job:
        actors = stage.enter(2)
        both = ["0", "1"]
        trace(job, 0, 0, 1, inject("x", "exception", 1, 1), at_work(4, 2, both))
        trace(job, 1, 0, 2, at_work(4, 2, both), inject("d", "drain", 4, 2), at_work(5, 2, both))
        actors["1", "0"].order("exit 0")
        trace(job, 0, 0, 1, at_work(9, 3, ["0"]))
        actors["1", "0"].gone()
        trace(job, 0, 0, 1, at_work(10, 3, ["0"]))  # 5 steps after its last
        (back,) = stage.enter(1).values()
        assert back.place == ("1", "0")
        for step in range(11, 100):  # the job trains on until it is asked to stop
            trace(job, 1, 0, 3, at_work(step, 4, both))
            trace(job, 0, 0, 1, at_work(step, 4, both))
            with suppress(queue.Empty):
                assert job.heard.get(timeout=0.1)[1]["type"] == "drain"
                break
        assert 20 <= step < 99
        back.order("exit 0")
        actors["0", "0"].order("exit 0")
        actors["0", "0"].gone()  # the bus alone asked it to leave, without a signal
        verdict = job.verdict()
    assert verdict.ok, verdict.lines


def test_a_plan_that_was_not_finished_is_no_good_end(run_job: StartJob, stage: Stage) -> None:
    fault = {"name": "late", "kind": "drain", "step": 4, "group": 0}
    plan = FaultPlan.model_validate({"faults": [fault]})
    with run_job(plan, groups=1, ranks=1, stop_after_plan=1) as job:
        (actor,) = stage.enter(1).values()
        actor.order("exit 0")
        verdict = job.verdict()
    assert verdict.lines[0] == "the fault plan was not finished: not all of its faults fired"
    assert (
        "did not fire" in verdict.lines[1] and "late (drain, step 4, group 0)" in verdict.lines[1]
    )


def test_successful_end_names_the_unfired_faults(
    run_job: StartJob, stage: Stage, tmp_path: Path
) -> None:
    """The list has planned and commanded faults and those of services; faults that fired are not
    named."""
    faults = [
        {"name": "done", "kind": "exception", "step": 1, "group": 1, "rank": 0, "phase": "vote"},
        {"name": "late", "kind": "kill", "step": 99, "group": 1, "rank": 0, "phase": "forward"},
        {"name": "bus", "kind": "bus_restart", "step": 99},
    ]
    asked = {"name": "asked", "kind": "slow", "step": 50, "group": "0", "rank": 0, "seconds": 1.0}
    word = {"type": "inject", "fault": {**asked, "steps": 2}, "refused": None, "by": "me"}
    plan = FaultPlan.model_validate({"faults": faults})
    with run_job(plan, groups=2, ranks=1) as job:
        actors = stage.enter(2)
        trace(job, 1, 0, 1, inject("done", "exception", 1, 1), at_work(2, 1, ["0", "1"]))
        asked_now = record(kind="note", note="command", data=word, step=2, epoch=1)
        trace(job, 0, 0, 1, at_work(2, 1, ["0", "1"]), asked_now)
        for actor in actors.values():
            actor.order("exit 0")
        verdict = job.verdict()
    assert verdict.ok
    assert verdict.lines == (
        "faults that did not fire, so this run does not test them: "
        "late (kill, step 99, phase forward, group 1 rank 0); bus (bus_restart, step 99); "
        "asked (slow, step 50, group 0 rank 0)",
    )
    reported = fired(tmp_path / "run")
    assert reported is not None and reported.startswith("3 of 4 faults did not fire")
    assert verdict.lines[0].partition(": ")[2].split("; ") == reported.split("\n  ")[1:]


@pytest.mark.parametrize("committed", [False, True])
def test_end_without_state_names_the_loss_and_the_fix(
    run_job: StartJob, stage: Stage, committed: bool
) -> None:
    with run_job(groups=1, ranks=1, max_restarts=0) as job:
        (actor,) = stage.enter(1).values()
        if committed:
            trace(job, 0, 0, 1, at_work(7, 1, ["0"]))
        actor.order("raise lost")
        verdict = job.verdict()
    assert not verdict.ok
    (line,) = [line for line in verdict.lines if line.startswith("NoState: ")]
    if committed:
        assert "the state of step 7" in line and "go on from a checkpoint" in line
    else:
        assert "No work is lost: start the job again" in line and "checkpoint, if" in line


def test_lost_state_ends_waiting_groups_without_restarts(run_job: StartJob, stage: Stage) -> None:
    with run_job(groups=2, ranks=1, max_restarts=10) as job:
        actors = two_at_work(job, stage, 7)
        os.kill(actors["0", "0"].pid, signal.SIGKILL)
        newcomer = stage.enter(1)["0", "0"]
        os.kill(actors["1", "0"].pid, signal.SIGKILL)
        second = stage.enter(1)["1", "0"]
        newcomer.order("raise lost")
        assert second.says() == {"heard": "sigterm"}
        second.order("exit 1")
        verdict = job.verdict()
    assert not verdict.ok
    assert any("NoState" in line and "the state of step 7" in line for line in verdict.lines)


def test_group_restarted_after_the_end_is_not_awaited(run_job: StartJob, stage: Stage) -> None:
    """In torchft's loop, no rank reports which commit is the last."""
    with run_job(groups=2, ranks=1) as job:
        actors = two_at_work(job, stage, 7)
        os.kill(actors["1", "0"].pid, signal.SIGKILL)
        again = stage.enter(1)["1", "0"]
        trace(job, 0, 0, 1, at_work(10, 2, ["0"]))
        actors["0", "0"].order("exit 0")
        assert again.says() == {"heard": "sigterm"}
        again.order("exit 0")
        assert job.verdict().ok


def test_group_joining_after_the_end_gets_an_error(run_job: StartJob, stage: Stage) -> None:
    with run_job(groups=1, ranks=1, max_restarts=0) as job:
        (actor,) = stage.enter(1).values()
        actor.order("raise late")
        assert not job.verdict().ok


def test_steps_of_departed_groups_count(tmp_path: Path) -> None:
    """Otherwise a job whose processes have all been restarted would have committed nothing."""
    (tmp_path / "g0r0i1.jsonl").write_text(at_work(7, 1, ["0"]))
    (tmp_path / "g0r0i2.jsonl").write_text(record(kind="transition", step=0, epoch=0, members=[]))
    tail = TraceTail(tmp_path)
    assert tail.poll().step == 7
    tail.close()


def test_rejoined_group_continues_after_the_others_finish(run_job: StartJob, stage: Stage) -> None:
    with run_job(groups=2, ranks=1) as job:
        actors = two_at_work(job, stage, 7)
        os.kill(actors["1", "0"].pid, signal.SIGKILL)
        again = stage.enter(1)["1", "0"]
        trace(job, 1, 0, 2, record(kind="transition", to="NORMAL", roles=["joining", "training"]))
        actors["0", "0"].order("exit 0")
        actors["0", "0"].gone()
        again.order("print still here")
        assert again.says() == {"printed": "still here"}
        again.order("exit 0")
        assert job.verdict().ok


def test_job_asked_to_end_reports_its_last_step(run_job: StartJob, stage: Stage) -> None:
    with run_job(groups=2, ranks=1) as job:
        actors = two_at_work(job, stage, 7)
        job.supervisor.interrupt()
        for actor in actors.values():
            assert actor.says() == {"heard": "sigterm"}
            actor.order("exit 0")
        verdict = job.verdict()
    assert verdict.ok
    assert verdict.lines[-1] == "the job was asked to end, and left after step 7"


def test_interrupt_after_lost_state_fails_the_job(run_job: StartJob, stage: Stage) -> None:
    with run_job(groups=2, ranks=1) as job:
        actors = two_at_work(job, stage, 7)
        for actor in actors.values():
            actor.order("raise cut")
        again = stage.enter(2)
        job.supervisor.interrupt()
        for actor in again.values():
            assert actor.says() == {"heard": "sigterm"}
            actor.leaves("drained", 0)
            actor.order("exit 0")
        verdict = job.verdict()
    assert not verdict.ok
    assert "started again since step 7 was committed" in verdict.lines[0]


def test_group_without_state_restarts_while_other_groups_hold_state(
    run_job: StartJob, stage: Stage
) -> None:
    with run_job(groups=2, ranks=1, max_restarts=1) as job:
        actors = stage.enter(2)
        trace(job, 1, 0, 1, at_work(7, 1, ["1"]))
        actors["0", "0"].order("raise lost")
        again = stage.enter(1)["0", "0"]
        again.order("exit 0")
        actors["1", "0"].order("exit 0")
        assert job.verdict().ok


@pytest.mark.parametrize(
    ("changes", "mend"),
    [
        ({"script": ["none.py"]}, "give the path of a Python file"),
        ({"groups": 0}, "--groups 0 is a host of spares only"),
        ({"min_groups": 3}, "--min-groups 3: expected 1 to 2"),
        ({"min_steps": 5}, "give both or neither"),
        ({"first_group": 2, "all_groups": 3}, "--all-groups 3: expected at least 4"),
        ({"host_limit": 0.0}, "--host-limit 0: expected a positive number"),
        ({"ranks_per_host": 2}, "--ranks-per-host 2: expected a divisor of --ranks 1"),
        ({"ranks": 4, "ranks_per_host": 2}, "a group on 2 hosts is not possible with"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(
    stage: Stage, tmp_path: Path, changes: dict[str, Any], mend: str
) -> None:
    good = {"script": [str(stage.script)], "groups": 2, "ranks": 1, "trace_dir": tmp_path / "run"}
    RunConfig(**good).check()
    with pytest.raises(SupervisorError, match=mend):
        RunConfig(**{**good, **changes}).check()


# --- commands of operators ---------------------------------------------------------------


def evict(job: Job, place: str, **how: Any) -> tuple[list[str], str]:
    """Evict as an operator does; return the accepted message and the final answer."""
    accepted: list[str] = []
    with JobClient(job.bus_url) as desk:
        settings = {"restart": False, "grace": 30.0, **how}
        done = drain.evict(desk, place, on_accepted=accepted.append, **settings)
    return accepted, done.done


def test_an_evicted_group_is_ended_and_not_started_again(
    run_job: StartJob, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUBBORN", "1")
    with run_job(groups=2, ranks=2) as job:
        actors = stage.enter(4)
        os.kill(actors["1", "1"].pid, signal.SIGSTOP)
        accepted, done = evict(job, "1", grace=0.5)
        pids = f"{actors['1', '0'].pid}, {actors['1', '1'].pid}"
        assert accepted == [f"the supervisor: ending pid {pids} of group 1"]
        assert done == (
            "group 1 has ended (rank 0: SIGKILL; rank 1: SIGKILL); it is not started again"
        )
        assert evict(job, "1", restart=True)[0] == ["the supervisor: no process to end"]
        assert set(stage.enter(2)) == {("1", "0"), ("1", "1")}
        evict(job, "1", grace=0.0)
        for rank in "01":
            actors["0", rank].order("exit 0")
        verdict = job.verdict()
    assert verdict.ok, "what was ended as asked is no failure"
    assert supervised_children() == []


def test_one_rank_is_evicted_and_its_group_starts_again(run_job: StartJob, stage: Stage) -> None:
    with run_job(groups=1, ranks=2) as job:
        actors = stage.enter(2)
        os.kill(actors["0", "1"].pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(evict, job, "0.1", restart=True)
            assert actors["0", "1"].says() == {"heard": "sigterm"}, "it was woken, and asked"
            actors["0", "1"].order("exit 3")
            actors["0", "0"].gone()
            accepted, done = answer.result(WAIT_S)
        assert accepted == [f"the supervisor: ending pid {actors['0', '1'].pid} of group 0"]
        assert done.endswith("rank 1: exit code 3); it is started again")
        for actor in stage.enter(2).values():
            actor.order("exit 0")
        assert job.verdict().ok


def test_two_supervisors_at_one_job_keep_to_their_own(
    run_job: StartJob, stage: Stage, tmp_path: Path
) -> None:
    with run_job(groups=1, ranks=1) as here:
        (first,) = stage.enter(1).values()
        services = Joined(here.bus_url, "http://127.0.0.1:1")
        config = RunConfig(
            [str(stage.script)], 1, 1, tmp_path / "there", first_group=1, all_groups=2
        )
        there = Job(Supervisor(config, FaultPlan(faults=[]), services), here.bus_url, config)
        with closing(there):
            (second,) = stage.enter(1).values()
            assert second.place == ("1", "0")
            assert second.env["NUM_REPLICA_GROUPS"] == "2"
            assert second.env["TORCHFT_LIGHTHOUSE"] == services.lighthouse_url
            know_each_other(here, there)
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(evict, here, "1")
                assert second.says() == {"heard": "sigterm"}
                second.order("exit 0")
                accepted, done = answer.result(WAIT_S)
            assert accepted == [f"the supervisor: ending pid {second.pid} of group 1"]
            assert done.endswith("it is not started again")
            assert there.verdict().ok
        first.order("exit 0")
        assert here.verdict().ok


def know_each_other(*jobs: Job) -> None:
    """Wait until each supervisor has received another one's heartbeat."""
    deadline = time.monotonic() + WAIT_S
    for job in jobs:
        while job.supervisor._links.alone:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_external_services_must_be_named() -> None:
    with pytest.raises(ServiceError, match="--join needs FFT_BUS"):
        Joined.from_env({})
    joined = Joined.from_env({"FFT_BUS": "tcp://a:1/j", "TORCHFT_LIGHTHOUSE": "http://a:2"})
    assert (joined.bus_url, joined.lighthouse_url) == ("tcp://a:1/j", "http://a:2")
    with pytest.raises(ServiceError, match="served elsewhere"):
        joined.restart_bus()


def test_an_eviction_that_cannot_be_is_refused(run_job: StartJob, stage: Stage) -> None:
    with run_job(groups=2, ranks=1) as job:
        actors = stage.enter(2)
        for place, why in (("7", "no group '7' here; the groups: 0, 1"), ("1.4", "no rank 4")):
            with pytest.raises(OperatorError, match=why):
                evict(job, place)
        job.supervisor.interrupt()
        for actor in actors.values():
            assert actor.says() == {"heard": "sigterm"}
        with pytest.raises(OperatorError, match="the job is ending"):
            evict(job, "1")
        for actor in actors.values():
            actor.order("exit 0")
        assert job.verdict().ok


@pytest.mark.parametrize("injectable", [True, False])
def test_services_are_restarted_only_for_an_injectable_job(
    run_job: StartJob, stage: Stage, injectable: bool
) -> None:
    with run_job(groups=1, ranks=1, injectable=injectable) as job:
        (actor,) = stage.enter(1).values()
        assert actor.env.get("FFT_INJECT") == ("1" if injectable else None)
        received: queue.Queue[Any] = queue.Queue()
        with JobClient(job.bus_url) as desk, closing(open_bus(job.bus_url)) as bus:
            bus.subscribe(lambda word: received.put(json.loads(word)), received.put, "commands")
            state = desk.job()
            plan = injecting.single(state, "lighthouse_restart", None, {})
            (output,) = injecting.send(desk, state, plan)
            assert received.get(timeout=WAIT_S)["by"] == desk.me
            if injectable:  # announces the fault for the traces of the receivers
                word = received.get(timeout=WAIT_S)
                assert (word["by"], word["fault"]) == ("supervisor", plan.faults[0].model_dump())
        assert output.ok is injectable
        word = "accepted: armed for step 0" if injectable else "refused: it runs without --inj"
        assert f"the supervisor {word}" in output.text
        actor.order("exit 0")
        assert job.verdict().ok


def test_job_without_a_commit_reports_the_cause_of_its_wait(
    run_job: StartJob,
    stage: Stage,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ending, "STANDSTILL_S", 1.0)
    with run_job(groups=2, ranks=1) as job:
        actors = two_at_work(job, stage, 5)
        cause = "rank 1/0 cannot be reached at 10.0.0.2:4711"
        trace(job, 0, 0, 1, record(kind="transition", to="ROLLBACK_REQ", cause=cause, step=5))
        wait_until(lambda: "since step 5. group 0: running (start 1)" in caplog.text, "it is said")
        assert cause in caplog.text
        wait_until(lambda: caplog.text.count("since step 5") == 2, "it is said again")
        trace(job, 0, 0, 1, at_work(6, 2, ["0", "1"]))
        wait_until(lambda: "since step 6" in caplog.text, "the time counts from the last commit")
        for actor in actors.values():
            actor.order("exit 0")
        assert job.verdict().ok


def test_host_of_spares_waits_for_the_end_of_the_job(stage: Stage, tmp_path: Path) -> None:
    with running(stage, tmp_path / "run", FaultPlan(faults=[]), groups=1, ranks=1) as job:
        config = RunConfig(
            [str(stage.script)],
            0,
            1,
            tmp_path / "spares",
            all_groups=1,
            spares=1,
            bus_url=job.bus_url,
        )
        spares = Supervisor(config, FaultPlan(faults=[]), Joined(job.bus_url))
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(spares.run)
            wait_until(lambda: spares._reforming.spares.ready == 1, "its spare is ready", WAIT_S)
            assert not ended.done()
            spares.interrupt()
            outcome = ended.result(WAIT_S)
        assert outcome.exit_status == ExitStatus.DRAINED
        for actor in stage.enter(1).values():
            actor.order("exit 0")
        assert job.verdict().ok

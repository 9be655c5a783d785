"""Tests of ends: of a group, whose ranks end one by one, and of the job, as recorded on its bus."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked_run import fft
from supervisor_stage import Actor, Job, Stage
from test_supervisor import at_work, record, trace, two_at_work
from waiting import wait_until

from fft.bus import ErrorBus, open_bus
from fft.bus.base import HEAD
from fft.checkpoints.plan import Checkpointing
from fft.launch.exit_status import ExitStatus
from fft.launch.kept import kept
from fft.launch.outcome import Outcome
from fft.launch.supervisor import Joined, RunConfig, Supervisor, ending, loop
from fft.launch.supervisor.ending import Outage, last_epoch
from fft.launch.supervisor.groups import Group
from fft.launch.supervisor.judgement import Judgement
from fft.messages.fault_plans import FaultPlan
from fft.messages.progress import CheckpointReport, TraceReport, encode_report
from fft.messages.protocol import GroupEntry, Peer, RankEntry, Record
from fft.messages.wire import EPOCH, SCOPES, Wire, encode_register, left_name, list_name
from fft.trace.tail import JobView

StartJob = Callable[..., AbstractContextManager[Job]]


def test_group_has_not_finished_if_one_rank_ended_and_another_died(
    run_job: StartJob, stage: Stage
) -> None:
    with run_job(groups=1, ranks=2) as job:
        actors = stage.enter(2)
        actors["0", "0"].order("exit 0")
        actors["0", "0"].gone()
        os.kill(actors["0", "1"].pid, signal.SIGKILL)
        again = stage.enter(2)
        assert set(again) == {("0", "0"), ("0", "1")}
        for actor in again.values():
            actor.order("exit 0")
        assert job.verdict().ok


@pytest.mark.parametrize("asked", ["nobody", "a drain", "its last step", "the end of its shard"])
def test_group_that_exits_0_mid_job_is_reported_unless_asked(
    run_job: StartJob, stage: Stage, asked: str
) -> None:
    """The supervisor reports it unless the group was asked to leave.

    Groups that end with the last step also end one after the other.
    """
    with run_job(groups=2, ranks=1) as job:
        actors = two_at_work(job, stage, 5)
        reasons = {"a drain": "drained", "its last step": "last_step"}
        reasons |= {"the end of its shard": "shard_ended", "nobody": "shut_down"}
        actors["1", "0"].leaves(reasons[asked])
        actors["1", "0"].order("exit 0")
        actors["1", "0"].gone()
        trace(job, 0, 0, 1, at_work(9, 2, ["0"]))
        actors["0", "0"].order("exit 0")
        verdict = job.verdict()
    assert verdict.ok
    if asked != "nobody":
        assert verdict.lines == ()
        return
    (line,) = verdict.lines
    assert "group 1 rank 0 ended with exit status 0 after step 5, unasked" in line
    assert "went on to step 9" in line and "g1r0-1.log" in line


def test_job_names_a_short_shard_if_the_others_needed_its_group(
    run_job: StartJob, stage: Stage
) -> None:
    with run_job(groups=2, ranks=1, max_restarts=0) as job:
        actors = two_at_work(job, stage, 5)
        actors["1", "0"].leaves("shard_ended")
        actors["1", "0"].order("exit 0")
        actors["1", "0"].gone()
        actors["0", "0"].order("raise few")
        actors["0", "0"].gone()
        verdict = job.verdict()
    assert (
        "group 1 left after step 5, because its shard of the data was trained" in verdict.lines[0]
    )


def report(job: Job, word: CheckpointReport | TraceReport) -> None:
    """Send a message on the bus as the child itself would."""
    with open_bus(job.bus_url) as bus:
        bus.broadcast(encode_report(word), "progress")


def in_epoch(job: Job, epoch: int, step: int, *peers: Peer) -> None:
    """Write registers in which these groups are in the newest epoch, which has committed
    ``step``."""
    members = tuple(
        GroupEntry(p.group, "h:1", (RankEntry(p.rank, p.inc, True, "http://h:1/", 7, "h"),))
        for p in peers
    )
    record = Record(2 * epoch, "epoch", epoch, 0, step - 1, "x", 0, 0, peers[0], members)
    head = replace(record, n=record.n + 1, kind="commit", txn=1, step=step, members=())
    with open_bus(job.bus_url) as bus:
        show(bus, record, head)


def test_a_state_that_is_lost_without_a_trace_is_noticed(run_job: StartJob, stage: Stage) -> None:
    """Traces cannot be written; the registers hold the previous states of the groups."""
    with run_job(groups=2, ranks=1, checkpoint=Checkpointing("checkpoints", 2)) as job:
        actors = stage.enter(2)
        in_epoch(job, 1, 8, Peer("0", 0, 1), Peer("1", 0, 1))
        os.kill(actors["0", "0"].pid, signal.SIGKILL)
        stage.enter(1)
        os.kill(actors["1", "0"].pid, signal.SIGKILL)
        verdict = job.verdict()
    assert verdict.lost == "all groups that had the state have died"
    assert verdict.step == 8


def test_group_without_a_writable_trace_is_not_reported_as_leaving_early(
    run_job: StartJob, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """The job is not reported as over: the restarted group has the state, though its trace does not
    show it."""
    with run_job(groups=2, ranks=1, checkpoint=Checkpointing("checkpoints", 2)) as job:
        actors = two_at_work(job, stage, 5)
        os.kill(actors["1", "0"].pid, signal.SIGKILL)
        again = stage.enter(1)["1", "0"]
        for inc in (1, 2, 2):
            report(job, TraceReport("1", 0, inc, f"No space left on device for {inc}"))
        wait_until(lambda: "No space left on device for 2" in caplog.text, "it is heard")
        trace(job, 1, 0, 2, at_work(6, 2, ["0", "1"]))
        in_epoch(job, 2, 8, Peer("0", 0, 1), Peer("1", 0, 2))
        os.kill(actors["0", "0"].pid, signal.SIGKILL)
        other = stage.enter(1)["0", "0"]
        trace(job, 0, 0, 2, at_work(9, 2, ["0", "1"]))
        again.leaves("last_step", 8)
        again.order("exit 0")
        again.gone()
        report(job, CheckpointReport("0", 0, 2, 8, "failed", "OSError: No space left on device"))
        other.order("exit 0")
        verdict = job.verdict()
    assert verdict.ok and verdict.lost is None and verdict.lines == ()
    assert verdict.failed == (8, "rank 0/0: OSError: No space left on device")
    assert verdict.step == 9
    for inc in (1, 2):
        text = f"the trace of rank 1/0 cannot be written: No space left on device for {inc};"
        assert caplog.text.count(text) == 1
    assert caplog.text.count("no checkpoint of step 8 from rank 0/0: OSError") == 1


def test_rank_that_exits_0_before_its_mate_fails_is_reported(
    run_job: StartJob, stage: Stage
) -> None:
    """The mate waits for it in vain, and its error message then is not the cause."""
    with run_job(groups=2, ranks=2, max_restarts=0) as job:
        actors = stage.enter(4)
        for group, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
            trace(job, group, rank, 1, at_work(5, 1, ["0", "1"]))
        actors["1", "1"].order("exit 0")
        shown = job.supervisor._groups["1"].doing
        wait_until(
            lambda: shown() == "running (start 1), rank 1 has ended", "the supervisor has seen it"
        )
        for rank in (0, 1):
            trace(job, 0, rank, 1, at_work(9, 2, ["0"]))
        actors["1", "0"].order("exit 3")
        actors["1", "0"].gone()
        for rank in "01":
            actors["0", rank].order("exit 0")
        verdict = job.verdict()
    assert not verdict.ok
    reported = [line for line in verdict.lines if "rank 1 ended with exit status 0" in line]
    assert len(reported) == 1 and "group 1" in reported[0] and "g1r1-1.log" in reported[0]


def test_departed_group_still_writing_a_checkpoint_is_awaited(
    run_job: StartJob, stage: Stage
) -> None:
    """The job is over, and its last epoch was one without this group."""
    with run_job(groups=2, ranks=1) as job:
        actors = two_at_work(job, stage, 5)
        at_its_end = {"from": "DRAIN_COMMIT", "to": "EXIT", "roles": ["last_commit", "terminal"]}
        trace(job, 1, 0, 1, record(kind="transition", step=5, **at_its_end))
        groups, tail = job.supervisor._groups, job.supervisor._tail
        wait_until(lambda: not groups["1"].waiting(set(), tail.view), "its end is seen")
        assert groups["1"].living
        (child,) = groups["0"].waiting(set(), tail.view)
        assert groups["0"].waiting({child.pid}, tail.view) == []
        for group in "01":
            actors[group, "0"].order("exit 0")
        assert job.verdict().ok


@pytest.fixture
def bus() -> Iterator[ErrorBus]:
    with open_bus(f"memory://ends-{uuid.uuid4().hex}") as bus:
        yield bus


def formed(epoch: int, *groups: str) -> Record:
    ranks = (RankEntry(0, 1, True, "", 1, "here"),)
    members = tuple(GroupEntry(group, "here:1", ranks) for group in groups)
    return Record(epoch, "epoch", epoch, 0, 7, "line", 0, 0, Peer("0", 0, 1), members)


def left(epoch: int, *leavers: str) -> Record:
    by = Peer("0", 0, 1)
    return Record(9, "commit", epoch, 1, 8, "line", 2, 2, by, change=True, leavers=leavers)


def show(bus: ErrorBus, listed: Record, head: Record) -> None:
    """Write the registers.

    ``listed`` is the newest epoch with a list of members, which may be late.
    """
    wire = Wire()
    bus.write(list_name(listed), encode_register(listed.members))
    bus.write(EPOCH, wire.encode_record(listed))
    assert bus.compare_set(HEAD, None, wire.encode_record(head)) == wire.encode_record(head)


def test_a_job_is_over_when_the_last_commit_has_all_groups_leave(bus: ErrorBus) -> None:
    show(bus, formed(2, "0", "1"), left(2, "0", "1"))
    assert last_epoch(bus) == formed(2, "0", "1")


def test_group_resuming_after_the_end_does_not_change_the_outcome(
    run_job: StartJob, stage: Stage
) -> None:
    """A group that was stopped and excluded resumes after the last step of the others."""
    with run_job(groups=2, ranks=1) as job, open_bus(job.bus_url) as bus:
        actors = two_at_work(job, stage, 7)
        show(bus, formed(2, "0"), left(2, "0"))
        actors["0", "0"].order("exit 0")
        actors["0", "0"].gone()
        actors["1", "0"].order("raise late")
        verdict = job.verdict()
    assert verdict.ok, verdict.lines
    assert "group 1 came back when the job was over" in verdict.lines


def test_job_has_no_last_epoch_while_a_group_stays(bus: ErrorBus) -> None:
    show(bus, formed(2, "0", "1"), left(2, "0"))
    assert last_epoch(bus) is None


@contextmanager
def staged(run_job: StartJob) -> Iterator[tuple[Job, ErrorBus, ErrorBus]]:
    """Return a job of two stages with their own scopes, and the buses of the scopes."""
    with (
        run_job(groups=2, ranks=1) as job,
        open_bus(job.bus_url) as bus,
        open_bus(f"{job.bus_url}.stage1") as later,
    ):
        bus.write(SCOPES, json.dumps(["stage1"]).encode())
        yield job, bus, later


def test_a_job_of_stages_goes_on_until_the_last_of_them_is_over(
    run_job: StartJob, stage: Stage
) -> None:
    """A group that dies after the end of the first stage is restarted, and no group is ended."""
    with staged(run_job) as (job, bus, later):
        actors = two_at_work(job, stage, 7)
        show(bus, formed(2, "0", "1"), left(2, "0", "1"))
        show(later, formed(2, "0", "1"), left(2, "1"))
        os.kill(actors["1", "0"].pid, signal.SIGKILL)
        again = stage.enter(1)["1", "0"]
        head = Wire().encode_record(left(2, "0", "1"))
        assert later.compare_set(HEAD, later.read(HEAD), head) == head
        for actor in (actors["0", "0"], again):
            assert actor.says() == {"heard": "sigterm"}
            actor.order("exit 0")
        assert job.verdict().ok


def test_group_is_not_restarted_after_its_later_stage_ended(
    run_job: StartJob, stage: Stage
) -> None:
    """No group can provide the state of that stage any more; the other groups continue and end
    well."""
    with staged(run_job) as (job, bus, later):
        actors = two_at_work(job, stage, 7)
        show(bus, formed(2, "0", "1"), left(2, "1"))
        show(later, formed(2, "0", "1"), left(2, "0", "1"))
        os.kill(actors["1", "0"].pid, signal.SIGKILL)
        again = stage.enter(1)["1", "0"]
        again.order("raise late")
        again.gone()
        wait_until(lambda: job.supervisor._groups["1"].given_up, "it is known", 20.0)
        assert stage.nobody()
        actors["0", "0"].order("exit 0")
        verdict = job.verdict()
    assert verdict.ok, verdict.lines
    assert "group 1 came back after a later stage had ended" in str(verdict.lines)


def test_a_stage_that_its_groups_have_left_without_a_commit_is_over(bus: ErrorBus) -> None:
    show(bus, formed(2, "0", "1"), left(2, "0"))
    bus.write(left_name("0", 0), b"1")
    assert last_epoch(bus) is None
    bus.write(left_name("1", 0), b"2")
    assert last_epoch(bus) is None, "that is another process of it"
    bus.write(left_name("1", 0), b"1")
    assert last_epoch(bus) == formed(2, "0", "1")


def test_members_of_an_older_epoch_need_not_leave(bus: ErrorBus) -> None:
    """Group 1 has joined since and trains on; only the member list of the epoch with it is late."""
    show(bus, formed(1, "0"), left(2, "0"))
    assert last_epoch(bus) is None


@pytest.mark.parametrize("how", ["vanishes", "shuts down", "the loop is torchft's"])
def test_exit_0_in_the_middle_of_the_job_is_a_loss(
    run_job: StartJob, stage: Stage, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A group that shuts down is lost only if the others continue, and only in FFT's own loop."""
    with run_job(groups=2, ranks=2) as job:
        actors = stage.enter(4)
        is_torchft = how == "the loop is torchft's"
        for group, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
            trace(job, group, rank, 1, at_work(5, 1, ["0", "1"]))
        if how != "vanishes":
            actors["1", "1"].leaves("shut_down" if is_torchft else "left_loop")
        actors["1", "1"].order("vanish" if how == "vanishes" else "exit 0")
        actors["1", "1"].gone()
        if how != "vanishes":
            for rank in (0, 1):
                trace(job, 0, rank, 1, at_work(6, 1, ["0", "1"]))
        if is_torchft:
            actors["1", "0"].order("exit 0")
            actors["1", "0"].gone()
            again = {}
        else:
            actors["1", "0"].gone()
            again = stage.enter(2)
        assert {place[0] for place in again} == ({"1"} if again else set())
        for actor in (actors["0", "0"], actors["0", "1"], *again.values()):
            actor.order("exit 0")
        verdict = job.verdict()
    text = "group 1 rank 1 (pid"
    assert verdict.ok
    assert (text in caplog.text) == bool(again)
    if again:
        assert "ended with exit status 0 at step 5, before the end of the job" in caplog.text
        assert caplog.text.count("before the end of the job; its group is restarted") == 1


def test_death_is_reported_at_once_with_signal_and_step(
    run_job: StartJob, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    with run_job(groups=2, ranks=1) as job:
        actors = two_at_work(job, stage, 5)
        os.kill(actors["1", "0"].pid, signal.SIGKILL)
        again = stage.enter(1)["1", "0"]
        pid = actors["1", "0"].pid
        text = f"group 1 rank 0 (pid {pid}) died: SIGKILL, possibly out of memory"
        assert text in caplog.text and "at step 5. Log: " in caplog.text
        again.order("raise cut")
        third = stage.enter(1)["1", "0"]
        assert "ended with ConnectionError at" in caplog.text
        assert "before its first transaction" in caplog.text
        third.order("exit 0")
        actors["0", "0"].order("exit 0")
        assert job.verdict().exit_status == ExitStatus.COMPLETE


@pytest.mark.parametrize(
    "how", ["interrupted", "killed", "drained", "one drained", "given up", "failed"]
)
def test_exit_status_encodes_the_end_of_the_job(run_job: StartJob, stage: Stage, how: str) -> None:
    with run_job(groups=2, ranks=1, max_restarts=0) as job:
        actors = two_at_work(job, stage, 5)
        if how in ("interrupted", "killed"):
            job.supervisor.interrupt()
            for actor in actors.values():
                assert actor.says() == {"heard": "sigterm"}
        for group in {"drained": (0, 1), "one drained": (1,)}.get(how, ()):
            actors[str(group), "0"].leaves("drained")
        for group in {"killed": (1,), "given up": (1,), "failed": (0, 1)}.get(how, ()):
            os.kill(actors[str(group), "0"].pid, signal.SIGKILL)
            actors[str(group), "0"].gone()
        for group in "01":
            with suppress(OSError):  # the process was killed
                actors[group, "0"].order("exit 0")
        status = job.verdict().exit_status
    assert (
        status
        == {
            "interrupted": ExitStatus.DRAINED,
            "killed": ExitStatus.DRAINED,
            "drained": ExitStatus.DRAINED,
            "one drained": ExitStatus.FEWER_GROUPS,
            "given up": ExitStatus.FEWER_GROUPS,
            "failed": ExitStatus.FAILED,
        }[how]
    )


@pytest.mark.parametrize("has_left", [True, False])
def test_rank_killed_at_exit_by_requested_sigterm_counts_as_drained(
    run_job: StartJob, stage: Stage, has_left: bool
) -> None:
    with run_job(groups=2, ranks=1) as job:
        actors = two_at_work(job, stage, 5)
        job.supervisor.interrupt()
        for actor in actors.values():
            assert actor.says() == {"heard": "sigterm"}
            if has_left:
                actor.leaves("drained", 6)
        actors["1", "0"].order("exit 0")
        actors["0", "0"].order("die SIGTERM")
        status = job.verdict().exit_status
    assert status == (ExitStatus.DRAINED if has_left else ExitStatus.FAILED)


@pytest.mark.parametrize("sharded", [True, False])
def test_group_that_is_away_at_the_end_leaves_its_shard_untrained(
    run_job: StartJob, stage: Stage, sharded: bool
) -> None:
    with run_job(groups=2, ranks=1) as job:
        actors = two_at_work(job, stage, 5)
        os.kill(actors["1", "0"].pid, signal.SIGKILL)
        again = stage.enter(1)["1", "0"]
        actors["0", "0"].leaves("shard_ended" if sharded else "last_step", 6)
        actors["0", "0"].order("exit 0")
        assert again.says() == {"heard": "sigterm"}
        again.order("die SIGTERM")
        outcome = job.verdict()
    text = "group 1 was away when the shards of the others ended"
    assert any(text in line for line in outcome.lines) == sharded, outcome.lines
    expected = ExitStatus.FEWER_GROUPS if sharded else ExitStatus.COMPLETE
    assert outcome.exit_status == expected


@pytest.mark.parametrize("is_last", [True, False])
def test_interrupted_job_that_finishes_its_last_step_is_complete(
    run_job: StartJob, stage: Stage, is_last: bool
) -> None:
    with run_job(groups=2, ranks=1) as job:
        actors = two_at_work(job, stage, 5)
        job.supervisor.interrupt()
        for actor in actors.values():
            assert actor.says() == {"heard": "sigterm"}
            actor.leaves("last_step" if is_last else "drained", 6)
            actor.order("exit 0")
        status = job.verdict().exit_status
    assert status == (ExitStatus.COMPLETE if is_last else ExitStatus.DRAINED)


@pytest.mark.multiprocess
def test_run_fails_if_no_rank_begins_a_transaction(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import torch\ntorch.nn.Linear(2, 1)(torch.ones(2)).sum().backward()\n")
    command = ["run", "--groups", "2", "--no-progress", "--no-lighthouse"]
    command += ["--trace-dir", str(tmp_path / "traces"), str(script)]
    done = fft(*command, folder=tmp_path, within=60.0, new_ranks=True)
    assert done.returncode == ExitStatus.FAILED
    assert "no rank began a transaction" in done.stderr
    assert "manager.transactions(loader)" in done.stderr


def test_deaths_at_one_step_end_the_job_in_the_third_round(run_job: StartJob, stage: Stage) -> None:
    with run_job(groups=2, ranks=1) as job:
        actors = two_at_work(job, stage, 5)
        victim = actors["1", "0"]
        for inc in (2, 3, 4):
            victim.order("print item 77 kills me")
            assert victim.says()
            os.kill(victim.pid, signal.SIGSEGV)
            victim.gone()
            if inc < 4:
                victim = stage.enter(1)["1", "0"]
                trace(job, 1, 0, inc, at_work(5, inc, ["0", "1"]))
        verdict = job.verdict()
    assert verdict.exit_status == ExitStatus.NO_PROGRESS
    assert kept(job.trace_dir)[:2] == [
        "the job has ended: given up after restarts without a step",
        verdict.lines[-1],
    ]
    assert "3 processes died at step 5" in verdict.lines[0]
    assert "group 1 rank 0 by SIGSEGV" in verdict.lines[0]
    assert verdict.lines[0].endswith("item 77 kills me; the job was ended")


def test_processes_that_die_together_are_one_round(run_job: StartJob, stage: Stage) -> None:
    """This happens when their host fails, or when the kernel runs out of memory."""
    with run_job(groups=4, ranks=1) as job:
        actors = stage.enter(4)
        for group in range(4):
            trace(job, group, 0, 1, at_work(5, 1, ["0", "1", "2", "3"]))
        for group in "123":
            os.kill(actors[group, "0"].pid, signal.SIGKILL)
        again = stage.enter(3)
        for actor in (actors["0", "0"], *again.values()):
            actor.order("exit 0")
        assert job.verdict().exit_status == ExitStatus.COMPLETE


def test_mismatched_collectives_end_the_job_with_the_error_line(
    run_job: StartJob, stage: Stage
) -> None:
    line = "what():  [enforce fail] Is there a distributed collective mismatch in your code?"
    with run_job(groups=2, ranks=2) as job:
        actors = stage.enter(4)
        for group, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
            trace(job, group, rank, 1, at_work(5, 1, ["0", "1"]))
        for group in "01":
            actor = actors[group, "1"]
            actor.order(f"print {line}")
            assert actor.says()
            os.kill(actor.pid, signal.SIGABRT)
        verdict = job.verdict()
    assert verdict.exit_status == ExitStatus.FAILED
    assert "2 processes died at step 5" in verdict.lines[0]
    assert "the ranks of a group called different collectives" in verdict.lines[0]
    assert line in verdict.lines[0]


def test_lost_shard_without_a_holder_is_resumed_at_once(run_job: StartJob, stage: Stage) -> None:
    """No successor is started for it, because no group could provide the state."""
    with run_job(groups=2, ranks=2, checkpoint=Checkpointing("checkpoints", 2)) as job:
        actors = stage.enter(4)
        header = record(kind="header", reforms=True)
        for group, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
            trace(job, group, rank, 1, header, at_work(5, 1, ["0", "1"]))
        for group in "01":
            os.kill(actors[group, "1"].pid, signal.SIGKILL)
        verdict = job.verdict()
    assert verdict.lost is not None
    assert verdict.deaths == {("step 5", "SIGKILL")}


@pytest.mark.parametrize(
    "failures, is_over",
    [
        ([0.0, 30.0, 59.0], False),
        ([0.0, 30.0, 60.0], True),
        ([0.0, 61.0, 100.0], False),  # the bus may have answered in the first minute
        ([0.0, 61.0, 100.0, 121.0], True),
    ],
)
def test_outage_exceeds_its_limit_after_failures_without_a_long_gap(
    failures: list[float], is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage()
    for at in failures:
        monkeypatch.setattr(
            "fft.launch.supervisor.ending.time.monotonic", lambda at=at: 1000.0 + at
        )
        found = outage.exceeds(60.0)
    assert found is is_over
    outage.answered()
    monkeypatch.setattr(
        "fft.launch.supervisor.ending.time.monotonic", lambda: 1000.0 + failures[-1] + 1.0
    )
    assert not outage.exceeds(60.0), "another outage"


def test_standstill_is_reported_after_half_a_minute_or_three_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = 1000.0
    monkeypatch.setattr("fft.launch.supervisor.ending.time.monotonic", lambda: clock)

    def reports(progress: int | None, seconds: int) -> list[int]:
        nonlocal clock
        found = []
        for _ in range(seconds):
            clock += 1.0
            at = None if progress is None else (progress, 0)
            if (lasts := found_by.lasts(at)) is not None:
                found.append(round(lasts))
        return found

    found_by = ending.Standstill()
    assert reports(None, 70) == [30, 60], "the start"
    assert reports(0, 100) == [30, 60], "counted from the first epoch"
    assert reports(1, 50) == [30]
    assert reports(2, 149) == [], "this job has steps of 50 s"
    assert reports(2, 200) == [150, 300]
    assert reports(3, 1) == reports(4, 149) == [], "one short step is not the usual one"
    for progress in range(5, 9):
        assert reports(progress, 10) == []
    assert reports(9, 35) == [30], "its steps are shorter now"


def test_job_that_starts_slowly_gets_no_warning_about_its_commits(
    run_job: StartJob,
    stage: Stage,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ending, "STANDSTILL_S", 0.3)
    caplog.set_level("INFO")
    with run_job(groups=1, ranks=1) as job:
        actor = stage.enter(1)["0", "0"]
        wait_until(lambda: "the job has been starting for" in caplog.text, "it is logged")
        assert "no commit for" not in caplog.text
        trace(job, 0, 0, 1, at_work(0, 1, ["0"]))
        wait_until(lambda: "no commit for" in caplog.text, "it is logged")
        found = [each.levelname for each in caplog.records if "no commit for" in each.message]
        assert set(found) == {"WARNING"}
        actor.order("exit 0")
        job.verdict()


@pytest.mark.parametrize("how", ["dies", "leaves", "is drained"])
def test_wrapper_that_outlives_its_trainer_is_ended(
    run_job: StartJob, stage: Stage, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    with run_job(groups=1, ranks=1, drain_timeout=10.0) as job:
        wrapper = stage.enter(1)["0", "0"]
        wrapper.order("spawn")
        trainer = stage.enter(1)["", ""]
        header = record(kind="header", config={"pid": trainer.pid})
        trace(job, 0, 0, 1, header, at_work(5, 1, ["0"]))
        child = job.supervisor._groups["0"].children[0]
        wait_until(lambda: child._has_trainer(), "the trainer is seen")
        if how == "is drained":
            job.supervisor.interrupt()
            trainer.gone()  # by SIGTERM, which the wrapper does not receive
            wrapper.leaves("drained", 6)
        elif how == "leaves":
            wrapper.leaves("last_step", 6)
        if how != "is drained":
            os.kill(trainer.pid, signal.SIGKILL)
            trainer.gone()
        if how == "dies":
            wrapper.gone()
            again = stage.enter(1)["0", "0"]
            text = (
                f"the trainer (pid {trainer.pid}) ended at step 5, before the end, and the script"
            )
            assert text in caplog.text
            again.order("exit 0")
        else:
            assert wrapper.says() == {"heard": "sigterm"}
            wrapper.order("die SIGTERM")
        outcome = job.verdict()
    expected = ExitStatus.DRAINED if how == "is drained" else ExitStatus.COMPLETE
    assert outcome.exit_status == expected, outcome.lines


def test_signal_goes_to_the_wrapper_if_its_trainer_ends_meanwhile(
    run_job: StartJob, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_job(groups=1, ranks=1) as job:
        wrapper = stage.enter(1)["0", "0"]
        child = job.supervisor._groups["0"].children[0]
        with subprocess.Popen(["true"]) as trainer:
            child.trainer.pid = trainer.pid
        monkeypatch.setattr(child, "_has_trainer", lambda: True)  # as it was before its end
        child.signal(signal.SIGTERM)
        assert wrapper.says() == {"heard": "sigterm"}
        wrapper.order("exit 0")
        assert job.verdict().exit_status == ExitStatus.COMPLETE


@pytest.mark.parametrize("here", [0, 1])
def test_interrupted_part_of_a_job_reports_no_lost_state(here: int) -> None:
    """Its groups, if it has any, have been started again; another host may have the state."""
    groups = [Group(str(number), 1, 1) for number in range(here)]
    judgement = Judgement(here=groups, plan=FaultPlan(faults=[]), has_services=False)
    judgement.note_interrupt(JobView(committed=True), parts_in_all=2)
    assert judgement.asked_to_end and judgement.problems == []


@contextmanager
def second_host(
    job: Job, stage: Stage, folder: Path, **settings: Any
) -> Iterator[tuple[Job, dict[tuple[str, str], Actor]]]:
    """Run a second supervisor of the job with group 1, which is restarted after step 5."""
    config = RunConfig(
        *([str(stage.script)], 1, 1, folder), first_group=1, all_groups=2, **settings
    )
    joined = Joined(job.bus_url)
    with closing(Job(Supervisor(config, FaultPlan(faults=[]), joined), job.bus_url, config)) as two:
        first = stage.enter(1)["1", "0"]
        trace(two, 1, 0, 1, at_work(5, 1, ["0", "1"]))
        os.kill(first.pid, signal.SIGKILL)
        yield two, stage.enter(1)


@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.parametrize("how", ["drained", "last step", "failed"])
def test_part_of_a_job_without_its_group_ends_as_the_others_did(
    run_job: StartJob, stage: Stage, tmp_path: Path, how: str, is_interrupted: bool
) -> None:
    """The hosts share no disk, and the head register does not tell a drain from the last step."""
    with (
        run_job(groups=1, ranks=1, all_groups=2, max_restarts=0) as one,
        open_bus(one.bus_url) as bus,
    ):
        first = stage.enter(1)["0", "0"]
        with second_host(one, stage, tmp_path / "two") as (two, actors):
            again = actors["1", "0"]
            if is_interrupted:  # as by the end of an allocation, which reaches all hosts
                two.supervisor.interrupt()
                assert again.says() == {"heard": "sigterm"}
            trace(one, 0, 0, 1, at_work(7, 2, ["0"]))
            first.leaves("drained" if how == "drained" else "last_step", 8)
            show(bus, formed(2, "0"), left(2, "0"))
            if not is_interrupted:
                assert again.says() == {"heard": "sigterm"}
            again.order("die SIGTERM")
            first.order("exit 1" if how == "failed" else "exit 0")
            verdicts = [one.verdict(), two.verdict()]
        outcome = Outcome.read(bus, 2)
    there = {
        "drained": ExitStatus.DRAINED,
        "last step": ExitStatus.COMPLETE,
        "failed": ExitStatus.FAILED,
    }[how]
    here = ExitStatus.DRAINED if is_interrupted else there
    is_left_out = how == "last step" and is_interrupted
    whole = ExitStatus.FEWER_GROUPS if is_left_out else there
    found = [verdict.exit_status for verdict in verdicts]
    assert (*found, outcome.status) == (there, here, whole), (verdicts, str(outcome))
    output = {
        "drained": "the job was drained before its end while no group here was in it",
        "failed": "no group here was in the job at its end, and those of other hosts failed",
    }
    for end, line in output.items():
        assert (line in verdicts[1].lines) == (how == end and not is_interrupted)


def test_part_of_a_job_without_its_group_is_resumed_if_the_others_are_lost(
    run_job: StartJob, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor of the group that left never releases it."""
    monkeypatch.setattr(loop, "RELEASE_S", 0.5)
    with (
        run_job(groups=1, ranks=1, all_groups=2) as one,
        open_bus(one.bus_url) as bus,
    ):
        first = stage.enter(1)["0", "0"]
        with second_host(one, stage, tmp_path / "two") as (two, actors):
            show(bus, formed(2, "0"), left(2, "0"))
            assert actors["1", "0"].says() == {"heard": "sigterm"}
            actors["1", "0"].order("die SIGTERM")
            assert two.verdict().exit_status == ExitStatus.DRAINED
        first.order("exit 0")
        assert one.verdict().ok

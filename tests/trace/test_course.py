"""Tests of the course of a job by its records: faults, absences, speed, goodput; `fft report`."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from traced import TracedJob, a_record
from typer.testing import CliRunner

from fft.cli import app
from fft.messages.causes import CauseCode
from fft.messages.progress import Goal
from fft.messages.protocol import Peer
from fft.trace.course import Course, TimeLost, readable_cause
from fft.trace.display import cost
from fft.trace.history import History
from fft.trace.lines import record_of
from fft.trace.read import merged_lines, read_lines
from fft.trace.report import (
    Incident,
    RunReport,
    change_lines,
    fault_table,
    history_of,
    summary,
    summary_lines,
)
from fft.trace.starts import newest_run
from fft.trace.tail import TraceTail


def interrupted() -> Course:
    """Two groups at 10 steps/s; group 1 is away from step 10 to 20; the rollback costs 0.4 s more.

    Group 1 leaves on purpose with step 30.
    """
    course = Course(goal=Goal(steps=50, items=1, all_items=200, samples=8))
    n, slices, at = 1, 0, 0.0
    course.take(a_record(1, "epoch", 0, 0, members="01"), -5.0)
    for step in range(1, 11):
        n, slices, at = n + 1, slices + 2, at + 0.1
        course.take(a_record(n, "commit", step, slices), at)
    cause = "0/0#1: 1/0#1 died (seen by supervisor)"
    course.take(a_record(n + 1, "abort", 10, slices, cause=cause, code=CauseCode.DIED), at + 0.05)
    course.take(a_record(n + 2, "epoch", 10, slices, epoch=2, members="0"), at + 0.1)
    n, at = n + 2, at + 0.4
    for step in range(11, 21):
        n, slices, at = n + 1, slices + 1, at + 0.1
        course.take(a_record(n, "commit", step, slices, epoch=2, change=step == 20), at)
    n += 1
    course.take(a_record(n, "epoch", 20, slices, epoch=3, members="01"), at + 0.01)
    for step in range(21, 31):
        n, slices, at = n + 1, slices + 2, at + 0.1
        leavers = ("1",) if step == 30 else ()
        more = {"change": step == 30, "leavers": leavers}
        course.take(a_record(n, "commit", step, slices, epoch=3, **more), at)
    course.take(a_record(n + 1, "epoch", 30, slices, epoch=4, members="0"), at + 0.01)
    for step in (31, 32):
        n, slices, at = n + 1, slices + 1, at + 0.1
        more = {"last": step == 32, "leavers": ("0",) if step == 32 else ()}
        course.take(a_record(n + 1, "commit", step, slices, epoch=4, **more), at)
    return course


def test_course_counts_steps_without_a_group() -> None:
    lost, left = interrupted().absences
    assert (lost.group, lost.step, lost.steps, lost.planned) == ("1", 10, 10, False)
    assert lost.back == pytest.approx(2.41)
    assert (left.group, left.step, left.steps, left.planned, left.back) == ("1", 30, 2, True, None)


def test_course_compares_with_an_undisturbed_run() -> None:
    """From the first commit on, 50 slices were trained in 3.5 s; without faults 20 per second."""
    course = interrupted()
    assert TimeLost(course).undisturbed_rate == pytest.approx(
        20.0
    ) and course.elapsed == pytest.approx(3.5)
    assert course.goodput == pytest.approx(50 / 70)
    lost = TimeLost(course).causes()
    assert lost["faults"] == pytest.approx(0.4)
    assert lost["absent groups"] == pytest.approx((1.0 + 0.2) / 2)
    assert sum(lost.values()) == pytest.approx(course.elapsed * (1 - 50 / 70))


def test_report_states_how_many_steps_had_a_smaller_batch() -> None:
    course = interrupted()
    expected = "samples per step: 16 in 20, 8 in 12; 12 steps ran with a smaller batch"
    assert expected in summary_lines(course)
    found = summary(course)
    assert found["steps_with_smaller_batch"] == 12
    assert found["steps_by_samples"] == [
        {"samples": 16, "slices": 2, "steps": 20},
        {"samples": 8, "slices": 1, "steps": 12},
    ]
    even = Course()
    even.take(a_record(1, "epoch", 0, 0, members="0"), 0.0)
    for step in (1, 2, 3):
        even.take(a_record(step + 1, "commit", step, 4 * step), float(step))
    even.take(a_record(5, "commit", 3, 16, batches=12, skip=True), 4.0)
    assert "slices per step: 4 in all steps" in summary_lines(even)


def test_course_estimates_the_remaining_time_by_steps_or_data() -> None:
    course = interrupted()
    assert course.share_done == pytest.approx(32 / 50)
    assert course.left_s() == pytest.approx(1.8)
    assert course.left_s(now=60.0) is None, "nothing was committed for long"
    course.goal = Goal(items=2, all_items=108)
    assert course.share_done == pytest.approx(52 * 2 / 108)


def test_course_reports_untrained_and_repeated_slices() -> None:
    course = Course(goal=Goal(samples=8))
    course.take(a_record(1, "epoch", 0, 0, members="0"), 0.0)
    end = {"batches": 2, "returned": (1,), "last": True}
    course.take(a_record(2, "commit", 1, 3, **end), 1.0)
    assert (course.unused, course.repeated) == (1, 0)
    course.take(a_record(3, "commit", 2, 3, batches=4), 1.0)
    assert course.repeated == 1


def test_course_of_traces_has_each_record_once(tmp_path: Path) -> None:
    job = TracedJob(tmp_path, groups=3)
    for _ in range(3):
        job.step()
    job.refuse(job.live()[1], "boom")
    job.step()
    job.close()
    course = history_of(tmp_path).course
    assert (course.steps, len(course.faults), len(course.members)) == (4, 1, 3)
    assert course.faults[0].cost_s is not None
    assert course.faults[0].cause.startswith("group ") and "#" not in course.faults[0].cause


def test_records_have_the_time_at_which_the_first_process_received_them(tmp_path: Path) -> None:
    job = TracedJob(tmp_path, groups=3)
    for _ in range(3):
        job.step()
    job.close()
    first: dict[int, float] = {}
    for line in read_lines(tmp_path):
        if found := (line.get("event") or {}).get("record"):
            first.setdefault(found["n"], line["wall"])
    lines = ((record_of(line), at) for at, _, line, _ in merged_lines(tmp_path))
    history = History()
    for record, at in lines:
        if record is not None:
            history.take_record(record, at)
    assert {n: at for n, (at, _) in history._records.items()} == pytest.approx(first)


def test_readable_cause_spells_out_group_and_rank() -> None:
    assert readable_cause("0/0#1: 1/2#3 died: killed\nmore") == "group 1 rank 2 died: killed"
    assert readable_cause("0/0#1: ValueError: boom") == "group 0 rank 0: ValueError: boom"
    assert readable_cause("a/b 1/2") == "a/b 1/2"


# --- fft report ------------------------------------------------------------------------


def test_report_summary_fits_80_columns() -> None:
    course = interrupted()
    lines = summary_lines(course)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert (
        "32 steps, 416 samples in 3.5 s" in text
        and "goodput 71.4%: 160.0 samples/s with all groups" in text
    )
    assert "samples never trained: 0, trained more than once: 0" in text
    assert "group 1 was away for 1.3 s, 10 of 32 steps (from step 10 to 20)" in text
    assert "group 1 was away as asked for 190 ms, 2 of 32 steps (from step 30)" in text
    assert summary(course)["samples_per_s"] == pytest.approx(8 * 50 / 3.5)


def test_report_leaves_planned_changes_out_of_the_faults(tmp_path: Path) -> None:
    job = TracedJob(tmp_path, groups=2)
    job.step()
    job.close()
    assert fault_table([], history_of(tmp_path).course) is None


def test_report_takes_the_newest_run_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["report"])
    assert result.exit_code == 2 and newest_run(Path()) is None
    for number, folder in enumerate(("runs/a", "b", "runs/c")):
        job = TracedJob(tmp_path / folder, groups=2)
        job.step()
        job.close()
        for path in (tmp_path / folder).glob("*.jsonl"):
            os.utime(path, (1000 - number, 1000 - number))
    assert newest_run(Path()) == Path("runs/a")
    job = TracedJob(tmp_path / "runs" / "d" / "traces", groups=2)  # as `fft launch` places them
    job.step()
    job.close()
    assert newest_run(Path()) == newest_run(Path("runs/d")) == Path("runs/d/traces")
    reported = json.loads(CliRunner().invoke(app, ["report", "runs/d", "--json"]).stdout)
    assert reported["directory"] == "runs/d/traces"
    shutil.rmtree("runs/d")
    found = json.loads(CliRunner().invoke(app, ["report", "--json"]).stdout)
    assert (found["directory"], found["steps"], found["incidents"]) == ("runs/a", 1, [])
    out = io.StringIO()
    Console(file=out, width=80).print(CliRunner().invoke(app, ["report", "b"]).stdout)
    assert "no fault was noticed" in out.getvalue()


def test_report_states_when_and_at_which_cost_a_group_joined(tmp_path: Path) -> None:
    job = TracedJob(tmp_path, groups=2)
    job.clock += 100.0
    for _ in range(4):
        job.step()
    job.start_group("2")
    for _ in range(3):
        job.step()
    job.close()
    (line,) = change_lines(RunReport(tmp_path).incidents, history_of(tmp_path).course)
    form = r"0\.\d\d s, step 5: group 2 joined, fetched 100 bytes; \d+ ms lost"
    assert re.fullmatch(form, line), line


def test_report_counts_the_time_before_a_rollback_to_its_cost(tmp_path: Path) -> None:
    job = TracedJob(tmp_path, groups=2)
    for _ in range(3):
        job.step()
    job.clock += 1.0
    job.refuse(job.live()[1], "boom")
    for _ in range(3):
        job.step()
    job.close()
    (incident,) = RunReport(tmp_path).to_json()["incidents"]
    assert incident["at_s"] > 1.0 and incident["lost_s"] > 1.0
    table = fault_table(RunReport(tmp_path).incidents, history_of(tmp_path).course)
    assert table is not None
    at, _, _, lost, *_ = (next(iter(column.cells)) for column in table.columns)
    assert (at, lost) == (f"{incident['at_s']:.2f}", f"{incident['lost_s']:.1f} s")


def test_report_gives_a_fault_of_a_later_stage_no_figures_of_the_first(tmp_path: Path) -> None:
    """Each scope numbers its own records."""
    for folder, cause in ((tmp_path, "boom"), (tmp_path / "scopes" / "stage1", "bang")):
        job = TracedJob(folder, groups=2)
        for _ in range(3):
            job.step()
        job.refuse(job.live()[1], cause)
        job.step()
        job.close()
    table = fault_table(RunReport(tmp_path).incidents, history_of(tmp_path).course)
    assert table is not None
    steps, causes = (list(map(str, column.cells)) for column in table.columns[1:3])
    assert steps == ["3", "-"] and "boom" in causes[0] and "bang" in causes[1]


def recomputed(every: int, lost: bool = False) -> Course:
    """Two groups at 10 steps/s; every n-th step is computed twice, which takes 0.1 s more.

    With ``lost``, group 1 does not come back from the rollback of step 6.
    """
    course, n, epoch, slices, at = Course(), 1, 1, 0, 0.0
    groups = ("0", "1")
    course.take(a_record(1, "epoch", 0, 0, members=groups), -5.0)
    for step in range(12):
        if step % every == 0:
            at, epoch = at + 0.1, epoch + 1
            groups = ("0",) if lost and step >= 6 else groups
            more = {"cause": "0/0#1: Recompute", "code": CauseCode.RECOMPUTED, "epoch": epoch - 1}
            course.take(a_record(n + 1, "abort", step, slices, **more), at)
            at += 5.0 if lost and step == 6 else 0.0
            more = {"epoch": epoch, "members": groups}
            course.take(a_record(n + 2, "epoch", step, slices, **more), at)
            n += 2
        n, slices, at = n + 1, slices + len(groups), at + 0.1
        course.take(a_record(n, "commit", step + 1, slices, epoch=epoch), at)
    return course


@pytest.mark.parametrize("every", [1, 4])
def test_course_counts_recomputed_steps_as_neither_faults_nor_changes(every: int) -> None:
    course = recomputed(every)
    assert course.faults == course.changes == course.absences == []
    lost = TimeLost(course).causes()
    assert lost.pop("recomputation") == pytest.approx(0.1 * 12 / every)
    assert all(seconds == 0.0 for seconds in lost.values()), lost
    assert course.rates() is not None and TimeLost(course).undisturbed_rate is not None


def test_course_counts_a_group_lost_during_a_replay() -> None:
    course = recomputed(6, lost=True)
    (fault,) = course.faults
    assert (fault.step, fault.lost, fault.code) == (6, ("1",), "recomputed")
    (absence,) = course.absences
    assert (absence.group, absence.planned, absence.n) == ("1", False, fault.n)
    lost = TimeLost(course).causes()
    assert lost["faults"] > 4.9 and lost["joins and leaves"] == 0.0


def begun(*groups: str) -> Course:
    """A job with one commit."""
    course = Course()
    course.take(a_record(1, "epoch", 0, 0, members=groups), 0.0)
    course.take(a_record(2, "commit", 1, len(groups)), 0.1)
    return course


def test_course_shows_the_end_of_a_job_as_no_departure() -> None:
    assert [change.step for change in interrupted().changes if change.left] == [30]


def test_course_names_the_commit_with_which_a_group_left() -> None:
    course = begun("0", "1")
    course.take(a_record(3, "commit", 2, 4, change=True, leavers=("1",)), 0.2)
    course.take(a_record(4, "epoch", 2, 4, epoch=2, members="0"), 0.3)
    (absence,) = course.absences
    assert (absence.n, absence.planned) == (3, True)


def test_course_counts_no_group_as_lost_that_left_before_a_fault() -> None:
    course = begun("0", "1", "2")
    course.take(a_record(3, "commit", 2, 6, change=True, leavers=("1",)), 0.2)
    course.take(a_record(4, "abort", 2, 6, cause="0/0#1: 2/0#1 died", code=CauseCode.DIED), 0.3)
    course.take(a_record(5, "epoch", 2, 6, epoch=2, members="0"), 0.4)
    course.take(a_record(6, "commit", 3, 7, epoch=2), 0.5)
    (fault,) = course.faults
    assert fault.lost == ("2",) and "group 1" not in cost(fault, course, TimeLost(course))
    table = fault_table([Incident("", fault.cause, None, None, 1, 0, n=fault.n)], course)
    assert table is not None and list(table.columns[4].cells) == ["1"], "of group 2 alone"


def test_course_divides_time_between_commits_among_the_rollbacks() -> None:
    course = begun("0", "1")
    course.take(a_record(3, "commit", 2, 4), 0.2)
    for n, epoch, at in ((4, 1, 0.5), (6, 2, 1.5)):
        more = {"cause": "0/0#1: failed", "code": CauseCode.STEP_FAILED, "epoch": epoch}
        course.take(a_record(n, "abort", 2, 4, **more), at)
        again = {"epoch": epoch + 1, "members": "01"}
        course.take(a_record(n + 1, "epoch", 2, 4, **again), at)
    assert [TimeLost(course).by(fault) for fault in course.faults] == [None, None]
    course.take(a_record(8, "commit", 3, 6, epoch=3), 1.8)
    assert [TimeLost(course).by(fault) for fault in course.faults] == pytest.approx([0.3, 1.2])
    assert TimeLost(course).causes()["faults"] == pytest.approx(1.6 - 0.1), "without one step"


def test_course_counts_a_step_that_the_user_skipped_as_no_fault() -> None:
    course = begun("0", "1")
    course.take(a_record(3, "abort", 1, 2, skip=True), 0.2)
    assert course.faults == []


def test_course_adds_an_epoch_without_commits_to_its_rollback() -> None:
    course = begun("0", "1")
    course.take(a_record(3, "commit", 2, 4), 0.2)
    course.take(a_record(4, "abort", 2, 4, cause="0/0#1: failed", code=CauseCode.STEP_FAILED), 0.3)
    for n in (5, 6):  # the first one is given up before its barrier
        course.take(a_record(n, "epoch", 2, 4, epoch=n - 3, members="01"), 0.1 * n)
    course.take(a_record(7, "commit", 3, 6, epoch=3), 0.9)
    lost = TimeLost(course).causes()
    assert lost["faults"] == pytest.approx(0.6) and lost["joins and leaves"] == 0.0


def test_course_counts_a_pause_with_a_fault_and_a_join_to_the_fault() -> None:
    course = begun("0", "1")
    course.take(a_record(3, "commit", 2, 4), 0.2)
    course.take(a_record(4, "abort", 2, 4, cause="0/0#1: failed", code=CauseCode.STEP_FAILED), 0.3)
    more = {"epoch": 2, "members": "012"}
    course.take(a_record(5, "epoch", 2, 4, **more), 0.4)
    course.take(a_record(6, "commit", 3, 7, epoch=2), 1.0)
    (change,), (fault,), times = course.changes, course.faults, TimeLost(course)
    assert change.joined == ("2",) and times.around(change) == 0.0
    assert times.by(fault) == pytest.approx(times.causes()["faults"]) == pytest.approx(0.65)


def test_course_counts_a_join_after_a_recomputed_step_as_a_join() -> None:
    course = begun("0", "1")
    course.take(a_record(3, "commit", 2, 4), 0.2)
    course.take(
        a_record(4, "abort", 2, 4, cause="0/0#1: Recompute", code=CauseCode.RECOMPUTED), 0.3
    )
    more = {"epoch": 2, "members": "012"}
    course.take(a_record(5, "epoch", 2, 4, **more), 0.4)
    course.take(a_record(6, "commit", 3, 7, epoch=2), 1.0)
    lost = TimeLost(course).causes()
    assert course.faults == [] and lost["faults"] == 0.0
    assert lost["joins and leaves"] == pytest.approx(0.65), "from 0.2 to 1.0, without a step"


def test_course_takes_the_undisturbed_rate_from_epochs_with_two_commits() -> None:
    """A group that joins for the last step leaves the rate of the others as the reference."""
    course = begun("0", "1")
    course.take(a_record(3, "commit", 2, 4), 0.2)
    course.take(a_record(4, "epoch", 2, 4, epoch=2, members="012"), 0.2)
    course.take(a_record(5, "commit", 3, 7, epoch=2), 0.4)
    assert TimeLost(course).undisturbed_rate == pytest.approx(20.0)
    assert course.goodput == pytest.approx(5 / 0.3 / 20.0)


def test_course_leaves_faults_before_the_first_commit_out_of_the_time_lost() -> None:
    """The goodput counts from the first commit on."""
    course = Course()
    course.take(a_record(1, "epoch", 0, 0, members="01"), 0.0)
    for n, at in ((2, 1.0), (4, 2.0)):
        more = {"cause": "0/0#1: failed", "code": CauseCode.STEP_FAILED, "epoch": n // 2}
        course.take(a_record(n, "abort", 0, 0, **more), at)
        again = {"epoch": n // 2 + 1, "members": "01"}
        course.take(a_record(n + 1, "epoch", 0, 0, **again), at)
    for n in (6, 7):
        course.take(a_record(n, "commit", n - 5, 2 * (n - 5), epoch=3), 4.0 + 0.1 * (n - 6))
    assert course.goodput == 1.0 and not any(TimeLost(course).causes().values())
    assert [TimeLost(course).by(fault) for fault in course.faults] == pytest.approx([0.0, 2.9])


def test_course_merges_synchronization_epochs_with_equal_members() -> None:
    """In an asynchronous job each synchronization is an epoch of its own."""
    course, n, slices, at = Course(), 0, 0, 0.0
    groups = ["0", "1"]
    for epoch in range(1, 21):
        at += 1.0 if epoch == 11 else 0.1
        if epoch == 11:
            groups.append("2")
        more = {"epoch": epoch, "standing": groups}
        course.take(a_record(n + 1, "epoch", epoch - 1, slices, **more), at - 0.05)
        slices += len(groups)
        course.take(a_record(n + 2, "commit", epoch, slices, epoch=epoch, change=True), at)
        n += 2
    assert [(each.epoch, each.commits) for each in course.epochs] == [(10, 10), (20, 10)]
    (change,), times = course.changes, TimeLost(course)
    assert times.undisturbed_rate == pytest.approx(30.0) and course.rates() is not None
    assert times.around(change) == pytest.approx(0.9) == times.causes()["joins and leaves"]


def test_goodput_is_at_most_one_if_fewer_groups_are_faster() -> None:
    """Groups that share the cores of a machine are faster while others are absent."""
    course = begun("0", "1")
    course.take(a_record(3, "commit", 2, 4), 0.2)
    course.take(a_record(4, "commit", 2, 4, change=True, leavers=("1",)), 0.2)
    course.take(a_record(5, "epoch", 2, 4, epoch=2, members="0"), 0.2)
    for n in range(6, 16):
        course.take(a_record(n, "commit", n - 3, n - 1, epoch=2), 0.2 + 0.02 * (n - 5))
    assert course.mean_rates is not None and course.mean_rates[1] > 25.0
    assert course.goodput == 1.0 and TimeLost(course).causes()["absent groups"] == 0.0


def test_course_counts_the_pause_for_a_group_that_failed_to_join() -> None:
    course = begun("0", "1")
    course.take(a_record(3, "commit", 2, 4, change=True), 0.2)
    course.take(a_record(4, "epoch", 2, 4, epoch=2, members="01"), 0.3)
    course.take(a_record(5, "commit", 3, 6, epoch=2), 1.0)
    assert course.changes == []
    assert TimeLost(course).causes()["joins and leaves"] == pytest.approx(0.7)


def test_course_names_the_lost_group_where_a_survivor_noticed_the_loss() -> None:
    def fault(cause: str, *accused: str) -> str:
        course, peers = begun("0", "1"), tuple(Peer(g, 0, 1) for g in accused)
        course.take(
            a_record(3, "abort", 1, 2, cause=cause, code=CauseCode.STEP_FAILED, accused=peers), 0.3
        )
        course.take(a_record(4, "epoch", 1, 2, epoch=2, members="0"), 0.4)
        return course.faults[0].cause

    closed = "0/0#1: RuntimeError: Connection closed by peer"
    noticed = "group 0 rank 0: RuntimeError: Connection closed by peer"
    assert fault(closed) == f"group 1 was lost; noticed as: {noticed}"
    assert fault("") == "group 1 was lost"
    assert fault("0/0#1: 1/0#1 died: SIGKILL", "1") == "group 1 rank 0 died: SIGKILL"


def test_course_counts_an_evaluation_beside_a_fault_as_no_loss() -> None:
    """A group dies while the script evaluates for 25 s between two steps of 0.1 s."""
    course = Course(idle=[(1.0, 26.0), (1.0, 25.5), (90.0, 95.0)])
    course.take(a_record(1, "epoch", 0, 0, members="01"), 0.0)
    for step in range(1, 11):
        course.take(a_record(1 + step, "commit", step, 2 * step), step / 10)
    course.take(a_record(12, "abort", 10, 20, cause="0/0#1: 1/0#1 died", code=CauseCode.DIED), 20.0)
    course.take(a_record(13, "epoch", 10, 20, epoch=2, members="01"), 26.1)
    for step in range(11, 21):
        course.take(a_record(3 + step, "commit", step, 2 * step, epoch=2), 26.3 + (step - 11) / 10)
    lost, (fault,) = TimeLost(course), course.faults
    assert lost.by(fault) == pytest.approx(0.2) == lost.causes()["faults"]
    assert course.goodput == pytest.approx(1.9 / 2.1, rel=1e-6)
    course.idle = []
    assert TimeLost(course).by(fault) == pytest.approx(25.2)


def test_report_leaves_an_evaluation_out_of_the_cost_of_a_fault(tmp_path: Path) -> None:
    def lost_s(folder: Path, has_note: bool) -> float:
        job = TracedJob(folder, groups=2)
        for _ in range(3):
            job.step()
        job.clock += 25.0
        if has_note:
            for member in job.live():
                job.writers[member.peer].note("idle", {"seconds": 25.0}, member.local)
        job.refuse(job.live()[1], "boom")
        for _ in range(3):
            job.step()
        job.close()
        (incident,) = RunReport(folder).to_json()["incidents"]
        live = TraceTail(folder).poll().course  # of `fft run` and its metrics
        (fault,) = live.faults
        assert TimeLost(live).by(fault) == pytest.approx(incident["lost_s"], abs=0.1)
        return float(incident["lost_s"])

    assert lost_s(tmp_path / "without", has_note=False) > 25.0
    assert lost_s(tmp_path / "with", has_note=True) < 1.0

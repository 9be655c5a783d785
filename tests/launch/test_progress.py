"""Tests of reading traces as they grow, and of detecting from them that a fault plan is finished.

They start no processes.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from traced import a_record

from fft.launch.supervisor.loop import PlanWatch
from fft.messages.fault_plans import FaultPlan
from fft.messages.progress import Goal
from fft.messages.protocol import Decision, Peer, event_to_json
from fft.protocol.load import load_spec
from fft.prove.simulator.run import run_seed
from fft.trace.course import Course
from fft.trace.display import (
    LiveDisplay,
    LiveTable,
    PlainDisplay,
    Row,
    Snapshot,
    open_display,
    render,
    row_of,
)
from fft.trace.format import FETCHING
from fft.trace.history import Injected, RankView
from fft.trace.lines import Noted, Transition
from fft.trace.tail import JobView, TraceTail
from fft.train.step.healing import FetchProgress


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def put(path: Path, data: bytes) -> None:
    """Append lines to a trace, with the process that the name of the file names."""
    match = re.fullmatch(r"g(\w)r(\d)i(\d+).jsonl", path.name)
    group, rank, inc = match.groups() if match is not None else ("9", "9", "9")
    who = f'{{"group": "{group}", "rank": {rank}, "inc": {inc}, "kind"'
    with path.open("ab") as file:
        file.write(data.replace(b'{"kind"', who.encode()))


ROLES = {state: spec.role for state, spec in load_spec("hsdp").states.items()}


def moved(to: str, before: str = "NORMAL", **fields: Any) -> bytes:
    roles = (ROLES[before], ROLES[to])
    return line(kind="transition", **{"from": before, "to": to}, roles=roles, **fields)


def test_registers_describe_a_resumed_job() -> None:
    """The job has committed when it is past that step; an older process is no evidence for a newer
    one."""
    view = JobView(begun=10)
    view.see_member(Peer("0", 0, 2), 10, has_committed=True)
    assert not view.committed
    view.see_member(Peer("0", 0, 1), 12, has_committed=True)
    assert view.committed and (view.ranks["0", 0].inc, view.step) == (2, 10)
    view.see_member(Peer("0", 0, 3), 12, has_committed=False)
    assert view.joined_since("0", {0: 2}) and not view.committed_since("0", {0: 2})


# --- tailing ---------------------------------------------------------------------------


def test_trace_line_counts_once_complete(tmp_path: Path) -> None:
    tail = TraceTail(tmp_path)
    assert tail.poll().ranks == {}
    whole = moved("PREPARED", epoch=2, step=5, members=["1", "0"])
    path = tmp_path / "g0r1i3.jsonl"
    put(path, line(kind="header", spec={"initial": "INIT"}, config={"pid": 7}) + whole[:-20])
    view = tail.poll().ranks["0", 1]
    assert (view.inc, view.state, view.pid) == (3, "INIT", 7)
    put(path, whole[-20:])
    view = tail.poll().ranks["0", 1]
    assert (view.state, view.epoch, view.step, view.members) == ("PREPARED", 2, 5, ("0", "1"))
    tail.close()


def test_notes_bring_loss_and_planned_faults(tmp_path: Path) -> None:
    put(
        tmp_path / "g1r0i7.jsonl",
        line(kind="note", note="metrics", data={"loss": 1.25}, step=3, epoch=2)
        + line(kind="note", note="inject", data={"name": "x", "kind": "kill"}, step=3, epoch=2)
        + moved("ROLLBACK_REQ", step=3, epoch=2, cause="OSError: peer gone\nmore"),
    )
    tail = TraceTail(tmp_path)
    view = tail.poll()
    assert view.injected == {"x": Injected("x", "kill", "1", 3, 2)}
    row = row_of(view, "1", "running")
    assert (row.loss, row.fault, row.state) == (1.25, "OSError: peer gone", "rolling back")
    tail.close()


def test_finished_live_blocks_are_progress_of_the_job(tmp_path: Path) -> None:
    """The step of such a job stays 0, so deaths in different blocks are not deaths at one step."""
    trace, tail = tmp_path / "g0r0i1.jsonl", TraceTail(tmp_path)
    found = []
    for n, live in enumerate(("entry", "end", "entry", "end"), 2):
        event = event_to_json(Decision(a_record(n, "commit", 0, live=live)))
        put(trace, moved("COMMIT", before="PREPARED", event=event, step=0, epoch=1))
        found.append(tail.poll().progress)
    assert found == [(0, 0), (0, 3), (0, 3), (0, 5)]
    tail.close()


@pytest.mark.parametrize("seed", [6, 19])
def test_asynchronous_job_clears_the_wait_reason_after_the_wait(seed: int, tmp_path: Path) -> None:
    """The input is line by line what the ranks of a simulated job wrote."""
    (tmp_path / "told").mkdir()
    run_seed(seed, load_spec("async"), trace_dir=tmp_path)
    waited = 0
    tail = TraceTail(tmp_path / "told")
    for path in tmp_path.glob("*.jsonl"):
        key = None
        with (tmp_path / "told" / path.name).open("ab", buffering=0) as file:
            for text in path.read_bytes().splitlines(keepends=True):
                file.write(text)
                record, ranks = json.loads(text), tail.poll().ranks
                key = record["group"], record["rank"]
                if record["kind"] == "transition" and ranks[key].inc == record["inc"]:
                    is_waiting = "waits for its quorum" in ranks[key].fault
                    assert is_waiting == ("waits for its quorum" in (record["cause"] or "")), text
                    waited += is_waiting
    tail.close()
    assert waited


def test_requested_fault_is_remembered_until_it_fires(tmp_path: Path) -> None:
    def word(
        name: str, kind: str, refused: str | None = None, by: str = "me", **more: Any
    ) -> bytes:
        data = {"type": "inject", "fault": {"name": name, "kind": kind, "step": 1, **more}}
        return line(kind="note", note="command", data={**data, "refused": refused, "by": by})

    place = {"group": "0", "rank": 0, "phase": "vote"}
    fired = line(kind="note", note="inject", data={"name": "b", "kind": "exception"}, step=1)
    put(
        tmp_path / "g0r0i1.jsonl",
        word("a", "exception", **place)
        + word("b", "exception", **place)
        + fired
        + word("c", "exception", "not allowed", **place)
        + word("d", "lighthouse_restart")
        + word("e", "lighthouse_restart")
        + word("e", "lighthouse_restart", by="supervisor")  # happens now
        + word("f", "nonsense"),
    )
    tail = TraceTail(tmp_path)
    plan = FaultPlan.model_validate({"faults": [KILL]})
    assert [fault.name for fault in tail.poll().unfired(plan)] == ["k", "a", "d"]
    tail.close()


def test_a_newer_incarnation_takes_the_place_of_the_older(tmp_path: Path) -> None:
    tail = TraceTail(tmp_path)
    put(tmp_path / "g0r0i9.jsonl", moved("COMMIT", step=8, epoch=4))
    before = tail.poll().incs("0")
    put(tmp_path / "g0r0i10.jsonl", moved("HEALING", step=0, epoch=5))
    view = tail.poll()
    assert view.ranks["0", 0].state == "HEALING" and view.ranks["0", 0].step == 0
    assert view.step == 8, "the job has committed them"
    assert not view.committed_since("0", before)
    put(tmp_path / "g0r0i9.jsonl", moved("COMMIT", step=9, epoch=4))
    assert tail.poll().ranks["0", 0].inc == 10
    put(tmp_path / "g0r0i10.jsonl", moved("COMMIT", step=9, epoch=5))
    assert tail.poll().committed_since("0", before)
    tail.close()


def test_the_files_of_processes_that_were_started_again_are_closed(tmp_path: Path) -> None:
    def held() -> set[str]:
        paths = [Path(file.path) for file in psutil.Process().open_files()]
        return {path.name for path in paths if path.parent == tmp_path}

    tail = TraceTail(tmp_path)
    fault = line(kind="note", note="inject", data={"name": "x", "kind": "kill"}, step=3, epoch=2)
    for inc in range(1, 6):
        put(tmp_path / f"g0r0i{inc}.jsonl", moved("COMMIT", step=inc, epoch=inc))
        tail.poll()
        if inc == 3:  # its last line comes when the next incarnation has begun
            put(tmp_path / "g0r0i2.jsonl", fault)
    view = tail.poll()
    assert held() == {"g0r0i5.jsonl"}
    assert view.injected["x"].kind == "kill" and view.ranks["0", 0].inc == 5
    tail.close()
    assert held() == set()


@pytest.mark.parametrize("junk", [b"{\n", b"[1]\n", b'"x"\n', b"\xff\n", b"\n", b'{"step": "a"}\n'])
def test_unreadable_entries_are_skipped(tmp_path: Path, junk: bytes) -> None:
    put(tmp_path / "other.jsonl", moved("COMMIT", step=99))
    put(tmp_path / "g0r0i1.jsonl", moved("COMMIT", step=2) + junk + moved("NORMAL", step=3))
    tail = TraceTail(tmp_path)
    view = tail.poll()
    assert (view.ranks["0", 0].state, view.step) == ("NORMAL", 3)
    tail.close()


# --- showing ---------------------------------------------------------------------------


def snapshot(elapsed: float, step: int = 27, **more: Any) -> Snapshot:
    view = JobView(
        {("0", 0): RankView(1, **{"epoch": 3, "step": step, "loss": 2.5, "role": "voting", **more})}
    )
    return Snapshot(elapsed, [row_of(view, "0", "running"), row_of(view, "1", "down")], 1, 4)


def lines_of(snapshots: Iterable[Snapshot]) -> list[str]:
    """Return the output for a standard output that is not a terminal."""
    out = io.StringIO()
    display = open_display(Console(file=out, width=40))
    assert isinstance(display, PlainDisplay)
    for each in snapshots:
        display.show(each)
    display.close()
    return out.getvalue().splitlines()


def test_without_a_terminal_steps_alone_give_a_line_in_ten_seconds() -> None:
    lines = lines_of(snapshot(tenths / 10, 27 + tenths) for tenths in range(250))
    assert [line.split()[0] for line in lines] == ["0.0", "10.0", "20.0"]
    assert "1 of 4 planned faults fired" in lines[0]
    assert "step 27, loss 2.500" in lines[0]
    assert "group 0 running: training at step 27" in lines[0]


def test_without_a_terminal_faults_and_epochs_are_printed_at_once() -> None:
    def at(tenths: int) -> Snapshot:
        fault = "[red]boom" if tenths >= 23 else ""
        return snapshot(tenths / 10, fault=fault, epoch=3 if tenths < 40 else 4)

    lines = lines_of(map(at, range(100)))
    assert [line.split()[0] for line in lines] == ["0.0", "2.3", "4.0"]
    assert "boom" not in lines[0] and "training at step 27 [[red]boom]" in lines[1]
    assert "boom" not in lines[2], "a group that trains again has got over its fault"


def test_without_a_terminal_many_changes_print_one_line_a_second() -> None:
    lines = lines_of(snapshot(tenths / 10, epoch=tenths) for tenths in range(25))
    assert [line.split()[0] for line in lines] == ["0.0", "1.0", "2.0", "2.4"]


def course_with_a_lost_group() -> Course:
    """Steps 1 to 9 of two groups at 10 steps/s, then group 1 dies; step 10 comes 0.25 s later."""
    course = Course(goal=Goal(steps=40, all_items=800, epoch_items=5, samples=8))
    course.take(a_record(1, "epoch", 0, members="01"), 100.0)
    for step in range(1, 10):
        course.take(a_record(1 + step, "commit", step, 2 * step), 100 + step / 10)
    cause = "0/0#1: 1/0#1 died: it was [killed] (seen by supervisor)"
    course.take(a_record(11, "abort", 9, 18, cause=cause, accused=(Peer("1", 0, 1),)), 101.0)
    course.take(a_record(12, "epoch", 9, 18, epoch=2, members="0"), 101.1)
    course.take(a_record(13, "commit", 10, 20, epoch=2), 101.25)
    return course


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_display_fits_width_and_lists_faults_with_cost(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, height=30, force_terminal=True, color_system=None)
    display = open_display(console)
    assert isinstance(display, LiveDisplay)
    rows = [Row("0", "running (start 1)", "training", step=10, loss=2.5), Row("1", "restarting")]
    display.show(Snapshot(3, rows, 1, 4, course_with_a_lost_group(), 101.3))
    display.write("[a line] of the script")
    display.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    lines = plain.replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(plain.split())
    assert "step 10 of 40" in text and "25% ETA -" in text
    assert "loss 2.500 · 4 data epochs" in text and "1 of 4 planned faults fired" in text
    assert "step 9 group 1 rank 0 died: it was [killed] (seen by supervisor); " in text
    assert "250 ms lost; group 1 is away: 1 steps, 150 ms" in text
    assert "[a line] of the script" in text and "restarting" in text


def test_terminal_display_shows_rows_of_troubled_groups_first() -> None:
    out = io.StringIO()
    rows = [Row(str(n), "running", "training", step=5) for n in range(40)]
    rows[33] = Row("33", "restarting")
    Console(file=out, width=80).print(render(Snapshot(1, rows, 0, 0), height=24))
    assert "33 " in out.getvalue() and "and 32 more groups" in out.getvalue()


def test_narrowed_terminal_erases_wrapped_lines() -> None:
    """A terminal of 50 columns shows the line of 70 as two, so three lines are erased, not two."""
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    table = LiveTable(console)
    table.draw("x" * 70 + "\nend")
    for width, lines in ((80, 2), (50, 3)):
        console.width = width
        out.seek(out.truncate(0))
        table.draw("x" * 40 + "\nend" if width == 50 else "x" * 70 + "\nend")
        assert out.getvalue().count("\x1b[2K") == lines
        assert out.getvalue().count("\x1b[1A") == lines - 1
    table.close()


# --- the end of a plan -----------------------------------------------------------------

KILL = {"name": "k", "kind": "kill", "step": 1, "group": 1, "phase": "vote"}
RAISE = {"name": "e", "kind": "exception", "step": 1, "group": 1, "rank": 0, "phase": "vote"}
LEAVE = {"name": "l", "kind": "drain", "step": 1, "group": 1}


def watch(*faults: dict[str, Any], further: int = 0, min_steps: int = 0) -> PlanWatch:
    plan = FaultPlan.model_validate({"faults": list(faults)})
    return PlanWatch(plan, ["0", "1"], further, min_steps)


def view_at(
    step: int, epochs: tuple[int, int] = (2, 2), *injected: Injected, state: str = "NORMAL"
) -> JobView:
    both = ("0", "1")
    ranks = {
        (group, rank): RankView(
            1,
            state=state,
            epoch=epoch,
            step=step,
            members=both if epochs[0] == epochs[1] else (group,),
            role=ROLES[state],
        )
        for group, epoch in zip(both, epochs, strict=True)
        for rank in (0, 1)
    }
    return JobView(ranks, {fault.name: fault for fault in injected})


def test_a_plan_is_through_only_after_the_recovery() -> None:
    at = watch(KILL)
    fired = Injected("k", "kill", "1", step=4, epoch=2)
    assert not at.due(view_at(9)) and at.unfired(view_at(9)) == ["k"]
    assert not at.due(view_at(5, (2, 2), fired))  # the survivors have not noticed it yet
    assert not at.due(view_at(5, (3, 2), fired))  # nor has the group come back
    assert not at.due(view_at(5, (4, 4), fired, state="HEALING"))
    assert not at.due(view_at(4, (4, 4), fired))  # nor has a step been committed
    assert at.due(view_at(5, (4, 4), fired))
    assert not at.due(view_at(6, (4, 4), fired))  # reported once only
    assert at.unfinished(view_at(6)) is None


def test_a_fault_that_changes_no_epoch_is_over_with_the_next_commit() -> None:
    fired = Injected("e", "exception", "1", step=4, epoch=2)
    at = watch(RAISE)
    assert not at.due(view_at(4, (2, 2), fired))
    assert at.due(view_at(5, (2, 2), fired))


def test_further_steps_and_the_least_step_come_after() -> None:
    fired = Injected("e", "exception", "1", step=4, epoch=2)
    at = watch(RAISE, further=3, min_steps=12)
    assert not at.due(view_at(6, (3, 3), fired))
    assert not at.due(view_at(9, (3, 3), fired))
    assert "step 9, before step 12" in str(at.unfinished(view_at(9, (3, 3), fired)))
    assert at.due(view_at(12, (3, 3), fired))


def test_a_group_that_left_for_good_is_not_waited_for() -> None:
    view = view_at(6, (3, 2), Injected("l", "drain", "1", step=4, epoch=2))
    assert watch(LEAVE).due(view)
    assert not watch({**LEAVE, "return_after_steps": 3}).due(view)


def test_the_rollbacks_since_the_last_commit_are_known(tmp_path: Path) -> None:
    def decided(n: int, kind: str, cause: str = "") -> bytes:
        accused = (Peer("1", 0, 1),) if kind == "abort" else ()
        found = a_record(n, kind, 4, cause=cause, accused=accused)
        return moved("NORMAL", event=event_to_json(Decision(found)))

    for name in ("g0r0i1", "g1r0i1"):  # both receive every message
        put(
            tmp_path / f"{name}.jsonl",
            decided(1, "abort", "1/0#1: ValueError: old")
            + decided(2, "commit")
            + decided(3, "abort", "1/0#1: ValueError: bad")
            + moved("NORMAL", event=None),
        )
    tail = TraceTail(tmp_path)
    (one,) = tail.poll().course.run
    assert (one.n, one.step, one.named) == (3, 4, {("1", 0)})
    tail.close()


def test_progress_of_a_long_fetch_is_shown_until_it_ends(tmp_path: Path) -> None:
    clock, notes = [0.0], list[dict[str, Any]]()

    def tell(got: int, total: int, left_s: float) -> None:
        notes.append({"bytes": got, "total": total, "left_s": left_s})

    progress = FetchProgress(tell, "0", lambda: clock[0])
    for clock[0], mib in ((0.5, 10), (2.0, 20), (2.5, 25), (12.0, 60)):
        progress(mib * 2**20, 100 * 2**20)
    assert [(note["bytes"] // 2**20, note["left_s"]) for note in notes] == [(20, 8.0), (60, 8.0)]
    job, place = JobView(), {"group": "1", "rank": 0, "inc": 1}
    job.add(Noted(kind="note", note=FETCHING, data=notes[0], **place), 1.0)
    assert row_of(job, "1", "running").state == "joining (20.0 of 100.0 MiB, 8 s left)"
    job.add(Transition(kind="transition", to="NORMAL", roles=("healing", "training"), **place), 2.0)
    assert row_of(job, "1", "running").state == "training"


def test_cause_in_the_progress_view_is_not_cut_off() -> None:
    cause = "TransferError: " + "the address " * 20 + "10.0.0.1:4711"
    for display in (PlainDisplay, LiveDisplay):
        out = io.StringIO()
        console = Console(file=out, force_terminal=display is LiveDisplay, width=120)
        shown = display(console)
        shown.show(Snapshot(1.0, [Row("0", "running", fault=cause, trouble=cause)], 0, 0))
        shown.close()
        assert cause.replace(" ", "") in re.sub(
            r"\x1b\[[0-9;?]*[a-zA-Z]|[^\w.:]", "", out.getvalue()
        )

"""Tests of the parts of `make bench` that need no job: figures from events, resuming, the page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks.side_by_side import page
from benchmarks.side_by_side.__main__ import chosen, in_turn
from benchmarks.side_by_side.events import Pen, Reader, lines
from benchmarks.side_by_side.legs import LEGS, SKIPPED, legs
from benchmarks.side_by_side.measure import Outcome, outcome, percentile
from benchmarks.side_by_side.results import Results, Task
from benchmarks.side_by_side.rows import FFT, QUICK, ROWS, SYSTEMS, TORCHFT, TUNED, Row

EXCEPTION, KILL = ROWS["exception-backward"], ROWS["sigkill"]
FAULT_MS = 1000
STEP_MS = 45


def event(what: str, ms: float, group: int, **fields: Any) -> dict[str, Any]:
    """Return one event of rank 0 of a group."""
    now = int(ms * 1e6)
    return {"e": what, "t": now, "m": now, "g": group, "r": 0, "pid": 100 + group, **fields}


def commit(ms: float, group: int, step: int, **fields: Any) -> dict[str, Any]:
    """Return a commit event, successful by default."""
    usual = {"step": step, "before": step, "after": step + 1, "n": 3, "in": True, "q": 1}
    return event("commit", ms, group, **{**usual, **fields})


def abort(ms: float, group: int, step: int, **fields: Any) -> dict[str, Any]:
    return event("abort", ms, group, **{"step": step, "n": 3, "in": True, "q": 1, **fields})


def before(groups: int = 3) -> list[dict[str, Any]]:
    """Return ten steps of a whole job, the last one 10 ms before the fault."""
    return [
        commit(FAULT_MS - 10 - STEP_MS * (10 - step), group, step)
        for step in range(1, 11)
        for group in range(groups)
    ]


def after(*at_ms: float, step: int = 11, **fields: Any) -> list[dict[str, Any]]:
    """Return the next commit of each group, the given times after the fault."""
    return [commit(FAULT_MS + ms, g, step, **fields) for g, ms in enumerate(at_ms)]


def fault(group: int = 2) -> dict[str, Any]:
    return event("fault", FAULT_MS, group, kind="exception")


def over(ms: float) -> dict[str, Any]:
    return event("over", FAULT_MS + ms, -1)


def test_times_are_of_the_last_survivor() -> None:
    aborts = [abort(FAULT_MS + 5, group, 10) for group in range(3)]
    found = outcome(EXCEPTION, [*before(), fault(), *aborts, *after(60, 61, 62, q=2), over(100)])
    assert found == Outcome(
        next_commit_ms=62,
        whole_ms=62,
        gap_ms=72,
        attempts_lost=1,
        transfers=0,
        splits=0,
        phantoms=0,
        mismatches=0,
        died=0,
        base_step_ms=STEP_MS,
    )


def test_the_group_that_the_fault_takes_is_not_waited_for() -> None:
    death = event("died", FAULT_MS + 1, -1, of=[2, 0], pid_of=102)
    found = outcome(KILL, [*before(), fault(), death, *after(80, 90, n=2), over(135)])
    assert (found.never, found.next_commit_ms, found.died) == (False, 90, 0)
    assert found.whole_ms is None


def test_survivor_that_never_commits_again_makes_the_outcome_never() -> None:
    dead = event("died", FAULT_MS + 500, -1, of=[1, 0], pid_of=101)
    found = outcome(EXCEPTION, [*before(), fault(), dead, *after(70), over(2000)])
    assert found.never and found.next_commit_ms is None and found.whole_ms is None
    assert found.waited_s == 2
    assert found.gap_ms == 2010  # a stopped group's gap lasts until the end
    assert found.died == 1


def test_a_step_that_one_commits_and_another_does_not_is_split() -> None:
    split = [*after(20, 21), abort(FAULT_MS + 22, 2, 10)]
    found = outcome(EXCEPTION, [*before(), fault(), *split, over(100)])
    assert found.splits == 1
    spare = [*after(20, 21), abort(FAULT_MS + 22, 2, 10, **{"in": False})]
    assert outcome(EXCEPTION, [*before(), fault(), *spare, over(100)]).splits == 0


def test_the_same_step_in_another_epoch_is_no_split() -> None:
    again = [abort(FAULT_MS + 5, 2, 10), *after(60, 60, 60, q=2)]
    assert outcome(EXCEPTION, [*before(), fault(), *again, over(100)]).splits == 0


def test_recovery_needs_a_step_that_all_groups_contributed_to() -> None:
    apart = [commit(FAULT_MS + 50, g, 11, n=2) for g in (0, 1)]
    apart += [commit(FAULT_MS + ms, g, 12) for g, ms in ((0, 95), (1, 96))]
    events = [*before(), fault(), *apart, over(100)]
    assert outcome(EXCEPTION, events).whole_ms is None
    # It takes part with a gradient of zeros
    healing = commit(FAULT_MS + 97, 2, 12, **{"in": False})
    assert outcome(EXCEPTION, [*events, healing]).whole_ms is None
    assert outcome(EXCEPTION, [*events, commit(FAULT_MS + 98, 2, 12)]).whole_ms == 98


def test_state_fetched_and_commits_that_change_nothing_are_counted() -> None:
    fetched = event("recovered", FAULT_MS + 30, 2, step=10)
    none = after(60, 60, 60, before=7, after=7)
    found = outcome(EXCEPTION, [*before(), fault(), fetched, *none, over(100)])
    assert (found.transfers, found.phantoms) == (1, 3)
    by_the_lost = outcome(KILL, [*before(), fault(), fetched, *none, over(100)])
    assert by_the_lost.transfers == 0


def test_parameters_that_differ_after_a_step_are_counted_by_step() -> None:
    other = [commit(FAULT_MS + 60, 0, 11), commit(FAULT_MS + 61, 1, 11, after=99)]
    assert outcome(EXCEPTION, [*before(), fault(), *other, over(100)]).mismatches == 1


def test_without_a_fault_only_measured_steps_count() -> None:
    row = ROWS["quiet-2x1-zero"]
    events = [
        commit(ms, group, step, n=2, measured=step > 2, cost_ns=int(step * 1e5))
        for step, ms in ((1, 0), (2, 500), (3, 510), (4, 514), (5, 519))
        for group in (0, 1)
    ]
    events += [event("enough", 520, group, kib=1024 * (group + 1)) for group in (0, 1)]
    found = outcome(row, events)
    assert (found.step_p50_ms, found.step_p99_ms) == (4, 5)
    assert (found.cost_p50_ms, found.cost_p99_ms) == (0.4, 0.5)
    assert found.memory_mib == 1.5


@pytest.mark.parametrize(("percent", "expected"), [(50, 50), (99, 99), (100, 100), (1, 1)])
def test_percentiles_are_values_that_occurred(percent: int, expected: int) -> None:
    assert percentile([float(n) for n in range(100, 0, -1)], percent) == expected


# --- files ----------------------------------------------------------------------------------------


def test_a_line_that_was_cut_off_is_left_for_later(tmp_path: Path) -> None:
    pen, reader = Pen(tmp_path, 0, 0), Reader(tmp_path)
    pen.say("start")
    assert [e["e"] for e in reader.news()] == ["start"]
    (path,) = tmp_path.glob("*.jsonl")
    with path.open("ab") as file:
        file.write(b'{"e": "comm')
        file.flush()
        assert reader.news() == []
        assert [e["e"] for e in lines(path)] == ["start"]
        file.write(b'it", "m": 1}\n')
    assert [e["e"] for e in reader.news()] == ["commit"]
    pen.close()


def test_existing_results_are_not_measured_again(tmp_path: Path) -> None:
    task = Task(KILL, FFT, 1)
    Results(tmp_path).add_outcome(task, Outcome(next_commit_ms=80.0))
    again = Results(tmp_path)
    assert again.done(task) and not again.done(Task(KILL, FFT, 2))
    assert not again.done(Task(KILL, TUNED, 1))
    assert again.of(KILL, FFT) == [Outcome(next_commit_ms=80.0)]


def test_figures_can_be_read_anew_from_the_events(tmp_path: Path) -> None:
    task, results = Task(EXCEPTION, FFT, 1), Results(tmp_path)
    results.keep_events(task, [*before(), fault(), *after(60, 61, 62), over(100)])
    results.add_outcome(task, Outcome(never=True))
    (found,) = results.measured_again(tmp_path / "again").of(EXCEPTION, FFT)
    assert not found.never and found.next_commit_ms == 62


# --- order, and the page --------------------------------------------------------------------------


def test_every_repetition_has_all_systems_before_the_next() -> None:
    pairs = [(row, system) for row in (EXCEPTION, KILL) for system in (FFT, TUNED)]
    order = [(t.row.name, t.system.name, t.number) for t in in_turn(pairs, 2)]
    assert order == [
        (row.name, name, number)
        for row in (EXCEPTION, KILL)
        for number in (1, 2)
        for name in ("fft", "torchft-tuned")
    ]


def test_the_quick_part_names_rows_and_systems_that_exist() -> None:
    assert all(SYSTEMS[name] in ROWS[row].systems for row, names in QUICK for name in names)
    args = argparse.Namespace(quick=True, row=None, system=None)
    assert len(chosen(args)) == sum(len(names) for _, names in QUICK)


def _filled(tmp_path: Path, row: Row, times: dict[str, list[float | None]]) -> Results:
    results = Results(tmp_path)
    for name, values in times.items():
        for number, ms in enumerate(values):
            found = Outcome(never=ms is None, next_commit_ms=ms, base_step_ms=45.0)
            results.add_outcome(Task(row, SYSTEMS[name], number), found)
    return results


def test_the_table_has_medians_ranges_ratios_and_targets(tmp_path: Path) -> None:
    times: dict[str, list[float | None]] = {
        "fft": [80, 100, 90],
        "torchft": [None, None, 5000],
        "torchft-tuned": [1000, 1100, 900],
    }
    results = _filled(tmp_path, EXCEPTION, times)
    (line,) = page.headline(results)
    found = dict(zip(page.HEADLINE, line, strict=True))
    assert found["FFT"] == "90 (80 … 100)"
    assert found["FFT ÷ default"] == "0 (it never does)"
    assert found["FFT ÷ tuned"] == "0.090"
    assert found["target of FFT, and met"] == "≤ 95: 2 of 3"
    assert found["torchft default"] == "5000; never 2 of 3"
    assert found["torchft tuned"] == "1000 (900 … 1100)"
    columns = [dict(zip(page.FAULTS, row, strict=True)) for row in page.fault_rows(results)]
    assert [one["n"] for one in columns] == ["3", "3", "3"]
    assert columns[1]["fault → next commit"] == "5000; never 2 of 3"


def test_where_nothing_need_be_lost_the_longest_gap_counts(tmp_path: Path) -> None:
    results, drain = Results(tmp_path), ROWS["drain"]
    for system, gap in ((FFT, 60.0), (TORCHFT, 5000.0)):
        found = Outcome(next_commit_ms=10.0, gap_ms=gap, base_step_ms=45.0)
        results.add_outcome(Task(drain, system, 1), found)
    (line,) = page.headline(results)
    assert line[1:3] == ("60", "5000")
    assert line[5] == "0.012" and line[7] == "≤ 90: 1 of 1"


@pytest.mark.parametrize(("step", "limit"), [(45.0, 1145), (300.0, 1900)])
def test_the_target_of_a_hang_counts_from_its_threshold(
    tmp_path: Path, step: float, limit: int
) -> None:
    results, hang = Results(tmp_path), ROWS["hang"]
    found = Outcome(next_commit_ms=limit + 1.0, base_step_ms=step)
    results.add_outcome(Task(hang, SYSTEMS["fft-txn"], 1), found)
    ((*_, target),) = page.headline(results)
    assert target == f"≤ {limit}: 0 of 1"


def test_missing_system_has_a_row_with_the_reason(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add_absence(KILL, SYSTEMS["nvrx"], "it is not installed")
    ((*_, name, count, why),) = [row[:4] for row in page.fault_rows(results)]
    assert (name, count, why) == (SYSTEMS["nvrx"].title, "0", "not measured: it is not installed")


def test_ratios_need_both(tmp_path: Path) -> None:
    results = _filled(tmp_path, EXCEPTION, {"fft": [None, None, 50.0], "torchft": [100.0]})
    fft, plain = results.of(EXCEPTION, FFT), results.of(EXCEPTION, TORCHFT)
    assert page.ratio(fft, plain, lambda one: one.next_commit_ms) == "∞"
    assert page.ratio(fft, [], lambda one: one.next_commit_ms) == "-"


def handled(on: str, at_ms: float, txn: int, took_ms: float = 0.2, **more: Any) -> dict[str, Any]:
    """Return a trace line of an event of that txn with the time for which the engine handled it."""
    move_event: dict[str, Any] = {"type": on, "token": [1, txn], **more}
    if on == "decision":
        move_event["record"] = {"kind": "commit", "epoch": 1, "txn": txn}
    times = {"at": at_ms / 1e3, "mono": (at_ms + took_ms) / 1e3}
    return {"kind": "transition", "on": on, "event": move_event, **times}


def test_the_legs_of_a_step_are_between_the_last_of_each_kind() -> None:
    lines = [{"kind": "header"}]
    for txn in range(1, SKIPPED + 4):
        lines += [handled("prepared", 0, txn), handled("prepared", 1, txn, 0.3)]
        lines += [handled("ballot", 2, txn), handled("decision", 3, txn, won=True)]
        lines += [handled("decision", 3.5, txn, won=False)]
        lines += [handled("applied", 5, txn), handled("applied", 5.5, txn, 0.1)]
    lines += [handled("prepared", 9, SKIPPED + 4)]  # interrupted, so not counted
    found = legs(lines)
    assert list(found) == list(LEGS)
    wanted = [1, 0.3, 0.7, 0.2, 0.8, 0.5, 0.2, 1.8, 0.1]
    assert list(found.values()) == pytest.approx(wanted, abs=1e-3)
    assert legs(lines[:SKIPPED]) == {}


def test_repeated_timeouts_shorten_the_wait(tmp_path: Path) -> None:
    """Two repetitions without success give the third a shorter wait; one that reached a commit does
    not."""
    row, results = ROWS["exception-forward"], Results(tmp_path)
    waits = []
    for number in range(1, 5):
        waits.append(row.limit_s(TORCHFT, results.in_vain(row, TORCHFT)))
        results.add_outcome(Task(row, TORCHFT, number), Outcome(never=number != 3, waited_s=1.0))
    assert waits == [75.0, 75.0, 20.0, 75.0]

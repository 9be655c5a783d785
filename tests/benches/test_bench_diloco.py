"""Tests of the parts of the DiLoCo benchmarks that need no job: slices, costs of faults, the
picture."""

from __future__ import annotations

import math
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.diloco import plot
from benchmarks.diloco.__main__ import arguments
from benchmarks.diloco.figures import BEFORE, Cost, costs, curve
from benchmarks.diloco.plan import KINDS, UNCOMMITTED, WHOLE, Schedule
from benchmarks.slices import Slices, slices
from fft.messages.fault_plans import AnyFault, FaultPlan
from tests.acceptance.chaos.__main__ import arguments as chaos_arguments
from tests.acceptance.chaos.alone import inner_of
from tests.acceptance.chaos.soak import DRAIN_EVERY, with_drains

# --- slices of the data -----------------------------------------------------------------


def record(n: int, kind: str, cursor: int, leases: dict[str, int], **more: Any) -> dict[str, Any]:
    """Return a line of a trace; ``leases`` holds the slice by group."""
    held = [[number, group, f"store-{group}"] for group, number in leases.items()]
    data = {"n": n, "kind": kind, "epoch": 1, "txn": n, "cursor": cursor, "leases": held}
    return {"event": {"record": {**data, "returned": [], **more}}}


def consumed(group: str, number: int, txn: int) -> dict[str, Any]:
    data = {"slice": number, "token": [1, txn]}
    return {"note": "consumed", "group": group, "data": data}


def leased() -> list[dict[str, Any]]:
    """Two commits of two groups; group 1 was killed after its vote and has traced no commit."""
    return [
        record(1, "epoch", 2, {"0": 0, "1": 1}),
        record(2, "abort", 2, {"0": 0, "1": 1}),
        record(3, "commit", 4, {"0": 2, "1": 3}),
        consumed("0", 0, 3),
        record(4, "epoch", 4, {"0": 2}, returned=[3]),
        record(5, "commit", 4, {"0": 3}),
        consumed("0", 2, 5),
    ]


def test_consumed_slices_are_counted_from_the_register() -> None:
    found = slices(leased())
    assert found == Slices(granted=4, once=3, twice=0, never=0, held=1)
    assert found.exact and str(found) == "3 / 0 / 0"


def test_commit_without_leases_consumes_all_slices_up_to_its_cursor() -> None:
    lines = [record(1, "epoch", 0, {}), record(2, "commit", 2, {}), record(3, "abort", 2, {})]
    assert slices(lines) == Slices(2, 2, 0, 0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(consumed("1", 0, 3), id="by two groups"),
        pytest.param(consumed("0", 0, 5), id="in two txns"),
        pytest.param(consumed("0", 3, 5), id="while it is held"),
    ],
)
def test_a_slice_that_is_consumed_twice_is_counted(wrong: dict[str, Any]) -> None:
    found = slices([*leased(), wrong])
    assert (found.twice, found.never) == (1, 0) and not found.exact


def test_slice_neither_consumed_nor_returned_is_counted() -> None:
    lines = leased()
    lines[4] = record(4, "epoch", 4, {"0": 2})  # 3 is not returned
    lines[5] = record(5, "commit", 5, {"0": 4})
    found = slices(lines)
    assert (found.never, found.held) == (1, 1) and not found.exact


def test_missing_record_raises_value_error_with_its_number() -> None:
    lines = leased()
    del lines[2]
    with pytest.raises(ValueError, match="record 3 of the register"):
        slices(lines)


# --- inner steps of a chaos run -----------------------------------------------------------


def inner(note: str, wall: float, **data: Any) -> dict[str, Any]:
    return {"note": note, "group": "0", "rank": 0, "inc": 1, "wall": wall, "data": data}


def test_inner_steps_count_if_their_slice_does() -> None:
    lines = [
        *(inner("inner_commit", 0.1 * i, slice=i // 2, inner_step=i % 2) for i in range(6)),
        inner("inner_abort", 1, slice=1, inner_step=0),
        *(inner("metrics", i, loss=5.0 - i) for i in range(3)),
    ]
    found = inner_of(lines, Slices(3, 2, 0, 0, 1))
    assert found is not None
    assert (found.steps, found.done, found.counted, found.repeated) == (2, 6, 4, 1)
    assert math.isclose(found.clean_ms, 100)
    assert math.isclose(found.goodput(groups=2, wall_s=0.4), 0.5)
    assert inner_of([], Slices(0, 0, 0, 0, 0)) is None


def test_the_loss_has_to_fall() -> None:
    step = inner("inner_commit", 0, slice=0, inner_step=0)
    falls = [inner("metrics", i, loss=1 / (1 + i)) for i in range(40)]
    for losses, learned in ((falls, True), (falls[::-1], False)):
        found = inner_of([step, *losses], Slices(1, 1, 0, 0, 0))
        assert found is not None and found.learned is learned


def test_trainers_of_one_rank_a_group_refuse_a_layout_of_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert chaos_arguments(["random", "--trainer", "diloco"]).layout == ["3x1"]
    assert chaos_arguments(["random", "--trainer", "gpt"]).layout == ["3x1", "2x2"]
    with pytest.raises(SystemExit):
        chaos_arguments(["random", "--trainer", "local_sgd", "--layout", "2x2"])
    output = capsys.readouterr().err
    assert "--trainer local_sgd does not train in 2x2: give --layout 3x1" in output


def test_some_faults_become_drains_of_the_same_group() -> None:
    entries = [
        {"name": f"f{i}", "kind": "exception", "step": i, "group": i % 3, "rank": 0,
         "phase": "forward"}
        for i in range(2 * DRAIN_EVERY)
    ]  # fmt: skip
    faults: list[AnyFault] = list(FaultPlan.model_validate({"faults": entries}).faults)
    changed = list(with_drains(faults))
    assert [f.name for f in changed] == [f.name for f in faults]
    assert [f.kind == "drain" for f in changed] == [
        (i + 1) % DRAIN_EVERY == 0 for i in range(len(faults))
    ]
    assert [getattr(f, "group", None) for f in changed] == [f"{i % 3}" for i in range(len(faults))]


# --- FFT beside torchft ---------------------------------------------------------------------


def event(what: str, ms: int, group: int, pid: int | None = None, **fields: Any) -> dict[str, Any]:
    """Return an event whose wall clock is an hour after the machine's clock."""
    at = ms * 1_000_000
    who = {"g": group, "r": 0, "pid": pid or 100 + group}
    return {"e": what, "m": at, "t": at + 3600 * 10**9, **who, **fields}


def begin(ms: int, group: int, *samples: int, **more: Any) -> dict[str, Any]:
    return event("begin", ms, group, samples=list(samples), step=0, **more)


def sync(ms: int, group: int, step: int, *samples: int, bits: int = 7) -> dict[str, Any]:
    return event(
        "sync", ms, group, step=step, n=2, sum=bits, samples=list(samples), loss=1.0 / step
    )


def of(kind: str, found: list[Cost]) -> Cost:
    return next(cost for cost in found if cost.kind == kind)


def test_failed_step_is_lost_but_its_samples_are_not_if_repeated() -> None:
    events = [begin(1, 0, 1), begin(1, 1, 2), event("fault", 2, 1, kind="exception", step=0)]
    events += [event("failed", 3, 1), begin(4, 1, 2), sync(5, 0, 1, 1), sync(5, 1, 1, 2)]
    assert of("exception", costs(events)) == Cost("exception", faults=1, lost_steps=1)
    skips = [e for e in events if not (e["e"] == "begin" and e["m"] > 3e6)]
    skips[-1]["samples"] = []
    assert of("exception", costs(skips)) == Cost("exception", faults=1, lost_steps=1, never=1)


def test_a_window_that_one_group_alone_commits_is_a_split() -> None:
    events = [begin(1, 0, 1), begin(1, 1, 2, 3), event("fault", 2, 1, kind="one_sided", step=0)]
    events += [sync(3, 0, 1, 1), event("dropped", 4, 1, why=UNCOMMITTED, step=0)]
    events += [begin(5, 0, 4), begin(5, 1, 5), event("fetched", 6, 1, bytes=80)]
    events += [event("dropped", 6, 1, why="another group's state", step=1)]
    events += [sync(7, 0, 2, 4), sync(7, 1, 2, 4)]  # the joiner reduces the donor's copy
    found = of("one_sided", costs(events))
    assert found == Cost(
        "one_sided", faults=1, lost_steps=2, twice=1, never=3, transfers=1, transfer_bytes=80,
        splits=1,
    )  # fmt: skip


def test_a_window_that_all_drop_is_no_split() -> None:
    events = [event("dropped", 1 + g, g, why=UNCOMMITTED, step=0) for g in (0, 1)]
    events += [sync(5, 0, 1), sync(5, 1, 1)]
    assert costs(events)[-1].splits == 0


def test_killed_process_loses_all_unsynchronized_work() -> None:
    events = [begin(1, 1, 1), sync(2, 1, 1, 1), begin(3, 1, 2), begin(4, 1, 3)]
    events += [event("fault", 5, 1, kind="kill", step=1), begin(9, 1, 2, pid=999)]
    events += [event("exit", 10, 1, pid=999)]
    found = of("kill", costs(events))
    assert (found.lost_steps, found.never) == (2, 2)


def test_fetched_bytes_are_attributed_to_the_preceding_fault() -> None:
    events = [event("fault", 1000, 1, kind="kill", step=3)]
    found = costs(events, [(3600.5, 10), (3601.5, 20)])
    assert [(c.kind, c.transfers, c.transfer_bytes) for c in found if c.transfers] == [
        (BEFORE, 1, 10),
        ("kill", 1, 20),
    ]


def test_divergent_groups_are_counted_by_step() -> None:
    events = [event("fault", 1, 1, kind="kill", step=0)]
    events += [sync(2, 0, 1), sync(2, 1, 1, bits=8), sync(3, 0, 2), sync(3, 1, 2)]
    assert of("kill", costs(events)).unequal == 1
    assert curve(events) == [(1, 1.0), (1, 1.0), (2, 0.5), (2, 0.5)]


def test_fault_schedule_cycles_the_kinds_and_leaves_time_at_the_end() -> None:
    plan = Schedule(outer=60, every=10)
    assert plan.due(0, 9, WHOLE) is None
    assert plan.due(0, 10, WHOLE - 1) is None
    assert [plan.due(n, 10 * (n + 1), WHOLE) for n in range(5)] == [*KINDS, KINDS[0], None]
    assert Schedule(60, 60).due(0, 59, WHOLE) is None


@pytest.mark.parametrize("words", [["--outer", "10"], ["--every", "0"]])
def test_a_run_without_a_fault_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(words)
    assert (arguments([]).outer, arguments([]).every) == (300, 10)


def test_picture_has_a_line_per_job_and_a_mark_per_fault() -> None:
    curves = {"fft": [(1, 4.0), (2, 3.0)], "torchft-clean": [(1, 4.2), (2, 3.5)]}
    drawn = ElementTree.fromstring(plot.svg(curves, {"fft": [(1, "kill")]}, 2))
    lines = [e for e in drawn if e.tag.endswith("path") and "L" in e.attrib["d"]]
    words = [e.text for e in drawn if e.tag.endswith("text")]
    assert len(lines) == 2
    assert "k" in words and plot.title("fft") in words

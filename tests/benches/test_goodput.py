"""Tests of the figures of `benchmarks.goodput`."""

from __future__ import annotations

from typing import Any

from benchmarks.goodput import Result, result, stream
from benchmarks.side_by_side.model import BATCH


def commit(m: int, group: int, step: int, n: int) -> dict[str, Any]:
    return {"e": "commit", "m": m, "g": group, "step": step, "n": n}


def test_stream_is_the_same_for_every_system_and_within_the_time() -> None:
    faults = list(stream(10.0, 1000.0, seed=1))
    assert faults == list(stream(10.0, 1000.0, seed=1))
    assert 70 < len(faults) < 130
    assert all(0 < at < 1000 for at, _, _ in faults)
    assert {kind for _, kind, _ in faults} == {"kill", "exception", "stop"}
    assert list(stream(0.0, 1000.0, seed=1)) == []


def test_result_counts_each_step_once_with_its_last_contributors() -> None:
    events = [
        commit(1, 0, 1, 2),  # before the time is measured
        {"e": "measured", "m": 2},
        *(commit(3, group, 2, 2) for group in (0, 1)),
        {"e": "fault", "m": 4},
        *(commit(5, group, 2, 1) for group in (0,)),  # again, from a checkpoint
        commit(6, 0, 3, 1),
    ]
    assert result(events, 2.0) == Result(
        samples=2 * BATCH / 2.0, faults=1, repeated=BATCH, seconds=2.0
    )

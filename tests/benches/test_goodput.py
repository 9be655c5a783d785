"""Tests of the figures of `benchmarks.goodput`."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.goodput import (
    FFT_SPARES,
    RATES_S,
    Result,
    lines_of,
    lost_per_fault,
    result,
    stream,
)
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
        {"e": "missed", "m": 7},
        commit(2_000_000_003, 0, 4, 1),  # after the end
    ]
    expected = Result(samples=2 * BATCH / 2.0, faults=1, missed=1, repeated=BATCH, seconds=2.0)
    assert result(events, 2.0) == expected


def test_table_has_the_goodput_and_the_cost_of_a_fault() -> None:
    found = {(FFT_SPARES, 0.0): Result(100.0, 0, 0, 0, 50.0)}
    for rate, samples in zip(RATES_S, (80.0, 90.0, 100.0), strict=True):
        found[FFT_SPARES, rate] = Result(samples, 3, 1, 8, 100.0)
    assert lost_per_fault(found, FFT_SPARES) == pytest.approx((20 + 10) / 9)
    assert lines_of(found)[2].split(" | ")[1:] == [
        *("80.0%", "90.0%", "100.0%", "9 (3)", "3.33", "0.4", "24 |"),
    ]

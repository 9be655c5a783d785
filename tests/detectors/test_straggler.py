"""Slow ranks, named from the body times of each txn."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fft.detectors.base import Level
from fft.detectors.straggler import BodyTimes, StragglerConfig, StragglerDetector

RANKS = [f"{group}/{rank}" for group in range(4) for rank in range(2)]


def fed(
    slow: dict[str, float], txns: int = 32, noise: float = 0.05, ranks: list[str] | None = None
) -> StragglerDetector:
    """A detector of a job in which ``slow`` ranks take so many times as long; steps differ."""
    detector, dice = StragglerDetector(), random.Random(7)
    for step in range(txns):
        hard = dice.choice([0.2, 0.24, 2.0])
        times = {
            rank: hard * slow.get(rank, 1.0) * (1 + noise * dice.random())
            for rank in ranks or RANKS
        }
        detector.observe(BodyTimes(step, times))
    return detector


def test_equal_ranks_are_green_however_uneven_the_steps() -> None:
    assert fed({}).verdict().level is Level.GREEN


def test_a_slow_rank_is_named_with_how_much_and_how_long() -> None:
    detector = StragglerDetector()
    for step in range(40):
        detector.observe(BodyTimes(step, {"0/0": 0.20, "0/1": 0.24, "1/0": 0.36, "1/1": 0.25}))
    verdict = detector.verdict()
    assert verdict.level is Level.YELLOW
    assert verdict.reason == (
        "rank 1/0 takes 1.50 × the median body time over the last 32 steps (0.36 s, not 0.24 s)"
    )


def test_several_are_named_slowest_first() -> None:
    detector = fed({"1/0": 1.5, "3/1": 2.0})
    assert list(detector.slow()) == ["3/1", "1/0"]
    assert detector.slow()["3/1"] == pytest.approx(2.0, rel=0.1)
    assert fed(dict.fromkeys(RANKS[:4], 3.0)).verdict().reason.endswith("and 1 more")


def test_of_two_ranks_one_can_be_the_slower() -> None:
    assert list(fed({"b": 1.6}, ranks=["a", "b"]).slow()) == ["b"]
    assert fed({"a": 9.0}, ranks=["a"]).slow() == {}


def test_single_slow_steps_and_a_young_job_say_nothing() -> None:
    detector = fed({})
    for step in range(10):
        detector.observe(BodyTimes(100 + step, {**dict.fromkeys(RANKS, 0.2), "0/0": 20.0}))
    assert detector.verdict().level is Level.GREEN
    assert fed({"1/0": 3.0}, txns=7).verdict().level is Level.GREEN
    assert fed({"1/0": 3.0}, txns=8).verdict().level is Level.YELLOW


def test_ranks_that_differ_anyway_are_not_slow_by_a_little() -> None:
    speeds = {rank: 1.0 + 0.2 * number for number, rank in enumerate(RANKS)}
    assert fed(speeds).slow() == {}


def test_who_recovers_is_green_again_and_who_is_gone_forgotten() -> None:
    detector = fed({"1/0": 3.0})
    for step in range(20):
        detector.observe(BodyTimes(32 + step, dict.fromkeys(RANKS, 0.2)))
    assert detector.verdict().level is Level.GREEN
    detector = fed({"1/0": 3.0})
    rest = {rank: 0.2 for rank in RANKS if rank != "1/0"}
    detector.observe(BodyTimes(40, rest))
    assert detector.slow() == {}
    detector.observe(BodyTimes(41, {**rest, "1/0": 0.6}))
    assert detector.slow() == {}


def test_times_that_cannot_be_are_left_out() -> None:
    detector = StragglerDetector()
    detector.observe(BodyTimes(0, {}))
    detector.observe(BodyTimes(1, {"a": 0.0, "b": -1.0}))
    for step in range(8):
        detector.observe(BodyTimes(step, {"a": 1.0, "b": 1.0, "c": 0.0}))
    assert detector.verdict().level is Level.GREEN


@pytest.mark.parametrize(
    "bad", [{"least": 0.0}, {"deviations": -1.0}, {"samples": 0}, {"samples": 33}]
)
def test_settings_that_cannot_be_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="need"):
        StragglerConfig(**bad)  # type: ignore[arg-type]


TXN = st.lists(st.floats(1e-3, 1e3), min_size=5, max_size=5)


@given(txns=st.lists(TXN, min_size=1, max_size=40), power=st.integers(-10, 10))
def test_fewer_than_half_are_slow_never_red_and_units_do_not_matter(
    txns: list[list[float]], power: int
) -> None:
    one, other = StragglerDetector(), StragglerDetector()
    for step, times in enumerate(txns):
        one.observe(BodyTimes(step, dict(zip("abcde", times, strict=True))))
        scaled = [seconds * 2.0**power for seconds in times]  # a power of two rounds nothing
        other.observe(BodyTimes(step, dict(zip("abcde", scaled, strict=True))))
    assert len(one.slow()) <= 2
    assert one.verdict().level in (Level.GREEN, Level.YELLOW)
    assert one.slow() == other.slow()

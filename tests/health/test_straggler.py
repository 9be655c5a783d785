"""Tests of the detection of slow ranks from the step function's times in each txn."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fft.health.detectors.base import Level
from fft.health.detectors.straggler import BodyTimes, StragglerConfig, StragglerDetector, Stragglers

RANKS = [f"{group}/{rank}" for group in range(4) for rank in range(2)]


def fed(
    slow: dict[str, float], txns: int = 12, noise: float = 0.05, ranks: list[str] | None = None
) -> StragglerDetector:
    """Return a detector of a job in which ``slow`` ranks take a multiple of the time; steps
    differ."""
    detector, dice = StragglerDetector(), random.Random(7)
    for _ in range(txns):
        hard = dice.choice([0.2, 0.24, 2.0])
        times = {
            rank: hard * slow.get(rank, 1.0) * (1 + noise * dice.random())
            for rank in ranks or RANKS
        }
        detector.observe(BodyTimes(times))
    return detector


def test_equal_ranks_are_green_however_uneven_the_steps() -> None:
    assert fed({}).verdict().level is Level.GREEN


def test_a_slow_rank_is_named_with_how_much_and_how_long() -> None:
    detector = StragglerDetector()
    for _ in range(40):
        detector.observe(BodyTimes({"0/0": 0.20, "0/1": 0.24, "1/0": 0.36, "1/1": 0.25}))
    verdict = detector.verdict()
    assert verdict.level is Level.YELLOW
    assert verdict.reason == (
        "rank 1/0 takes 1.50 × the median body time over its last 10 reports (0.36 s, not 0.24 s)"
    )


def test_several_are_named_slowest_first() -> None:
    detector = fed({"1/0": 1.5, "3/1": 2.0})
    assert list(detector.slow()) == ["3/1", "1/0"]
    assert detector.slow()["3/1"] == pytest.approx(2.0, rel=0.1)
    assert fed(dict.fromkeys(RANKS[:4], 3.0)).verdict().reason.endswith("and 1 more")


def test_slower_of_two_ranks_is_named() -> None:
    assert list(fed({"b": 1.6}, ranks=["a", "b"]).slow()) == ["b"]
    assert fed({"a": 9.0}, ranks=["a"]).slow() == {}


def test_single_slow_steps_and_a_young_job_are_not_reported() -> None:
    detector = fed({})
    for _ in range(4):
        detector.observe(BodyTimes({**dict.fromkeys(RANKS, 0.2), "0/0": 20.0}))
    assert detector.verdict().level is Level.GREEN
    assert fed({"1/0": 3.0}, txns=4).verdict().level is Level.GREEN
    assert fed({"1/0": 3.0}, txns=5).verdict().level is Level.YELLOW


def test_ranks_that_differ_anyway_are_not_slow_by_a_little() -> None:
    speeds = {rank: 1.0 + 0.2 * number for number, rank in enumerate(RANKS)}
    assert fed(speeds).slow() == {}


def test_recovered_rank_is_green_and_departed_rank_is_forgotten() -> None:
    detector = fed({"1/0": 3.0})
    for _ in range(20):
        detector.observe(BodyTimes(dict.fromkeys(RANKS, 0.2)))
    assert detector.verdict().level is Level.GREEN
    detector = fed({"1/0": 3.0})
    rest = {rank: 0.2 for rank in RANKS if rank != "1/0"}
    detector.observe(BodyTimes(rest))
    assert detector.slow() == {}
    detector.observe(BodyTimes({**rest, "1/0": 0.6}))
    assert detector.slow() == {}


def test_times_that_cannot_be_are_left_out() -> None:
    detector = StragglerDetector()
    detector.observe(BodyTimes({}))
    detector.observe(BodyTimes({"a": 0.0, "b": -1.0}))
    for _ in range(8):
        detector.observe(BodyTimes({"a": 1.0, "b": 1.0, "c": 0.0}))
    assert detector.verdict().level is Level.GREEN


@pytest.mark.parametrize(
    "bad",
    [
        {"least": 0.0},
        {"least_s": -1.0},
        {"deviations": -1.0},
        {"samples": 0},
        {"samples": 11},
        {"sure": 0},
    ],
)
def test_settings_that_cannot_be_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="need"):
        StragglerConfig(**bad)  # type: ignore[arg-type]


TXN = st.lists(st.floats(1e-3, 1e3), min_size=5, max_size=5)


@given(txns=st.lists(TXN, min_size=1, max_size=40), power=st.integers(-10, 10))
def test_fewer_than_half_are_slow_never_red_and_units_do_not_matter(
    txns: list[list[float]], power: int
) -> None:
    config = StragglerConfig(least_s=0.0)
    one, other = StragglerDetector(config), StragglerDetector(config)
    for times in txns:
        one.observe(BodyTimes(dict(zip("abcde", times, strict=True))))
        scaled = [seconds * 2.0**power for seconds in times]  # a power of two does not round
        other.observe(BodyTimes(dict(zip("abcde", scaled, strict=True))))
    assert len(one.slow()) <= 2
    assert one.verdict().level in (Level.GREEN, Level.YELLOW)
    assert one.slow() == other.slow()


def test_momentary_difference_is_noise() -> None:
    detector = StragglerDetector()
    for _ in range(10):
        detector.observe(BodyTimes({"a": 0.002, "b": 0.051}))
    assert detector.slow() == {}
    for _ in range(10):
        detector.observe(BodyTimes({"a": 0.002, "b": 0.053}))
    assert list(detector.slow()) == ["b"]


@pytest.mark.parametrize(
    ("rank", "seconds", "others"), [("0/0", 0.0734, 0.0501), ("0/1", 0.0524, 0.0393)]
)
def test_ranks_of_a_sound_job_that_shares_two_cores_are_not_named(
    rank: str, seconds: float, others: float
) -> None:
    """The times are from two runs of the demo in which a rank was named when 10 ms sufficed for
    that."""
    times = {**dict.fromkeys(["0/0", "0/1", "1/0", "1/1"], others), rank: seconds}
    assert changes_after(Stragglers(), times, 60) == []
    assert changes_after(Stragglers(StragglerConfig(least_s=0.01)), times, 60) == [f"{rank} slow"]


@pytest.mark.parametrize(("median", "late"), [(0.02, 0.2), (0.05, 0.06), (0.2, 0.06), (1.0, 0.3)])
def test_rank_beyond_the_noise_is_named(median: float, late: float) -> None:
    times = {**dict.fromkeys(["0/0", "0/1", "1/0"], median), "1/1": median + late}
    assert changes_after(Stragglers(), times, 12) == ["1/1 slow"]


# --- from words as they come in ----------------------------------------------------------------


def changes_after(
    stragglers: Stragglers, times: dict[str, float], rounds: int, inc: int = 1
) -> list[str]:
    """Return the findings when every rank reports ``rounds`` times, in changing order."""
    dice, news = random.Random(3), []
    for _ in range(rounds):
        for rank in dice.sample(sorted(times), len(times)):
            news += stragglers.hear(rank, inc, times[rank])
    return [f"{change.rank} {'slow' if change.slow else 'no more'}" for change in news]


def test_straggler_onset_and_end_are_reported_once() -> None:
    stragglers = Stragglers()
    equal = {"0/0": 0.1, "1/0": 0.11, "2/0": 0.1}
    assert changes_after(stragglers, equal, 10) == []
    assert changes_after(stragglers, {**equal, "1/0": 0.3}, 12) == ["1/0 slow"]
    assert stragglers.slow == {"1/0": pytest.approx(3.0)}
    assert changes_after(stragglers, equal, 12) == ["1/0 no more"]
    assert stragglers.slow == {}


def test_one_of_two_ranks_is_named_with_the_evidence() -> None:
    stragglers = Stragglers()
    changes = []
    for _ in range(10):
        changes += stragglers.hear("0/0", 1, 0.1) + stragglers.hear("1/0", 1, 0.4)
    (change,) = changes
    assert change.evidence == (
        "rank 1/0 takes 4.00 × the median body time over its last 9 reports (0.4 s, not 0.1 s)"
    )


def test_rarely_reporting_rank_is_awaited_and_a_departed_one_is_not() -> None:
    stragglers = Stragglers()
    for _ in range(12):
        for rank, seconds in (("a", 0.1), ("a", 0.1), ("a", 0.1), ("b", 0.1), ("c", 0.5)):
            stragglers.hear(rank, 1, seconds)
    assert list(stragglers.slow) == ["c"]
    assert changes_after(stragglers, {"a": 0.1, "b": 0.1}, 4) == ["c no more"]


def test_short_slowness_is_not_reported() -> None:
    stragglers = Stragglers(StragglerConfig(window=3, samples=3, sure=3))
    fast, slow = {"a": 0.1, "b": 0.1, "c": 0.1}, {"a": 0.1, "b": 0.1, "c": 0.5}
    for _ in range(5):
        assert changes_after(stragglers, fast, 10) == []
        assert changes_after(stragglers, slow, 2) == [], "found slow in two rounds"
    assert changes_after(stragglers, slow, 6) == ["c slow"]
    assert changes_after(stragglers, fast, 2) == []
    assert changes_after(stragglers, slow, 6) == [], "and never told to be so no more"


def test_a_new_process_of_a_rank_is_not_judged_by_the_old_one() -> None:
    stragglers = Stragglers()
    changes_after(stragglers, {"a": 0.1, "b": 0.1, "c": 0.5}, 10)
    assert stragglers.hear("c", 2, 0.1) == []
    assert changes_after(stragglers, {"a": 0.1, "b": 0.1}, 1) == ["c no more"]
    assert stragglers.hear("c", 1, 0.5) == [], "a late word of the old one"
    for _ in range(10):
        assert changes_after(stragglers, {"a": 0.1, "b": 0.1}, 1) == []
        assert stragglers.hear("c", 2, 0.1) == []

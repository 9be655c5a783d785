"""Tests of the detection of a hanging main thread, from times alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fft.health.detectors.base import Level
from fft.health.detectors.trainer import (
    Atomic,
    Begun,
    Ended,
    Looked,
    Marked,
    Moved,
    ProgressConfig,
    ProgressDetector,
    Stopped,
    Waiting,
)

CONFIG = ProgressConfig(max_s=60.0, grace_s=10.0)


def after_steps(
    count: int, seconds: float = 0.24, config: ProgressConfig = CONFIG
) -> tuple[ProgressDetector, float]:
    """Return a detector that saw ``count`` steps, in the middle of the next one; and the time."""
    detector, now = ProgressDetector(config), 100.0
    for step in range(count):
        detector.observe(Begun(now, step))
        now += seconds
        detector.observe(Ended(now, committed=True))
    detector.observe(Begun(now, count))
    return detector, now


def level(detector: ProgressDetector, now: float) -> Level:
    return detector.verdict(now).level


def test_a_detector_that_saw_nothing_is_green() -> None:
    assert level(ProgressDetector(CONFIG), 1e9) is Level.GREEN


def test_reason_names_the_measurement_and_its_threshold() -> None:
    detector, now = after_steps(812)
    assert level(detector, now + 1.19) is Level.GREEN
    verdict = detector.verdict(now + 1.31)
    assert verdict.level is Level.YELLOW
    assert verdict.reason == (
        "no progress for 1.31 s at step 812 (threshold 1.20 s = 5 × the median 0.24 s of 32 steps)"
    )


def test_red_comes_after_the_grace() -> None:
    detector, now = after_steps(40)
    assert level(detector, now + 1.2 + 9.9) is Level.YELLOW
    verdict = detector.verdict(now + 1.2 + 10.1)
    assert verdict.level is Level.RED
    assert verdict.reason.endswith("and the 10 s of grace are over")


def test_until_there_are_three_step_times_only_the_maximum_counts() -> None:
    detector, now = after_steps(2)
    assert level(detector, now + 59.9) is Level.GREEN
    assert "too few steps" in detector.verdict(now + 60.1).reason
    detector, now = after_steps(3)
    assert level(detector, now + 1.3) is Level.YELLOW


def test_first_steps_are_judged_by_those_of_the_other_ranks() -> None:
    config = ProgressConfig(max_s=600.0, grace_s=10.0)
    detector, now = after_steps(0, config=config)
    assert detector.threshold() == 600.0, "nothing is known"
    detector.expected_s = 0.2
    assert detector.threshold() == 10.0, "not 5 × 0.2 s: a first step loads what others use"
    detector.expected_s = 4.0
    assert level(detector, now + 19.9) is Level.GREEN
    verdict = detector.verdict(now + 20.1)
    assert verdict.level is Level.YELLOW
    assert "threshold 20.00 s, from 5 × the median 4 s of the other ranks" in verdict.reason
    detector.observe(Ended(now + 21, committed=False))  # the rank was left out, and comes back
    detector.observe(Begun(now + 22, 7))
    assert detector.threshold() == 40.0, "an alarm doubles it, at whatever step it comes back"
    timed, _ = after_steps(3, config=config)
    timed.expected_s = 4.0
    assert timed.threshold() == pytest.approx(1.2), "its own steps count from here on"


def test_joiner_is_suspected_by_the_median_of_the_others_and_not_ended() -> None:
    """The others wait for it also while it compiles, or runs a loop of bytecodes."""
    for noise in (Moved, lambda at: Atomic(at, on=True)):
        detector, now = after_steps(0, config=ProgressConfig(max_s=600.0, grace_s=10.0))
        detector.expected_s, detector.joiner_s = 0.3, 1.0
        detector.observe(noise(now))
        for tick in range(15):
            detector.observe(Looked(now + tick / 10))
            detector.observe(Moved(now + tick / 10))
        assert level(detector, now + 1.45) is Level.GREEN
        verdict = detector.verdict(now + 1.55)
        assert verdict.level is Level.YELLOW
        assert "threshold 1.50 s, from 5 × the median 0.3 s of the other ranks" in verdict.reason
        for tick in range(16, 400):
            detector.observe(Moved(now + tick / 10))
        assert level(detector, now + 40.0) is Level.YELLOW, "it may compile for long"
        detector.observe(Ended(now + 40, committed=False))
        detector.observe(Begun(now + 41, 7))
        assert level(detector, now + 41 + 2.9) is Level.GREEN, "an alarm doubles the threshold"
        assert level(detector, now + 41 + 3.1) is Level.YELLOW
        detector.joiner_s = 0.0
        assert level(detector, now + 41 + 3.1) is Level.GREEN, "no other rank waits"
        detector.joiner_s = 10.0  # its first step was not rehearsed
        assert level(detector, now + 41 + 19.9) is Level.GREEN
        assert level(detector, now + 41 + 20.1) is Level.YELLOW


def test_joiner_is_not_judged_by_steps_that_it_does_not_know() -> None:
    detector, now = after_steps(0)
    detector.joiner_s = 1.0
    assert level(detector, now + 59.9) is Level.GREEN
    timed, now = after_steps(3, seconds=10.0)
    timed.joiner_s, timed.expected_s = 1.0, 0.1
    assert level(timed, now + 49.9) is Level.GREEN, "its own steps count from here on"


def test_stopped_process_is_found_as_soon_with_the_steps_of_others() -> None:
    detector, now = after_steps(0)
    detector.expected_s = 0.01
    detector.observe(Stopped(now, True))
    assert level(detector, now + 0.9) is Level.GREEN
    assert level(detector, now + 1.1) is Level.YELLOW


def test_the_threshold_has_a_floor_and_a_ceiling() -> None:
    detector, now = after_steps(8, 0.001)
    assert detector.threshold() == pytest.approx(1.0)
    assert "the minimum, which is more than 5 ×" in detector.verdict(now + 1.1).reason
    detector, now = after_steps(8, 30.0)
    assert detector.threshold() == pytest.approx(60.0)
    assert "the maximum; otherwise 5 ×" in detector.verdict(now + 61).reason


def test_only_the_last_steps_count_and_only_committed_ones() -> None:
    detector, now = after_steps(40, 10.0)
    for step in range(32):
        detector.observe(Begun(now, 40 + step))
        now += 0.5
        detector.observe(Ended(now, committed=True))
        detector.observe(Begun(now, 41 + step))
        now += 20.0  # a txn that was rolled back after a long time
        detector.observe(Ended(now, committed=False))
    detector.observe(Begun(now, 100))
    assert detector.threshold() == pytest.approx(2.5)


def test_every_kind_of_movement_counts() -> None:
    for mark in (Moved, Marked):
        detector, now = after_steps(8)
        for _ in range(40):
            now += 1.1
            assert level(detector, now) is Level.GREEN
            detector.observe(mark(now))


def test_a_loop_that_only_runs_bytecodes_is_held_to_the_maximum() -> None:
    detector, now = after_steps(8)
    for tick in range(600):
        detector.observe(Moved(now + tick * 0.1))
    assert level(detector, now + 59.95) is Level.GREEN
    detector.observe(Moved(now + 60.05))
    verdict = detector.verdict(now + 60.1)
    assert verdict.level is Level.YELLOW
    assert verdict.reason == (
        "the interpreter runs, but no progress was marked for 60.10 s at step 8 "
        "(the maximum is 60 s)"
    )


def test_outside_a_txn_running_bytecodes_is_enough() -> None:
    """An evaluation of an hour between two steps is not a hang."""
    detector, now = after_steps(8)
    detector.observe(Ended(now, committed=True))
    for _ in range(100):
        now += 59.0
        assert level(detector, now) is Level.GREEN
        detector.observe(Moved(now))
    verdict = detector.verdict(now + 61)
    assert verdict.level is Level.YELLOW
    assert "after step 8 (outside every txn; the maximum is 60 s)" in verdict.reason


def test_rank_waiting_for_a_peer_is_not_blamed() -> None:
    detector, now = after_steps(8)
    detector.observe(Waiting(now + 0.1, on=True))
    assert level(detector, now + 1e6) is Level.GREEN
    detector.observe(Waiting(now + 1e6, on=False))
    assert level(detector, now + 1e6 + 1.1) is Level.GREEN
    assert level(detector, now + 1e6 + 1.3) is Level.YELLOW
    assert detector.threshold() == pytest.approx(1.2)  # the wait caused no alarm


def test_an_atomic_section_is_held_to_the_maximum() -> None:
    detector, now = after_steps(8)
    detector.observe(Atomic(now + 0.1, on=True))
    assert level(detector, now + 60.0) is Level.GREEN
    assert "in an atomic section" in detector.verdict(now + 60.2).reason
    detector.observe(Atomic(now + 30, on=False))
    assert level(detector, now + 31.3) is Level.YELLOW


def test_false_alarm_doubles_the_threshold_until_the_next_commit() -> None:
    detector, now = after_steps(8)
    found = []
    for _ in range(8):
        found.append(detector.threshold())
        now += found[-1] + 0.01
        assert level(detector, now) is Level.YELLOW
        detector.observe(Ended(now, committed=False))
        detector.observe(Begun(now, 8))
    assert found == pytest.approx([1.2, 2.4, 4.8, 9.6, 19.2, 38.4, 60.0, 60.0])
    assert "doubled 8 ×" in detector.verdict(now + 61).reason
    detector.observe(Ended(now + 0.1, committed=True))
    detector.observe(Begun(now + 0.1, 8))  # the commit counts, not the number
    assert detector.threshold() == pytest.approx(1.2)


def test_late_report_does_not_age_the_state() -> None:
    detector, now = after_steps(8)
    detector.observe(Marked(now + 1.0))
    detector.observe(Moved(now + 0.5))
    assert level(detector, now + 2.1) is Level.GREEN
    assert level(detector, now + 2.3) is Level.YELLOW


def test_asking_changes_nothing() -> None:
    detector, now = after_steps(8)
    for tick in range(100):
        detector.verdict(now + tick)
    assert detector.threshold() == pytest.approx(1.2)
    assert level(detector, now + 1.1) is Level.GREEN


def test_the_pause_of_the_observer_does_not_count() -> None:
    detector, now = after_steps(8, config=ProgressConfig(max_s=60, grace_s=10, look_s=0.2))
    detector.observe(Looked(now))
    detector.observe(Looked(now + 0.1))
    assert level(detector, now + 30.0) is Level.GREEN
    detector.observe(Looked(now + 30.0))  # 0.3 s of this count
    assert level(detector, now + 30.2) is Level.GREEN
    for tick in range(1, 10):
        detector.observe(Looked(now + 30.0 + tick * 0.1))
    assert level(detector, now + 30.89) is Level.GREEN
    assert level(detector, now + 30.91) is Level.YELLOW


def test_a_move_in_the_middle_of_a_pause_leaves_the_rest_excused() -> None:
    detector, now = after_steps(8, config=ProgressConfig(max_s=60, grace_s=10, look_s=0.2))
    detector.observe(Looked(now))
    detector.observe(Looked(now + 10.0))
    detector.observe(Marked(now + 4.0))
    for tick in range(1, 12):
        detector.observe(Looked(now + 10.0 + tick * 0.1))
    assert level(detector, now + 11.15) is Level.GREEN
    assert level(detector, now + 11.25) is Level.YELLOW


@pytest.mark.parametrize(
    "bad",
    [
        {"max_s": 0.5},
        {"min_s": 0.0},
        {"grace_s": -1.0},
        {"factor": 0.5},
        {"samples": 0},
        {"samples": 33},
        {"look_s": 0.0},
        {"max_s": float("inf")},
        {"max_s": float("nan")},
    ],
)
def test_limits_that_cannot_be_kept_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="need"):
        ProgressConfig(**bad)  # type: ignore[arg-type]


STEPS = st.lists(st.floats(0.01, 20.0), min_size=3, max_size=60)
FRACTIONS = st.lists(st.floats(0.0, 0.99), max_size=40)


@given(steps=STEPS, fractions=FRACTIONS, marks=st.lists(st.booleans(), min_size=40, max_size=40))
def test_marks_within_the_threshold_prevent_the_alarm(
    steps: list[float], fractions: list[float], marks: list[bool]
) -> None:
    detector, now = ProgressDetector(CONFIG), 5.0
    for step, seconds in enumerate(steps):
        detector.observe(Begun(now, step))
        now += seconds
        detector.observe(Ended(now, committed=True))
    detector.observe(Begun(now, len(steps)))
    threshold, worked = detector.threshold(), now
    for fraction, mark in zip(fractions, marks, strict=False):
        now += fraction * threshold
        mark = mark or now - worked > 20.0
        if now - worked < 60.0:
            assert level(detector, now) is Level.GREEN
        detector.observe(Marked(now) if mark else Moved(now))
        worked = now if mark else worked
    assert detector.threshold() == threshold
    assert level(detector, now + threshold * 1.001) is not Level.GREEN
    assert level(detector, now + (threshold + 10.0) * 1.001) is Level.RED


@given(steps=STEPS, moves=FRACTIONS)
def test_the_threshold_is_always_within_its_bounds(steps: list[float], moves: list[float]) -> None:
    detector, now = ProgressDetector(CONFIG), 5.0
    for step, seconds in enumerate(steps):
        detector.observe(Begun(now, step))
        for move in moves:
            detector.observe(Moved(now + move * seconds))
        now += seconds
        detector.observe(Ended(now, committed=step % 3 != 0))
        assert 1.0 <= detector.threshold() <= 60.0


def test_once_suspected_in_a_txn_bytecodes_prove_nothing() -> None:
    """The signals that unwind its step function also wake a main thread that stays stuck."""
    detector = ProgressDetector(ProgressConfig(max_s=60.0, grace_s=2.0, min_s=1.0))
    for step in range(4):
        detector.observe(Begun(step * 0.1, step))
        detector.observe(Ended(step * 0.1 + 0.1, committed=True))
    detector.observe(Begun(0.4, 4))
    assert detector.verdict(1.5).level is Level.YELLOW
    for n in range(100):
        detector.observe(Moved(1.5 + n * 0.02))
    assert detector.verdict(3.5).level is Level.RED
    detector.observe(Marked(3.6))
    assert detector.verdict(3.7).level is Level.GREEN

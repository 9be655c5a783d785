"""Tests of the detection of a silent peer, from the times of its beats and of the observations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fft.health.detectors.base import Level
from fft.health.detectors.silence import Seen, SilenceConfig, SilenceDetector

CONFIG = SilenceConfig(max_s=10.0, grace_s=5.0, min_s=0.5, look_s=0.2)


def after_gaps(
    gaps: list[float], config: SilenceConfig = CONFIG, look: float = 0.1
) -> tuple[SilenceDetector, float]:
    """Return a detector after beats with these gaps and regular observations, and the last time."""
    detector, now = SilenceDetector("host b", config), 50.0
    detector.observe(Seen(now, now))
    for gap in gaps:
        looks = int(gap / look)
        for tick in range(1, looks + 1):
            detector.observe(Seen(now + tick * look))
        now += gap
        detector.observe(Seen(now, now))
    return detector, now


def listen(detector: SilenceDetector, since: float, until: float, look: float = 0.1) -> Level:
    """Observe regularly without beats, and return the verdict."""
    for tick in range(1, int((until - since) / look) + 1):
        detector.observe(Seen(since + tick * look))
    return detector.verdict(until).level


def test_participant_never_seen_is_not_missed() -> None:
    detector = SilenceDetector("host b", CONFIG)
    detector.observe(Seen(1.0))
    assert listen(detector, 1.0, 1000.0, look=1.0) is Level.GREEN
    assert detector.silent(1000.0) == 0.0


def test_the_bound_follows_the_longest_gap() -> None:
    detector, now = after_gaps([1.0, 2.0, 1.0])
    assert detector.bound() == pytest.approx(6.0)
    assert listen(detector, now, now + 5.9) is Level.GREEN
    assert listen(detector, now + 5.9, now + 6.1) is Level.YELLOW
    assert detector.verdict(now + 6.1).reason == (
        "nothing was heard from host b for 6.10 s "
        "(bound 6.00 s = 3 × the longest of the last 3 gaps)"
    )
    assert listen(detector, now + 6.1, now + 11.2) is Level.RED
    assert detector.verdict(now + 11.2).reason.endswith("and the 5 s of grace are over")


def test_bound_has_a_floor_and_a_ceiling_and_names_them() -> None:
    detector, now = after_gaps([0.01] * 5)
    assert listen(detector, now, now + 0.6) is Level.YELLOW
    assert "the minimum; 3 × the longest of the last 5 gaps is only 0.03 s" in (
        detector.verdict(now + 0.6).reason
    )
    detector, now = after_gaps([5.0] * 5)
    assert listen(detector, now, now + 10.1) is Level.YELLOW
    assert "the maximum; 3 × the longest of the last 5 gaps is 15" in (
        detector.verdict(now + 10.1).reason
    )
    detector, now = after_gaps([0.01] * 2)
    assert listen(detector, now, now + 9.9) is Level.GREEN
    assert listen(detector, now + 9.9, now + 10.1) is Level.YELLOW
    assert "too few beats" in detector.verdict(now + 10.1).reason


def test_silence_without_a_grace_never_becomes_red() -> None:
    detector, now = after_gaps([0.1] * 5, SilenceConfig(look_s=0.2))
    assert listen(detector, now, now + 100.0) is Level.YELLOW


def test_false_alarm_raises_its_own_bound() -> None:
    detector, now = after_gaps([0.1] * 5)
    assert listen(detector, now, now + 1.0) is Level.YELLOW
    detector.observe(Seen(now + 1.0, now + 1.0))
    assert detector.verdict(now + 1.0).level is Level.GREEN
    assert listen(detector, now + 1.0, now + 3.9) is Level.GREEN


def test_an_old_or_repeated_beat_is_no_beat() -> None:
    detector, now = after_gaps([0.1] * 5)
    for tick in range(1, 6):
        detector.observe(Seen(now + tick / 10, now))
    detector.observe(Seen(now + 0.6, now - 1.0))
    assert detector.silent(now + 0.6) == pytest.approx(0.6)
    assert detector.verdict(now + 0.6).level is Level.YELLOW


def test_the_observers_own_pause_is_not_held_against_the_peer() -> None:
    detector, now = after_gaps([0.1] * 5)
    detector.observe(Seen(now + 1000.0))
    assert detector.silent(now + 1000.0) == pytest.approx(0.2)
    assert listen(detector, now + 1000.0, now + 1000.29) is Level.GREEN
    assert listen(detector, now + 1000.29, now + 1000.4) is Level.YELLOW


def test_a_verdict_long_after_the_last_look_is_about_the_observer() -> None:
    detector, now = after_gaps([0.1] * 5)
    assert detector.verdict(now + 1000.0).level is Level.GREEN


def test_a_gap_during_the_observers_pause_does_not_blunt_the_bound() -> None:
    """The peer beat all the time; the observer found only the newest beat after its pause."""
    detector, now = after_gaps([0.1] * 5)
    detector.observe(Seen(now + 1000.0, now + 999.95))
    assert detector.bound() <= 0.9


@pytest.mark.parametrize(
    "bad",
    [
        {"max_s": 0.5},
        {"min_s": 0.0},
        {"grace_s": -1.0},
        {"factor": 0.5},
        {"samples": 0},
        {"samples": 65},
        {"look_s": 0.0},
        {"max_s": float("nan")},
    ],
)
def test_limits_that_cannot_be_kept_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="need"):
        SilenceConfig(**bad)  # type: ignore[arg-type]


GAPS = st.lists(st.floats(0.01, 2.0), min_size=3, max_size=30)


@given(gaps=GAPS)
def test_silence_is_green_within_the_bound_and_never_beyond(gaps: list[float]) -> None:
    detector, now = after_gaps(gaps)
    bound = detector.bound()
    assert 0.5 <= bound <= 10.0
    assert listen(detector, now, now + bound * 0.99) is Level.GREEN
    assert listen(detector, now + bound * 0.99, now + bound * 1.001) is Level.YELLOW


@given(gaps=GAPS, pauses=st.lists(st.floats(0.0, 1e5), max_size=4))
def test_pauses_of_the_observer_alone_never_make_an_alarm(
    gaps: list[float], pauses: list[float]
) -> None:
    """After each pause the peer's beats are received in time again."""
    detector, now = after_gaps(gaps)
    for pause in pauses:
        now += pause
        detector.observe(Seen(now))
        assert detector.verdict(now).level is Level.GREEN
        detector.observe(Seen(now + 0.1, now + 0.1))
        now += 0.1
        assert detector.verdict(now).level is Level.GREEN

"""Tests of the heartbeat record: any reader reads what was written, whatever the writer does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from fft.health.detectors.trainer import (
    Atomic,
    Begun,
    Ended,
    Marked,
    Moved,
    ProgressConfig,
    ProgressDetector,
    Pulse,
    PulseReader,
    Reading,
    Waiting,
    changes,
)
from fft.health.monitor_client import MainThreadProbe

LIMIT_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pulse(clock: Clock) -> Iterator[Pulse]:
    made = Pulse(clock)
    yield made
    made.close()


def test_written_pulse_is_read_back(pulse: Pulse, clock: Clock) -> None:
    reader = PulseReader(pulse.fd)
    assert reader.read() == Reading()
    pulse.begin(7)
    clock.now = 101.0
    pulse.beat()
    pulse.moved()
    with pulse.waiting:
        clock.now = 102.0
        with pulse.waiting:
            pass
        assert reader.read().waiting
    assert reader.read() == Reading(
        beat=101.0, moved=101.0, marked=102.0, begun=100.0, step=7, in_txn=True
    )
    with pulse.atomic:
        assert reader.read().atomic
    for least_s in (1.0, 0.0):
        pulse.join(least_s)
        assert reader.read().joins == least_s
    clock.now = 103.5
    pulse.end(committed=True)
    pulse.leave()
    after = reader.read()
    assert (after.took, after.ended, after.commits) == (3.5, 103.5, 1)
    assert (after.in_txn, after.atomic, after.left) == (False, False, True)
    reader.close()


def test_an_end_without_a_begin_is_only_a_mark(pulse: Pulse) -> None:
    reader = PulseReader(pulse.fd)
    pulse.end(committed=True)
    assert reader.read() == Reading(marked=100.0)
    reader.close()


def test_pulse_changes_are_reported_in_the_order_of_judgement(pulse: Pulse, clock: Clock) -> None:
    reader = PulseReader(pulse.fd)
    before = reader.read()
    assert changes(before, before) == []
    pulse.begin(7)
    clock.now = 101.0
    pulse.end(committed=True)
    clock.now = 102.0
    pulse.begin(8)
    middle = reader.read()
    assert changes(before, middle) == [
        Ended(101.0, committed=True, took_s=1.0),
        Begun(102.0, 8),
        Marked(102.0),
    ]
    clock.now = 103.0
    pulse.moved()
    pulse.end(committed=False)
    assert changes(middle, after := reader.read()) == [
        Ended(103.0, committed=False),
        Marked(103.0),
        Moved(103.0),
    ]
    clock.now = 104.0
    with pulse.waiting, pulse.atomic:
        inside = reader.read()
        on = [Atomic(104.0, on=True), Waiting(104.0, on=True), Marked(104.0)]
        assert changes(after, inside) == on
        clock.now = 105.0
    off = [Atomic(105.0, on=False), Waiting(105.0, on=False), Marked(105.0)]
    assert changes(inside, reader.read()) == off
    reader.close()


def test_invalid_pulse_is_refused() -> None:
    for size in (0, 104, 4096):
        fd = os.memfd_create("other")
        os.ftruncate(fd, size)
        with pytest.raises(ValueError, match="is not a pulse"):
            PulseReader(fd)
        os.close(fd)


def test_the_file_cannot_be_cut_off_under_its_reader(pulse: Pulse) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(pulse.fd, 0)


def test_a_reader_outlives_the_writer(pulse: Pulse) -> None:
    reader = PulseReader(pulse.fd)
    pulse.begin(3)
    pulse.close()
    pulse.close()
    assert reader.read().step == 3
    reader.close()


class Torn(PulseReader):
    """A reader whose record changes during the read."""

    def __init__(self, fd: int, found: list[Reading]) -> None:
        super().__init__(fd)
        self.found = found

    def _collect(self) -> Reading:
        return self.found.pop(0)


def test_a_reading_is_one_that_was_found_twice(pulse: Pulse) -> None:
    half, whole, later = Reading(step=1), Reading(step=1, begun=1.0), Reading(step=2)
    assert Torn(pulse.fd, [half, whole, whole, later]).read() == whole


def test_a_record_that_never_stands_still_is_read_all_the_same(pulse: Pulse) -> None:
    reader = Torn(pulse.fd, [Reading(step=number) for number in range(100)])
    assert reader.read() == Reading(step=4)


# --- the mover ---


def until(reader: PulseReader, field: str, later_than: float) -> Reading:
    """Return the first reading in which ``field`` is later, running bytecodes meanwhile."""
    deadline = time.monotonic() + LIMIT_S
    while getattr(reading := reader.read(), field) <= later_than:
        assert time.monotonic() < deadline, f"{field} stays at {later_than}"
    return reading


@pytest.fixture
def real() -> Iterator[Pulse]:
    made = Pulse(time.monotonic)
    yield made
    made.close()


def test_running_main_thread_moves_and_a_blocked_one_only_beats(real: Pulse) -> None:
    reader = PulseReader(real.fd)
    moves = MainThreadProbe(real, 0.005)
    assert moves.follows_main
    until(reader, "moved", time.monotonic())
    found: list[Reading] = []

    def watch() -> None:
        """Wait until beats have come for 0.2 s without a move, while this thread blocks the
        other."""
        reading = reader.read()
        while reading.beat - reading.moved < 0.2:
            reading = until(reader, "beat", reading.beat)
        found.append(reading)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join(LIMIT_S)
    until(reader, "moved", found[0].beat)
    moves.close()
    moves.close()
    reader.close()


def test_off_the_main_thread_there_are_beats_only(real: Pulse) -> None:
    reader, made = PulseReader(real.fd), []
    thread = threading.Thread(target=lambda: made.append(MainThreadProbe(real, 0.005)))
    thread.start()
    thread.join(LIMIT_S)
    reading = until(reader, "beat", time.monotonic())
    assert not made[0].follows_main
    assert reading.moved == 0.0
    made[0].close()
    reader.close()


def test_an_interval_must_be_more_than_nothing(real: Pulse) -> None:
    with pytest.raises(ValueError, match="interval_s"):
        MainThreadProbe(real, 0.0)


@pytest.mark.parametrize(("commits", "is_timed"), [(2, False), (3, True)])
def test_threshold_counts_steps_that_end_between_two_looks(commits: int, is_timed: bool) -> None:
    detector = ProgressDetector(ProgressConfig(max_s=600.0, min_s=1.0))
    after = Reading(begun=10.0, ended=10.02, took=0.01, step=commits, commits=commits, in_txn=True)
    for event in changes(Reading(), after):
        detector.observe(event)
    detector.observe(Begun(10.03, commits))
    assert detector.threshold() == (1.0 if is_timed else 600.0)

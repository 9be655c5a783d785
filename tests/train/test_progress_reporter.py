"""Tests of progress messages: contents, the timing of step functions, and trouble with the bus."""

from __future__ import annotations

import json
import queue
import threading
import time
import uuid
from collections.abc import Callable
from itertools import pairwise

import pytest
from waiting import wait_until

from fft.bus import BusUnreachable
from fft.bus.base import Topic
from fft.bus.memory import MemoryBus
from fft.messages.progress import (
    MAX_WORD,
    CheckpointReport,
    SpeedReport,
    TraceReport,
    decode_report,
    encode_report,
)
from fft.messages.protocol import Peer, UnreadableMessage
from fft.trace.checkpoint_notes import report_of
from fft.train.guard.progress_reporter import ProgressReporter
from fft.train.guard.watchers import ExpectedStep

LIMIT_S = 30.0
ME = Peer("1", 0, 3)


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def bus(kind: Callable[[str], MemoryBus] = MemoryBus) -> MemoryBus:
    return kind(f"pacer-{uuid.uuid4().hex}")


def body(pacer: ProgressReporter, clock: Hand, own: float, waited: float, step: int) -> None:
    pacer.begin()
    clock.now += own / 2
    with pacer.waiting:
        clock.now += waited
    clock.now += own / 2
    pacer.end()
    clock.now += 5.0  # the vote
    pacer.committed(step, 2)


def test_speed_report_has_exactly_one_encoding() -> None:
    word = SpeedReport("1", 0, 3, 17, 0.25)
    assert decode_report(encode_report(word)) == word
    plain = json.loads(encode_report(word))
    assert plain == {
        "group": "1",
        "rank": 0,
        "inc": 3,
        "step": 17,
        "compute": 0.25,
        "v": 1,
        "type": "progress",
    }
    for changed in (
        {"compute": -1},
        {"compute": "1"},
        {"step": 1.5},
        {"more": 1},
        {"v": 2},
        {"type": "death"},
        {"group": "x" * MAX_WORD},
    ):
        with pytest.raises(UnreadableMessage):
            decode_report(json.dumps({**plain, **changed}).encode())
    for other in (b"", b"[]", b"NaN", b'{"type":"progress"}'):
        with pytest.raises(UnreadableMessage):
            decode_report(other)


def test_body_time_excludes_its_waits() -> None:
    clock = Hand()
    with bus() as mine:
        pacer = ProgressReporter(mine, ME, 0.0, clock)
        for step, own in enumerate((0.5, 0.25, 8.0), 1):
            body(pacer, clock, own, 3.0, step)
        pacer.begin()  # an attempt that is rolled back sends nothing
        clock.now += 60
        pacer.end()
        assert pacer.word() == SpeedReport("1", 0, 3, 3, 0.5)
        assert pacer.word() is None
        pacer.close()


def test_reports_are_sent_by_a_thread_until_it_is_closed() -> None:
    received: queue.Queue[bytes] = queue.Queue()
    clock = Hand()
    with bus() as mine:
        mine.subscribe(received.put, lambda error: None, "progress")
        pacer = ProgressReporter(mine, ME, 0.01, clock)
        body(pacer, clock, 0.5, 1.0, 1)
        assert decode_report(received.get(timeout=LIMIT_S)) == SpeedReport("1", 0, 3, 1, 0.5)
        pacer.close()
        pacer.close()
        body(pacer, clock, 0.5, 1.0, 2)
        assert pacer.word() is not None, "nobody has said it"
    assert "fft-progress" not in [thread.name for thread in threading.enumerate()]


class Lost(MemoryBus):
    """A bus that does not answer."""

    asked: threading.Event

    def broadcast(self, payload: bytes, topic: Topic = "protocol") -> None:
        self.asked.set()
        raise BusUnreachable(self.url, "gone")


class Stuck(Lost):
    """A bus that does not answer until it is released."""

    release: threading.Event

    def broadcast(self, payload: bytes, topic: Topic = "protocol") -> None:
        self.asked.set()
        assert self.release.wait(LIMIT_S)


@pytest.mark.parametrize("kind", [Lost, Stuck])
def test_a_bus_in_trouble_neither_fails_nor_holds_up_a_step(kind: type[Lost]) -> None:
    clock = Hand()
    with bus(kind) as mine:
        mine.asked, release = threading.Event(), threading.Event()  # type: ignore[attr-defined]
        mine.release = release  # type: ignore[attr-defined]
        pacer = ProgressReporter(mine, ME, 0.01, clock)
        body(pacer, clock, 0.5, 0.0, 1)
        assert mine.asked.wait(LIMIT_S)  # type: ignore[attr-defined]
        for step in range(2, 3000):
            body(pacer, clock, 0.5, 0.0, step)
        begun = time.monotonic()
        pacer.close()
        assert time.monotonic() - begun < LIMIT_S / 2
        release.set()


def test_pending_reports_are_sent_before_closing() -> None:
    """The thread sends them in order, also without messages of its own, and nothing after that."""
    received: queue.Queue[bytes] = queue.Queue()
    words = [CheckpointReport("1", 0, 3, step, "failed", "x") for step in range(3)]
    with bus() as mine:
        mine.subscribe(received.put, lambda error: None, "progress")
        reporter = ProgressReporter(mine, ME, 0.0)
        for word in words:
            reporter.say(word)
        reporter.close()
        reporter.say(TraceReport("1", 0, 3, "too late"))
        assert [decode_report(received.get(timeout=LIMIT_S)) for _ in words] == words
        mine.broadcast(encode_report(SpeedReport("1", 0, 3, 1, 0.5)), "progress")
        assert isinstance(decode_report(received.get(timeout=LIMIT_S)), SpeedReport)


@pytest.mark.parametrize("interval", [0.0, 0.05])
def test_reporter_thread_waits_until_there_is_a_report(interval: float) -> None:
    looks, received = list[float](), queue.Queue[bytes]()

    class Counted(ProgressReporter):
        def word(self) -> SpeedReport | None:
            looks.append(time.monotonic())
            return super().word()

    with bus() as mine:
        mine.subscribe(received.put, lambda error: None, "progress")
        reporter = Counted(mine, ME, interval)
        word = CheckpointReport("1", 0, 3, 4, "failed", "x")
        reporter.say(word)
        assert decode_report(received.get(timeout=LIMIT_S)) == word
        if interval:
            wait_until(lambda: len(looks) > 3, "it looks again and again")
        reporter.close()
        assert mine.read("report/failed") == encode_report(word)
    assert all(b - a >= interval for a, b in pairwise(looks))
    assert bool(looks) == bool(interval)


def test_after_the_end_no_thread_is_started() -> None:
    with bus() as mine:
        reporter = ProgressReporter(mine, ME, 0.0)
        reporter.close()
        reporter.say(TraceReport("1", 0, 3, "too late"))
        assert reporter._thread is None


def test_longest_cause_fits_into_a_report() -> None:
    for text in ("x", "\u00e4", "\U0001f600", "\x00", "\udcff"):
        note = {"step": 4, "error": text * 5000}
        word = report_of(Peer("g" * 64, 10**6, 10**6), "checkpoint_failed", note)
        assert word is not None and decode_report(encode_report(word)) == word


def test_no_interval_no_thread() -> None:
    before = set(threading.enumerate())  # threads that a stuck bus held may end late
    with bus() as mine:
        pacer = ProgressReporter(mine, ME, 0.0)
        assert not [t for t in set(threading.enumerate()) - before if t.name == "fft-progress"]
        pacer.close()


def test_expected_step_is_the_median_of_the_other_ranks_newest_reports() -> None:
    expected: list[float] = []
    taken = ExpectedStep(ME, expected.append)
    reports = [
        SpeedReport("0", 0, 1, 7, 2.0),
        SpeedReport("1", 0, 2, 7, 90.0),  # of an earlier process in this place
        SpeedReport("2", 0, 1, 7, 4.0),
        SpeedReport("0", 0, 1, 9, 6.0),
        TraceReport("0", 0, 1, "no space"),
    ]
    for report in reports:
        taken.take(encode_report(report))
    taken.take(b"no report")
    assert expected == [2.0, 3.0, 5.0]

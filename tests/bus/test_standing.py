"""Tests of the listener that subscribes again after an overrun, and ends with its bus or owner."""

from __future__ import annotations

import threading
import time
import uuid
from contextlib import closing

import pytest
from bus_helpers import NOISE_S, Heard
from waiting import wait_until

from fft.bus.base import RING_MESSAGES, BusForgot, BusOverrun, BusUnreachable
from fft.bus.memory import MemoryBus
from fft.bus.resubscribing import ResubscribingListener
from fft.errors import BusError


def name() -> str:
    return f"standing-{uuid.uuid4().hex}"


def test_overrun_subscription_receives_later_messages(caplog: pytest.LogCaptureFixture) -> None:
    with MemoryBus(name()) as bus:
        release, received, again = threading.Event(), [], threading.Event()

        def hear(payload: bytes) -> None:
            assert release.wait(60)
            received.append(payload)
            if payload == b"later":
                again.set()

        missed: list[object] = []
        standing = ResubscribingListener(bus, "commands", hear, "a test", missed.append)
        for number in range(RING_MESSAGES + 10):
            bus.broadcast(b"%d" % number, "commands")
        release.set()
        deadline = time.monotonic() + NOISE_S
        while not again.wait(0.05):  # the listener may not have subscribed again yet
            assert time.monotonic() < deadline, "it hears nothing more"
            bus.broadcast(b"later", "commands")
        assert "a test missed messages of the topic commands" in caplog.text
        assert [type(error) for error in missed] == [BusOverrun]
        before = received[: received.index(b"later")]
        assert before == [b"%d" % number for number in range(len(before))]
        standing.close()
        seen, other = len(received), Heard(bus, topic="commands")
        bus.broadcast(b"to others", "commands")
        other.wait(1)
        assert received[seen:].count(b"to others") == 0


class Forgetful(MemoryBus):
    """A bus that reports to every listener of commands that it has come back empty."""

    def subscribe(self, on_message, on_lost, topic="protocol"):  # type: ignore[no-untyped-def]
        subscription = super().subscribe(on_message, on_lost, topic)
        if topic == "commands":
            threading.Thread(target=on_lost, args=(BusForgot("it forgot"),)).start()
        return subscription


def test_lost_bus_is_logged_once_and_not_retried(caplog: pytest.LogCaptureFixture) -> None:
    with Forgetful(name()) as bus:
        reported: list[str] = []
        unheard, lost = (
            (lambda error: reported.append("missed")),
            (lambda error: reported.append(str(error))),
        )
        with closing(
            ResubscribingListener(bus, "commands", lambda _: None, "a test", unheard, lost)
        ):
            expected = "a test no longer receives the topic commands: it forgot"
            wait_until(lambda: expected in caplog.text, "it is said", NOISE_S)
            wait_until(lambda: reported == ["it forgot"], "its owner is told", NOISE_S)
        assert caplog.text.count("no longer receives the topic commands") == 1


class Once(MemoryBus):
    """A bus that accepts one listener of commands, and no second one."""

    def subscribe(self, on_message, on_lost, topic="protocol"):  # type: ignore[no-untyped-def]
        if topic == "commands":
            if getattr(self, "taken", None) is not None:
                raise BusUnreachable("memory://gone", "no place")
            self.taken = on_lost
        return super().subscribe(on_message, on_lost, topic)


@pytest.mark.parametrize("is_closed", [False, True])
def test_failed_resubscription_is_reported_unless_closed(is_closed: bool) -> None:
    missed: list[BusError] = []
    lost: list[BusError] = []
    with Once(name()) as bus:
        listener = ResubscribingListener(
            bus, "commands", lambda _: None, "a test", missed.append, lost.append
        )
        if is_closed:
            listener.close()
        bus.taken(BusOverrun("fell behind"))
        assert missed == []
        assert [type(error) for error in lost] == ([] if is_closed else [BusUnreachable])
        listener.close()

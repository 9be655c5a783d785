"""Tests of the messages that a sealed bus refuses, and of those that it must never refuse."""

from __future__ import annotations

import json
import logging
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from bus_helpers import Heard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fft.bus import MAX_MESSAGE_BYTES, BusForged, Refusal, open_job_bus, serve_tcp
from fft.bus.base import HEAD, TOPICS, Topic
from fft.bus.memory import MemoryBus
from fft.bus.sealed import SealedBus, _Channel, _Refused
from fft.bus.token import JobToken, TokenError, mac

TOKEN = JobToken.fresh()


def head(epoch: int) -> bytes:
    return json.dumps({"members": "", "record": {"epoch": epoch}}).encode()


class Place:
    """A memory bus with clients that have a token, and raw access to its traffic."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.name = f"sealed-{uuid.uuid4().hex}"
        self.raw = MemoryBus(self.name)
        stack.callback(self.raw.close)
        self.raw.extra = 2**20

    def open(self, token: JobToken = TOKEN, **more: Any) -> SealedBus:
        bus = SealedBus(MemoryBus(self.name), token, who="a test", **more)
        self._stack.callback(bus.close)
        return bus

    def reach(self, epoch: int) -> None:
        """Bring the job to an epoch, from another process's point of view."""
        bus = self.open()
        held = bus.read(HEAD)
        assert bus.compare_set(HEAD, held, head(epoch)) == head(epoch)


@pytest.fixture
def place() -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(stack)


def recorded(place: Place, *payloads: bytes, by: SealedBus | None = None) -> list[bytes]:
    """Record the frames of the messages that were sent."""
    sender, mine = by or place.open(), Heard(place.raw)
    for payload in payloads:
        sender.broadcast(payload)
    return list(mine.wait(len(payloads)))


def after(
    bus: SealedBus, place: Place, *frames: bytes, inbox: str | None = None, purpose: str = "bus"
) -> list[bytes]:
    """Return the messages that a listener on ``bus`` receives of frames, before a genuine one."""
    received = Heard(bus, inbox=inbox)
    for frame in frames:
        place.raw.broadcast(frame) if inbox is None else place.raw.send(inbox, frame)
    sender = place.open(purpose=purpose)
    sender.broadcast(b"honest") if inbox is None else sender.send(inbox, b"honest")
    while received.messages[-1:] != [b"honest"]:
        received.wait(len(received.messages) + 1)
    received.subscription.close()
    return received.messages[:-1]


def test_messages_without_the_token_are_dropped(place: Place) -> None:
    bus, reported = place.open(), []
    bus.on_refusal = reported.append
    place.open(JobToken.fresh()).broadcast(b"forged")
    other = recorded(place, b"x", by=place.open(JobToken.fresh()))
    assert after(bus, place, b'{"type":"drain"}', b"", *other) == []
    assert bus.refusals() == {"unsealed": 2, "forged": 1}
    claims = "a_test"
    assert reported == [
        Refusal("unsealed", 1, "broadcast", ""),
        Refusal("forged", 1, "broadcast", claims),
    ]


def test_every_changed_byte_is_noticed(place: Place) -> None:
    (frame,) = recorded(place, b"payload")
    bus = place.open()
    changed = [
        frame[:i] + bytes([frame[i] ^ bit]) + frame[i + 1 :]
        for i in range(len(frame))
        for bit in (1, 0x80)
    ]
    cut = [frame[:n] for n in range(len(frame))]
    assert after(bus, place, *changed, *cut) == []
    assert sum(bus.refusals().values()) == len(changed) + len(cut)
    assert after(bus, place, frame) == [b"payload"]


@pytest.mark.parametrize("topic", TOPICS)
def test_a_message_cannot_be_moved_to_another_topic(place: Place, topic: Topic) -> None:
    frames = Heard(place.raw, topic=topic)
    sender = place.open()
    sender.broadcast(b"evict", topic)
    (frame,) = frames.wait(1)
    for other in TOPICS:
        bus = place.open()
        received = Heard(bus, topic=other)
        place.raw.broadcast(frame, other)
        place.open().broadcast(b"honest", other)
        assert received.wait(1 + (other == topic))[-1] == b"honest"
        assert bus.refusals() == ({} if other == topic else {"forged": 1})


def test_topics_are_numbered_apart_and_take_no_replay(place: Place) -> None:
    bus, frames = place.open(), Heard(place.raw, topic="commands")
    received, protocol = Heard(bus, topic="commands"), Heard(bus)
    sender = place.open()
    sender.broadcast(b"a", "commands")
    sender.broadcast(b"b")
    (frame,) = frames.wait(1)
    place.raw.broadcast(frame, "commands")
    sender.broadcast(b"c", "commands")
    assert received.wait(2) == [b"a", b"c"]
    assert protocol.wait(1) == [b"b"]
    assert bus.refusals() == {"repeated": 1}


def test_sender_without_protocol_subscription_reads_the_epoch_first(place: Place) -> None:
    supervisor = place.open()
    Heard(supervisor, topic="commands")
    place.reach(7)
    began_later = Heard(place.open())
    supervisor.broadcast(b"death")
    assert began_later.wait(1) == [b"death"]


def test_a_message_stays_in_its_channel_and_its_job(place: Place) -> None:
    (frame,) = recorded(place, b"x")
    inbox, group_bus = place.open(), place.open(purpose="group bus")
    assert after(inbox, place, frame, inbox="mine") == []
    assert after(group_bus, place, frame, purpose="group bus") == []
    assert inbox.refusals() == group_bus.refusals() == {"forged": 1}


def test_repeated_frames_are_delivered_once(place: Place) -> None:
    bus = place.open()
    frames = recorded(place, b"1", b"2", b"3")
    assert after(bus, place, *frames, *frames, frames[0]) == [b"1", b"2", b"3"]
    assert bus.refusals() == {"repeated": 4}


def test_oversized_is_refused_and_the_longest_is_not(place: Place) -> None:
    bus = place.open()
    longest = b"x" * MAX_MESSAGE_BYTES
    (frame,) = recorded(place, longest)
    assert after(bus, place, frame + b"x", b"y" * 2 * MAX_MESSAGE_BYTES, frame) == [longest]
    assert bus.refusals() == {"oversized": 2}


def test_an_old_recording_is_nothing_to_a_listener_that_begins(place: Place) -> None:
    place.reach(4)
    old = recorded(place, b"old")
    place.reach(5)
    new = recorded(place, b"new")
    bus = place.open()
    assert after(bus, place, *old, *new) == [b"new"]
    assert bus.refusals() == {"stale": 1}


def test_sender_that_returns_with_an_old_epoch_is_accepted_again(place: Place) -> None:
    place.reach(4)
    stopped = place.open()
    ears = Heard(stopped)
    place.reach(10)
    began_later = place.open()
    received = Heard(began_later)
    stopped.broadcast(b"of old")
    ears.wait(1)
    assert (received.messages, stopped.epoch) == ([], 4)
    began_later.broadcast(b"welcome")
    ears.wait(2)
    stopped.broadcast(b"back")
    assert received.wait(2) == [b"welcome", b"back"]
    assert began_later.refusals() == {"stale": 1}


def test_sender_is_received_again_after_reading_the_head(place: Place) -> None:
    place.reach(4)
    stopped = place.open()
    Heard(stopped)
    place.reach(10)
    received = Heard(place.open())
    stopped.read(HEAD)
    stopped.broadcast(b"back")
    assert received.wait(1) == [b"back"]


def test_sender_without_a_listener_knows_the_epoch(place: Place) -> None:
    """A supervisor sends hours after it began, to processes that it has just started."""
    supervisor, tool = place.open(), place.open()
    Heard(tool).subscription.close()
    for epoch in (7, 8):
        place.reach(epoch)
        young = place.open()
        received, inbox = Heard(young), Heard(young, inbox=f"young {epoch}")
        supervisor.broadcast(b"death")
        tool.broadcast(b"drain")
        tool.send(f"young {epoch}", b"you")
        assert received.wait(2) == [b"death", b"drain"]
        assert inbox.wait(1) == [b"you"]
        assert young.refusals() == {}


def test_recipient_of_a_joiner_can_answer(place: Place) -> None:
    member = place.open()
    ears = Heard(member)
    place.reach(3)
    joiner = place.open()
    inbox = Heard(joiner, inbox="joiner")
    joiner.broadcast(b"join")
    ears.wait(1)
    member.send("joiner", b"here")
    assert inbox.wait(1) == [b"here"]


def test_session_limit_loses_no_message_of_honest_senders(place: Place) -> None:
    bus = place.open(max_sessions=8)
    first = place.open()
    old = recorded(place, b"first", by=first)
    place.reach(1)
    received = Heard(bus)
    place.raw.broadcast(old[0])
    for number in range(30):
        place.open().broadcast(b"%d" % number)
    first.broadcast(b"again")
    place.raw.broadcast(old[0])
    first.broadcast(b"end")
    messages = received.wait(32)
    assert messages == [b"%d" % n for n in range(30)] + [b"again", b"end"]
    # The frame was recorded before the listener began, which later learned its session.
    assert bus.refusals() == {"stale": 1, "repeated": 1}


@pytest.mark.parametrize("ahead", [0, 1], ids=["in its epoch", "in a later epoch"])
def test_listener_refuses_recordings_however_many_senders_came_after(
    place: Place, ahead: int
) -> None:
    bus, others = place.open(max_sessions=8), [place.open() for _ in range(30)]
    place.reach(1)
    received, tap = Heard(bus), Heard(place.raw)
    for number in range(3):
        others[0].broadcast(b"victim %d" % number)
    frames = list(tap.wait(3))
    place.reach(1 + ahead)
    for number, other in enumerate(others[1:]):
        other.broadcast(b"%d" % number)
    assert len(received.wait(32)) == 32
    assert after(bus, place) == []
    for frame in frames:
        place.raw.broadcast(frame)
    others[0].broadcast(b"back")
    expected = [b"victim %d" % n for n in range(3)] + [b"%d" % n for n in range(29)]
    assert received.wait(34) == [*expected, b"honest", b"back"]
    assert sum(bus.refusals().values()) == 3


@settings(max_examples=200, deadline=None)
@example([(0, 0, False)] + [(n, 0, False) for n in range(2, 6)] + [(1, 2, False)])
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.booleans()), max_size=60))
def test_no_frame_is_accepted_twice_and_the_table_stays_small(
    steps: list[tuple[int, int, bool]],
) -> None:
    """Senders broadcast while epochs pass, and recordings of all of them are replayed at any
    time."""
    channel, key = _Channel("broadcast", b"k", 0, 3), b"k"
    epoch, numbers, recorded = 0, [0] * 10, list[bytes]()
    for sender, more, replay in steps:
        if replay and recorded:
            with pytest.raises(_Refused):
                channel.open(recorded[(sender * 7 + more) % len(recorded)])
            continue
        epoch, numbers[sender] = epoch + more // 2, numbers[sender] + 1
        message = b"fft1 who %016x %d %d" % (sender, numbers[sender], epoch)
        tag = mac(key, message + b"\n").hex().encode()
        recorded.append(message + b" " + tag + b"\n")
        assert channel.open(recorded[-1]) == (epoch, b"")
        assert len([e for _, e in channel._heard.values() if e < epoch]) <= 3


def test_a_register_that_is_not_ours_is_not_read(place: Place) -> None:
    bus = place.open()
    bus.write("a", b"1")
    moved = place.raw.read("a")
    assert moved is not None
    for value in (b"", b"2", moved[:-1] + b"2"):
        place.raw.write("a", value)
        for attempt in (lambda: bus.read("a"), lambda: bus.compare_set("a", b"1", b"3")):
            with pytest.raises(BusForged, match=r"'a' .*token.*bus of its own"):
                attempt()
        assert place.raw.read("a") == value
    place.raw.write("b", moved)
    with pytest.raises(BusForged):
        bus.read("b")


def test_votes_that_are_not_ours_neither_count_nor_hide_a_ballot(place: Place) -> None:
    bus = place.open()
    place.open().ballot("s", "1.1", b"old", 9)
    moved = (place.raw.ballot("s", "1.1", b"", 1) or [])[0]
    place.raw.ballot("s", "1.2", moved, 9)
    place.raw.ballot("s", "1.2", b'["forged"]', 9)
    assert bus.ballot("s", "1.2", b"mine", 2) == [b"mine"]
    assert place.open().ballot("s", "1.2", b"yours", 2) == [b"mine", b"yours"]
    assert bus.refusals() == {"forged": 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("secret", "hexadecimal"),
        ("ab" * 15, "16 random bytes"),
        ("00" * 32, "can be guessed"),
        ("abc" + "0123456789" * 4, "hexadecimal"),
    ],
)
def test_a_bad_token_is_refused_and_not_shown(text: str, expected: str) -> None:
    with pytest.raises(TokenError, match=expected) as caught:
        JobToken.from_env({"FFT_TOKEN": text})
    assert text not in str(caught.value) and "FFT_TOKEN" in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_token_file_of_another_user_is_refused_until_returned(tmp_path: Path) -> None:
    TOKEN.save(path := tmp_path / "t")
    os.chown(path, 12345, -1)
    with pytest.raises(TokenError, match=f"12345, who knows the token.*chown 0 {path}"):
        JobToken.from_env({"FFT_TOKEN_FILE": str(path)})
    os.chown(path, 0, -1)
    assert JobToken.from_file(path).text() == TOKEN.text()


def test_a_token_is_kept_to_oneself(tmp_path: Path) -> None:
    path = tmp_path / "t"
    TOKEN.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(TokenError, match=r"FFT_TOKEN_FILE: .* unset it to start another one"):
        JobToken.from_env({"FFT_TOKEN_FILE": str(path.with_name("gone"))})
    found = JobToken.from_env({"FFT_TOKEN_FILE": str(path)})
    assert found is not None and found.text() == TOKEN.text()
    assert TOKEN.text() not in f"{TOKEN} {TOKEN!r}"
    with pytest.raises(TokenError, match="both set"):
        JobToken.from_env({"FFT_TOKEN_FILE": str(path), "FFT_TOKEN": TOKEN.text()})
    path.chmod(0o640)
    with pytest.raises(TokenError, match="chmod 600"):
        JobToken.from_file(path)
    with pytest.raises(TokenError, match="cannot be read"):
        JobToken.from_file(tmp_path / "none")
    assert JobToken.from_env({}) is None


def test_keys_differ_by_every_part_of_their_label() -> None:
    labels = [("a", "b"), ("ab",), ("a", "b", ""), ("b", "a"), ("1:a,", "b"), ("a,1:b",)]
    assert len({TOKEN.key(*label) for label in labels}) == len(labels)


def test_without_a_token_there_is_a_warning_where_others_can_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serve_tcp(job="job") as server:
        open_job_bus(server.url, None).close()
        open_job_bus(f"memory://{uuid.uuid4().hex}", None).close()
        assert caplog.records == []
        open_job_bus(server.url.replace("127.0.0.1", "0.0.0.0"), None).close()
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "FFT_TOKEN_FILE" in caplog.text

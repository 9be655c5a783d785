"""Tests of the codec: what is written is read back equal, and invalid messages are refused as a
whole."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from fft.messages import protocol as messages
from fft.messages.protocol import (
    MAX_MESSAGE,
    BusMessage,
    Death,
    Decision,
    Drain,
    Event,
    GroupEntry,
    Leave,
    Peer,
    Record,
    Token,
    UnreadableMessage,
    Vote,
    decode,
    decode_record,
    decode_vote,
    encode,
    encode_record,
    encode_vote,
    event_from_json,
    event_to_json,
    next_lineage,
)
from fft.trace.writer import encode_line

# --- strategies, read off the dataclasses ---------------------------------------------------------


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Draw every value that a field of this type may have."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return bounded(args[0], args[1:])
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values, args))
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if kind is type(None):
        return st.none()
    if hasattr(kind, "_fields") or dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind, vars(messages), include_extras=True)
        return st.builds(kind, **{name: values(hint) for name, hint in hints.items()})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    return {str: st.text(max_size=20), int: st.integers(), bool: st.booleans()}[kind]


def bounded(kind: type, notes: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """Draw a number or text within the limits that pydantic enforces."""
    limits: dict[str, int] = {}
    for rule in (r for note in notes if isinstance(note, FieldInfo) for r in note.metadata):
        limits |= dataclasses.asdict(rule)
    if kind is int:
        return st.integers(min_value=limits["ge"])
    return st.text(min_size=limits.get("min_length", 0), max_size=min(limits["max_length"], 80))


BUS = st.one_of(*map(values, get_args(BusMessage)))
EVENTS = {kind.__name__: kind for kind in get_args(Event)}
ROUNDS: dict[str, tuple[Any, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "bus message": (BUS, encode, decode),
    "record": (values(Record), encode_record, decode_record),
    "vote": (values(Vote), encode_vote, decode_vote),
}


@pytest.mark.parametrize("kind", get_args(BusMessage), ids=lambda k: k.__name__)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_bus_message_survives_encoding_and_decoding(kind: type, data: st.DataObject) -> None:
    message = data.draw(values(kind))
    assert decode(encode(message)) == message
    assert type(decode(encode(message))) is kind


@pytest.mark.parametrize("name", EVENTS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_event_goes_into_a_trace_line_and_comes_back(name: str, data: st.DataObject) -> None:
    event = data.draw(values(EVENTS[name]))
    line = json.dumps(event_to_json(event))
    assert event_from_json(json.loads(line)) == event
    assert json.loads(encode_line({"event": event, "x": "\ud800"}))["event"] == json.loads(line)
    assert json.loads(encode_line({"event": event}))["event"] == json.loads(line)


@settings(max_examples=50, deadline=None)
@given(values(Record), values(Record))
def test_records_are_equal_if_and_only_if_their_bytes_are(one: Record, other: Record) -> None:
    """The register compares bytes, so a writer must reproduce its predecessor's bytes exactly."""
    again = decode_record(encode_record(one))
    assert again == one and encode_record(again) == encode_record(one)
    assert (one == other) == (encode_record(one) == encode_record(other))


@settings(max_examples=50, deadline=None)
@given(values(Vote))
def test_vote_survives_encoding_and_decoding(vote: Vote) -> None:
    assert decode_vote(encode_vote(vote)) == vote


# --- what is no message ---------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "v", "hello", "token", "peer"]), inner)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@st.composite
def damaged(draw: st.DrawFn, written: st.SearchStrategy[bytes]) -> bytes:
    """Draw a valid message with one change: a byte, or a value somewhere inside."""
    raw = draw(written)
    if draw(st.booleans()):
        at = draw(st.integers(0, len(raw) - 1))
        return raw[:at] + draw(st.binary(max_size=2)) + raw[at + 1 :]
    data = json.loads(raw)
    owner, key = data, draw(st.sampled_from(sorted(data)))
    while isinstance(owner[key], dict) and owner[key] and draw(st.booleans()):
        owner, key = owner[key], draw(st.sampled_from(sorted(owner[key])))
    if draw(st.booleans()):
        del owner[key]
    else:
        owner[key] = draw(JSON)
    return json.dumps(data).encode()


@pytest.mark.parametrize("what", ROUNDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_bytes_are_a_message_or_are_refused(what: str, data: st.DataObject) -> None:
    """For any bytes on the bus, the reader gets a message of the exact form, or one error."""
    good, write, read = ROUNDS[what]
    raw = data.draw(
        st.binary() | JSON.map(lambda v: json.dumps(v).encode()) | damaged(good.map(write))
    )
    try:
        message = read(raw)
    except UnreadableMessage as error:
        assert str(error)
    else:
        assert read(write(message)) == message


@settings(max_examples=60, deadline=None)
@given(JSON)
def test_any_trace_line_is_an_event_or_is_refused(data: Any) -> None:
    try:
        event = event_from_json(data)
    except UnreadableMessage as error:
        assert str(error)
    else:
        assert event_from_json(event_to_json(event)) == event


# --- limits ---------------------------------------------------------------------------------------

DEATH = {
    "v": 1, "type": "death", "group": "1", "rank": 0, "pid": 12, "host": "h", "by": "supervisor",
    "cause": "SIGKILL",
}  # fmt: skip
LEAVE = {"type": "leave", "peer": ["1", 0, 1], "cause": ""}
READY = {"type": "ready", "peer": ["1", 0, 1], "epoch": 1}
HELLO = {
    "peer": ["1", 0, 1], "world": 1, "store": "h:1", "transport": "", "pid": 1, "host": "h",
    "step": 0, "lineage": "", "cursor": 0, "batches": 0,
}  # fmt: skip
JOIN = {"type": "join", "hello": HELLO}


def raw(message: dict[str, Any], **changed: Any) -> bytes:
    return json.dumps({**message, **changed}).encode()


def test_messages_written_by_others_are_read() -> None:
    """The supervisor and the monitors write this form by hand; ``cause`` may be omitted."""
    assert decode(raw(DEATH)) == Death("1", 0, 12, "h", "supervisor", "SIGKILL")
    short = {k: v for k, v in DEATH.items() if k != "cause"}
    assert decode(raw(short)) == Death("1", 0, 12, "h", "supervisor")
    drain = b'{"v":1,"type":"drain","groups":["1","2"],"by":"supervisor"}'
    assert decode(drain) == Drain(("1", "2"), "supervisor")
    assert decode(b'{"record":null,"type":"decision"}') == Decision(None)


def test_longest_message_is_read_and_a_longer_one_refused_unparsed() -> None:
    whole = raw(LEAVE)
    longest = whole + b" " * (MAX_MESSAGE - len(whole))
    assert decode(longest) == Leave(Peer("1", 0, 1))
    with pytest.raises(UnreadableMessage, match="message of 1048577 bytes; the limit is 1048576"):
        decode(longest + b" ")
    with pytest.raises(UnreadableMessage, match="limit"):
        decode(b"\xff" * (MAX_MESSAGE + 1))


@pytest.mark.parametrize(
    ("message", "field", "longest"),
    [(LEAVE, "cause", 2000), (DEATH, "cause", 2000), (DEATH, "group", 64)],
)
def test_a_text_has_a_limit(message: dict[str, Any], field: str, longest: int) -> None:
    assert getattr(decode(raw(message, **{field: "é" * longest})), field) == "é" * longest
    with pytest.raises(UnreadableMessage, match=f"{field}: String should have at most {longest}"):
        decode(raw(message, **{field: "é" * (longest + 1)}))


def test_longest_cause_in_the_widest_characters_still_fits() -> None:
    """Limits are in characters, the message's in bytes; they must not contradict each other."""
    assert decode(encode(Leave(Peer("1", 0, 1), "\U0001f600" * 2000)))
    assert decode(encode(Leave(Peer("1", 0, 1), "\x01" * 2000)))


REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "JSON"),
    "not JSON": (b"hello", "JSON"),
    "not UTF-8": (b'{"type":"leave\xff"}', "JSON"),
    "half a letter": (raw(LEAVE, cause="x").replace(b'"x"', rb'"\ud800"'), "JSON"),
    "cut off": (raw(LEAVE)[:-1], "JSON"),
    "nested without end": (b"[" * MAX_MESSAGE, "JSON"),
    "a list": (b"[]", ""),
    "no type": (b"{}", "type"),
    "unknown type": (raw(LEAVE, type="vote"), "vote"),
    "an event that never goes over the bus": (b'{"type":"start"}', "start"),
    "field missing": (b'{"type":"ready","epoch":1}', "ready.peer: Field required"),
    "field unknown": (raw(LEAVE, extra=1), "leave.extra"),
    "number as text": (raw(READY, epoch="1"), "ready.epoch"),
    "fraction": (raw(READY, epoch=1.5), "ready.epoch"),
    "truth as number": (raw(READY, epoch=True), "ready.epoch"),
    "a count below zero": (raw(JOIN, hello={**HELLO, "step": -1}), "join.hello.step"),
    "another version": (raw(DEATH, v=2), "death.v"),
    "group without a name": (raw(DEATH, group=""), "death.group"),
    "peer too short": (raw(READY, peer=["1", 0]), "ready.peer"),
    "peer too long": (raw(READY, peer=["1", 0, 1, 2]), "ready.peer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_message_is_refused_with_its_place(name: str) -> None:
    data, place = REFUSED[name]
    with pytest.raises(UnreadableMessage) as caught:
        decode(data)
    assert place in str(caught.value)


@pytest.mark.parametrize("read", [decode_record, decode_vote])
def test_a_register_or_ballot_that_holds_anything_else_is_refused(
    read: Callable[[bytes], object],
) -> None:
    for data in (b"", b"null", b"{}", raw(LEAVE), b"\x80"):
        with pytest.raises(UnreadableMessage):
            read(data)


def test_an_event_that_is_none_is_refused_by_the_audit() -> None:
    with pytest.raises(UnreadableMessage, match=r"timer\.serial"):
        event_from_json({"type": "timer", "name": "pause"})


# --- values that mean something -------------------------------------------------------------------


def test_tokens_are_ordered_by_epoch_first() -> None:
    assert Token(1, 9) < Token(2, 0) < Token(2, 1)


def test_a_group_entry_names_its_participants_in_rank_order() -> None:
    rank = messages.RankEntry(0, 3, True, "", 1, "h")
    entry = GroupEntry("a", "s", (rank, dataclasses.replace(rank, rank=1, inc=4)))
    assert entry.peers() == (Peer("a", 0, 3), Peer("a", 1, 4))
    assert [str(p) for p in entry.peers()] == ["a/0#3", "a/1#4"]


@settings(max_examples=50, deadline=None)
@given(
    st.tuples(st.text(max_size=5), values(Token), st.integers(0, 99), st.integers(0, 99)),
    st.tuples(st.text(max_size=5), values(Token), st.integers(0, 99), st.integers(0, 99)),
)
def test_lineages_are_equal_only_after_equal_histories(one: Any, other: Any) -> None:
    assert (next_lineage(*one) == next_lineage(*other)) == (one == other)
    assert next_lineage(*one) not in ("", "genesis", one[0]), "never lost, never the start"

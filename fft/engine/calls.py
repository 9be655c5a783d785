"""Bus operations of the engine as pure data, and their execution on real buses.

The engine core only describes an operation and receives the reply later, so a simulator can reply
in virtual time. Calls and replies hold typed objects; ``Buses`` encodes and decodes them.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar, assert_never

from fft.bus.base import HEAD, ErrorBus, Topic
from fft.errors import BusError
from fft.messages.commands import Answer, encode_answer
from fft.messages.progress import HeldReport, encode_report
from fft.messages.protocol import BusMessage, UnreadableMessage, Vote, encode
from fft.messages.wire import (
    EPOCH,
    LEFT,
    Packed,
    Register,
    decode_packed,
    decode_votes,
    encode_packed,
    encode_register,
    encode_votes,
)

SCOPE = ""
"""The bus of the engine's own scope, which holds the scope's records and ballots."""
JOB = "job"
"""The bus for job-wide messages: drains, and replies to operators."""
GROUP = "group"
"""The bus of this replica group, on which its ranks vote first."""


def beside(scope: str) -> str:
    """Return the value of ``Call.at`` that selects the bus of another scope."""
    return f"scope {scope}"


@dataclass(frozen=True, slots=True)
class Read:
    """Read a register. The reply is its value, or None if the register is empty."""

    key: str
    at: str = SCOPE


@dataclass(frozen=True, slots=True)
class Write:
    """Write a register. The reply is None."""

    key: str
    value: Register
    at: str = SCOPE


@dataclass(frozen=True, slots=True)
class CompareSet:
    """Write ``desired`` to the head register if it holds ``expected`` (compare-and-set).

    The reply is the value that the register holds afterwards. With ``announce``, a winning call
    also broadcasts ``desired``.
    """

    expected: Packed | None
    desired: Packed
    announce: bool = False
    at: str = SCOPE


@dataclass(frozen=True, slots=True)
class Cast:
    """Add votes to a ballot. The reply is all of its votes once there are ``voters``, or None."""

    slot: str
    tag: str
    votes: tuple[Vote, ...]
    voters: int
    at: str = SCOPE


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a register, ballot or inbox. The reply is None."""

    key: str
    at: str = SCOPE


@dataclass(frozen=True, slots=True)
class Publish:
    """Broadcast a message. The reply is None."""

    message: BusMessage | Packed | HeldReport
    at: str = SCOPE
    topic: Topic = "protocol"


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to an inbox. The reply is None."""

    inbox: str
    message: BusMessage | Packed | Answer
    at: str = SCOPE


Call = Read | Write | CompareSet | Cast | Delete | Publish | Send

T = TypeVar("T")
Calls = Generator[Call, Any, T]
"""A generator that yields calls, receives their replies or errors, and returns a ``T``."""


class Buses:
    """The real buses of one engine. It performs calls synchronously.

    Args:
        scope: The bus of the engine's scope, with its records and ballots.
        job: The bus for job-wide messages (deaths, suspicions, drains and operator commands); by
            default the bus of the scope.
    """

    def __init__(self, scope: ErrorBus, job: ErrorBus | None = None) -> None:
        self.scope, self.job = scope, job or scope
        self.group: ErrorBus | None = None
        """The bus of the replica group, on which its ranks vote first."""
        self._at = {SCOPE: scope, JOB: self.job}

    def add(self, scope: str, bus: ErrorBus) -> None:
        """Add the bus of another scope."""
        self._at[beside(scope)] = bus

    def meet(self, bus: ErrorBus) -> None:
        """Replace the bus of the replica group."""
        self.group = self._at[GROUP] = bus

    def perform(self, call: Call) -> object:
        """Perform a call and return the reply. Raises ``BusError``, ``UnreadableMessage``."""
        bus = self._at[call.at]
        match call:
            case Read(key=key):
                held = bus.read(key)
                return None if held is None else _decoded(key, held)
            case Write(key=key, value=value):
                bus.write(key, encode_register(value))
            case CompareSet():
                return self._compare_set(bus, call)
            case Cast(slot=slot, tag=tag, votes=votes, voters=voters):
                cast = bus.ballot(slot, tag, encode_votes(votes), voters, weight=len(votes))
                return None if cast is None else [v for some in cast for v in decode_votes(some)]
            case Delete(key=key):
                bus.delete(key)
            case Publish(message=message, topic=topic):
                bus.broadcast(_encoded(message), topic)
            case Send(inbox=inbox, message=message):
                bus.send(inbox, _encoded(message))
            case _:
                assert_never(call)
        return None

    def run(self, calls: Calls[T]) -> T:
        """Run a procedure to its end and return its result. Its exceptions propagate."""
        advance, given = calls.send, None
        while True:
            try:
                call = advance(given)
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                advance, given = calls.send, self.perform(call)
            except (BusError, UnreadableMessage) as error:
                advance, given = calls.throw, error

    def _compare_set(self, bus: ErrorBus, call: CompareSet) -> Packed | None:
        expected = None if call.expected is None else encode_packed(call.expected)
        desired = encode_packed(call.desired)
        if call.announce:
            held = bus.decide(HEAD, expected, desired, desired)
        else:
            held = bus.compare_set(HEAD, expected, desired)
        if held == desired:
            return call.desired
        return None if held is None else decode_packed(held)


def _decoded(key: str, held: bytes) -> Packed | bytes | int:
    """Decode the value of a register. A member list stays encoded: ``Wire`` may have it cached."""
    if key in (HEAD, EPOCH):
        return decode_packed(held)
    return int(held) if key.startswith(LEFT) and held.isdigit() else held


def _encoded(message: BusMessage | Packed | HeldReport | Answer) -> bytes:
    match message:
        case Packed():
            return encode_packed(message)
        case HeldReport():
            return encode_report(message)
        case Answer():
            return encode_answer(message)
    return encode(message)

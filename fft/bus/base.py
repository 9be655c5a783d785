"""The contract of the error bus: what every backend promises, its errors, its limits.

The bus carries FFT's control traffic and nothing else: what concerns all (`broadcast`, in topics),
words to one participant (`send`), write-once decisions (`compare_set`), votes (`ballot`) and fresh
numbers (`next_number`). This module may touch neither torch nor any transport; backends implement
it and `tests/bus/test_contract.py` holds all of them to it.

With n participants a `broadcast` costs the bus n deliveries; everything else costs it as much as
is handed over, whoever else is there. So what concerns one participant is sent to its inbox.

Registers, ballots, counters and inboxes are four kinds of entry, each with a name space of its own.
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, get_args

from fft.util.errors import FftError

MAX_MESSAGE_BYTES = 1024 * 1024
"""Longest payload, register value or vote, in bytes."""

MAX_VALUE_BYTES = 8 * 1024 * 1024 - 4096
"""Longest register value that `write` takes, in bytes."""

MAX_KEY_CHARS = 256
"""Longest register, ballot, tag, counter or inbox name, in characters."""

MAX_WEIGHT = 2**31
"""Voters that one vote may count for."""

RING_MESSAGES = 1024
"""How many messages of a topic a listener may fall behind before it is told `BusOverrun`."""

Topic = Literal["protocol", "commands", "progress"]
"""What is broadcast, by who needs to hear it: ``protocol`` what the core hears, which must stay in
one order; ``commands`` what operators ask; ``progress`` how fast the ranks are."""
TOPICS: tuple[Topic, ...] = get_args(Topic)

HEAD = "head"
"""The register that names the newest record of a job."""

JOB_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

logger = logging.getLogger(__name__)


class BusError(FftError):
    """Anything the bus has to complain about; the text names the place and the mend."""


class BusUnreachable(BusError):
    """No answer from the bus within its timeout: what was asked may be done, now or later, or not.

    Ask again on the same bus object to see whether the bus has come back: a server that was only
    silent has kept all. One that has ended comes back where it keeps what it holds (nats); else it
    never will (tcp), and only a new process can go on.
    """

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"the bus at {url} cannot be reached: {reason}. "
            "Start one with `fft serve` and pass the FFT_BUS that it prints."
        )


class BusOverrun(BusError):
    """A listener or writer fell behind by a whole ring, so delivery can no longer be promised."""


class BusForgot(BusError):
    """Something known to have been on the bus is gone: the bus lost its memory."""


class BusForged(BusError):
    """A register has a value that nobody wrote who has the job token. It is not obeyed."""


class BusClosed(BusError):
    """The bus object was closed by its owner and then used."""


@dataclass(frozen=True)
class Refusal:
    """A message or vote that was refused, unread."""

    reason: str
    """``unsealed``, ``oversized``, ``forged``, ``stale`` or ``repeated``."""
    count: int
    """How many were refused for this reason by now."""
    channel: str
    """Where it came in."""
    claims: str
    """Who it says it is from; anybody can say so."""


class Subscription(ABC):
    """One listener's place in the message order."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening; returns within 1 s. Idempotent; may be called from a callback.

        No callback starts after it has returned (called from a callback: after that one).
        """


class ErrorBus(ABC):
    """A job's bus. Every operation may be called from any thread.

    Raised by any operation: `BusUnreachable` (no answer within the timeout given to `open_bus`),
    `BusForgot` (the bus is known to have come back empty; from then on), `BusClosed` (after
    `close`), `BusError` (bad argument).
    """

    url: str
    generation: str
    """Names one life of the bus. A bus that came back empty has another generation."""
    extra: int = 0
    """Bytes that messages, values and votes may be longer than the limits: an envelope's."""
    on_refusal: Callable[[Refusal], None] | None = None
    """Told of what was refused, by a bus that tells who may speak: the 1st, 10th, 100th … of
    each reason. From a listener's thread, or the caller's of ``ballot``."""

    @abstractmethod
    def broadcast(self, payload: bytes, topic: Topic = "protocol") -> None:
        """Send `payload` to every listener of `topic`, the sender's own included.

        Each listener hears it exactly once, and all hear all messages of a topic in the same
        order. Two broadcasts in one topic of which the second starts after the first returned are
        heard in that order. Between topics there is no order. Nobody else pays for a topic.
        Raises `BusOverrun` when this writer was stalled for so long, at the one moment where
        it matters, that it cannot know whether the message was heard.
        """

    @abstractmethod
    def subscribe(
        self,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
        topic: Topic = "protocol",
    ) -> Subscription:
        """Hear every message of `topic` whose broadcast starts after this call returned.

        Callbacks run one at a time on a thread of this subscription. What `on_message` raises is
        logged and the listener lives on. `on_lost` is called at most once, and never after
        `close`: with `BusUnreachable` (the bus will not come back), `BusForgot` or `BusOverrun`.
        The subscription has then ended. Until then it has missed nothing, however long the bus
        was silent.
        """

    @abstractmethod
    def send(self, inbox: str, payload: bytes) -> None:
        """Put `payload` into `inbox`, where its one listener takes it; nobody else hears of it.

        It is kept until then, also when nobody listens yet. One sender's messages are heard in
        the order of sending. Returns when the message is on its way: a bus that is lost at this
        moment loses it without an error here. An inbox that nobody empties grows by whatever is
        sent to it, until `delete(inbox)`; who stops listening, or outlives a listener, does that.
        """

    @abstractmethod
    def listen(
        self,
        inbox: str,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
    ) -> Subscription:
        """Hear every message sent to `inbox`, before or after this call, each exactly once.

        An inbox has one listener in its life: name it after who listens. Callbacks as for
        `subscribe`, except that nobody falls behind; a server that was lost without a word is
        noticed by the next operation of this bus object. What was sent and not heard when the
        subscription is closed stays, or is lost: nobody may count on either.
        """

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """The value of register `key`, or None if it has none. Never waits for a value."""

    @abstractmethod
    def write(self, key: str, value: bytes) -> None:
        """Put `value` into register `key`, whatever it holds. Up to `MAX_VALUE_BYTES`.

        Once it has returned, whoever reads the register finds this value or a later one. A
        register is either written or compared, not both.
        """

    @abstractmethod
    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        """Put `desired` into register `key` if it holds `expected` (None: if it has no value).

        Linearizable. Returns the value held afterwards: equal to `desired` if and only if this
        call won, given that no two callers desire the same bytes. Raises `BusForgot` when
        `expected` is not None and the register has no value.
        """

    def decide(
        self, key: str, expected: bytes | None, desired: bytes, announcement: bytes
    ) -> bytes | None:
        """`compare_set`; if this call wins, `announcement` is broadcast in ``protocol`` as well.

        For a value that one caller at a time is expected to propose: where it costs less than the
        two by themselves, a call that does not win may cost the listeners a message.
        An error may come after the decision: then it may be announced, or not.
        """
        held = self.compare_set(key, expected, desired)
        if held == desired:
            self.broadcast(announcement)
        return held

    @abstractmethod
    def ballot(
        self, slot: str, tag: str, vote: bytes, voters: int, weight: int = 1
    ) -> list[bytes] | None:
        """Add `vote` to ballot `slot` under `tag`; the votes under `tag` once there are `voters`.

        A vote counts for `weight` voters: one that speaks for a whole group says how many it is.
        Votes come back in the order of casting. At least whoever casts the last vote gets the
        list; earlier callers get None, and cost the bus nothing that grows with `voters`. Calling
        twice votes twice, so the list may then come early and hold one voter twice: look whose
        votes they are. Votes under other tags are neither counted nor returned. The slot lives
        until `delete(slot)`; a vote cast meanwhile under one of its tags may be lost.
        """

    @abstractmethod
    def next_number(self, key: str) -> int:
        """The next number of counter `key`: 1, 2, 3 … Linearizable; no two callers get the same.

        Numbers are unsigned 64-bit: after 2**64 - 1 comes 0. Compare them as serial numbers if
        a counter could ever get there.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove ballot `key`; if there is none, register `key`; then counter, then inbox `key`.

        So use a name for one kind only. It is no error if there is nothing to remove. What is
        sent to an inbox after that is kept again.
        """

    @abstractmethod
    def key_count(self, messages: bool = True) -> int:
        """How many entries this job occupies on the bus, bookkeeping included.

        Inboxes with messages in them count only where the backend can see them. Without
        ``messages``, those that the topics hold, `RING_MESSAGES` each at most, are left out.
        """

    def refusals(self) -> dict[str, int]:
        """How many messages and votes were refused, by reason (`Refusal.reason`)."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """End all subscriptions and let go of the connection. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def check_bytes(value: bytes, what: str, limit: int = MAX_MESSAGE_BYTES) -> None:
    """Raise `BusError` unless `value` is at most `limit` bytes; `what` names it."""
    if not isinstance(value, bytes):
        raise BusError(f"{what} must be bytes, not {type(value).__name__}")
    if len(value) > limit:
        raise BusError(
            f"{what} has {len(value)} bytes; the bus carries at most {limit}. "
            "Send a reference to the data, not the data."
        )


def check_key(key: str, what: str = "key") -> None:
    """Raise `BusError` unless `key` is a usable name; `what` names it."""
    if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_CHARS:
        raise BusError(f"{what} must be a string of 1 to {MAX_KEY_CHARS} characters, not {key!r}")


def check_topic(topic: str) -> None:
    """Raise `BusError` unless `topic` is one."""
    if topic not in TOPICS:
        raise BusError(f"there is no topic {topic!r} on a bus; there are {', '.join(TOPICS)}")


def check_voters(voters: int, weight: int) -> None:
    """Raise `BusError` unless `voters` can be reached by votes that count for `weight`."""
    if voters < 1:
        raise BusError(f"a ballot needs at least one voter, not {voters}")
    if not 1 <= weight <= MAX_WEIGHT:
        raise BusError(f"a vote counts for 1 to {MAX_WEIGHT} voters, not {weight}")


def check_job(job: str, url: str) -> None:
    """Raise `BusError` unless `job` is a legal job name; `url` is shown in the error."""
    if not JOB_NAME.fullmatch(job):
        raise BusError(
            f"bus URL {url!r}: {job!r} is no job name; use 1 to 64 of the characters "
            "A-Z a-z 0-9 . _ -, as in tcp://host:port/my-job or memory://my-job"
        )


def overrun_text(who: str) -> str:
    """The text of a `BusOverrun`; `who` is "listener" or "writer"."""
    return (
        f"this {who} fell {RING_MESSAGES} messages or more behind on the bus; messages may be "
        "missing, so read the state again and subscribe again"
    )


def deliver(on_message: Callable[[bytes], None], payload: bytes) -> None:
    """Hand `payload` to a listener; what it raises is logged and goes no further."""
    try:
        on_message(payload)
    except Exception:  # a listener's bug must not deafen the rank
        logger.exception("a bus listener failed on a message of %d bytes", len(payload))


def report_lost(on_lost: Callable[[BusError], None], error: BusError) -> None:
    """Tell a listener that its subscription has ended; what it raises is logged."""
    try:
        on_lost(error)
    except Exception:  # nobody above this thread could handle it
        logger.exception("a bus listener failed when it was called: %s", error)

"""The contract of the error bus: the guarantees, errors and limits of every backend.

The bus carries only FFT's control traffic: messages to all participants (`broadcast`, by topic),
messages to one participant (`send`), write-once decisions (`compare_set`), votes (`ballot`) and
fresh numbers (`next_number`). This module imports neither torch nor a transport. The backends
implement it, and `tests/bus/test_contract.py` runs against each of them.

With n participants a `broadcast` costs the bus n deliveries. The cost of every other operation
depends only on the bytes that it transfers. A message for one participant is therefore sent to
that participant's inbox.

Registers, ballots, counters and inboxes are four kinds of entry, each with its own namespace.
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, get_args

from fft.errors import BusError

MAX_MESSAGE_BYTES = 1024 * 1024
"""Maximum size of a payload, register value or vote, in bytes."""

MAX_VALUE_BYTES = 8 * 1024 * 1024 - 4096
"""Maximum size of a register value that `write` accepts, in bytes."""

MAX_KEY_CHARS = 256
"""Maximum length of a register, ballot, tag, counter or inbox name, in characters."""

MAX_WEIGHT = 2**31
"""Maximum number of voters that one vote may count for."""

RING_MESSAGES = 1024
"""Number of messages of a topic by which a listener may lag before it gets `BusOverrun`."""

Topic = Literal["protocol", "commands", "progress"]
"""The topic of a broadcast. ``protocol`` carries the events of the protocol core, which need one
order; ``commands`` carries operators' requests; ``progress`` carries the speed of the ranks."""
TOPICS: tuple[Topic, ...] = get_args(Topic)

HEAD = "head"
"""Name of the register that holds the newest record of a job."""

JOB_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

logger = logging.getLogger(__name__)


class BusUnreachable(BusError):
    """The bus did not answer within its timeout; the operation may or may not take effect.

    Retry on the same bus object to find out whether the bus is back. A server that was only silent
    has kept its contents. A server that has ended comes back only if it stores its contents (nats).
    A tcp server does not, so only a new process can continue.
    """

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"the bus at {url} cannot be reached: {reason}. Check that its server runs (`fft "
            "serve`, `fft run` or NATS), that this host can connect to the address, and that "
            "FFT_BUS is what the server has printed."
        )


class BusOverrun(BusError):
    """A listener or writer lagged by a whole ring, so delivery is no longer guaranteed."""


class BusForgot(BusError):
    """An entry known to have been on the bus is gone, so the bus has lost its contents."""


class BusForged(BusError):
    """The register value failed authentication and is ignored."""


class BusClosed(BusError):
    """The bus object was used after its owner closed it."""


@dataclass(frozen=True)
class Refusal:
    """A message or vote that failed authentication and was dropped without being decoded."""

    reason: str
    """``unsealed``, ``oversized``, ``forged``, ``stale`` or ``repeated``."""
    count: int
    """Number of refusals for this reason so far."""
    channel: str
    """The topic, inbox or ballot that it arrived in."""
    claims: str
    """The sender that it names, which is not authenticated; empty if it names none."""


class Subscription(ABC):
    """One listener's position in the message order."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening; returns within 1 s. Idempotent; may be called from a callback.

        No callback starts after this method returns. If a callback calls it, that callback is the
        last one.
        """


class ErrorBus(ABC):
    """A job's bus. Every operation may be called from any thread.

    Raises (every operation):
        BusUnreachable: No answer within the timeout given to `open_bus`.
        BusForgot: The bus has come back empty; raised by every operation from then on.
        BusClosed: The bus object is closed.
        BusError: An argument is invalid.
    """

    url: str
    generation: str
    """Identifies one life of the bus. A bus that comes back empty has another generation."""
    extra: int = 0
    """Bytes by which messages, values and votes may exceed the limits; a seal needs them."""
    on_refusal: Callable[[Refusal], None] | None = None
    """Called by an authenticated bus for the 1st, 10th, 100th … refusal of each reason, on a
    listener's thread or on the thread that calls ``ballot``."""

    @abstractmethod
    def broadcast(self, payload: bytes, topic: Topic = "protocol") -> None:
        """Send `payload` to every listener of `topic`, the sender's own included.

        Each listener receives it exactly once, and all listeners of a topic receive its messages in
        the same order. If one broadcast starts after another in the same topic has returned, they
        arrive in that order. Messages of different topics have no order. A topic costs nothing to
        processes that do not listen to it.

        Raises:
            BusOverrun: This writer stalled between reserving a number and writing the message for
                so long that it cannot know whether the message was delivered.
        """

    @abstractmethod
    def subscribe(
        self,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
        topic: Topic = "protocol",
    ) -> Subscription:
        """Receive every message of `topic` whose broadcast starts after this call returns.

        Callbacks run one at a time on a thread of this subscription. An exception from `on_message`
        is logged, and the subscription continues. `on_lost` is called at most once, and never after
        `close`, with `BusUnreachable` (the bus will not come back), `BusForgot` or `BusOverrun`.
        The subscription has then ended. Until then it misses no message, however long the bus is
        silent.
        """

    @abstractmethod
    def send(self, inbox: str, payload: bytes) -> None:
        """Put `payload` into `inbox`, from which its only listener takes it.

        The bus keeps the message until the listener takes it, even if none is there yet. The
        messages of one sender arrive in the order of sending. This returns when the message is on
        its way, so a bus that is lost at that moment loses it without an error here. An inbox
        without a listener grows until `delete(inbox)`: the process that stops listening, or that
        outlives a listener, must call it.
        """

    @abstractmethod
    def listen(
        self,
        inbox: str,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
    ) -> Subscription:
        """Receive every message sent to `inbox`, before or after this call, each exactly once.

        If the connection is lost, the one message that is being transferred may be lost with it.

        An inbox has only one listener ever, so name it after that listener. The callbacks are those
        of `subscribe`, but a listener of an inbox never gets `BusOverrun`. The loss of a silent
        server is noticed by the next operation of this bus object. Messages that are not delivered
        when the subscription is closed may stay or be lost; callers must not rely on either.
        """

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """Return the value of register `key`, or None if it has none, without waiting for one."""

    @abstractmethod
    def write(self, key: str, value: bytes) -> None:
        """Put `value` into register `key` unconditionally; up to `MAX_VALUE_BYTES`.

        After this returns, every read of the register returns this value or a later one. A register
        is used either with `write` or with `compare_set`, not both.
        """

    @abstractmethod
    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        """Put `desired` into register `key` if it holds `expected` (None: if it has no value).

        Linearizable.

        Returns:
            The value held afterwards. It equals `desired` if and only if this call won, provided
            that no two callers desire the same bytes.

        Raises:
            BusForgot: `expected` is not None and the register has no value.
        """

    def decide(
        self, key: str, expected: bytes | None, desired: bytes, announcement: bytes
    ) -> bytes | None:
        """Call `compare_set`, and broadcast `announcement` in ``protocol`` if this call wins.

        Use it for a value that usually has one proposer at a time. A backend may combine the two
        operations to save a round trip; a call that loses may then cost the listeners an empty
        message. An error may be raised after the decision, which is then announced or not.
        """
        held = self.compare_set(key, expected, desired)
        if held == desired:
            self.broadcast(announcement)
        return held

    @abstractmethod
    def ballot(
        self, slot: str, tag: str, vote: bytes, voters: int, weight: int = 1
    ) -> list[bytes] | None:
        """Add `vote` to ballot `slot` under `tag`; return the votes once there are `voters`.

        A call that is repeated votes twice, so the list may then come early and hold one voter
        twice: check whose votes it holds. Votes under other tags are neither counted nor returned.
        The slot exists until `delete(slot)`; a vote cast during the deletion under one of its tags
        may be lost.

        Args:
            voters: Number of voters that completes the ballot of `tag`.
            weight: Number of voters that this vote counts for; one vote may stand for a group.

        Returns:
            All votes under `tag` in the order of casting, at least for the caller whose vote
            completes them. Earlier callers get None, at a cost that does not grow with `voters`.
        """

    @abstractmethod
    def next_number(self, key: str) -> int:
        """Return the next number of counter `key`: 1, 2, 3 … Linearizable and unique per call.

        Numbers are unsigned 64-bit and wrap from 2**64 - 1 to 0. Compare them as serial numbers if
        a counter could ever get there.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the first that exists of ballot, register, counter and inbox `key`.

        So use each name for one kind only. A key that does not exist is not an error. Messages sent
        to an inbox after its removal are kept again.
        """

    @abstractmethod
    def key_count(self, messages: bool = True) -> int:
        """Return the number of entries that this job occupies on the bus, including bookkeeping.

        Inboxes that hold messages are counted only if the backend can list them.

        Args:
            messages: Also count the messages of the topics, up to `RING_MESSAGES` each.
        """

    def lose(self) -> bool:
        """Lose the bus for good, to inject a fault; return False if the backend cannot."""
        return False

    def refusals(self) -> dict[str, int]:
        """Return the number of refused messages and votes by reason (`Refusal.reason`)."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """End all subscriptions and close the connection. Idempotent."""

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
    """Raise `BusError` unless `value` is bytes, at most `limit` long; `what` names it."""
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
    """Raise `BusError` unless `topic` is a topic."""
    if topic not in TOPICS:
        raise BusError(f"there is no topic {topic!r} on a bus; there are {', '.join(TOPICS)}")


def check_voters(voters: int, weight: int) -> None:
    """Raise `BusError` unless `voters` is positive and `weight` is within its limits."""
    if voters < 1:
        raise BusError(f"a ballot needs at least one voter, not {voters}")
    if not 1 <= weight <= MAX_WEIGHT:
        raise BusError(f"a vote counts for 1 to {MAX_WEIGHT} voters, not {weight}")


def check_job(job: str, url: str) -> None:
    """Raise `BusError` unless `job` is a valid job name; the message quotes `url`."""
    if not JOB_NAME.fullmatch(job):
        raise BusError(
            f"bus URL {url!r}: {job!r} is no job name; use 1 to 64 of the characters "
            "A-Z a-z 0-9 . _ -, as in tcp://host:port/my-job or memory://my-job"
        )


def overrun_text(who: str) -> str:
    """Return the text of a `BusOverrun`; `who` is "listener" or "writer"."""
    return (
        f"this {who} fell {RING_MESSAGES} messages or more behind on the bus; messages may be "
        "missing, so read the state again and subscribe again"
    )


def deliver(on_message: Callable[[bytes], None], payload: bytes) -> None:
    """Call a listener with `payload`, and log any exception that it raises."""
    try:
        on_message(payload)
    except Exception:  # a bug in the listener must not end the subscription
        logger.exception("a bus listener failed on a message of %d bytes", len(payload))


def report_lost(on_lost: Callable[[BusError], None], error: BusError) -> None:
    """Notify a listener that its subscription has ended, and log any exception that it raises."""
    try:
        on_lost(error)
    except Exception:  # this thread has no caller that could handle it
        logger.exception("a bus listener failed when it was called: %s", error)

"""The contract of the error bus: what every backend promises, its errors, its limits.

The bus carries FFT's control traffic and nothing else: fault notices and acknowledgements
(`broadcast`), write-once decisions (`compare_set`), votes (`ballot`) and fresh numbers
(`next_number`). This module may touch neither torch nor any transport; backends implement it
and `tests/bus/test_contract.py` holds all of them to it.

Registers, ballots and counters are three kinds of entry, each with a name space of its own.
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self

from fft.errors import FftError

MAX_MESSAGE_BYTES = 1024 * 1024
"""Longest payload, register value or vote, in bytes."""

MAX_KEY_CHARS = 256
"""Longest register, ballot, tag or counter name, in characters."""

RING_MESSAGES = 1024
"""How many messages a listener may fall behind before it is told `BusOverrun`."""

JOB_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

logger = logging.getLogger(__name__)


class BusError(FftError):
    """Anything the bus has to complain about; the text names the place and the mend."""


class BusUnreachable(BusError):
    """No answer from the bus within its timeout. The bus object stays unusable: open a new one."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"the bus at {url} cannot be reached: {reason}. "
            "Start one with `fft serve` and pass the FFT_BUS that it prints."
        )


class BusOverrun(BusError):
    """A listener or writer fell behind by a whole ring, so delivery can no longer be promised."""


class BusForgot(BusError):
    """Something known to have been on the bus is gone: the bus lost its memory."""


class BusClosed(BusError):
    """The bus object was closed by its owner and then used."""


class Subscription(ABC):
    """One listener's place in the message order."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening; returns within 1 s. Idempotent; may be called from a callback.

        No callback starts after it has returned (called from a callback: after that one).
        """


class ErrorBus(ABC):
    """A job's bus. Every operation may be called from any thread.

    Raised by any operation: `BusUnreachable` (no answer within the timeout given to `open_bus`,
    and ever after), `BusClosed` (after `close`), `BusError` (bad argument).
    """

    url: str
    generation: str
    """Names one life of the bus. A bus that came back empty has another generation."""

    @abstractmethod
    def broadcast(self, payload: bytes) -> None:
        """Send `payload` to every listener, the sender's own included.

        Each listener hears it exactly once, and all hear all messages in the same order. Two
        broadcasts of which the second starts after the first returned are heard in that order.
        Raises `BusOverrun` when this writer was stalled for so long, at the one moment where
        it matters, that it cannot know whether the message was heard.
        """

    @abstractmethod
    def subscribe(
        self, on_message: Callable[[bytes], None], on_lost: Callable[[BusError], None]
    ) -> Subscription:
        """Hear every message whose broadcast starts after this call returned.

        Callbacks run one at a time on a thread of this subscription. What `on_message` raises is
        logged and the listener lives on. `on_lost` is called at most once, with `BusUnreachable`
        or `BusOverrun`, and never after `close`; the subscription has then ended.
        """

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """The value of register `key`, or None if it has none. Never waits for a value."""

    @abstractmethod
    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        """Put `desired` into register `key` if it holds `expected` (None: if it has no value).

        Linearizable. Returns the value held afterwards: equal to `desired` if and only if this
        call won, given that no two callers desire the same bytes. Raises `BusForgot` when
        `expected` is not None and the register has no value.
        """

    @abstractmethod
    def ballot(self, slot: str, tag: str, vote: bytes, voters: int) -> list[bytes] | None:
        """Add `vote` to ballot `slot` under `tag`; the votes under `tag` once there are `voters`.

        Votes come back in the order of casting. At least whoever casts the last vote gets the
        list; earlier callers may get None. Calling twice votes twice. The slot lives until
        `delete(slot)`.
        """

    @abstractmethod
    def next_number(self, key: str) -> int:
        """The next number of counter `key`: 1, 2, 3 … Linearizable; no two callers get the same.

        Numbers are unsigned 64-bit: after 2**64 - 1 comes 0. Compare them as serial numbers if
        a counter could ever get there.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove ballot `key`; if there is none, register `key`; if none, counter `key`.

        So use a name for one kind only. It is no error if there is nothing to remove.
        """

    @abstractmethod
    def key_count(self) -> int:
        """How many entries this job occupies on the bus, bookkeeping included."""

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


def check_bytes(value: bytes, what: str) -> None:
    """Raise `BusError` unless `value` is bytes within the size limit; `what` names it."""
    if not isinstance(value, bytes):
        raise BusError(f"{what} must be bytes, not {type(value).__name__}")
    if len(value) > MAX_MESSAGE_BYTES:
        raise BusError(
            f"{what} has {len(value)} bytes; the bus carries at most {MAX_MESSAGE_BYTES}. "
            "Send a reference to the data, not the data."
        )


def check_key(key: str, what: str = "key") -> None:
    """Raise `BusError` unless `key` is a usable name; `what` names it."""
    if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_CHARS:
        raise BusError(f"{what} must be a string of 1 to {MAX_KEY_CHARS} characters, not {key!r}")


def check_voters(voters: int) -> None:
    """Raise `BusError` unless `voters` can be reached by voting."""
    if voters < 1:
        raise BusError(f"a ballot needs at least one voter, not {voters}")


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
        "missing, so take the state anew and subscribe again"
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
        logger.exception("a bus listener failed while it was told: %s", error)

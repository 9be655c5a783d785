"""A bus that accepts only messages made with the job token: an `ErrorBus` around any backend.

The engine and the protocol core do not depend on it. Messages of other senders are refused before
they are decoded, counted, and reported to `on_refusal`. docs/bus.md specifies the format for
programs in other languages.

**Messages** are sealed with a session, a sequence number, an epoch and a keyed hash over all of it.
The key is derived for this job, this life of its bus and this channel (one topic or one inbox), so
a message cannot be changed, moved to another channel, or repeated. A *session* is one sender's bus
object. It numbers its messages per channel, and a listener accepts only rising numbers. This never
refuses a genuine message: backends keep the order of each sender, and a sender numbers and sends a
message under one lock.

**Replayed recordings.** A new listener knows no sessions, so old messages could be replayed to it.
From an unknown session it therefore accepts only messages of the epoch at which it began, or later.
This requires senders to know the epoch. A sender that listens to the protocol learns it there, and
from each value of the head register that it reads. Any other sender (a supervisor, a tool) reads
the head before each message. The owner of an inbox has sent a message before or is in an epoch
record, so every sender to that inbox knows an epoch at least as new as the one at which the owner
began. Listeners that began meanwhile refuse a process that comes back with an old epoch, until it
has received or read a newer one; it is not locked out. One gap remains: a message of the epoch in
which a listener begins, from a session that has been silent since, can be replayed to that listener
once.

Sessions are held in a table. When it exceeds `MAX_SESSIONS`, the listener drops the session that
was silent for longest and from then on requires unknown sessions to have an epoch later than that
session's last one, so none of its messages can be repeated. A session of the newest epoch is never
dropped: the listener would then have to refuse all new senders of this epoch, or accept replays of
it. So the table can exceed `MAX_SESSIONS` by the senders of one epoch, all of which have the token.

**Registers and votes** carry a keyed hash of their value under a key for their name, so equal
values have equal bytes, as `compare_set` needs. A register whose value fails authentication raises
`BusForged`: the engine treats the bus as failing, decides nothing, and stops after `bus_limit`.
Votes that fail authentication are dropped. **Counters** are incremented by the store and are not
protected: a process that can write to the store can make processes of one identity fence each
other. It can also remove any entry, or restore an older value of a register; that stops a job. The
engine treats a head that went back, and two records that contradict each other, as a bus that lost
its contents, and never uses it again (`fft.protocol.witness`; docs/bus.md lists the attacks that
remain possible).
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache, partial

from fft.bus.base import (
    HEAD,
    MAX_MESSAGE_BYTES,
    MAX_VALUE_BYTES,
    TOPICS,
    BusForged,
    ErrorBus,
    Refusal,
    Subscription,
    Topic,
    check_bytes,
    check_key,
    check_topic,
)
from fft.bus.token import JobToken, mac
from fft.errors import BusError
from fft.util.log_sampler import LogSampler

SEAL_BYTES = 256
"""Maximum number of bytes that sealing adds to a message or value."""
MAX_SESSIONS = 65_536
"""Maximum number of sessions of older epochs that a listener keeps in its table."""

_TAG_BYTES = 32
_KEYS = 256
"""Number of derived keys that are cached."""
_NUMBER = rb"(0|[1-9][0-9]{0,18})"
_HEADER = re.compile(
    rb"fft1 ([!-~]{1,64}) ([0-9a-f]{16}) %b %b ([0-9a-f]{64})" % (_NUMBER, _NUMBER)
)

logger = logging.getLogger(__name__)


class _Refused(Exception):
    """A frame was refused; ``claims`` is the sender that it names, unauthenticated."""

    def __init__(self, reason: str, claims: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.claims = claims


class _Channel:
    """One listener's record of the senders of its channel. Its callbacks come one at a time."""

    def __init__(self, name: str, key: bytes, began: int, limit: int) -> None:
        self.name = name
        self._key = key
        self._began = self._newest = began
        """Earliest epoch accepted from unknown sessions, and the newest epoch received."""
        self._limit = limit
        self._heard: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """Session → its newest (number, epoch); the session that was silent for longest first."""

    def open(self, frame: bytes) -> tuple[int, bytes]:
        """Authenticate a frame and return its (epoch, payload). Raises `_Refused`."""
        if len(frame) > MAX_MESSAGE_BYTES + SEAL_BYTES:
            raise _Refused("oversized")
        end = frame.find(b"\n", 0, SEAL_BYTES)
        header = _HEADER.fullmatch(frame, 0, max(end, 0))
        if header is None:
            raise _Refused("unsealed")
        who, session, number, epoch, tag = header.groups()
        claims = who.decode()
        if len(frame) - end - 1 > MAX_MESSAGE_BYTES:
            raise _Refused("oversized", claims)
        said = frame[: end - 65] + frame[end:]
        if not hmac.compare_digest(mac(self._key, said).hex().encode(), tag):
            raise _Refused("forged", claims)
        self._check_fresh(session, int(number), int(epoch), claims)
        return int(epoch), frame[end + 1 :]

    def _check_fresh(self, session: bytes, number: int, epoch: int, claims: str) -> None:
        before = self._heard.get(session)
        if before is None and epoch < self._began:
            raise _Refused("stale", claims)
        if before is not None and number <= before[0]:
            raise _Refused("repeated", claims)
        self._heard[session] = number, epoch
        self._heard.move_to_end(session)
        self._newest = max(self._newest, epoch)
        while len(self._heard) > self._limit:
            silent, (_, last) = next(iter(self._heard.items()))
            if last == self._newest:  # without it, replays of its messages would be accepted
                return
            del self._heard[silent]
            self._began = max(self._began, last + 1)


class _Listening(Subscription):
    """A protocol subscription, which keeps the sealed bus's epoch current while it lasts."""

    def __init__(self, bus: SealedBus, inner: Subscription | None = None) -> None:
        self._bus = bus
        self.inner = inner

    def close(self) -> None:
        self._bus.ended(self)
        if self.inner is not None:
            self.inner.close()


class SealedBus(ErrorBus):
    """A wrapper that seals and authenticates all messages of ``inner``; `close` closes ``inner``.

    Args:
        token: The job's secret.
        purpose: Distinguishes the buses of one job that share a token.
        who: Name of this sender in reports of refusals; empty for ``host:pid``.
    """

    def __init__(
        self,
        inner: ErrorBus,
        token: JobToken,
        purpose: str = "bus",
        who: str = "",
        max_sessions: int = MAX_SESSIONS,
    ) -> None:
        self._inner = inner
        self.url, self.generation = inner.url, inner.generation
        inner.extra = SEAL_BYTES
        self._token = token
        self._scope = ("fft1", purpose, inner.url.rpartition("/")[2], inner.generation)
        who = who or f"{socket.gethostname()}:{os.getpid()}"
        self._who = re.sub(r"[^!-~]", "_", who)[:64]
        self._key = lru_cache(_KEYS)(self._derived)
        self._session = secrets.token_hex(8)
        self._max_sessions = max_sessions
        self._lock = threading.Lock()
        self._sending = {topic: threading.Lock() for topic in TOPICS}
        """One lock per topic, so that a slow send does not delay other topics; messages to inboxes
        use the lock of ``protocol``."""
        self._numbers: dict[str, int] = {}
        """Sequence number of the last message, by channel."""
        self._epoch = 0
        self._following: set[_Listening] = set()
        self._refused = LogSampler()

    @property
    def epoch(self) -> int:
        """The newest epoch that this sender knows of."""
        return self._epoch

    def lose(self) -> bool:
        return self._inner.lose()

    def refusals(self) -> dict[str, int]:
        return self._refused.counts()

    # --- messages ---

    def broadcast(self, payload: bytes, topic: Topic = "protocol") -> None:
        check_topic(topic)
        check_bytes(payload, "a message")
        put = partial(self._inner.broadcast, topic=topic)
        self._say(_channel(topic), payload, put, topic)

    def send(self, inbox: str, payload: bytes) -> None:
        check_key(inbox, "inbox")
        check_bytes(payload, "a message")
        self._say(_inbox(inbox), payload, lambda frame: self._inner.send(inbox, frame))

    def _say(
        self,
        channel: str,
        payload: bytes,
        put: Callable[[bytes], None],
        topic: Topic = "protocol",
    ) -> None:
        with self._sending[topic]:  # listeners accept only rising numbers
            put(self._message(channel, payload))

    def _message(self, channel: str, payload: bytes) -> bytes:
        if not self._following:
            self.read(HEAD)
        number = self._numbers.get(channel, 0) + 1
        self._numbers[channel] = number
        said = b"fft1 %b %b %d %d" % (
            self._who.encode(),
            self._session.encode(),
            number,
            self._epoch,
        )
        tag = mac(self._key("message", channel), said + b"\n" + payload).hex().encode()
        return said + b" " + tag + b"\n" + payload

    def subscribe(
        self,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
        topic: Topic = "protocol",
    ) -> Subscription:
        check_topic(topic)
        hear = self._hearing(_channel(topic), on_message)
        if topic != "protocol":  # the other topics do not announce epochs
            return self._inner.subscribe(hear, on_lost, topic)
        listening = _Listening(self)

        def lost(error: BusError) -> None:
            self.ended(listening)
            on_lost(error)

        with self._lock:
            self._following.add(listening)
        try:
            listening.inner = self._inner.subscribe(hear, lost)
        except BusError:
            self.ended(listening)
            raise
        return listening

    def listen(
        self,
        inbox: str,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
    ) -> Subscription:
        check_key(inbox, "inbox")
        return self._inner.listen(inbox, self._hearing(_inbox(inbox), on_message), on_lost)

    def ended(self, listening: _Listening) -> None:
        """Note that this subscription ended; without one, each send reads the head first."""
        with self._lock:
            self._following.discard(listening)

    def _hearing(self, name: str, on_message: Callable[[bytes], None]) -> Callable[[bytes], None]:
        self.read(HEAD)  # sets the epoch at which this listener begins, before its first message
        channel = _Channel(name, self._key("message", name), self._epoch, self._max_sessions)

        def hear(frame: bytes) -> None:
            try:
                epoch, payload = channel.open(frame)
            except _Refused as refused:
                self._refuse(refused.reason, name, refused.claims)
                return
            self._know(epoch)
            on_message(payload)

        return hear

    def _refuse(self, reason: str, channel: str, claims: str = "") -> None:
        count = self._refused.add(reason)
        if count is None:
            return
        logger.warning(
            "refused on %s: a %s message or vote in %r that claims to be from %r (%d by now)",
            self.url,
            reason,
            channel,
            claims,
            count,
        )
        if self.on_refusal is not None:
            self.on_refusal(Refusal(reason, count, channel, claims))

    # --- registers, votes ---

    def read(self, key: str) -> bytes | None:
        check_key(key)
        return self._value(key, self._inner.read(key))

    def write(self, key: str, value: bytes) -> None:
        check_key(key)
        check_bytes(value, "a register value", MAX_VALUE_BYTES)
        self._inner.write(key, self._tagged(value, "register", key))

    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        before, after = self._compared(key, expected, desired)
        return self._value(key, self._inner.compare_set(key, before, after))

    def decide(
        self, key: str, expected: bytes | None, desired: bytes, announcement: bytes
    ) -> bytes | None:
        before, after = self._compared(key, expected, desired)
        check_bytes(announcement, "a message")
        with self._sending["protocol"]:  # a call that loses skips its number
            said = self._message(_channel("protocol"), announcement)
            held = self._inner.decide(key, before, after, said)
        return self._value(key, held)

    def _compared(
        self, key: str, expected: bytes | None, desired: bytes
    ) -> tuple[bytes | None, bytes]:
        check_key(key)
        check_bytes(desired, "a register value")
        before = None if expected is None else self._tagged(expected, "register", key)
        return before, self._tagged(desired, "register", key)

    def ballot(
        self, slot: str, tag: str, vote: bytes, voters: int, weight: int = 1
    ) -> list[bytes] | None:
        """Vote as on every bus; votes that fail authentication are left out of the list."""
        check_key(slot, "slot")
        check_key(tag, "tag")
        check_bytes(vote, "a vote")
        cast = self._inner.ballot(slot, tag, self._tagged(vote, "vote", slot, tag), voters, weight)
        if cast is None:
            return None
        votes = [self._untagged(frame, "vote", slot, tag) for frame in cast]
        for _ in range(votes.count(None)):
            self._refuse("forged", f"ballot {slot}")
        return [vote for vote in votes if vote is not None]

    def next_number(self, key: str) -> int:
        return self._inner.next_number(key)

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    def key_count(self, messages: bool = True) -> int:
        return self._inner.key_count(messages)

    def close(self) -> None:
        self._inner.close()

    # --- keys and the epoch ---

    def _derived(self, *name: str) -> bytes:
        return self._token.key(*self._scope, *name)

    def _tagged(self, value: bytes, *name: str) -> bytes:
        return mac(self._key(*name), value) + value

    def _untagged(self, held: bytes, *name: str) -> bytes | None:
        value = held[_TAG_BYTES:]
        return value if hmac.compare_digest(self._tagged(value, *name), held) else None

    def _value(self, key: str, held: bytes | None) -> bytes | None:
        if held is None:
            return None
        value = self._untagged(held, "register", key)
        if value is None:
            raise BusForged(
                f"register {key!r} on {self.url} has a value that was not written with this job's "
                "token. Either another program writes to this bus (give the job a bus of its own), "
                "or the job's processes have different tokens (FFT_TOKEN)"
            )
        if key == HEAD:
            self._know(_epoch_in(value))
        return value

    def _know(self, epoch: int) -> None:
        with self._lock:
            self._epoch = max(self._epoch, epoch)


def _channel(topic: Topic) -> str:
    return "broadcast" if topic == "protocol" else "topic:" + topic


def _inbox(inbox: str) -> str:
    return "inbox:" + inbox


def _epoch_in(head: bytes) -> int:
    """Return the epoch in a value of the head register, or 0 if it has none."""
    try:
        epoch = json.loads(head)["record"]["epoch"]
    except (ValueError, TypeError, KeyError):
        return 0
    return epoch if isinstance(epoch, int) and epoch >= 0 else 0

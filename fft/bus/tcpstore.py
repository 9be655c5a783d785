"""The bus over torch's TCPStore: `tcp://host:port/job`.

Touches one TCPStore server and, in it, only keys under `fft/<job>/`. Per job there are

- `gen`        names this life of the server (see `ErrorBus.generation`)
- `head`       the number of the last message of the protocol taken, a counter
- `q/<number>` one such message: write-once, removed once it is `RING_MESSAGES` old
- `p/<topic>/head`, `p/<topic>/q/<number>`  the same for another topic
- `r/` `c/`    registers and counters by name
- `b/<slot>`   one ballot: all its votes in the order of casting
- `n/<slot>/<tag>`  how many votes were cast in it under one tag, a counter
- `i/<inbox>`  a queue of the store; it exists only while something is in it

**Messages.** A writer takes a number from `head`, then writes that slot. Listeners read the slots
in the order of numbers, so all hear the same order. A slot that stays empty while `head` has
passed it belongs to a writer that died or stalled: after `_GRACE_S` a listener's watch thread
fills it with a tombstone. A slot's first content is final; a writer that finds a tombstone takes
a new number. Whoever takes number n removes slot n - ring, so anything that happened to a slot
while `head` was less than a ring past it happened before the removal. That is the test both sides
use: a listener trusts what it read, and a writer what it wrote, only if `head`, read afterwards,
is still less than a ring past the slot. Otherwise it says `BusOverrun`.

**Ballots.** A vote is appended, then counted; only who brings the count to `voters` reads them.
So no count is ever ahead of the votes that it counts. Removing a ballot removes the counters of
the tags found in it. A vote that was appended before the removal and counted after it leaves its
counter behind, without a vote under its tag; now and then a client looks for such counters.

**Inboxes** are queues: the listener waits for one to have something in it, on a connection of its
own, and takes message by message. The store removes a queue with its last message; it neither
counts nor lists queues.

**Numbers** are the store's signed 64-bit counters taken modulo 2**64 and compared by their
distance (serial-number arithmetic), so running past the range is nothing special.

**Connections.** A TCPStore client never connects again, and after an operation that timed out the
late answer would be taken for the answer to the next question. So the first failure makes the
bus object unusable for good. Pass the old `generation` to `open_bus` to recognise a bus that was
started again empty. torch writes its own warnings about a lost server to stderr.

**Name service.** On every new connection torch looks up the client's name in the server's only
thread, and the server's name in the client. `serve_tcp` listens on an IPv4 socket when the host is
one, so that loopback peers are found in /etc/hosts; with torch's own IPv6 socket each of them
would be a DNS question, and one lost packet would stop the bus for 5 s. For clients on other
hosts, see that their addresses resolve quickly where the bus is served.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import struct
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import torch.distributed as dist

from fft.bus.base import (
    MAX_MESSAGE_BYTES,
    MAX_VALUE_BYTES,
    RING_MESSAGES,
    TOPICS,
    BusClosed,
    BusError,
    BusForgot,
    BusOverrun,
    BusUnreachable,
    ErrorBus,
    Subscription,
    Topic,
    check_bytes,
    check_job,
    check_key,
    check_topic,
    check_voters,
    deliver,
    overrun_text,
    report_lost,
)
from fft.bus.tcpconnection import Connection, TCPStore

_GRACE_S: Final = 0.5  # how long a taken slot may stay empty before it is given up
_WATCH_S: Final = 0.1  # how often a subscription looks at a slot that may hold it up
_PAUSE_S: Final = (0.5, 1.0)  # how often it looks whether there is one; at random, as many do it
_SELDOM_S: Final = (4.0, 8.0)  # the same in topics that can wait for a writer that died
_STALL_S: Final = 0.05  # a writer that took longer to get its number looks before it writes
_IDLE = timedelta(days=1)  # a listener's wait; torch warns on stderr each time one runs out
_NUDGE_WAIT_S: Final = 0.4
_JOIN_WAIT_S: Final = 0.4
_SWEEP: Final = 4096  # messages, or ballots removed, between two sweeps for what others left
_RETRIES: Final = 100
_NUMBERS: Final = 2**64
_SLOTS: Final = "q/"

_MESSAGE, _NUDGE, _TOMBSTONE = b"M", b"N", b"T"
_VALUE = b"="  # before every register value: the store cannot tell an empty one from none
_ABSENT = b"?"  # no value begins with this, so comparing with it reads and never writes
_VOTE = struct.Struct("!HII")  # bytes in the tag, in the vote, and its weight; then both


def _lag(head: int, number: int) -> int:
    """How far `head` is past `number`; negative if it has not reached it."""
    distance = (head - number) % _NUMBERS
    return distance - _NUMBERS if distance >= _NUMBERS // 2 else distance


class _Listener(Subscription):
    """A thread that waits on a connection of its own and hands over what `_hear` finds."""

    def __init__(
        self,
        bus: TcpBus,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
    ) -> None:
        self._bus = bus
        self._on_message = on_message
        self._on_lost = on_lost
        self._connection = bus._dial()
        self._connection.store.set_timeout(_IDLE)
        self._lock = threading.Lock()
        self._ended = False  # lost or closed: whichever comes first
        self._stop = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="fft-bus-listen", daemon=True)

    def start(self) -> None:
        self._listener.start()

    def discard(self) -> None:
        """Give the connection back; instead of `start`."""
        self._connection.drop()

    def cut(self) -> None:
        """Have the listener notice that the bus is lost, or that it was closed."""
        self._connection.cut()

    @abstractmethod
    def _hear(self) -> None:
        """Wait for what comes next and deliver it. Returns after a while, or when cut and closed.

        Raises a `BusError` that ends the subscription.
        """

    def _listen(self) -> None:
        try:
            while not self._stop.is_set():
                self._hear()
        except BusError as error:
            self._lose(error)
        finally:
            self._connection.drop()
            self._stop.set()

    def _ask(self, operation: Callable[[Any], Any]) -> Any:
        """Run `operation` on the listener's store; None if there is nothing, or when closed."""
        try:
            return operation(self._connection.store)
        except dist.DistStoreError:  # an empty queue, or a day went by
            return None
        except RuntimeError as error:
            if self._stop.is_set():
                return None
            raise self._bus._unreachable(error) from error

    def _lose(self, error: BusError) -> None:
        with self._lock:
            told, self._ended = self._ended, True
        self._stop.set()
        if not told:
            self._bus._forget(self)
            report_lost(self._on_lost, error)

    def close(self) -> None:
        with self._lock:
            self._ended = True
        self._stop.set()
        self._bus._forget(self)
        self._end()

    def _end(self) -> None:
        """End the threads, within 1 s; `_stop` is set."""
        self._connection.cut()
        self._join(self._listener, _JOIN_WAIT_S)

    @staticmethod
    def _join(thread: threading.Thread, seconds: float) -> None:
        if thread is not threading.current_thread():
            thread.join(seconds)


class _TcpInbox(_Listener):
    """Takes what is in one queue of the store."""

    def __init__(
        self,
        bus: TcpBus,
        inbox: str,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
    ) -> None:
        super().__init__(bus, on_message, on_lost)
        self._queue = bus._key("i/" + inbox)

    def _hear(self) -> None:
        # Taken first: where many messages wait, each costs the server one operation.
        frame = self._ask(lambda store: store.queue_pop(self._queue, False))
        if frame is None and not self._stop.is_set():
            self._ask(lambda store: store.wait([self._queue]))
        elif frame is not None and frame[:1] == _MESSAGE and not self._stop.is_set():
            deliver(self._on_message, bytes(frame[1:]))

    def _end(self) -> None:
        if self._listener is threading.current_thread():  # it ends with its callback
            return
        with contextlib.suppress(BusError):  # torch writes to stderr when a connection is cut
            self._bus._push(self._queue, _NUDGE)
            self._join(self._listener, _NUDGE_WAIT_S)
        if self._listener.is_alive():
            super()._end()


class _TcpSubscription(_Listener):
    """Waits for the next slot of a topic's ring; a second thread watches over it."""

    def __init__(
        self,
        bus: TcpBus,
        topic: Topic,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
    ) -> None:
        super().__init__(bus, on_message, on_lost)
        self._ring = bus._rings[topic]
        self._pauses = _PAUSE_S if topic == "protocol" else _SELDOM_S
        try:
            self._next = (self._ring.head() + 1) % _NUMBERS
        except BusError:
            self._connection.drop()
            raise
        self._watcher = threading.Thread(target=self._watch, name="fft-bus-watch", daemon=True)

    def start(self) -> None:
        super().start()
        self._watcher.start()

    def _hear(self) -> None:
        frame = self._wait_for(self._next)
        if frame is None or self._stop.is_set():
            return
        self._next = (self._next + 1) % _NUMBERS
        if frame[:1] == _MESSAGE:
            deliver(self._on_message, frame[1:])

    def _wait_for(self, number: int) -> bytes | None:
        """The content of slot `number` once it has any; None to try again.

        One `multi_get` reads the slot and then `head`: the order the ring's rule asks for.
        """
        keys = [self._ring.slot(number), self._bus._key(self._ring.head_name)]
        found = self._ask(lambda store: store.multi_get(keys))
        if found is None:
            return None
        frame, head = found
        if not frame or _lag(int(head), number) >= RING_MESSAGES:
            self._bus._delete(self._ring.slot_name(number))  # our watcher may have made it again
            raise BusOverrun(overrun_text("listener"))
        return bytes(frame)

    def _pause(self) -> float:
        return random.uniform(*self._pauses)

    def _watch(self) -> None:
        """Give up slots that hold the listener up; cut it loose from a server gone silent."""
        position, head, since = self._next, self._next - 1, time.monotonic()
        try:
            while not self._stop.wait(_WATCH_S if _lag(head, position) >= 0 else self._pause()):
                held_up = position == self._next and _lag(head, position) >= 0
                if held_up and time.monotonic() - since < _GRACE_S:
                    continue
                if held_up:
                    self._ring.bury(position, head)
                position, head, since = self._next, self._ring.head(), time.monotonic()
            if self._listener.is_alive():
                self._ring.send(_NUDGE)  # so that our listener wakes and sees the stop
        except BusError:  # the listener, cut loose, says why
            self._connection.cut()

    def _end(self) -> None:
        self._join(self._listener, _NUDGE_WAIT_S)
        if self._listener.is_alive():  # it is in a callback, or the server is silent
            super()._end()
        self._join(self._watcher, 0.1)


def _below(topic: Topic) -> str:
    """What the names of a topic's keys begin with."""
    return "" if topic == "protocol" else f"p/{topic}/"


class Ring:
    """The messages of one topic: how a slot is taken, written, given up and removed."""

    def __init__(self, bus: TcpBus, topic: Topic) -> None:
        self._bus = bus
        self.head_name = _below(topic) + "head"
        self._slots = _below(topic) + _SLOTS

    def send(self, frame: bytes) -> None:
        """Put `frame` into the next slot. Raises `BusOverrun` if this writer was stalled."""
        for _ in range(_RETRIES):
            asked = time.monotonic()
            number = self.take_number()
            if time.monotonic() - asked > _STALL_S and self._passed(number):
                continue  # given up for sure before anything was written
            if self.write_slot(number, frame):
                return
        raise BusOverrun(overrun_text("writer"))

    def take_number(self) -> int:
        return self._bus._add(self.head_name, 1)

    def write_slot(self, number: int, frame: bytes) -> bool:
        """Write a message into its slot; False if the slot was given up before."""
        if self._bus._swap(self.slot_name(number), b"", frame) != frame:
            return False
        self._bus._delete(self.slot_name(number - RING_MESSAGES))
        if self._passed(number):  # so the slot may have been given up, removed and made again
            self._bus._delete(self.slot_name(number))
            raise BusOverrun(overrun_text("writer"))
        if number % _SWEEP == 0:
            self._bus._sweep()
        return True

    def _passed(self, number: int) -> bool:
        return _lag(self.head(), number) >= RING_MESSAGES

    def bury(self, first: int, last: int) -> None:
        """Fill the slots from `first` to `last` that are still empty with tombstones.

        If the ring has removed `first` for good, only that one, so that whoever waits for it
        wakes and sees where `last` is.
        """
        lag = _lag(last, first)
        for offset in range(lag + 1 if lag < RING_MESSAGES else 1):
            name = self.slot_name(first + offset)
            if not self._bus._filled(name):
                self._bus._swap(name, b"", _TOMBSTONE)

    def sweep(self, names: Iterable[str]) -> None:
        """Remove what is in `names` of slots that the ring has passed."""
        slots = [name for name in names if name.startswith(self._slots)]
        head = self.head() if slots else 0
        for name in slots:
            if _lag(head, int(name.removeprefix(self._slots), 16)) >= RING_MESSAGES:
                self._bus._delete(name)

    def head(self) -> int:
        """The number that was taken last."""
        return self._bus._add(self.head_name, 0)

    def slot_name(self, number: int) -> str:
        return f"{self._slots}{number % _NUMBERS:016x}"

    def slot(self, number: int) -> str:
        """The key of slot `number`."""
        return self._bus._key(self.slot_name(number))


class TcpBus(ErrorBus):
    """One client of a TCPStore server, on one job's keys."""

    def __init__(self, url: str, timeout: float = 5.0) -> None:
        self.url = url
        self._host, self._port, self._job = parse_url(url)
        if not timeout > 0:
            raise BusError(f"the bus timeout must be more than 0 seconds, not {timeout!r}")
        self._timeout = timeout
        self._prefix = f"fft/{self._job}/"
        self._failure: str | None = None  # why the bus is unusable
        self._lock = threading.Lock()
        self._closing = False
        self._listeners: set[_Listener] = set()
        self._removed = 0  # ballots
        self._rings = {topic: Ring(self, topic) for topic in TOPICS}
        self._connection: Connection | None = self._dial()
        self._connection.limit(timeout)
        try:
            self.generation = self._find_generation()
        except BusError:
            self.close()
            raise

    def broadcast(self, payload: bytes, topic: Topic = "protocol") -> None:
        check_topic(topic)
        check_bytes(payload, "a message", MAX_MESSAGE_BYTES + self.extra)
        self._rings[topic].send(_MESSAGE + payload)

    def subscribe(
        self,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
        topic: Topic = "protocol",
    ) -> Subscription:
        check_topic(topic)
        self._live()
        return self._start(_TcpSubscription(self, topic, on_message, on_lost))

    def send(self, inbox: str, payload: bytes) -> None:
        check_key(inbox, "inbox")
        check_bytes(payload, "a message", MAX_MESSAGE_BYTES + self.extra)
        self._push(self._key("i/" + inbox), _MESSAGE + payload)

    def listen(
        self,
        inbox: str,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
    ) -> Subscription:
        check_key(inbox, "inbox")
        self._live()
        return self._start(_TcpInbox(self, inbox, on_message, on_lost))

    def _start(self, listener: _Listener) -> Subscription:
        with self._lock:
            if not self._closing:
                self._listeners.add(listener)
                listener.start()
                return listener
        listener.discard()
        raise BusClosed(f"the bus {self.url} was closed meanwhile")

    def read(self, key: str) -> bytes | None:
        check_key(key)
        held = self._peek("r/" + key)
        return None if held is None else held[1:]

    def write(self, key: str, value: bytes) -> None:
        check_key(key)
        check_bytes(value, "a register value", MAX_VALUE_BYTES + self.extra)
        self._do(lambda store: store.set(self._key("r/" + key), _VALUE + value))
        self._filled("r/" + key)  # the store answers to this only, and in order

    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        check_key(key)
        check_bytes(desired, "a register value", MAX_MESSAGE_BYTES + self.extra)
        before = b"" if expected is None else _VALUE + expected
        after = _VALUE + desired
        held = self._swap("r/" + key, before, after)
        # Without a value the store repeats what was expected: not to be taken for an answer.
        if before and held == before and (after != before or self._peek("r/" + key) is None):
            raise BusForgot(f"register {key!r} on {self.url} is gone; its value was known")
        return held[1:]

    def ballot(
        self, slot: str, tag: str, vote: bytes, voters: int, weight: int = 1
    ) -> list[bytes] | None:
        check_key(slot, "slot")
        check_key(tag, "tag")
        check_bytes(vote, "a vote", MAX_MESSAGE_BYTES + self.extra)
        check_voters(voters, weight)
        name = tag.encode()
        frame = _VOTE.pack(len(name), len(vote), weight) + name + vote
        self._do(lambda store: store.append(self._key("b/" + slot), frame))
        if self._add(_tally(slot, tag), weight) < voters:
            return None
        cast = self._peek("b/" + slot)
        if cast is None:
            return None  # deleted since; whoever deletes a ballot has done with it
        mine = [(v, w) for t, v, w in _split_votes(cast) if t == name]
        return [v for v, _ in mine] if sum(w for _, w in mine) >= voters else None

    def next_number(self, key: str) -> int:
        check_key(key)
        return self._add("c/" + key, 1)

    def delete(self, key: str) -> None:
        check_key(key)
        if self._remove_ballot(key) or self._delete("r/" + key) or self._delete("c/" + key):
            return
        self._remove_inbox(key)

    def _remove_ballot(self, slot: str) -> bool:
        cast = self._peek("b/" + slot)
        if cast is None:
            return False
        self._delete("b/" + slot)
        for tag in {t for t, _, _ in _split_votes(cast)}:
            self._delete(_tally(slot, tag.decode()))
        self._removed += 1
        if self._removed % _SWEEP == 0:
            self._sweep()
        return True

    def _remove_inbox(self, inbox: str) -> None:
        """Empty the queue: the store then forgets it. As many as are there now, no more."""
        queue = self._key("i/" + inbox)
        for _ in range(self._do(lambda store: store.queue_len(queue))):
            if self._do(lambda store: _pop(store, queue)) is None:
                return

    def key_count(self, messages: bool = True) -> int:
        found = self._keys("")
        if messages:
            return len(found)
        slots = tuple(self._key(_below(topic) + _SLOTS) for topic in TOPICS)
        return sum(not name.startswith(slots) for name in found)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            ending, connection = list(self._listeners), self._connection
        for listener in ending:
            listener.close()
        with self._lock:
            self._connection = None
        if connection is not None:
            connection.cut()
            connection.drop()

    # ---- the message rings

    def _sweep(self) -> None:
        """Remove slots that a writer should have removed before it died, and stray counters."""
        names = [key.removeprefix(self._prefix) for key in self._keys("")]
        for ring in self._rings.values():
            ring.sweep(names)
        self._sweep_tallies(names)

    def _sweep_tallies(self, names: Iterable[str]) -> None:
        """Remove counters without a vote under their tag.

        A counter that was there when the keys were listed was there after its votes. So if none
        of them is in the ballot now, they have been removed, and the counter was forgotten.
        """
        slots: dict[str, list[tuple[str, str]]] = {}
        for name in names:
            if name.startswith("n/"):
                slot, tag = _untally(name)
                slots.setdefault(slot, []).append((tag, name))
        for slot, tallies in slots.items():
            cast = {tag for tag, _, _ in _split_votes(self._peek("b/" + slot) or b"")}
            for tag, name in tallies:
                if tag.encode() not in cast:
                    self._delete(name)

    # ---- the store

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _dial(self) -> Connection:
        return Connection(self._host, self._port, self.url, self._timeout)

    def _find_generation(self) -> str:
        fresh = _VALUE + secrets.token_hex(16).encode()
        return self._swap("gen", b"", fresh)[1:].decode()

    def _forget(self, listener: _Listener) -> None:
        with self._lock:
            self._listeners.discard(listener)

    def _unreachable(self, error: Exception) -> BusUnreachable:
        """The error to raise for torch's `error`: the first reason found stays the reason.

        Every listener is cut loose, so that it hears of it too.
        """
        with self._lock:
            if self._failure is None:
                self._failure = (str(error).splitlines() or [type(error).__name__])[0]
            listeners = list(self._listeners)
        for listener in listeners:
            listener.cut()
        return BusUnreachable(self.url, self._failure)

    def _live(self) -> Connection:
        connection = self._connection
        if connection is None:
            raise BusClosed(f"the bus {self.url} was closed; open it again with open_bus")
        if self._failure is not None:
            raise BusUnreachable(self.url, self._failure)
        return connection

    def _do(self, operation: Callable[[Any], Any]) -> Any:
        """Run `operation` on the store; its first failure is the bus's last word."""
        connection = self._live()
        store = connection.store
        if store is None:
            raise BusClosed(f"the bus {self.url} was closed meanwhile")
        try:
            return operation(store)
        except RuntimeError as error:
            if self._connection is None:
                raise BusClosed(f"the bus {self.url} was closed meanwhile") from error
            connection.cut()
            raise self._unreachable(error) from error

    def _push(self, queue: str, frame: bytes) -> None:
        self._do(lambda store: store.queue_push(queue, frame))

    def _add(self, name: str, amount: int) -> int:
        return int(self._do(lambda store: store.add(self._key(name), amount))) % _NUMBERS

    def _swap(self, name: str, expected: bytes, desired: bytes) -> bytes:
        key = self._key(name)
        return bytes(self._do(lambda store: store.compare_set(key, expected, desired)))

    def _peek(self, name: str) -> bytes | None:
        """What `name` holds, now. (The store's own `get` waits for a key that is not there.)"""
        held = self._swap(name, _ABSENT, _ABSENT)
        return None if held == _ABSENT else held

    def _filled(self, name: str) -> bool:
        return bool(self._do(lambda store: store.check([self._key(name)])))

    def _delete(self, name: str) -> bool:
        return bool(self._do(lambda store: store.delete_key(self._key(name))))

    def _keys(self, below: str) -> list[str]:
        start = self._key(below)
        return [key for key in self._do(stored_keys) if key.startswith(start)]


def stored_keys(store: Any) -> list[str]:
    """All keys of a TCPStore, or those below the prefix of a PrefixStore.

    torch's ``list_keys`` keeps the interpreter's lock until the store has answered: of one whose
    host has vanished, for good. ``num_keys`` waits too, but stops no other thread.
    """
    store.num_keys()
    return list(store.list_keys())


def _pop(store: Any, queue: str) -> bytes | None:
    """The next message of a queue; None if it is empty."""
    try:
        return bytes(store.queue_pop(queue, False))
    except dist.QueueEmptyError:
        return None


def _tally(slot: str, tag: str) -> str:
    """Name of the counter of votes; the slot's length makes it clear where the tag begins."""
    return f"n/{len(slot)}/{slot}/{tag}"


def _untally(name: str) -> tuple[str, str]:
    """(slot, tag) of a counter's name."""
    _, length, rest = name.split("/", 2)
    return rest[: int(length)], rest[int(length) + 1 :]


def _split_votes(cast: bytes) -> list[tuple[bytes, bytes, int]]:
    """(tag, vote, weight) of every vote in a ballot, in the order of casting."""
    votes, at = [], 0
    while at < len(cast):
        tag_bytes, vote_bytes, weight = _VOTE.unpack_from(cast, at)
        at += _VOTE.size
        tag, at = cast[at : at + tag_bytes], at + tag_bytes
        votes.append((tag, cast[at : at + vote_bytes], weight))
        at += vote_bytes
    return votes


def parse_url(url: str) -> tuple[str, int, str]:
    """(host, port, job) of `tcp://host:port/job`; `BusError` that names what is wrong."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BusError(f"bus URL {url!r}: {error}; write tcp://host:port/job") from error
    if parts.scheme != "tcp" or not host or not port or parts.query or parts.fragment:
        raise BusError(f"bus URL {url!r}: write tcp://host:port/job")
    check_job(parts.path.removeprefix("/"), url)
    return host, port, parts.path.removeprefix("/")


class TcpBusServer:
    """A TCPStore server in this process, and the URL of one job on it."""

    def __init__(self, store: Any, url: str) -> None:
        self._store = store
        self.url = url

    def close(self) -> None:
        """Stop serving; every client's next operation fails. Idempotent."""
        self._store = None

    def __enter__(self) -> TcpBusServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_tcp(host: str = "127.0.0.1", port: int = 0, job: str | None = None) -> TcpBusServer:
    """Serve a bus on `host` only, at `port` (0: a free one), for `job` (None: a random name).

    Raises `BusError` if the address is not to be had.
    """
    job = job if job is not None else "job-" + secrets.token_hex(4)
    check_job(job, f"tcp://{host}:{port}/{job}")
    store, port = host_store(host, port)
    reach = f"[{host}]" if ":" in host else host
    return TcpBusServer(store, f"tcp://{reach}:{port}/{job}")


def host_store(host: str = "127.0.0.1", port: int = 0) -> tuple[Any, int]:
    """A TCPStore server in this process that listens on `host` only, and its port.

    It is given its listening socket: torch's own would be one for IPv6, on which the server's only
    thread asks the name service about every loopback client. Raises `BusError` if the address is
    not to be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise BusError(
            f"cannot serve on {host}:{port}: {error}; choose another host or port"
        ) from error
    port = listening.getsockname()[1]
    store = TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return store, port

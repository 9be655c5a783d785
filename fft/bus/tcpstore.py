"""The bus over torch's TCPStore: `tcp://host:port/job`.

It uses one TCPStore server and, in it, only keys under `fft/<job>/`. Each job has these keys:

- `gen`        identifies this life of the server (see `ErrorBus.generation`)
- `head`       a counter: the last number that was reserved for a message of the protocol
- `q/<number>` one such message: write-once, removed once it is `RING_MESSAGES` old
- `p/<topic>/head`, `p/<topic>/q/<number>`  the same for another topic
- `r/` `c/`    registers and counters by name
- `b/<slot>`   one ballot: all its votes in the order of casting
- `n/<slot>/<tag>`  a counter: the number of voters counted in the slot under one tag
- `i/<inbox>`  a queue of the store; it exists only while it holds a message

**Messages.** A writer reserves a number from `head`, then writes that slot. Listeners read the
slots in the order of numbers, so all receive the same order. A slot that stays empty while `head`
has passed it belongs to a writer that died or stalled: after half a second a listener's watch
thread fills it with a tombstone. A slot's first content is final; a writer that finds a tombstone
reserves a new number. The writer of number n removes slot n - ring, so anything that happened to a
slot while `head` was less than a ring past it happened before the removal. Both sides check this: a
listener trusts its read, and a writer its write, only if `head`, read afterwards, is still less
than a ring past the slot. Otherwise it raises `BusOverrun`.

**Ballots.** A vote is appended, then counted, so no count is ever ahead of the votes that it
counts. Only a client that sees the count reach `voters` uses the votes. Removing a ballot removes
the counters of the tags found in it. A vote that is appended before the removal and counted after
it leaves its counter behind, without a vote under its tag; clients occasionally sweep such
counters.

**Inboxes** are queues: the listener waits on its own connection until the queue holds a message,
and takes one message at a time. The store removes a queue with its last message; it neither counts
nor lists queues.

**Numbers** are the store's signed 64-bit counters taken modulo 2**64 and compared by their
distance (serial-number arithmetic), so wrapping around needs no special case.

**Connections.** `fft.bus.tcpclient` talks to the server; this module does not import torch.
Requests that do not depend on each other's answers are sent together. A server without an answer in
time may be stopped, and come back with its contents. A connection may also be lost while the
server lives: a firewall forgets it, or a switch restarts. The next operation, and each listener,
then opens a new connection and checks that the generation is the same. Requests that were certainly
not sent are sent again; of others it is unknown whether they took effect (`BusUnreachable`).
Subscriptions read on where they were. A listener of an inbox can lose the one message that the
server was sending it. A server that has ended has lost its contents. So a refused connection or
another generation makes the bus object unusable for good. Pass the old `generation` to `open_bus`
to recognise a bus that was started again empty.

**Name service.** For every new connection torch looks up the client's name in the server's only
thread. `serve_tcp` listens on an IPv4 socket if the host has an IPv4 address, so that loopback
peers are found in /etc/hosts. With torch's own IPv6 socket each of them would need a DNS query, and
one lost packet would stop the bus for 5 s. Make sure that the addresses of clients on other hosts
resolve quickly on the host that serves the bus.
"""

from __future__ import annotations

import logging
import secrets
import struct
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

from fft.bus import tcpclient
from fft.bus.base import (
    MAX_MESSAGE_BYTES,
    MAX_VALUE_BYTES,
    RING_MESSAGES,
    TOPICS,
    BusClosed,
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
from fft.bus.tcpclient import NotSent, Request, StoreClient
from fft.errors import BusError
from fft.util.chance import CHANCE

logger = logging.getLogger(__name__)

_FEW: Final = 8  # up to so many voters, reading the votes costs less than another round trip
_SWEEP: Final = 4096  # messages, or removed ballots, between two sweeps for leftovers
_VALUE = b"="  # prefix of every register value: the store treats an empty value as none
_ABSENT = b"?"  # no value begins with this, so comparing with it reads and never writes
_VOTE = struct.Struct("!HII")  # length of the tag, length of the vote, weight; tag and vote follow
_STALL_S: Final = 0.05  # a writer that waited longer for its number checks `head` before it writes
_RETRIES: Final = 100
_SLOTS: Final = "q/"
NUMBERS: Final = 2**64
MESSAGE, _TOMBSTONE = b"M", b"T"
_GRACE_S: Final = 0.5  # how long a reserved slot may stay empty before it gets a tombstone
_WATCH_S: Final = 0.1  # interval of checks while a slot may be blocking the subscription
PAUSE_S: Final = (0.5, 1.0)  # interval of checks otherwise; random, to spread many subscriptions
_SELDOM_S: Final = (4.0, 8.0)  # the same in topics that can wait longer for a dead writer's slot
_JOIN_WAIT_S: Final = 0.4


def lag(head: int, number: int) -> int:
    """Return how far `head` is past `number`; negative if it has not reached it."""
    distance = (head - number) % NUMBERS
    return distance - NUMBERS if distance >= NUMBERS // 2 else distance


def below(topic: Topic) -> str:
    """Return the prefix of the names of a topic's keys."""
    return "" if topic == "protocol" else f"p/{topic}/"


def slots_of(topic: Topic) -> str:
    """Return the prefix of the names of a topic's slots."""
    return below(topic) + _SLOTS


class Ring:
    """The messages of one topic: reserves, writes, buries and removes slots."""

    def __init__(self, bus: TcpBus, topic: Topic) -> None:
        self._bus = bus
        self.head_name = below(topic) + "head"
        self._slots = slots_of(topic)

    def send(self, frame: bytes) -> None:
        """Write `frame` into the next slot. Raises `BusOverrun` if this writer stalled."""
        for _ in range(_RETRIES):
            asked = time.monotonic()
            if self.fill(self.take_number(), asked, frame):
                return
        raise BusOverrun(overrun_text("writer"))

    def fill(self, number: int, asked: float, frame: bytes) -> bool:
        """Write into the slot `number`, which was requested at the time `asked` (monotonic).

        Returns False if the slot was given up, so that `frame` was not written.
        """
        if time.monotonic() - asked > _STALL_S and self._passed(number):
            return False  # certain, because nothing was written yet
        return self.write_slot(number, frame)

    def take_number(self) -> int:
        return self._bus._add(self.head_name, 1)

    def write_slot(self, number: int, frame: bytes) -> bool:
        """Write a message into its slot; return False if the slot holds a tombstone."""
        bus = self._bus
        held, _, head = bus._ask(
            tcpclient.compare_set(self.slot(number), b"", frame),
            tcpclient.delete(self.slot(number - RING_MESSAGES)),
            tcpclient.add(bus._key(self.head_name), 0),
        )
        if held != frame:
            return False
        if lag(head % NUMBERS, number) >= RING_MESSAGES:
            # The slot may have been buried and removed, and this call may have created it anew.
            bus._delete(self.slot_name(number))
            raise BusOverrun(overrun_text("writer"))
        if number % _SWEEP == 0:
            bus._sweep()
        return True

    def _passed(self, number: int) -> bool:
        return lag(self.head(), number) >= RING_MESSAGES

    def bury(self, first: int, last: int) -> None:
        """Fill the slots from `first` to `last` that are still empty with tombstones.

        If the ring has already passed `first`, fill only that slot, so that a listener that waits
        for it wakes up and notices the overrun.
        """
        passed = lag(last, first)
        for offset in range(passed + 1 if passed < RING_MESSAGES else 1):
            name = self.slot_name(first + offset)
            if not self._bus._filled(name):
                self._bus._swap(name, b"", _TOMBSTONE)

    def sweep(self, names: Iterable[str]) -> None:
        """Remove the slots in `names` that the ring has passed."""
        slots = [name for name in names if name.startswith(self._slots)]
        head = self.head() if slots else 0
        for name in slots:
            if lag(head, int(name.removeprefix(self._slots), 16)) >= RING_MESSAGES:
                self._bus._delete(name)

    def head(self) -> int:
        """Return the number that was reserved last."""
        return self._bus._add(self.head_name, 0)

    def slot_name(self, number: int) -> str:
        return f"{self._slots}{number % NUMBERS:016x}"

    def slot(self, number: int) -> str:
        """Return the key of slot `number`."""
        return self._bus._key(self.slot_name(number))


class Listener(Subscription):
    """A thread that waits for messages on its own connection and delivers them (`_hear`)."""

    def __init__(
        self,
        bus: TcpBus,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
    ) -> None:
        self._bus = bus
        self._on_message = on_message
        self._on_lost = on_lost
        self._client = bus._dial()
        self._is_waiting = False
        """It waits for a message, and has requested none."""
        self._turn = threading.Lock()
        """Held while `_is_waiting` changes, and while `renew` acts on it: a request that takes a
        message from the server must not lose its answer."""
        self._lock = threading.Lock()
        self._ended = False  # lost or closed, whichever came first
        self._stop = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="fft-bus-listen", daemon=True)

    def start(self) -> None:
        self._listener.start()

    def discard(self) -> None:
        """Close the connection; called instead of `start`."""
        self._client.close()

    def cut(self) -> None:
        """Wake the listener, so that it notices that the bus is lost or was closed."""
        self._client.cut()

    @abstractmethod
    def _hear(self) -> None:
        """Wait for the next message and deliver it; return early once closed.

        A `BusError` that it raises ends the subscription.
        """

    def _listen(self) -> None:
        try:
            while not self._stop.is_set():
                self._hear()
        except BusError as error:
            self._lose(error)
        finally:
            self._client.close()
            self._stop.set()

    def renew(self) -> None:
        """Open a new connection if it is only waiting, because others were lost. Thread-safe."""
        with self._turn:
            if self._is_waiting:
                self._client.cut()

    def _ask(self, *requests: Request, waits: bool = False) -> Any:
        """Return the server's answer to the last of the requests, or None once closed.

        Repeats the requests on a new connection if the present one is lost.

        Args:
            waits: The requests only wait for a message.
        """
        while not self._stop.is_set():
            with self._turn:
                self._is_waiting = waits
            try:
                return self._client.ask(*requests)[-1]
            except OSError as error:
                self._is_waiting = False
                self._reconnect(error)
        return None

    def _reconnect(self, error: OSError) -> None:
        """Open a new connection, unless the listener is closed meanwhile.

        Raises:
            BusError: The bus is lost.
        """
        while not self._stop.is_set():
            if (why := self._bus._lost) is not None:
                raise why()
            try:
                client = self._bus._verified()
            except BusError:
                if self._bus.is_lost:
                    raise
                self._stop.wait(CHANCE.uniform(*PAUSE_S))
                continue
            client.wait_without_limit()
            self._client.close()
            self._client = client
            if self._stop.is_set() or self._bus.is_lost:  # a cut may have missed the new connection
                client.cut()
            logger.warning(
                "a listener of the bus at %s is connected again: %s", self._bus.url, error
            )
            return

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
        """End the threads within 1 s, after `_stop` was set."""
        self._client.cut()
        self._join(self._listener, _JOIN_WAIT_S)

    @staticmethod
    def _join(thread: threading.Thread, seconds: float) -> None:
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join(seconds)


class TcpInbox(Listener):
    """The listener of an inbox, which is one queue of the store."""

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
        # Pop before waiting: a message from a backlog then costs the server one operation.
        frame = self._ask(tcpclient.pop(self._queue))
        if frame is None and not self._stop.is_set():
            self._ask(tcpclient.wait([self._queue]), waits=True)
        elif frame is not None and not self._stop.is_set():
            deliver(self._on_message, frame.removeprefix(MESSAGE))


class TcpSubscription(Listener):
    """The listener of a topic's ring, with a second thread that buries slots of dead writers."""

    def __init__(
        self,
        bus: TcpBus,
        topic: Topic,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
    ) -> None:
        super().__init__(bus, on_message, on_lost)
        self._ring = bus._rings[topic]
        self._pauses = PAUSE_S if topic == "protocol" else _SELDOM_S
        try:
            self._next = (self._ring.head() + 1) % NUMBERS
        except BusError:
            self.discard()
            raise
        self._watcher = threading.Thread(target=self._watch, name="fft-bus-watch", daemon=True)

    def start(self) -> None:
        super().start()
        self._watcher.start()

    def _hear(self) -> None:
        frame = self._wait_for(self._next)
        if frame is None or self._stop.is_set():
            return
        self._next = (self._next + 1) % NUMBERS
        if frame[:1] == MESSAGE:
            deliver(self._on_message, frame[1:])

    def _wait_for(self, number: int) -> bytes | None:
        """Wait until slot `number` is filled and return its content, or None once closed.

        One request reads the slot and then `head`, the order that the overrun check needs.
        """
        keys = [self._ring.slot(number), self._bus._key(self._ring.head_name)]
        if self._ask(tcpclient.wait(keys), waits=True) is None:
            return None
        found = self._ask(tcpclient.get_all(keys))
        if found is None:
            return None
        frame, head = found
        if not frame or lag(int(head), number) >= RING_MESSAGES:
            self._bus._delete(self._ring.slot_name(number))  # the watcher may have recreated it
            raise BusOverrun(overrun_text("listener"))
        return bytes(frame)

    def _pause(self) -> float:
        return CHANCE.uniform(*self._pauses)

    def _watch(self) -> None:
        """Bury slots that block the listener; cut its connection once the bus is lost."""
        position, head, since = self._next, self._next - 1, time.monotonic()
        while not self._stop.wait(_WATCH_S if lag(head, position) >= 0 else self._pause()):
            held_up = position == self._next and lag(head, position) >= 0
            if held_up and time.monotonic() - since < _GRACE_S:
                continue
            try:
                if held_up:
                    self._ring.bury(position, head)
                position, head, since = self._next, self._ring.head(), time.monotonic()
            except BusError:  # if the bus is lost, the listener reports the reason once it is cut
                if self._bus.is_lost:
                    self._client.cut()
                    return

    def _end(self) -> None:
        super()._end()
        self._join(self._watcher, 0.1)


class TcpBus(ErrorBus):
    """One client of a TCPStore server, on one job's keys."""

    def __init__(self, url: str, timeout: float = 5.0) -> None:
        self.url = url
        self._host, self._port, self._job = parse_url(url)
        if not timeout > 0:
            raise BusError(f"the bus timeout must be more than 0 seconds, not {timeout!r}")
        self._timeout = timeout
        self._prefix = f"fft/{self._job}/"
        self._lost: Callable[[], BusError] | None = None  # why it is unusable for good
        self._lock = threading.Lock()
        self._dialling = threading.RLock()
        self._closing = False
        self._listeners: set[Listener] = set()
        self._removed = 0  # ballots
        self._rings = {topic: Ring(self, topic) for topic in TOPICS}
        self._client: StoreClient | None = self._dial(timeout)
        try:
            self.generation = self._find_generation()
        except BusError:
            self.close()
            raise

    def broadcast(self, payload: bytes, topic: Topic = "protocol") -> None:
        check_topic(topic)
        check_bytes(payload, "a message", MAX_MESSAGE_BYTES + self.extra)
        self._rings[topic].send(MESSAGE + payload)

    def subscribe(
        self,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
        topic: Topic = "protocol",
    ) -> Subscription:
        check_topic(topic)
        self._live()
        return self._start(TcpSubscription(self, topic, on_message, on_lost))

    def send(self, inbox: str, payload: bytes) -> None:
        check_key(inbox, "inbox")
        check_bytes(payload, "a message", MAX_MESSAGE_BYTES + self.extra)
        self._push(self._key("i/" + inbox), MESSAGE + payload)

    def listen(
        self,
        inbox: str,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
    ) -> Subscription:
        check_key(inbox, "inbox")
        self._live()
        return self._start(TcpInbox(self, inbox, on_message, on_lost))

    def _start(self, listener: Listener) -> Subscription:
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
        name = self._key("r/" + key)
        # A put has no answer; the answer to the check, which comes later, proves that it is done.
        self._ask(tcpclient.put(name, _VALUE + value), tcpclient.check(name))

    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        asking = self._comparison(key, expected, desired)
        return self._held(key, expected, desired, self._ask(asking)[0])

    def decide(
        self, key: str, expected: bytes | None, desired: bytes, announcement: bytes
    ) -> bytes | None:
        """Reserve the broadcast's number together with the compare-and-set; losers release it."""
        check_bytes(announcement, "a message", MAX_MESSAGE_BYTES + self.extra)
        ring, asked, held = self._rings["protocol"], time.monotonic(), None
        asking = self._comparison(key, expected, desired)
        answer, taken = self._ask(asking, tcpclient.add(self._key(ring.head_name), 1))
        number, frame = taken % NUMBERS, MESSAGE + announcement
        try:
            held = self._held(key, expected, desired, answer)
        finally:
            if held != desired:
                ring.bury(number, number)
        if held == desired and not ring.fill(number, asked, frame):
            ring.send(frame)
        return held

    def _comparison(self, key: str, expected: bytes | None, desired: bytes) -> Request:
        check_key(key)
        check_bytes(desired, "a register value", MAX_MESSAGE_BYTES + self.extra)
        before = b"" if expected is None else _VALUE + expected
        return tcpclient.compare_set(self._key("r/" + key), before, _VALUE + desired)

    def _held(self, key: str, expected: bytes | None, desired: bytes, answer: bytes) -> bytes:
        """Return the value held after a compare-and-set with this answer."""
        # For a key without a value the store returns `expected`, which is not a value it holds.
        repeats = expected is not None and answer == _VALUE + expected
        if repeats and (desired != expected or self._peek("r/" + key) is None):
            raise BusForgot(f"register {key!r} on {self.url} is gone; its value was known")
        return answer[1:]

    def ballot(
        self, slot: str, tag: str, vote: bytes, voters: int, weight: int = 1
    ) -> list[bytes] | None:
        check_key(slot, "slot")
        check_key(tag, "tag")
        check_bytes(vote, "a vote", MAX_MESSAGE_BYTES + self.extra)
        check_voters(voters, weight)
        name = tag.encode()
        frame = _VOTE.pack(len(name), len(vote), weight) + name + vote
        ballot = self._key("b/" + slot)
        counted, *read = self._ask(
            tcpclient.append(ballot, frame),
            tcpclient.add(self._key(_tally(slot, tag)), weight),
            *([_look(ballot)] if voters <= _FEW else []),
        )
        if counted % NUMBERS < voters:
            return None
        cast = _seen(read[0]) if read else self._peek("b/" + slot)
        if cast is None:
            return None  # deleted since; a ballot is deleted once its result is not needed
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
        tallies = [_tally(slot, tag.decode()) for tag in {t for t, _, _ in _split_votes(cast)}]
        self._ask(*(tcpclient.delete(self._key(name)) for name in ("b/" + slot, *tallies)))
        self._removed += 1
        if self._removed % _SWEEP == 0:
            self._sweep()
        return True

    def _remove_inbox(self, inbox: str) -> None:
        """Empty the queue, which removes it; take no more messages than it holds at the start."""
        queue = self._key("i/" + inbox)
        for _ in range(self._ask(tcpclient.length(queue))[0]):
            if self._ask(tcpclient.pop(queue)) == [None]:
                return

    def key_count(self, messages: bool = True) -> int:
        found = self._keys("")
        if messages:
            return len(found)
        slots = tuple(self._key(slots_of(topic)) for topic in TOPICS)
        return sum(not name.startswith(slots) for name in found)

    def lose(self) -> bool:
        self._lose(partial(BusUnreachable, self.url, "an injected fault"))
        if (client := self._client) is not None:
            client.cut()
        return True

    def close(self) -> None:
        with self._lock:
            self._closing = True
            ending, client = list(self._listeners), self._client
        for listener in ending:
            listener.close()
        with self._lock:
            self._client = None
        if client is not None:
            client.close()

    # ---- the message rings

    def _sweep(self) -> None:
        """Remove slots that a dead writer left behind, and stray vote counters."""
        names = [key.removeprefix(self._prefix) for key in self._keys("")]
        for ring in self._rings.values():
            ring.sweep(names)
        self._sweep_tallies(names)

    def _sweep_tallies(self, names: Iterable[str]) -> None:
        """Remove vote counters whose ballot holds no vote under their tag.

        A counter is created after its first vote. So if a counter was listed and the ballot has
        none of its votes now, the votes were removed and the counter was left behind.
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

    def _dial(self, limit: float | None = None) -> StoreClient:
        try:
            return StoreClient(self._host, self._port, self._timeout, limit)
        except OSError as error:
            raise BusUnreachable(self.url, str(error)) from error

    def _find_generation(self) -> str:
        fresh = _VALUE + secrets.token_hex(16).encode()
        return self._swap("gen", b"", fresh)[1:].decode()

    def _forget(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.discard(listener)

    @property
    def is_lost(self) -> bool:
        """Whether the server is known to have ended, or to have lost its contents."""
        return self._lost is not None

    def _lose(self, why: Callable[[], BusError]) -> BusError:
        """Mark the bus as lost, cut every listener, and return the error for the first reason."""
        with self._lock:
            self._lost = why = self._lost or why
            listeners = list(self._listeners)
        for listener in listeners:
            listener.cut()
        return why()

    def _live(self) -> StoreClient:
        client = self._client
        if client is None:
            raise BusClosed(f"the bus {self.url} was closed; open it again with open_bus")
        if self._lost is not None:
            raise self._lost()
        return self._back(client) if client.has_failed else client

    def _back(self, old: StoreClient) -> StoreClient:
        """Replace a connection that has failed, if the server's generation is unchanged."""
        with self._dialling:
            if self._client is not old:
                return self._live()
            client = self._verified()
            with self._lock:
                if self._closing:
                    client.close()
                    raise BusClosed(f"the bus {self.url} was closed meanwhile")
                self._client, listeners = client, list(self._listeners)
            old.close()
            logger.warning("the bus at %s answers on a new connection", self.url)
            for listener in listeners:  # whatever ended this connection may have ended theirs
                listener.renew()
            return client

    def _verified(self) -> StoreClient:
        """Return a new connection to the same server.

        Raises:
            BusUnreachable: The server did not answer; if it has ended, the bus is lost.
            BusForgot: Another server has taken its place, so the bus is lost.
        """
        try:
            client = self._dial(self._timeout)
        except BusUnreachable as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                why = partial(BusUnreachable, self.url, str(error.__cause__))
                raise self._lose(why) from error
            raise
        try:
            held = client.ask(_look(self._key("gen")))[0]
        except OSError as error:
            client.close()
            raise BusUnreachable(self.url, str(error)) from error
        if held != _VALUE + self.generation.encode():
            client.close()
            text = f"the bus at {self.url} has come back empty, and cannot be gone on with"
            raise self._lose(partial(BusForgot, text))
        return client

    def _ask(self, *requests: Request) -> list[Any]:
        """Send the requests in one round trip and return the server's answers."""
        client = self._live()
        try:
            try:
                return client.ask(*requests)
            except NotSent:
                return self._live().ask(*requests)
        except OSError as error:
            if self._client is None:
                raise BusClosed(f"the bus {self.url} was closed meanwhile") from error
            raise BusUnreachable(self.url, str(error) or type(error).__name__) from error

    def _push(self, queue: str, frame: bytes) -> None:
        self._ask(tcpclient.push(queue, frame))

    def _add(self, name: str, amount: int) -> int:
        return int(self._ask(tcpclient.add(self._key(name), amount))[0]) % NUMBERS

    def _swap(self, name: str, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._ask(tcpclient.compare_set(self._key(name), expected, desired))[0])

    def _peek(self, name: str) -> bytes | None:
        """Return the current value of `name`, or None."""
        return _seen(self._ask(_look(self._key(name)))[0])

    def _filled(self, name: str) -> bool:
        return bool(self._ask(tcpclient.check(self._key(name)))[0])

    def _delete(self, name: str) -> bool:
        return bool(self._ask(tcpclient.delete(self._key(name)))[0])

    def _keys(self, below: str) -> list[str]:
        start = self._key(below)
        return [key for key in self._ask(tcpclient.list_keys())[0] if key.startswith(start)]


def _look(key: str) -> Request:
    """Return a request that reads a key; the store's own read would wait for a missing key."""
    return tcpclient.compare_set(key, _ABSENT, _ABSENT)


def _seen(held: bytes) -> bytes | None:
    """Return the value in an answer to `_look`, or None if the key has none."""
    return None if held == _ABSENT else held


def _tally(slot: str, tag: str) -> str:
    """Return the name of a vote counter; the slot's length marks where the tag begins."""
    return f"n/{len(slot)}/{slot}/{tag}"


def _untally(name: str) -> tuple[str, str]:
    """Return the (slot, tag) in a vote counter's name."""
    _, length, rest = name.split("/", 2)
    return rest[: int(length)], rest[int(length) + 1 :]


def _split_votes(cast: bytes) -> list[tuple[bytes, bytes, int]]:
    """Return (tag, vote, weight) of every vote in a ballot, in the order of casting."""
    votes, at = [], 0
    while at < len(cast):
        tag_bytes, vote_bytes, weight = _VOTE.unpack_from(cast, at)
        at += _VOTE.size
        tag, at = cast[at : at + tag_bytes], at + tag_bytes
        votes.append((tag, cast[at : at + vote_bytes], weight))
        at += vote_bytes
    return votes


def parse_url(url: str) -> tuple[str, int, str]:
    """Return (host, port, job) of `tcp://host:port/job`; raise `BusError` if it is malformed."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BusError(f"bus URL {url!r}: {error}; write tcp://host:port/job") from error
    if parts.scheme != "tcp" or not host or not port or parts.query or parts.fragment:
        raise BusError(f"bus URL {url!r}: write tcp://host:port/job")
    check_job(parts.path.removeprefix("/"), url)
    return host, port, parts.path.removeprefix("/")

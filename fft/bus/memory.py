"""The in-process bus, `memory://name`, for tests, simulations and groups that are threads.

It fulfils the whole contract of `fft.bus.base` among the threads of one process. The broker of a
name exists while a client of that name is open. It uses nothing outside the process.
"""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Callable

from fft.bus.base import (
    MAX_MESSAGE_BYTES,
    MAX_VALUE_BYTES,
    RING_MESSAGES,
    TOPICS,
    BusClosed,
    BusForgot,
    BusOverrun,
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
from fft.errors import BusError

_CLOSE_WAIT_S = 0.9  # close() promises 1 s; a callback that runs longer is left to finish


class _MemorySubscription(Subscription):
    """A queue and the thread that empties it: the listener of a topic, or of `inbox` if given."""

    def __init__(
        self,
        broker: _Broker,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
        inbox: str | None = None,
    ) -> None:
        self._broker = broker
        self._on_message = on_message
        self._on_lost = on_lost
        self.inbox = inbox
        self._ready = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._closed = False
        self._overrun = False
        self._thread = threading.Thread(target=self._listen, name="fft-bus-listen", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, payload: bytes) -> None:
        """Queue `payload`; called under the broker's lock, so that all queues have one order."""
        with self._ready:
            if self.inbox is None and len(self._waiting) >= RING_MESSAGES:
                self._overrun = True
            if not self._overrun:
                self._waiting.append(payload)
            self._ready.notify()

    def _listen(self) -> None:
        while True:
            with self._ready:
                while not (self._waiting or self._overrun or self._closed):
                    self._ready.wait()
                if self._closed:
                    return
                if self._overrun:
                    break
                payload = self._waiting.popleft()
            deliver(self._on_message, payload)
        self._broker.remove(self)
        report_lost(self._on_lost, BusOverrun(overrun_text("listener")))

    def close(self) -> None:
        self._broker.remove(self)
        with self._ready:
            self._closed = True
            self._ready.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_WAIT_S)


class _Broker:
    """The state that all clients of one name share. `lock` guards every attribute."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.generation = uuid.uuid4().hex
        self.clients = 0
        self.listeners: dict[Topic, list[_MemorySubscription]] = {topic: [] for topic in TOPICS}
        self.inboxes: dict[str, _MemorySubscription] = {}
        self.mail: dict[str, list[bytes]] = {}  # messages to inboxes without a listener
        self.registers: dict[str, bytes] = {}
        self.ballots: dict[str, list[tuple[str, bytes, int]]] = {}
        self.counters: dict[str, int] = {}

    def remove(self, subscription: _MemorySubscription) -> None:
        with self.lock:
            for listeners in self.listeners.values():
                if subscription in listeners:
                    listeners.remove(subscription)
            if subscription.inbox and self.inboxes.get(subscription.inbox) is subscription:
                del self.inboxes[subscription.inbox]


_brokers: dict[str, _Broker] = {}
_brokers_lock = threading.Lock()


class MemoryBus(ErrorBus):
    """One client of the broker `name`."""

    def __init__(self, name: str) -> None:
        self.url = f"memory://{name}"
        check_job(name, self.url)
        self._name = name
        self._closed = False
        self._subscriptions: list[_MemorySubscription] = []
        with _brokers_lock:
            self._shared = _brokers.setdefault(name, _Broker())
            self._shared.clients += 1
        self.generation = self._shared.generation

    def _open(self) -> _Broker:
        if self._closed:
            raise BusClosed(f"the bus {self.url} was closed; open it again with open_bus")
        return self._shared

    def broadcast(self, payload: bytes, topic: Topic = "protocol") -> None:
        check_topic(topic)
        check_bytes(payload, "a message", MAX_MESSAGE_BYTES + self.extra)
        broker = self._open()
        with broker.lock:
            for listener in broker.listeners[topic]:
                listener.put(payload)

    def subscribe(
        self,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
        topic: Topic = "protocol",
    ) -> Subscription:
        check_topic(topic)
        broker = self._open()
        subscription = _MemorySubscription(broker, on_message, on_lost)
        with broker.lock:
            broker.listeners[topic].append(subscription)
            self._subscriptions.append(subscription)
        subscription.start()
        return subscription

    def send(self, inbox: str, payload: bytes) -> None:
        check_key(inbox, "inbox")
        check_bytes(payload, "a message", MAX_MESSAGE_BYTES + self.extra)
        broker = self._open()
        with broker.lock:
            if inbox in broker.inboxes:
                broker.inboxes[inbox].put(payload)
            else:
                broker.mail.setdefault(inbox, []).append(payload)

    def listen(
        self,
        inbox: str,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
    ) -> Subscription:
        check_key(inbox, "inbox")
        broker = self._open()
        subscription = _MemorySubscription(broker, on_message, on_lost, inbox)
        with broker.lock:
            if inbox in broker.inboxes:
                raise BusError(f"somebody listens to inbox {inbox!r} on {self.url} already")
            for payload in broker.mail.pop(inbox, []):
                subscription.put(payload)
            broker.inboxes[inbox] = subscription
            self._subscriptions.append(subscription)
        subscription.start()
        return subscription

    def read(self, key: str) -> bytes | None:
        check_key(key)
        broker = self._open()
        with broker.lock:
            return broker.registers.get(key)

    def write(self, key: str, value: bytes) -> None:
        check_key(key)
        check_bytes(value, "a register value", MAX_VALUE_BYTES + self.extra)
        broker = self._open()
        with broker.lock:
            broker.registers[key] = value

    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        check_key(key)
        check_bytes(desired, "a register value", MAX_MESSAGE_BYTES + self.extra)
        broker = self._open()
        with broker.lock:
            held = broker.registers.get(key)
            if held is None and expected is not None:
                raise BusForgot(f"register {key!r} on {self.url} is gone; its value was known")
            if held != expected:
                return held
            broker.registers[key] = desired
            return desired

    def ballot(
        self, slot: str, tag: str, vote: bytes, voters: int, weight: int = 1
    ) -> list[bytes] | None:
        check_key(slot, "slot")
        check_key(tag, "tag")
        check_bytes(vote, "a vote", MAX_MESSAGE_BYTES + self.extra)
        check_voters(voters, weight)
        broker = self._open()
        with broker.lock:
            cast = broker.ballots.setdefault(slot, [])
            cast.append((tag, vote, weight))
            mine = [(v, w) for t, v, w in cast if t == tag]
        return [v for v, _ in mine] if sum(w for _, w in mine) >= voters else None

    def next_number(self, key: str) -> int:
        check_key(key)
        broker = self._open()
        with broker.lock:
            number = (broker.counters.get(key, 0) + 1) % 2**64
            broker.counters[key] = number
        return number

    def delete(self, key: str) -> None:
        check_key(key)
        broker = self._open()
        with broker.lock:
            for kind in (broker.ballots, broker.registers, broker.counters, broker.mail):
                if key in kind:
                    del kind[key]
                    return

    def key_count(self, messages: bool = True) -> int:
        broker = self._open()
        with broker.lock:
            named = len(broker.registers) + len(broker.ballots) + len(broker.counters)
            return named + len(broker.mail)

    def close(self) -> None:
        with _brokers_lock:
            if self._closed:
                return
            self._closed = True
            self._shared.clients -= 1
            if self._shared.clients == 0:
                del _brokers[self._name]
        with self._shared.lock:
            ending = list(self._subscriptions)
        for subscription in ending:
            subscription.close()

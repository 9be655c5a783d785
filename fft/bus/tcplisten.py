"""Listeners of a TCP bus, each on a connection of its own; see `fft.bus.tcpstore`."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from fft.bus import tcpclient
from fft.bus.base import (
    RING_MESSAGES,
    BusError,
    BusOverrun,
    Subscription,
    Topic,
    deliver,
    overrun_text,
    report_lost,
)
from fft.bus.tcpclient import Request
from fft.bus.tcpring import MESSAGE, NUMBERS, lag
from fft.util.chance import CHANCE

if TYPE_CHECKING:
    from fft.bus.tcpstore import TcpBus

_GRACE_S: Final = 0.5  # how long a taken slot may stay empty before it is given up
_WATCH_S: Final = 0.1  # how often a subscription looks at a slot that may hold it up
PAUSE_S: Final = (0.5, 1.0)  # how often it looks whether there is one; at random, as many do it
_SELDOM_S: Final = (4.0, 8.0)  # the same in topics that can wait for a writer that died
_JOIN_WAIT_S: Final = 0.4


class Listener(Subscription):
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
        self._client = bus._dial()
        self._lock = threading.Lock()
        self._ended = False  # lost or closed: whichever comes first
        self._stop = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="fft-bus-listen", daemon=True)

    def start(self) -> None:
        self._listener.start()

    def discard(self) -> None:
        """Give the connection back; instead of `start`."""
        self._client.close()

    def cut(self) -> None:
        """Have the listener notice that the bus is lost, or that it was closed."""
        self._client.cut()

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
            self._client.close()
            self._stop.set()

    def _ask(self, *requests: Request) -> Any:
        """What the server answers to the last of the requests; None when closed."""
        try:
            return self._client.ask(*requests)[-1]
        except OSError as error:
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
        self._client.cut()
        self._join(self._listener, _JOIN_WAIT_S)

    @staticmethod
    def _join(thread: threading.Thread, seconds: float) -> None:
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join(seconds)


class TcpInbox(Listener):
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
        frame = self._ask(tcpclient.pop(self._queue))
        if frame is None and not self._stop.is_set():
            self._ask(tcpclient.wait([self._queue]))
        elif frame is not None and not self._stop.is_set():
            deliver(self._on_message, frame.removeprefix(MESSAGE))


class TcpSubscription(Listener):
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
        """The content of slot `number` once it has any; None when closed.

        One request reads the slot and then `head`: the order the ring's rule asks for.
        """
        keys = [self._ring.slot(number), self._bus._key(self._ring.head_name)]
        if self._ask(tcpclient.wait(keys)) is None:
            return None
        found = self._ask(tcpclient.get_all(keys))
        if found is None:
            return None
        frame, head = found
        if not frame or lag(int(head), number) >= RING_MESSAGES:
            self._bus._delete(self._ring.slot_name(number))  # our watcher may have made it again
            raise BusOverrun(overrun_text("listener"))
        return bytes(frame)

    def _pause(self) -> float:
        return CHANCE.uniform(*self._pauses)

    def _watch(self) -> None:
        """Give up slots that hold the listener up; cut it loose once the bus is lost."""
        position, head, since = self._next, self._next - 1, time.monotonic()
        while not self._stop.wait(_WATCH_S if lag(head, position) >= 0 else self._pause()):
            held_up = position == self._next and lag(head, position) >= 0
            if held_up and time.monotonic() - since < _GRACE_S:
                continue
            try:
                if held_up:
                    self._ring.bury(position, head)
                position, head, since = self._next, self._ring.head(), time.monotonic()
            except BusError:  # silent, or lost; then the listener, cut loose, says why
                if self._bus.is_lost:
                    self._client.cut()
                    return

    def _end(self) -> None:
        super()._end()
        self._join(self._watcher, 0.1)

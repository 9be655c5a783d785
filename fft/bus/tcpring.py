"""The messages of one topic of a TCP bus: slots in a ring; see `fft.bus.tcpstore`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from fft.bus import tcpclient
from fft.bus.base import RING_MESSAGES, BusOverrun, Topic, overrun_text

if TYPE_CHECKING:
    from fft.bus.tcpstore import TcpBus

_STALL_S: Final = 0.05  # a writer that took longer to get its number looks before it writes
_SWEEP: Final = 4096  # messages between two sweeps for what others left
_RETRIES: Final = 100
_SLOTS: Final = "q/"
NUMBERS: Final = 2**64
MESSAGE, _TOMBSTONE = b"M", b"T"


def lag(head: int, number: int) -> int:
    """How far `head` is past `number`; negative if it has not reached it."""
    distance = (head - number) % NUMBERS
    return distance - NUMBERS if distance >= NUMBERS // 2 else distance


def below(topic: Topic) -> str:
    """What the names of a topic's keys begin with."""
    return "" if topic == "protocol" else f"p/{topic}/"


def slots_of(topic: Topic) -> str:
    """What the names of its slots begin with."""
    return below(topic) + _SLOTS


class Ring:
    """The messages of one topic: how a slot is taken, written, given up and removed."""

    def __init__(self, bus: TcpBus, topic: Topic) -> None:
        self._bus = bus
        self.head_name = below(topic) + "head"
        self._slots = slots_of(topic)

    def send(self, frame: bytes) -> None:
        """Put `frame` into the next slot. Raises `BusOverrun` if this writer was stalled."""
        for _ in range(_RETRIES):
            asked = time.monotonic()
            if self.fill(self.take_number(), asked, frame):
                return
        raise BusOverrun(overrun_text("writer"))

    def fill(self, number: int, asked: float, frame: bytes) -> bool:
        """Write into a slot whose number was asked for at that time; False: it was given up."""
        if time.monotonic() - asked > _STALL_S and self._passed(number):
            return False  # for sure, and before anything was written
        return self.write_slot(number, frame)

    def take_number(self) -> int:
        return self._bus._add(self.head_name, 1)

    def write_slot(self, number: int, frame: bytes) -> bool:
        """Write a message into its slot; False if the slot was given up before."""
        bus = self._bus
        held, _, head = bus._ask(
            tcpclient.compare_set(self.slot(number), b"", frame),
            tcpclient.delete(self.slot(number - RING_MESSAGES)),
            tcpclient.add(bus._key(self.head_name), 0),
        )
        if held != frame:
            return False
        if lag(head % NUMBERS, number) >= RING_MESSAGES:
            # so the slot may have been given up, removed and made again
            bus._delete(self.slot_name(number))
            raise BusOverrun(overrun_text("writer"))
        if number % _SWEEP == 0:
            bus._sweep()
        return True

    def _passed(self, number: int) -> bool:
        return lag(self.head(), number) >= RING_MESSAGES

    def bury(self, first: int, last: int) -> None:
        """Fill the slots from `first` to `last` that are still empty with tombstones.

        If the ring has removed `first` for good, only that one, so that whoever waits for it
        wakes and sees where `last` is.
        """
        passed = lag(last, first)
        for offset in range(passed + 1 if passed < RING_MESSAGES else 1):
            name = self.slot_name(first + offset)
            if not self._bus._filled(name):
                self._bus._swap(name, b"", _TOMBSTONE)

    def sweep(self, names: Iterable[str]) -> None:
        """Remove what is in `names` of slots that the ring has passed."""
        slots = [name for name in names if name.startswith(self._slots)]
        head = self.head() if slots else 0
        for name in slots:
            if lag(head, int(name.removeprefix(self._slots), 16)) >= RING_MESSAGES:
                self._bus._delete(name)

    def head(self) -> int:
        """The number that was taken last."""
        return self._bus._add(self.head_name, 0)

    def slot_name(self, number: int) -> str:
        return f"{self._slots}{number % NUMBERS:016x}"

    def slot(self, number: int) -> str:
        """The key of slot `number`."""
        return self._bus._key(self.slot_name(number))

"""A listener that can be waited for, and child processes, for the bus tests."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

from forked import Forked, as_main

from fft.bus import ErrorBus
from fft.bus.base import Topic
from fft.errors import BusError

CHILD = Path(__file__).with_name("child.py")

NOISE_S = 15.0
"""Time that a busy machine may add to a wait. A test that bounds a wait rules out one of LONG_S."""
LONG_S = 60.0
"""A timeout that a test shows not to be waited for."""


class Heard:
    """A collector of the messages of a subscription, to one inbox or to one topic.

    Waits are bounded; a late message fails the test.
    """

    def __init__(
        self,
        bus: ErrorBus,
        on_message: Callable[[bytes], None] | None = None,
        inbox: str | None = None,
        topic: Topic = "protocol",
    ) -> None:
        self.messages: list[bytes] = []
        self.lost: list[BusError] = []
        self._changed = threading.Condition()
        self._also = on_message
        if inbox is None:
            self.subscription = bus.subscribe(self._message, self._lost, topic)
        else:
            self.subscription = bus.listen(inbox, self._message, self._lost)

    def _message(self, payload: bytes) -> None:
        with self._changed:
            self.messages.append(payload)
            self._changed.notify_all()
        if self._also is not None:
            self._also(payload)

    def _lost(self, error: BusError) -> None:
        with self._changed:
            self.lost.append(error)
            self._changed.notify_all()

    def wait(self, count: int, timeout: float = 20.0) -> list[bytes]:
        with self._changed:
            done = self._changed.wait_for(
                lambda: len(self.messages) >= count or bool(self.lost), timeout
            )
            assert not self.lost, self.lost
            assert done, f"heard {len(self.messages)} of {count} messages in {timeout} s"
            return list(self.messages)

    def wait_lost(self, timeout: float = 30.0) -> BusError:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.lost), timeout), "never told of a loss"
            return self.lost[0]


class Child:
    """A real process that runs one command of `child.py`."""

    def __init__(self, *arguments: str) -> None:
        self.process = Forked(as_main, str(CHILD), *arguments, talks=True)

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def wait(self, timeout: float = 60.0) -> int:
        return self.process.wait(timeout)

    def stop(self) -> None:
        """Stop the process; return when the last of its threads has stopped."""
        self.process.stop()

    def resume(self) -> None:
        self.process.signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.close()

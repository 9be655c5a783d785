"""Listeners of the NATS bus: a task that fetches new messages and a thread that delivers them.

A listener reads one stream by direct gets and, for an inbox, purges the messages that it has taken;
`fft.bus.nats` describes the design.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from fft.bus.base import (
    RING_MESSAGES,
    BusOverrun,
    BusUnreachable,
    Subscription,
    deliver,
    overrun_text,
    report_lost,
)
from fft.bus.natslink import Headers, NatsLink, Stored
from fft.errors import BusError
from fft.util.chance import CHANCE

NUDGE: Final = "Fft-Nudge"
"""Header of a broadcast that carries no message and only reserves a number."""

_JOIN_WAIT_S: Final = 0.9  # close() promises 1 s; a callback that runs longer is left to finish
_LOOK_S: Final = (0.05, 1.0)  # first and longest interval between reads of the stream
_BEHIND_S: Final = (0.002, 0.1)  # pauses while the replica lacks a message that was announced
_GIVE_UP_S: Final = 5.0  # how long until that message is assumed to be removed
_BATCH: Final = 256
_BATCH_BYTES: Final = 4 * 1024 * 1024


class Listener(Subscription):
    """A subscription that delivers the messages of `subject` in `stream` in order of their numbers.

    With `ring`, every number of the stream belongs to `subject`, so a missing number is a lost
    message.
    """

    def __init__(
        self,
        link: NatsLink,
        stream: str,
        subject: str,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
        ring: bool,
        forget: Callable[[Listener], None],
    ) -> None:
        self._link, self._stream, self._subject, self._ring = link, stream, subject, ring
        self._on_message, self._on_lost, self._forget = on_message, on_lost, forget
        self._ready = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._ended = False  # closed or lost, whichever came first
        self._error: BusError | None = None
        self._thread = threading.Thread(target=self._listen, name="fft-bus-listen", daemon=True)
        # The attributes below are used on the event loop only.
        self._next = 1
        self._announced = 0
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._deaf: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None

    # ---- on the loop

    async def open(self, note: str) -> None:
        """Subscribe to the wake-ups on the subject `note`."""
        self._deaf = await self._link.hear(note, self._note)

    def start(self, first: int) -> None:
        """Start fetching messages from number `first` on; called on the loop."""
        self._next = first
        self._task = asyncio.get_running_loop().create_task(self._fetch())
        self._thread.start()

    def look(self) -> None:
        """Make the task read the stream now."""
        self._wake.set()

    def deaf(self) -> None:
        """Unsubscribe from the wake-ups; called instead of `start`, or at the end."""
        self._deaf()

    def _note(self, headers: Headers) -> None:
        self._announced = max(self._announced, int(headers.get("Nats-Sequence", 0)))
        self._wake.set()

    async def _fetch(self) -> None:
        first, longest = _LOOK_S
        look = first
        try:
            while not self._ended:
                await self._take_all()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), look * CHANCE.uniform(0.5, 1))
                look = first if self._wake.is_set() else min(look * 2, longest)
                self._wake.clear()
        except BusError as error:
            self.lose(error)

    async def _take_all(self) -> None:
        """Fetch messages until the stream has no more and every announced one has arrived."""
        taken, pause, since = False, _BEHIND_S[0], time.monotonic()
        while not self._ended:
            try:
                found = await self._link.repeat(self._batch)
            except BusUnreachable:
                self._link.check()  # retry until the link gives up
                continue
            if found:
                taken, since = True, time.monotonic()
                await self._put(found)
            elif self._announced < self._next or time.monotonic() - since > _GIVE_UP_S:
                break
            else:
                await asyncio.sleep(pause)
                pause = min(pause * 2, _BEHIND_S[1])
        if taken and not self._ring:
            await self._clear()

    async def _batch(self, limit: float) -> list[Stored]:
        request = {
            "seq": self._next,
            "next_by_subj": self._subject,
            "batch": _BATCH,
            "max_bytes": _BATCH_BYTES,
        }
        return await self._link.get(self._stream, request, limit)

    async def _put(self, found: list[Stored]) -> None:
        for message in found:
            if message.seq < self._next:
                continue
            if self._ring and message.seq > self._next:
                raise BusOverrun(overrun_text("listener"))
            self._next = message.seq + 1
            if NUDGE not in message.headers:
                self._queue(message.payload)
        while not self._ring and not self._ended and len(self._waiting) > RING_MESSAGES:
            self._room.clear()
            if len(self._waiting) > RING_MESSAGES:
                await self._room.wait()

    def _queue(self, payload: bytes) -> None:
        with self._ready:
            if self._ring and len(self._waiting) >= RING_MESSAGES:
                raise BusOverrun(overrun_text("listener"))
            self._waiting.append(payload)
            self._ready.notify()

    async def _clear(self) -> None:
        """Purge the messages that were taken from the stream."""

        async def purge(limit: float) -> None:
            request = {"filter": self._subject, "seq": self._next}
            await self._link.api(f"STREAM.PURGE.{self._stream}", request, limit)

        with contextlib.suppress(BusUnreachable):  # the next purge covers these messages too
            await self._link.repeat(purge)

    # ---- on the thread

    def _listen(self) -> None:
        while True:
            with self._ready:
                while not self._waiting and not self._ended:
                    self._ready.wait()
                if self._ended:
                    break
                payload = self._waiting.popleft()
            if not self._ring and len(self._waiting) == RING_MESSAGES:
                self._link.call(self._room.set)
            deliver(self._on_message, payload)
        if self._error is not None:
            report_lost(self._on_lost, self._error)

    # ---- the end, from any thread

    def lose(self, error: BusError) -> None:
        """End the subscription and call `on_lost` with `error`, unless it has ended before."""
        if self._end(error):
            self._forget(self)

    def close(self) -> None:
        self._end(None)
        self._forget(self)
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(_JOIN_WAIT_S)

    def _end(self, error: BusError | None) -> bool:
        with self._ready:
            if self._ended:
                return False
            self._ended, self._error = True, error
            self._ready.notify()
        self._link.call(self._stop)
        return True

    def _stop(self) -> None:
        self._deaf()
        self._wake.set()
        self._room.set()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

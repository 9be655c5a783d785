"""The engine in production: one thread that drives an ``EngineCore`` on real buses.

Events from the bus, the main thread and timers come through one queue. The core handles them in its
order and asks for operations on buses, which this thread carries out one after another. The main
thread takes its commands from a slot that holds the newest one.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial

from fft.bus.base import Refusal, Subscription
from fft.bus.resubscribing import ResubscribingListener
from fft.engine.calls import Buses, Call
from fft.engine.core import SILENCE_S, Close, EngineCore, Posted, ScopeReader, Wiring
from fft.engine.core import Command as Command
from fft.engine.core import Host as Host
from fft.engine.other_scopes import OtherScope
from fft.errors import BusError, FftError
from fft.messages.commands import decode_command
from fft.messages.effects import Finish
from fft.messages.protocol import BusDown, Death, Drain, Event, Stop, Suspect, UnreadableMessage
from fft.messages.wire import decode, inbox_name
from fft.protocol.participant import Participant
from fft.protocol.state import Local
from fft.trace.writer import TraceWriter
from fft.util.log_sampler import LogSampler

logger = logging.getLogger(__name__)

_SHOWN = 200
"""Bytes of an unreadable message, and of its error, that log and trace have."""


class Engine:
    """Runs one participant. ``start`` once, ``post`` from any thread, ``close`` at the end."""

    def __init__(
        self,
        participant: Participant,
        local: Local,
        buses: Buses,
        trace: TraceWriter,
        host: Host,
        others: Iterable[OtherScope] = (),
    ) -> None:
        """Prepare the engine.

        Args:
            participant: The protocol core that it runs.
            local: The participant's first state.
            buses: The buses that it uses.
            trace: Its trace.
            host: Its process.
            others: The scopes that this one is bound to.
        """
        self.participant = participant
        self.bus = buses.scope
        self.trace = trace
        self.ended = threading.Event()
        """Set when the participant is out: peers and the main thread have been informed."""
        self._buses, self._host = buses, host
        self._others = tuple(others)
        for other in self._others:
            buses.add(other.name, other.bus)
        readers = tuple(ScopeReader(other.name, other.most) for other in self._others)
        wiring = Wiring(self.bus.url, buses.group is not None, readers)
        self._core = EngineCore(participant, local, host, self, trace, wiring)
        self._events: queue.SimpleQueue[Posted] = queue.SimpleQueue()
        self._slot: Command | None = None
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._abandoned: Finish | None = None
        self._subscriptions: list[Subscription] = []
        self._strange = LogSampler()
        self._thread = threading.Thread(
            target=self._run, name=f"fft-engine-{participant.config.me}", daemon=True
        )

    # --- any thread ---

    @property
    def local(self) -> Local:
        """State of the participant."""
        return self._core.local

    @property
    def fenced(self) -> int:
        """Number of events that were dropped because their fencing token was old."""
        return self._core.fenced

    @property
    def unreadable(self) -> int:
        """Messages from the bus that were no messages of FFT."""
        return sum(self._strange.counts().values())

    def start(self) -> None:
        """Listen to the bus and run."""
        self.bus.on_refusal = self._on_refusal
        me = self.participant.config.me
        hear = partial(self._on_message, decode)
        self._subscriptions.append(self.bus.listen(inbox_name(me), hear, self._on_lost))
        # an engine that no longer receives commands continues without them
        obey, who = partial(self._on_message, decode_command), f"participant {me}"
        self._subscriptions += [
            ResubscribingListener(self.bus, "protocol", hear, who, self._on_missed, self._on_lost),
            ResubscribingListener(self._buses.job, "commands", obey, who),
        ]
        if self._buses.job is not self.bus:
            self._subscriptions.append(
                ResubscribingListener(
                    self._buses.job,
                    "protocol",
                    partial(self._on_message, _of_all_scopes),
                    f"{who}, of all scopes,",
                    on_lost=self._on_lost,
                )
            )
        self._subscriptions += [o.listen(self._events.put, who) for o in self._others]
        if me.inc > 1:
            self.bus.delete(inbox_name(me._replace(inc=me.inc - 1)))
        self._thread.start()

    def post(self, event: Event) -> None:
        """Queue an event. Never blocks; may be called from a signal handler."""
        self._events.put(event)

    def wait_command(self, limit: float | None = None) -> Command:
        """Wait for the newest command, which stays in the slot until ``take``. Main thread only.

        The core's own timers bound the wait.

        Args:
            limit: Maximum time of the wait in seconds.

        Raises:
            TimeoutError: The limit is over.
            FftError: The engine's thread has failed; the cause is its error.
        """
        deadline = None if limit is None else time.monotonic() + limit
        with self._changed:
            while (command := self._abandoned or self._slot) is None:
                if self._failure is not None:
                    raise FftError("the FFT engine thread has failed") from self._failure
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError
                self._changed.wait(left)
            return command

    def wait_for(self, done: Callable[[], bool]) -> bool:
        """Wait until ``done()`` holds. Main thread only.

        The thread that makes it true calls ``nudge`` and bounds the wait. The engine's thread does
        so when this rank has the state (``Local.healed``).

        Returns:
            False if a command came first; the command stays in the slot.
        """
        with self._changed:
            self._changed.wait_for(lambda: done() or self.has_word())
            return not self.has_word()

    def has_word(self) -> bool:
        """Return whether ``wait_command`` would return or raise at once. Any thread."""
        return self.superseded() or self._failure is not None

    def nudge(self) -> None:
        """Let ``wait_for`` evaluate its condition again. Any thread."""
        with self._changed:
            self._changed.notify_all()

    def take(self, command: Command) -> None:
        """Free the slot, unless it holds a newer command than this one. Main thread only."""
        with self._changed:
            if self._slot is command:
                self._slot = None

    def superseded(self) -> bool:
        """Return whether a newer command than the one in progress waits. Main thread only."""
        return self._slot is not None or self._abandoned is not None

    def abandon(self, command: Finish) -> None:
        """Stop the main thread with ``command`` while this thread is held up. Any thread."""
        with self._changed:
            self._abandoned = command
            self._changed.notify_all()
        self._host.interrupt(command.reason)

    @property
    def abandoned(self) -> bool:
        """Whether ``abandon`` was called."""
        return self._abandoned is not None

    def held_up(self) -> str | None:
        """Return which operation on the bus gets no answer; None if none is late. Any thread."""
        if (at := self._core.at_bus) is None or (took := time.monotonic() - at[1]) < SILENCE_S:
            return None
        return f"{at[0]} on the bus has had no answer for {took:.1f} s"

    def close(self, limit: float = 5.0) -> None:
        """Leave the job if still in it, and end the thread and the subscriptions. Idempotent.

        An abandoned engine ends when its bus is closed; this call does not wait for it.

        Args:
            limit: Maximum time in seconds to wait for the thread.
        """
        if self._thread.is_alive():
            self.post(Stop("shut down"))
            self._events.put(Close())
            if self.abandoned:
                return
            self._thread.join(limit)
        ending, self._subscriptions = self._subscriptions, []
        for subscription in ending:
            subscription.close()
        not_obeyed = {**self.bus.refusals(), **self._strange.counts()}
        if ending and not_obeyed:
            self.trace.note("not_obeyed", not_obeyed)
        if ending:
            with contextlib.suppress(BusError):  # a bus that is gone keeps nothing
                self.bus.delete(inbox_name(self.participant.config.me))

    # --- bus listener thread ---

    def _on_message(self, read: Callable[[bytes], Posted | None], payload: bytes) -> None:
        try:
            if (event := read(payload)) is None:
                return
        except UnreadableMessage as error:
            if (count := self._strange.add("unreadable")) is not None:
                reason = str(error)[:_SHOWN]  # it may quote names of fields of any length
                logger.warning("a message on the bus is not in FFT's format: %s", reason)
                shown = payload[:_SHOWN].decode("utf-8", "replace")
                told = {"reason": reason, "message": shown, "count": count}
                self.trace.note("unreadable", told)
            return
        self._events.put(event)

    def _on_refusal(self, refusal: Refusal) -> None:
        self.trace.note("refused", asdict(refusal))

    def _on_missed(self, error: BusError) -> None:
        self._events.put(BusDown("overrun", str(error)[:2000]))

    def _on_lost(self, error: BusError) -> None:
        self._events.put(BusDown("listen", str(error)[:2000]))

    # --- engine thread ---

    def put(self, command: Command) -> None:
        """Hand a command to the main thread; the core calls this, as on its ``Slot``."""
        with self._changed:
            self._slot = command
            self._changed.notify_all()
        if isinstance(command, Finish):
            self.ended.set()

    def _run(self) -> None:
        core = self._core
        try:
            while True:
                while not self._events.empty():  # this thread is the only reader
                    core.post(self._events.get())
                call = core.step(time.monotonic())
                while call is not None:
                    call = self._perform(call)
                if core.closed:
                    return
                self._wait()
        except BaseException as error:  # the main thread must receive it, whatever it is
            logger.exception("the FFT engine thread failed")
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self.ended.set()
            cause = f"engine failed: {error!r}"
            self._host.cancel_futures(cause)
            self._host.abort_groups(cause)

    def _perform(self, call: Call) -> Call | None:
        try:
            answer = self._buses.perform(call)
        except (BusError, UnreadableMessage) as error:
            return self._core.fail(time.monotonic(), error)
        return self._core.step(time.monotonic(), answer)

    def _wait(self) -> None:
        """Wait for an event or a timer, unless the core has work."""
        limit = self._core.patience(time.monotonic())
        if limit == 0.0:
            return
        with contextlib.suppress(queue.Empty):
            self._core.post(self._events.get(timeout=limit))


def _of_all_scopes(payload: bytes) -> Event | None:
    """Decode a message that concerns all scopes; None if it concerns only the first one."""
    message = decode(payload)
    return message if isinstance(message, Death | Suspect | Drain) else None

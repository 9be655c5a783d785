"""The engine in production: one thread that drives an ``EngineCore`` on real buses.

Events from the buses and from other threads arrive through one queue. The core orders them and
requests bus operations, which the engine thread performs one after another. The main thread takes
its commands from a slot that holds the newest one.
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

from fft.bus.base import ErrorBus, Refusal, Subscription
from fft.bus.resubscribing import ResubscribingListener
from fft.engine.calls import GROUP, Buses, Call
from fft.engine.core import SILENCE_S, Close, EngineCore, Posted, Wiring
from fft.engine.core import Command as Command
from fft.engine.core import Host as Host
from fft.engine.other_scopes import OtherScope
from fft.errors import BusError, FftError
from fft.messages.causes import LeaveReason
from fft.messages.commands import decode_command
from fft.messages.effects import Finish
from fft.messages.exits import Exit, encode_exit, exit_register
from fft.messages.protocol import BusDown, Death, Drain, Event, Stop, Suspect, UnreadableMessage
from fft.messages.wire import Packed, decode, inbox_name
from fft.protocol.apart import in_job
from fft.protocol.participant import Participant
from fft.protocol.state import Local
from fft.trace.writer import TraceWriter
from fft.util.log_sampler import LogSampler

logger = logging.getLogger(__name__)

_SHOWN = 200
"""Maximum length of an unreadable message, and of its error text, in the log and the trace."""
_SILENT_S = 0.2
"""Wait for the bus of the group, in seconds, that a fault of the job ends."""


class Engine:
    """The engine thread of one participant.

    Call ``start`` once and ``close`` at the end. ``post`` is thread-safe.
    """

    def __init__(
        self,
        participant: Participant,
        local: Local,
        buses: Buses,
        trace: TraceWriter,
        host: Host,
        others: Iterable[OtherScope] = (),
        is_inner: bool = False,
    ) -> None:
        """Prepare the engine.

        Args:
            participant: The protocol logic to run.
            local: The initial state of the participant.
            buses: The buses that the engine uses.
            trace: Trace writer of the participant.
            host: Callbacks into the process that the engine runs in.
            others: The linked scopes (upstream and downstream stages).
            is_inner: Its scope is inside a replica group, so its end is not that of the process.
        """
        self._is_inner = is_inner
        self.participant = participant
        self.bus = buses.scope
        self.trace = trace
        self.ended = threading.Event()
        """Set when the participant has finished or failed, after the main thread was notified."""
        self._buses, self._host = buses, host
        self._others = tuple(others)
        for other in self._others:
            buses.add(other.name, other.bus)
        wiring = Wiring(self.bus.url)
        self._core = EngineCore(participant, local, host, self, trace, wiring)
        self._events: queue.SimpleQueue[Posted | ErrorBus] = queue.SimpleQueue()
        self._slot: Command | None = None
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._abandoned: Finish | None = None
        self._at_group: float | None = None
        """When the present operation on the bus of the group began, on the monotonic clock."""
        self.has_left_group_bus = False
        """The bus of the group was closed, because it gave no answer."""
        self._subscriptions: list[Subscription] = []
        self._unreadable = LogSampler()
        self._thread = threading.Thread(
            target=self._run, name=f"fft-engine-{participant.config.me}", daemon=True
        )

    # --- any thread ---

    @property
    def local(self) -> Local:
        """The state of the participant."""
        return self._core.local

    @property
    def fenced(self) -> int:
        """The number of events that were dropped because their fencing token was old."""
        return self._core.fenced

    @property
    def unreadable(self) -> int:
        """The number of messages from the bus that could not be decoded."""
        return sum(self._unreadable.counts().values())

    def start(self) -> None:
        """Subscribe to the buses and start the thread."""
        self.bus.on_refusal = self._on_refusal
        me = self.participant.config.me
        on_message = partial(self._on_message, decode)
        self._subscriptions.append(self.bus.listen(inbox_name(me), on_message, self._on_lost))
        # no on_lost for operator commands: the engine can run without them
        on_command, who = partial(self._on_message, decode_command), f"participant {me}"
        self._subscriptions += [
            ResubscribingListener(
                self.bus, "protocol", on_message, who, self._on_missed, self._on_lost
            ),
            ResubscribingListener(self._buses.job, "commands", on_command, who),
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

    def use_group_bus(self, bus: ErrorBus) -> None:
        """Vote on this bus of the replica group from the next event on. Thread-safe."""
        self.has_left_group_bus = False
        self._events.put(bus)

    def wait_command(self, limit: float | None = None) -> Command:
        """Wait for the newest command, which stays in the slot until ``take``. Main thread only.

        The timers of the core also bound the wait.

        Args:
            limit: Timeout in seconds, or None.

        Raises:
            TimeoutError: No command arrived within ``limit``.
            FftError: The engine thread has failed; ``__cause__`` is its error.
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
        """Wait until ``done()`` is true. Main thread only.

        The thread that makes the condition true calls ``nudge`` and enforces its own timeout. The
        engine thread calls ``nudge`` when this rank holds the state (``Local.healed``).

        Returns:
            False if a command arrived first; the command stays in the slot.
        """
        with self._changed:
            self._changed.wait_for(lambda: done() or self.has_command())
            return not self.has_command()

    def has_command(self) -> bool:
        """Return whether ``wait_command`` would return or raise at once. Thread-safe."""
        return self.superseded() or self._failure is not None

    def nudge(self) -> None:
        """Wake ``wait_for``, so that it re-evaluates its condition. Thread-safe."""
        with self._changed:
            self._changed.notify_all()

    def take(self, command: Command) -> None:
        """Empty the slot, unless a newer command has replaced this one. Main thread only."""
        with self._changed:
            if self._slot is command:
                self._slot = None

    def superseded(self) -> bool:
        """Return whether a newer command than the one in progress is waiting. Thread-safe."""
        return self._slot is not None or self._abandoned is not None

    def abandon(self, command: Finish) -> None:
        """Stop the main thread with ``command`` while the engine thread is blocked. Thread-safe."""
        with self._changed:
            self._abandoned = command
            self._changed.notify_all()
        self._host.interrupt(command.reason)

    @property
    def abandoned(self) -> bool:
        """Whether ``abandon`` was called, so the main thread stops without the engine."""
        return self._abandoned is not None

    def describe_stall(self) -> str | None:
        """Describe the bus operation that blocks the engine thread, or return None. Thread-safe."""
        if (at := self._core.at_bus) is None or (took := time.monotonic() - at[1]) < SILENCE_S:
            return None
        return f"{at[0]} on the bus has had no answer for {took:.1f} s"

    def close(self, limit: float = 5.0, reason: LeaveReason = LeaveReason.SHUT_DOWN) -> None:
        """Leave the job if still a member; stop the thread; close the subscriptions. Idempotent.

        The thread of an abandoned engine is not joined: it ends when the bus is closed.

        Args:
            reason: Why the participant leaves, if it does now.
            limit: Timeout of the join in seconds.
        """
        if self._thread.is_alive():
            self.post(Stop("shut down", reason))
            self._events.put(Close())
            if self.abandoned:
                return
            self._thread.join(limit)
        ending, self._subscriptions = self._subscriptions, []
        for subscription in ending:
            subscription.close()
        dropped_messages = {**self.bus.refusals(), **self._unreadable.counts()}
        if ending and dropped_messages:
            self.trace.note("dropped_messages", dropped_messages)
        if ending:
            with contextlib.suppress(BusError):  # if the bus is gone, so is the inbox
                self.bus.delete(inbox_name(self.participant.config.me))

    # --- bus listener thread ---

    def _on_message(self, read: Callable[[bytes], Posted | None], payload: bytes) -> None:
        try:
            if (event := read(payload)) is None:
                return
        except UnreadableMessage as error:
            if (count := self._unreadable.add("unreadable")) is not None:
                reason = str(error)[:_SHOWN]  # the error may quote field names of any length
                logger.warning("a message on the bus is not in FFT's format: %s", reason)
                shown = payload[:_SHOWN].decode("utf-8", "replace")
                told = {"reason": reason, "message": shown, "count": count}
                self.trace.note("unreadable", told)
            return
        self._events.put(event)
        is_fault = isinstance(event, Death | Suspect)
        is_fault |= isinstance(event, Packed) and event.record.kind == "abort"
        if is_fault and self.participant.config.spans_hosts:
            self._leave_silent_group_bus()

    def _leave_silent_group_bus(self) -> None:
        """Close the bus of the group if an operation of the engine thread on it does not end.

        The host of its store may be the one that was lost, and the others wait for this
        participant's acknowledgement.
        """
        if (began := self._at_group) is not None:
            left = max(0.0, began + _SILENT_S - time.monotonic())
            timer = threading.Timer(left, self._close_group_bus, (began,))
            timer.daemon = True
            timer.start()

    def _close_group_bus(self, began: float) -> None:
        """Close the bus of the group if the operation that began then has not ended."""
        bus = self._buses.group
        if bus is not None and self._at_group == began:
            self.has_left_group_bus = True
            bus.close()

    def _on_refusal(self, refusal: Refusal) -> None:
        self.trace.note("refused", asdict(refusal))

    def _on_missed(self, error: BusError) -> None:
        self._events.put(BusDown("overrun", str(error)[:2000]))

    def _on_lost(self, error: BusError) -> None:
        self._events.put(BusDown("listen", str(error)[:2000]))

    # --- engine thread ---

    def put(self, command: Command) -> None:
        """Put a command into the slot of the main thread; implements ``CommandSlot``."""
        if isinstance(command, Finish):
            self._write_exit(command)
        with self._changed:
            self._slot = command
            self._changed.notify_all()
        if isinstance(command, Finish):
            self.ended.set()

    def _write_exit(self, command: Finish) -> None:
        """Write why this process ends into its register, for launchers and observers."""
        if self._is_inner or command.error == "InDoubt":  # then the bus is out of reach
            return
        c, s = self.participant.config, self.local
        reason = None if command.error else self._core.why_left
        found = Exit(
            *(c.me.group, c.me.rank, c.pid, c.host, s.step, reason),
            error=command.error or "",
            took_part=s.epoch is not None or in_job(s, c.me),
        )
        try:
            self._buses.job.write(exit_register(c.me.group, c.me.rank), encode_exit(found))
        except BusError as error:
            logger.warning("launchers may not learn why this process ends: %s", error)

    def _run(self) -> None:
        core = self._core
        try:
            while True:
                while not self._events.empty():  # this thread is the only reader
                    self._take_in(self._events.get())
                call = core.step(time.monotonic())
                while call is not None:
                    call = self._perform(call)
                if core.closed:
                    return
                self._wait()
        except BaseException as error:  # the main thread raises every error of this thread
            logger.exception("the FFT engine thread failed")
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self.ended.set()
            cause = f"engine failed: {error!r}"
            self._host.cancel_futures(cause)
            self._host.abort_groups(cause)

    def _perform(self, call: Call) -> Call | None:
        self._at_group = time.monotonic() if call.at == GROUP else None
        try:
            answer = self._buses.perform(call)
        except (BusError, UnreadableMessage) as error:
            return self._core.fail(time.monotonic(), error)
        finally:
            self._at_group = None
        return self._core.step(time.monotonic(), answer)

    def _wait(self) -> None:
        """Wait for an event or a timer, unless the core has work to do."""
        limit = self._core.time_to_next_work(time.monotonic())
        if limit == 0.0:
            return
        with contextlib.suppress(queue.Empty):
            self._take_in(self._events.get(timeout=limit))

    def _take_in(self, event: Posted | ErrorBus) -> None:
        if isinstance(event, ErrorBus):
            self._buses.meet(event)
            self._core.regain_group_bus()
        else:
            self._core.post(event)


def _of_all_scopes(payload: bytes) -> Event | None:
    """Decode a job-wide message, or return None if it concerns only the job bus's own scope."""
    message = decode(payload)
    return message if isinstance(message, Death | Suspect | Drain) else None

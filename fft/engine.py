"""The engine: one thread that owns a participant, carries out its effects, and keeps its timers.

Events come from the bus listener, the main thread and timers through one queue; each is handled
by the core, traced, and then its effects are carried out, in order, here. What only the main
thread may do (restore, heal, apply, begin) is handed to it through a slot that holds the newest
command. Touches bus, trace and threads; knows nothing of torch.
"""

from __future__ import annotations

import heapq
import logging
import queue
import threading
import time
from collections import deque
from typing import Protocol, assert_never

from fft.bus.base import BusError, ErrorBus, Subscription
from fft.core.local import Local
from fft.core.messages import (
    AbortGroups,
    Apply,
    Ballot,
    Broadcast,
    BusDown,
    CancelFutures,
    CastVote,
    ClearTimers,
    Decide,
    Decision,
    DropBallot,
    Effect,
    Event,
    Finish,
    Heal,
    ReadHead,
    Record,
    Restore,
    SetTimer,
    StartTxn,
    Stop,
    Timer,
    Token,
    UnreadableMessage,
    decode,
    decode_record,
    decode_vote,
    encode,
    encode_record,
    encode_vote,
)
from fft.core.participant import Participant
from fft.errors import FftError
from fft.trace import TraceWriter

logger = logging.getLogger(__name__)

HEAD = "head"
_SLOTS = 8
"""Ballots live in so many reused slots, so that a vote that comes too late leaves no key behind."""

Command = Restore | Heal | Apply | StartTxn | Finish


class Host(Protocol):
    """What the engine asks of the process it runs in; both return at once, from this thread."""

    def cancel_futures(self, cause: str) -> None:
        """Fail every pending future of the txn."""

    def abort_groups(self, cause: str) -> None:
        """Abort the process groups of the epoch, freeing whoever is blocked in them."""


class Engine:
    """Runs one participant. ``start`` once, ``post`` from any thread, ``close`` at the end."""

    def __init__(
        self, participant: Participant, local: Local, bus: ErrorBus, trace: TraceWriter, host: Host
    ) -> None:
        self.participant = participant
        self.bus = bus
        self.trace = trace
        self.local = local
        self._host = host
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._next: deque[Event] = deque()
        """Answers of the bus to this thread's own calls; handled before anything else."""
        self._timers: list[tuple[float, int, Timer]] = []
        self._slot: Command | None = None
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._subscription: Subscription | None = None
        self.unreadable = 0
        """Messages from the bus that were no messages of FFT."""
        self.fenced = 0
        """Events dropped because their fencing token was old."""
        self._thread = threading.Thread(
            target=self._run, name=f"fft-engine-{participant.config.me}", daemon=True
        )

    # --- any thread ---

    def start(self) -> None:
        """Listen to the bus and run."""
        self._subscription = self.bus.subscribe(self._on_message, self._on_lost)
        self._thread.start()

    def post(self, event: Event) -> None:
        """Queue an event. Never blocks; may be called from a signal handler."""
        self._events.put(event)

    def wait_command(self, limit: float | None = None) -> Command:
        """Main thread: the newest command, left in the slot until ``take``.

        Bounded by the core's own timers; ``limit`` seconds bound it further (``TimeoutError``).
        Raises what ended the engine thread, if it has ended.
        """
        deadline = None if limit is None else time.monotonic() + limit
        with self._changed:
            while self._slot is None:
                if self._failure is not None:
                    raise FftError("the FFT engine thread has failed") from self._failure
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError
                self._changed.wait(left)
            return self._slot

    def take(self, command: Command) -> None:
        """Main thread: ``command`` is being carried out; the slot is free unless a newer came."""
        with self._changed:
            if self._slot is command:
                self._slot = None

    def superseded(self) -> bool:
        """Main thread, at work on a command: whether a newer one is waiting."""
        return self._slot is not None

    def close(self, limit: float = 5.0) -> None:
        """Leave (if still in), end the thread and the subscription. Idempotent."""
        if self._thread.is_alive():
            self.post(Stop("shut down"))
            self._events.put(None)
            self._thread.join(limit)
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None

    # --- bus listener thread ---

    def _on_message(self, payload: bytes) -> None:
        try:
            event = decode(payload)
        except UnreadableMessage as error:
            self.unreadable += 1
            logger.warning("a message on the bus is not in FFT's format: %s", error)
            shown = payload[:200].decode("utf-8", "replace")
            self.trace.note("unreadable", {"reason": str(error), "message": shown})
            return
        self._events.put(event)

    def _on_lost(self, error: BusError) -> None:
        self._events.put(BusDown("listen", str(error)[:2000]))

    # --- engine thread ---

    def _run(self) -> None:
        try:
            while (event := self._take_event()) is not None:
                self._handle(event)
        except BaseException as error:  # the main thread must hear of it, whatever it is
            logger.exception("the FFT engine thread failed")
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self._host.cancel_futures(f"engine failed: {error!r}")
            self._host.abort_groups(f"engine failed: {error!r}")

    def _take_event(self) -> Event | None:
        if self._next:
            return self._next.popleft()
        while self._timers:
            left = self._timers[0][0] - time.monotonic()
            if left <= 0:
                return heapq.heappop(self._timers)[2]
            try:
                return self._events.get(timeout=left)
            except queue.Empty:
                continue
        return self._events.get()

    def _handle(self, event: Event) -> None:
        before, now = self.local, time.monotonic()
        after, out = self.participant.handle(before, event, now)
        self.local = after
        if out.verdict == "fenced":
            self.fenced += 1
        elif out.verdict == "refused" or (out.verdict == "row" and out.reason):
            logger.error("protocol error: %s (%s)", out.reason, event)
        self.trace.outcome(before, after, event, out, now)
        for effect in out.effects:
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case CancelFutures(cause=cause):
                self._host.cancel_futures(cause)
            case AbortGroups(cause=cause):
                self._host.abort_groups(cause)
            case SetTimer(name=name, seconds=seconds, serial=serial):
                due = time.monotonic() + seconds
                heapq.heappush(self._timers, (due, serial, Timer(name, serial)))
            case ClearTimers(names=names):
                self._timers = [t for t in self._timers if t[2].name not in names]
                heapq.heapify(self._timers)
            case Restore() | Heal() | Apply() | StartTxn() | Finish():
                with self._changed:
                    self._slot = effect
                    self._changed.notify_all()
            case Broadcast() | ReadHead() | Decide() | CastVote() | DropBallot():
                self._use_bus(effect)
            case _:
                assert_never(effect)

    def _use_bus(self, effect: Broadcast | ReadHead | Decide | CastVote | DropBallot) -> None:
        try:
            match effect:
                case Broadcast(message=message):
                    self.bus.broadcast(encode(message))
                case ReadHead():
                    held = self.bus.read(HEAD)
                    self._next.append(Decision(None if held is None else decode_record(held)))
                case Decide(after=after, proposal=proposal):
                    self._decide(after, proposal)
                case CastVote():
                    self._cast(effect)
                case DropBallot(token=token):
                    # Not this slot: a voter of the same txn may still be adding to it.
                    self.bus.delete(_slot(Token(token.epoch, token.txn + _SLOTS // 2)))
                case _:
                    assert_never(effect)
        except (BusError, UnreadableMessage) as error:
            operation = type(effect).__name__
            logger.error("%s on the bus failed: %s", operation, error)
            self._next.append(BusDown(operation, str(error)[:2000]))

    def _decide(self, after: Record | None, proposal: Record) -> None:
        expected = None if after is None else encode_record(after)
        desired = encode_record(proposal)
        held = self.bus.compare_set(HEAD, expected, desired)
        if held == desired:
            self._next.append(Decision(proposal, won=True))
        elif held is not None:
            self._next.append(Decision(decode_record(held)))

    def _cast(self, effect: CastVote) -> None:
        tag = f"{effect.token.epoch}.{effect.token.txn}"
        vote = encode_vote(effect.vote)
        votes = self.bus.ballot(_slot(effect.token), tag, vote, effect.voters)
        if votes is not None:
            ballot = Ballot(effect.token, tuple(decode_vote(v) for v in votes))
            self._next.append(ballot)


def _slot(token: Token) -> str:
    return f"ballot{(token.epoch + token.txn) % _SLOTS}"

"""The sans-I/O core of the engine, driven by its caller.

``EngineCore`` owns a participant. It orders the events, passes each one to the protocol, traces the
outcome and carries out the effects. It reads no clock, starts no thread and performs no I/O. The
caller passes the time to ``step``, which returns each bus operation as a ``Call``. The caller
passes the reply to the next ``step``, or the error to ``fail``. Requests to the process do not wait
for other processes, so they are plain calls of the injected ``Host`` and ``CommandSlot``.

Replies from the bus are handled first. Then follow cleanup work, if no event is queued, expired
timers, and queued events. Commands for the main thread (restore, heal, apply, start a txn, finish)
go to the slot, which holds the newest command.

To keep the load on the job bus low, records are sent without their member lists
(``fft.messages.wire``). The ranks of a group first vote on a bus of their own. The last of them to
vote then casts all votes of the group on the job bus.

Live processes garbage-collect the keys and inboxes of exited processes. The proposer of an epoch
deletes the member list of the previous epoch. The coordinator deletes the inboxes of peers that its
epoch excludes, starting with its first commit. Each process deletes the inbox of its previous
incarnation when it starts. A message that is sent after that to a process that never restarts is
not deleted; this leaks one entry.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol, assert_never

from fft.bus.base import HEAD, BusForgot
from fft.engine.calls import (
    GROUP,
    JOB,
    SCOPE,
    Call,
    Calls,
    Cast,
    CompareSet,
    Delete,
    Publish,
    Read,
    Send,
    Write,
    beside,
)
from fft.errors import BusError
from fft.messages.causes import CauseCode, LeaveReason
from fft.messages.commands import COMMANDS, Answer, RollCall, answer_inbox
from fft.messages.commands import Command as OperatorCommand
from fft.messages.effects import (
    AbortGroups,
    Apply,
    Broadcast,
    CancelFutures,
    CastVote,
    ClearTimers,
    Decide,
    DropBallot,
    Effect,
    Finish,
    Heal,
    ReadHead,
    ReadScope,
    Restore,
    SetTimer,
    StartTxn,
    Tell,
    TellHeld,
)
from fft.messages.progress import HeldReport
from fft.messages.protocol import (
    Ballot,
    BusDown,
    BusMessage,
    Decision,
    Drain,
    Event,
    Leave,
    NoStep,
    Peer,
    Record,
    ScopeRecord,
    Timer,
    Token,
    UnreadableMessage,
    Vote,
)
from fft.messages.wire import EPOCH, MissingList, Packed, Wire, inbox_name, left_name, list_name
from fft.protocol.participant import Outcome, Participant
from fft.protocol.state import Local
from fft.protocol.witness import Witness

SLOTS = 8
"""Number of ballot slots. They are reused, so that a late vote leaks no key."""
SILENCE_S = 0.3
"""Duration in seconds after which a pending bus operation counts as a bus stall."""
_READS = 16
"""Maximum number of retries when the head register advances while its member list is read."""
_BUS_TIMERS = ("bus_retry", "bus_limit", "bus_quiet")
_REMOVALS = 16
"""Maximum number of inboxes deleted after one commit, which bounds the delay of the commit."""

logger = logging.getLogger("fft.engine")


@dataclass(frozen=True)
class ScopeAnnouncement:
    """A record that another scope announced."""

    scope: str
    packed: Packed


@dataclass(frozen=True)
class Close:
    """The last event from the caller: the core runs the pending cleanup work and closes."""


Posted = Event | OperatorCommand | RollCall | Packed | ScopeAnnouncement | Close
BusEffect = Broadcast | Tell | ReadHead | ReadScope | Decide | CastVote | DropBallot
Command = Restore | Heal | Apply | StartTxn | Finish
_Failed = (BusError, UnreadableMessage)


# --- interfaces that the caller implements ------------------------------------------------------


class Host(Protocol):
    """Callbacks into the process that the engine runs in.

    None of them waits for another process. `abort_groups` runs the user's abort functions, each of
    which has a time limit.
    """

    def cancel_futures(self, cause: str) -> None:
        """Complete every pending future of the txn with its default, and let the step fail."""

    def abort_groups(self, cause: str) -> None:
        """Abort the process groups of the epoch, which unblocks all threads in their collectives.

        The host may defer the abort of the replica group's own process group until the main thread
        asks for a txn. The user's code between two txns may still run collectives on that group.
        """

    def members_lost(self) -> None:
        """Handle newly dead or suspected peers, which may be ranks of this group."""

    def decided(self, record: Record) -> None:
        """Handle a decided record of the job; it may be passed more than once."""

    def no_step(self, message: NoStep) -> None:
        """Report a fault if the main thread is in a step function of the txn of ``message``."""

    def command(self, command: OperatorCommand) -> None:
        """Handle an operator's command, which may not concern this process. Never raises."""

    def interrupt(self, cause: str) -> None:
        """Interrupt the running step function, if any: a command is waiting for the main thread.

        The core calls this after it puts the command into the slot, so a step function that starts
        later finds the command.
        """


class CommandSlot(Protocol):
    """A one-entry mailbox that holds the newest command for the main thread."""

    def put(self, command: Command) -> None:
        """Replace the command in the slot."""

    def nudge(self) -> None:
        """Wake the main thread, so that it re-evaluates the condition that it waits for."""


class Trace(Protocol):
    """The trace of the participant; see ``fft.trace.writer.TraceWriter``."""

    def outcome(self, before: Local, after: Local, event: Event, out: Outcome, now: float) -> None:
        """Trace the outcome of an event, before its effects are carried out."""

    def note(self, name: str, data: dict[str, Any], local: Local | None = None) -> None:
        """Trace an observation that is not a protocol event."""


@dataclass(frozen=True)
class Wiring:
    """The buses that a core uses, and its logger."""

    url: str = "the bus"
    """URL of the scope's bus, for error messages."""
    has_group_bus: bool = False
    """Whether the ranks of this replica group first vote on a bus of their own."""
    others: tuple[ScopeReader, ...] = ()
    """The linked scopes (upstream and downstream stages), whose records this scope waits for."""
    log: logging.Logger = logger


# --- another scope ------------------------------------------------------------------------------


class ScopeReader:
    """Access to the records of a linked scope.

    Args:
        name: The scope.
        most: Maximum number of groups that consume data; further groups are spares.
        at: Value of ``Call.at`` that selects the bus of the scope.
    """

    def __init__(self, name: str, most: int | None = None, at: str | None = None) -> None:
        self.name = name
        self._most = most
        self._at = beside(name) if at is None else at
        self._wire = Wire()
        self._epoch: Record | None = None
        """The newest epoch record that was read."""

    def take(self, packed: Packed) -> Calls[ScopeRecord | None]:
        """Return the position according to a record, or None if the scope has a newer epoch."""
        record = yield from self._found(packed)
        if record is None:
            return None
        if record.kind == "epoch":
            self._epoch = record
        elif self._epoch is None or self._epoch.epoch != record.epoch:
            held = yield Read(EPOCH, self._at)
            found = None if held is None else (yield from self._found(held))
            if found is None or found.epoch != record.epoch:
                return None  # the epoch record is still being written
            self._epoch = found
        groups = tuple(g.group for g in self._epoch.members if g.group not in record.leavers)
        takers = len(groups) if self._most is None else min(len(groups), self._most)
        return ScopeRecord(self.name, record.n, record.cursor, groups, takers)

    def read(self) -> Calls[ScopeRecord | None]:
        """Return the position according to the newest record.

        Returns:
            None if there is no record or if its member list is still being written.
        """
        held = yield Read(HEAD, self._at)
        found = None if held is None else (yield from self.take(held))
        if found is None:
            return None
        for group in found.groups:
            if not (yield from self._has_left(group)):
                return found
        return replace(found, groups=(), takers=0)

    def _has_left(self, group: str) -> Calls[bool]:
        """Return whether all ranks of a group left without a record, as the last groups may."""
        assert self._epoch is not None, "its groups are known"
        ranks = next(g.ranks for g in self._epoch.members if g.group == group)
        for rank in ranks:
            if (yield Read(left_name(group, rank.rank), self._at)) != rank.inc:
                return False
        return True

    def _found(self, packed: Packed) -> Calls[Record | None]:
        if (record := self._wire.whole(packed)) is not None:
            return record
        listed = yield Read(list_name(packed), self._at)
        try:
            return self._wire.complete(packed, listed)
        except MissingList:
            return None


# --- the engine ---------------------------------------------------------------------------------


class EngineCore:
    """The decision logic of one participant; see the module docstring for the calling convention.

    Attributes:
        local: State of the participant.
        at_bus: Name of the effect whose bus operation is pending and its start time, or None.
        closed: Whether ``Close`` was handled; the core then ignores all events.
        fenced: Number of events that were dropped because their fencing token was old.
        why_left: Why the participant leaves in good order, once that is decided, or None.
    """

    def __init__(
        self,
        participant: Participant,
        local: Local,
        host: Host,
        slot: CommandSlot,
        trace: Trace,
        wiring: Wiring = Wiring(),
    ) -> None:
        self.participant = participant
        self.local = local
        self.at_bus: tuple[str, float] | None = None
        self.closed = False
        self.fenced = 0
        self.why_left: LeaveReason | None = None
        self._host, self._slot, self._trace, self._wiring = host, slot, trace, wiring
        self._others = {other.name: other for other in wiring.others}
        self._now = 0.0
        self._turn: Calls[None] | None = None
        """The generator that handles the current event, suspended while a call is pending."""
        self._inbox: deque[Posted] = deque()
        self._answers: deque[Event] = deque()
        """Events that result from replies to calls; handled before all others."""
        self._timers: list[tuple[float, int, str]] = []
        """Heap of (time, serial, name)."""
        self._chores: deque[Callable[[], Calls[None]]] = deque()
        """Cleanup work, which runs when no event is queued."""
        self._records = _Records(self, wiring)
        self._ballots = _Ballots(self, wiring)
        self._reported_hold: TellHeld | None = None
        self._ended = False

    # --- the caller ---

    def post(self, event: Posted) -> None:
        """Queue an event."""
        self._inbox.append(event)

    def regain_group_bus(self) -> None:
        """Vote on the bus of the replica group again, because the group has a new one."""
        self._ballots.regain()

    def step(self, now: float, answer: object = None) -> Call | None:
        """Run until the next bus call, or to the end of the current event.

        If no call is pending, this starts the next event. One event may make many calls.

        Args:
            now: Time in seconds; all calls must use the same clock.
            answer: Reply to the pending call.

        Returns:
            The next call, or None at the end of the event. Pass the reply to a call to ``step``, or
            its error to ``fail``.
        """
        self._now = now
        if self._turn is None:
            self._turn = self._next_turn()
            if self._turn is None:
                return None
            answer = None
        return self._resume(self._turn.send, answer)

    def fail(self, now: float, error: Exception) -> Call | None:
        """Continue after the pending call failed; otherwise like ``step``.

        Args:
            now: Time in seconds.
            error: A ``BusError`` or ``UnreadableMessage``. Any other error ends the engine.
        """
        assert self._turn is not None, "a call is open"
        self._now = now
        return self._resume(self._turn.throw, error)

    def time_to_next_work(self, now: float) -> float | None:
        """Return the seconds until the next work without a new event, or None if no work is due."""
        if self._turn or self._answers or self._inbox or self._chores:
            return 0.0
        return max(0.0, self._timers[0][0] - now) if self._timers else None

    def _resume(self, advance: Callable[[Any], Call], given: Any) -> Call | None:
        try:
            return advance(given)
        except StopIteration:
            self._turn = None
            return None

    # --- one event after another ---

    def _next_turn(self) -> Calls[None] | None:
        if self.closed:
            return None
        if self._answers:
            return self._handle(self._answers.popleft())
        if self._chores and not self._inbox:
            return self._chores.popleft()()
        if self._timers and self._timers[0][0] <= self._now:
            _, serial, name = heapq.heappop(self._timers)
            return self._handle(Timer(name, serial))
        return self._take(self._inbox.popleft()) if self._inbox else None

    def _take(self, posted: Posted) -> Calls[None]:
        match posted:
            case Close():
                while self._chores:
                    yield from self._chores.popleft()()
                self.closed = True
            case RollCall():
                yield from self._answer_roll(posted)
            case ScopeAnnouncement():
                yield from self._on_announcement(posted)
            case Packed():
                yield from self._handle((yield from self._records.whole(posted)))
            case _ if isinstance(posted, COMMANDS):
                self._host.command(posted)
            case _:
                yield from self._handle(posted)

    def _answer_roll(self, call: RollCall) -> Calls[None]:
        """Reply if this participant holds the state from which the job would continue."""
        s = self.local
        if s.head is None or self._ended:
            return
        is_member = s.epoch is not None and s.epoch.epoch == s.head.epoch
        if not is_member and s.lineage != s.head.lineage:
            return
        answer = Answer(call.id, str(self.participant.config.me), "accepted")
        try:
            yield Send(answer_inbox(call.id), answer, JOB)
        except BusError as error:
            self.answer(self._records.failed("roll call", error))

    def _on_announcement(self, announcement: ScopeAnnouncement) -> Calls[None]:
        try:
            record = yield from self._others[announcement.scope].take(announcement.packed)
        except _Failed as error:  # a txn that waits for that scope reads the head register
            self._wiring.log.warning(
                "a record of scope %s cannot be read: %s", announcement.scope, error
            )
            return
        if record is not None:
            yield from self._handle(record)

    def _handle(self, event: Event) -> Calls[None]:
        if isinstance(event, Decision) and event.record is not None:
            event = self._records.check_decision(event, event.record)
        before, now = self.local, self._now
        after, out = self.participant.handle(before, event, now)
        self.local = after
        if after.healed and not before.healed:
            self._slot.nudge()  # healing sends no command to wake the main thread
        if out.verdict == "fenced":
            self.fenced += 1
        elif out.verdict == "refused" or (out.verdict == "row" and out.reason):
            self._wiring.log.error("protocol error: %s (%s)", out.reason, event)
        self._trace.outcome(before, after, event, out, now)
        if after.role == "last_commit" and after.head is not None:
            self.why_left = after.head.why_left(self.participant.config.me.group)
        for effect in out.effects:
            if isinstance(effect, Broadcast) and isinstance(effect.message, Leave):
                self.why_left = self.why_left or effect.message.reason
            yield from self._carry_out(effect)
        if (after.dead, after.suspected) != (before.dead, before.suspected):
            self._host.members_lost()
        if isinstance(event, NoStep):
            self._host.no_step(event)
        if isinstance(event, Decision) and event.record is not None:
            self._host.decided(event.record)
            self._ballots.decided(event.record)
            yield from self._records.clean_up(event.record)

    # --- used by the components of the core ---

    def answer(self, event: Event) -> None:
        """Queue the result of a bus call, which is handled before any other event."""
        self._answers.append(event)

    def add_chore(self, work: BusEffect | Callable[[], Calls[None]]) -> None:
        """Add cleanup work or an effect, which runs when no event is queued."""
        self._chores.append(work if callable(work) else partial(self._use_bus, work))

    # --- effects ---

    def _carry_out(self, effect: Effect) -> Calls[None]:
        match effect:
            case CancelFutures(cause=cause):
                self._host.cancel_futures(cause)
            case AbortGroups(cause=cause):
                self._host.abort_groups(cause)
            case SetTimer(name=name, seconds=seconds, serial=serial):
                heapq.heappush(self._timers, (self._now + seconds, serial, name))
            case ClearTimers(names=names):
                self._timers = [t for t in self._timers if t[2] not in names]
                heapq.heapify(self._timers)
            case Restore() | Heal() | Apply() | StartTxn():
                self._slot.put(effect)
                if isinstance(effect, Restore):
                    self._host.interrupt(effect.cause.text or "rolled back")
            case Finish():
                yield from self._finish(effect)
            case Broadcast() | Tell() | ReadHead() | ReadScope() | Decide() | CastVote():
                yield from self._use_bus(effect)
            case TellHeld():
                yield from self._report_hold(effect)
            case DropBallot():
                self.add_chore(effect)
            case _:
                assert_never(effect)

    def _finish(self, effect: Finish) -> Calls[None]:
        me = self.participant.config.me
        if effect.error is not None:
            self._host.cancel_futures(effect.reason)  # peers may have left the collective
            self._host.abort_groups(effect.reason)
        elif self._others:  # no record shows the exit of the last groups
            try:
                yield Write(left_name(me.group, me.rank), me.inc)
            except BusError as error:
                self._wiring.log.warning(
                    "stages that wait for this one may not learn that it has left: %s", error
                )
        if effect.error is None and self.why_left is None:  # an asynchronous job ended meanwhile
            self.why_left = LeaveReason.LAST_STEP
        self._ended = True
        self._slot.put(effect)
        self._host.interrupt("this participant stops")

    def _report_hold(self, held: TellHeld) -> Calls[None]:
        if held == self._reported_hold:
            return
        self._reported_hold = held
        self._trace.note("held", asdict(held), self.local)
        self._wiring.log.warning(
            "step %d waits until scope %s has taken %d slices of the data; it has taken %d",
            held.step,
            held.scope,
            held.needed,
            held.cursor,
        )
        me = self.participant.config.me
        report = HeldReport(*me, held.step, held.scope, held.cursor, held.needed)
        with suppress(BusError):  # best effort: only observers need it; the trace has it
            yield Publish(report, JOB, "progress")

    def _use_bus(self, effect: BusEffect) -> Calls[None]:
        begun = self._now
        self.at_bus = type(effect).__name__, begun
        try:
            yield from self._perform(effect)
        except _Failed as error:
            self.answer(self._records.failed(type(effect).__name__, error))
        self.at_bus = None
        self._postpone_timers(self._now - begun)

    def _perform(self, effect: BusEffect) -> Calls[None]:
        records = self._records
        if isinstance(effect, ReadHead | Decide | CastVote):
            records.check_trust()
        match effect:
            case Broadcast(message=message):
                if not records.is_announced(message):
                    at = JOB if isinstance(message, Drain) else SCOPE
                    yield Publish(records.packed(message), at)
            case Tell(to=to, message=message):
                if to == self.participant.config.me:
                    self.post(message)
                else:
                    yield Send(inbox_name(to), records.packed(message))
            case ReadHead():
                self.answer(Decision((yield from records.read_head())))
            case ReadScope(scope=scope):
                if (position := (yield from self._others[scope].read())) is not None:
                    self.answer(position)
            case Decide(after=after, proposal=proposal):
                yield from records.decide(after, proposal)
            case CastVote():
                if (ballot := (yield from self._ballots.cast(effect))) is not None:
                    self.answer(ballot)
            case DropBallot(token=token):
                yield Delete(_old_slot(token))
            case _:
                assert_never(effect)

    def _postpone_timers(self, seconds: float) -> None:
        """Postpone all timers except the bus timers by the duration of a bus stall.

        No message arrived during the stall, and the core handles queued messages only after expired
        timers. Without the extension, every leader election of a replicated bus would cause
        suspicion of all peers.
        """
        if seconds < SILENCE_S:
            return
        self._timers = [
            (due if name in _BUS_TIMERS else due + seconds, serial, name)
            for due, serial, name in self._timers
        ]
        heapq.heapify(self._timers)


class _Records:
    """Access to the records of the core's scope, with checks that the bus has not lost data."""

    def __init__(self, core: EngineCore, wiring: Wiring) -> None:
        self._core, self._url, self._log = core, wiring.url, wiring.log
        self._me = core.participant.config.me
        self._wire = Wire()
        self._epoch: Record | None = None
        """The newest epoch record seen."""
        self._announced: Record | None = None
        """The newest own commit record that the bus announced together with the decision."""
        self._witness = Witness()
        self._distrusted = ""
        """Why the head register is no longer trusted; empty while it is."""
        self._lists: dict[str, int] = {}
        """Names of this rank's member lists on the bus → the epoch that each was proposed for."""
        self._gone: set[Peer] = set()
        """Excluded peers whose inboxes are not deleted yet."""

    # --- trust ---

    def failed(self, operation: str, error: Exception) -> BusDown:
        """Log a failed bus operation and return the event that reports it."""
        self._log.error("%s on the bus failed: %s", operation, error)
        if isinstance(error, BusForgot):  # later replies from this bus may be wrong
            operation, self._distrusted = "forgot", self._distrusted or str(error)
        return BusDown(operation, str(error)[:2000])

    def check_trust(self) -> None:
        """Raise ``BusForgot`` if the head register is no longer trusted."""
        if self._distrusted:
            raise BusForgot(self._distrusted)

    def check_decision(self, event: Decision, record: Record) -> Event:
        """Return the decision, or a ``BusDown`` event if it contradicts a record seen before.

        In the latter case the earlier record is broadcast. A peer that received only one of the two
        would continue with it.
        """
        if (found := self._witness.against(record)) is None:
            return event
        why, known = found
        if not self._distrusted:
            self._core.add_chore(Broadcast(Decision(known)))
        error = BusForgot(f"the head register on {self._url} has gone back: {why}")
        return self.failed("decision", error)

    # --- the register ---

    def packed(self, message: BusMessage) -> BusMessage | Packed:
        """Return the form in which the message is sent: a record without its member list."""
        if isinstance(message, Decision) and message.record is not None and not message.won:
            return self._wire.pack(message.record)
        return message

    def is_announced(self, message: BusMessage) -> bool:
        """Return whether the bus has announced this message together with the decision."""
        return isinstance(message, Decision) and message.record is self._announced

    def read_head(self) -> Calls[Record | None]:
        """Return the newest record, or None if there is none.

        Raises:
            BusForgot: The register is empty or older than a record seen before.
        """
        held = yield Read(HEAD)
        if held is not None:
            return (yield from self._newest(held))
        if self._core.local.head is not None:
            raise BusForgot(f"the head register on {self._url} is gone")
        return None

    def decide(self, after: Record | None, proposal: Record) -> Calls[None]:
        """Propose the successor of a record; the result is queued as a ``Decision``."""
        wire, answer = self._wire, self._core.answer
        expected = None if after is None else wire.pack(after)
        desired = wire.pack(proposal)
        if lists := proposal.kind == "epoch":
            name = list_name(desired)
            self._lists[name] = proposal.epoch
            yield Write(name, proposal.members)
        # commits usually have one proposer; losing proposers reserve a broadcast for nothing
        announce = proposal.kind == "commit"
        held = yield CompareSet(expected, desired, announce)
        won = held == desired
        if announce:
            self._announced = proposal if won else None
        if won:
            answer(Decision(proposal, won=True))
            if lists and self._epoch is not None and list_name(self._epoch) != list_name(desired):
                yield Delete(list_name(self._epoch))
            yield from self._drop_lists(desired)
        elif held is not None:
            yield from self._drop_lists(held)
            answer(Decision((yield from self._newest(held))))

    def _drop_lists(self, head: Packed) -> Calls[None]:
        """Delete the member lists of this rank's lost proposals; keep those still undecided."""
        epoch, kept = head.record.epoch, list_name(head) if head.members else ""
        for name, number in list(self._lists.items()):
            if name != kept and (number < epoch or (number == epoch and kept)):
                del self._lists[name]
                yield Delete(name)

    # --- records with their members ---

    def whole(self, packed: Packed) -> Calls[Event]:
        """Return the event of a record that was announced without its members."""
        try:
            return Decision((yield from self._complete(packed)))
        except _Failed as error:
            return self.failed("members", error)

    def _newest(self, held: Packed) -> Calls[Record]:
        record = yield from self._complete(held)
        known = self._core.local.head
        if known is not None and record.n < known.n:
            raise BusForgot(f"the head register on {self._url} has gone back to an old record")
        return record

    def _complete(self, packed: Packed) -> Calls[Record]:
        """Return the record with its members, or a newer record if the head register has advanced.

        Raises:
            BusForgot: The member list of the newest record is missing.
        """
        for _ in range(_READS):
            if (record := self._wire.whole(packed)) is not None:
                return record
            listed = yield Read(list_name(packed))
            try:
                return self._wire.complete(packed, listed)
            except MissingList as error:
                missing = error
            head = yield Read(HEAD)
            if head is None or head == packed:
                break
            packed = head
        raise BusForgot(f"{self._url}: {missing}") from missing

    # --- after a decision ---

    def clean_up(self, record: Record) -> Calls[None]:
        """Publish this rank's epoch record for observers; delete the inboxes of excluded peers."""
        if record.kind == "epoch" and (self._epoch is None or record.n > self._epoch.n):
            before = frozenset() if self._epoch is None else self._epoch.peer_set
            self._gone = (self._gone | before) - record.peer_set
            self._epoch = record
            if record.by == self._me:
                yield from self._clean_up_bus([Write(EPOCH, self._wire.pack(record))])
        elif record.kind == "commit" and self._gone:
            gone = sorted(self._gone)[:_REMOVALS]
            self._gone.difference_update(gone)
            if self._epoch is not None and self._epoch.by == self._me:
                yield from self._clean_up_bus([Delete(inbox_name(peer)) for peer in gone])

    def _clean_up_bus(self, calls: Iterable[Call]) -> Calls[None]:
        try:
            for call in calls:  # noqa: UP028  (a list cannot receive replies)
                yield call
        except BusError as error:
            self._core.answer(self.failed("cleanup", error))


class _Ballots:
    """Two-level voting: first the ballot of the replica group, then the ballot of the job.

    The ranks of a group first vote on a bus of their own. The rank whose vote completes the group's
    ballot casts all of its votes on the job bus.
    """

    def __init__(self, core: EngineCore, wiring: Wiring) -> None:
        self._core, self._log = core, wiring.log
        self._world = core.participant.config.world
        self._has_group_bus = wiring.has_group_bus and self._world > 1
        self._newest, self._is_after_commit = 0, False
        """Number of the newest record, and whether it is a commit."""
        self._is_stalled = False
        """Whether the newest rollback had no decision in time, and no group has joined since."""

    def decided(self, record: Record) -> None:
        """Note a record of the scope. All ranks of a group must draw the same conclusion.

        A rank that replaces another one may not have seen the rollback. It is in the epoch that
        follows the rollback, for which it has read the head, or in one that follows a commit.
        """
        if record.n <= self._newest:
            return
        if record.kind == "abort":
            self._is_stalled = record.code == CauseCode.NO_DECISION
        elif record.kind == "epoch" and self._is_after_commit:
            self._is_stalled = False
        self._newest, self._is_after_commit = record.n, record.kind == "commit"

    def cast(self, effect: CastVote) -> Calls[Ballot | None]:
        """Cast a vote; return the job's ballot if it is complete, or None."""
        votes = yield from self._group_votes(effect)
        if not votes:
            return None
        slot, tag = _slot(effect.token), _tag(effect.token)
        cast = yield Cast(slot, tag, tuple(votes), effect.voters)
        by_peer = _by_peer(cast)
        if len(by_peer) < effect.voters:  # a vote was counted twice; the last voter gets all votes
            return None
        return Ballot(effect.token, tuple(by_peer.values()))

    def _group_votes(self, effect: CastVote) -> Calls[list[Vote]]:
        """Return the votes to cast on the job bus: all of the group, this rank's only, or none.

        Every rank votes directly on the job bus in the first txn of an epoch, and in all txns of an
        epoch that follows a rollback without a decision in time. A group in which one rank has lost
        the group bus, while the others wait for its vote there, can then commit.
        """
        if not self._has_group_bus or effect.token.txn <= 1 or self._is_stalled:
            return [effect.vote]
        try:
            slot, tag = _slot(effect.token), _tag(effect.token)
            cast = yield Cast(slot, tag, (effect.vote,), self._world, GROUP)
        except BusError as error:
            self._lose_group_bus(error)
            return [effect.vote]
        if effect.vote.peer.rank == 0:
            self._core.add_chore(partial(self._drop_group_ballot, effect.token))
        by_peer = _by_peer(cast)
        return list(by_peer.values()) if len(by_peer) >= self._world else []

    def _drop_group_ballot(self, token: Token) -> Calls[None]:
        if not self._has_group_bus:
            return
        try:
            yield Delete(_old_slot(token), GROUP)
        except BusError as error:
            self._lose_group_bus(error)

    def regain(self) -> None:
        """Vote on the group's bus again, because the group has another one."""
        self._has_group_bus = self._world > 1

    def _lose_group_bus(self, error: BusError) -> None:
        self._log.warning("votes of the group go to the job's bus from now on: %s", error)
        self._has_group_bus = False


def _by_peer(votes: Iterable[Vote] | None) -> dict[Peer, Vote]:
    return {vote.peer: vote for vote in votes or ()}


def _slot(token: Token) -> str:
    return f"ballot{(token.epoch + token.txn) % SLOTS}"


def _old_slot(token: Token) -> str:
    """Return the slot half a cycle away. Deleting the txn's own slot could delete the vote of a
    slow voter."""
    return _slot(Token(token.epoch, token.txn + SLOTS // 2))


def _tag(token: Token) -> str:
    return f"{token.epoch}.{token.txn}"

"""The engine: one thread that owns a participant, carries out its effects, and keeps its timers.

Events come from the bus (the protocol and the participant's own inbox), the main thread and timers
through one queue. Each is handled by the core and traced, and then its effects are carried out
here, in order; effects that only tidy up wait until there is nothing else to do. Commands of
operators come the same way, and go to the host. What only the main thread may do (restore, heal,
apply, begin) is handed to it through a slot that holds the newest command. Touches bus, trace and
threads; knows nothing of torch.

The load on the job's bus is low: records cross it without their members (``fft.messages.wire``),
and the ranks of a group vote on a bus of their own first; one of them sends a message to the job's.

What ended processes leave on the bus is removed by others: the list of an epoch's members by who
forms the next one; the inboxes of those left out by who formed it, with its first commit (nobody
sends to them after that); that of an earlier process of one's own identity at the start. A message
sent later to a process that never comes back stays: one entry.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import assert_never

from fft.bus.base import HEAD, BusError, BusForgot, ErrorBus, Refusal, Subscription
from fft.bus.resubscribing import ResubscribingListener
from fft.engine.host import Host
from fft.engine.other_scopes import Heard, OtherScope, tell_held, tell_left
from fft.engine.votes import Ballots
from fft.messages.commands import (
    COMMANDS,
    Answer,
    RollCall,
    answer_inbox,
    decode_command,
    encode_answer,
)
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
from fft.messages.protocol import (
    BusDown,
    BusMessage,
    Death,
    Decision,
    Drain,
    Event,
    Peer,
    Record,
    Stop,
    Suspect,
    Timer,
    UnreadableMessage,
)
from fft.messages.wire import (
    EPOCH,
    MissingList,
    Packed,
    Wire,
    decode,
    decode_packed,
    encode_members,
    encode_packed,
    inbox_name,
    list_name,
)
from fft.protocol.participant import Participant
from fft.protocol.state import Local
from fft.protocol.witness import Witness
from fft.trace.writer import TraceWriter
from fft.util.errors import FftError
from fft.util.log_sampler import LogSampler

logger = logging.getLogger(__name__)

_READS = 16
"""How often the head may move on while its members are looked up."""
_SHOWN = 200
"""Bytes of an unreadable message, and of what is wrong with it, that log and trace have."""
_SILENCE_S = 0.3
"""An operation on the bus that takes longer is a silence of the bus."""
_BUS_TIMERS = ("bus_retry", "bus_limit", "bus_quiet")
_REMOVALS = 16
"""Inboxes removed with one commit, so that the commit is not held up."""

_Queued = Event | OperatorCommand | RollCall | Packed | Heard
BusEffect = Broadcast | Tell | ReadHead | ReadScope | Decide | CastVote | DropBallot
Command = Restore | Heal | Apply | StartTxn | Finish


class Engine:
    """Runs one participant. ``start`` once, ``post`` from any thread, ``close`` at the end."""

    def __init__(
        self,
        participant: Participant,
        local: Local,
        bus: ErrorBus,
        trace: TraceWriter,
        host: Host,
        group_bus: ErrorBus | None = None,
        job_bus: ErrorBus | None = None,
        others: Iterable[OtherScope] = (),
    ) -> None:
        """
        Args:
            bus: of the scope, where it decides.
            group_bus: one of this replica group alone, where its ranks vote first.
            job_bus: where is told what all scopes must know: deaths, suspicions, drains, and the
                commands of operators. None: ``bus``.
            others: the scopes that this one is bound to.
        """
        self.participant = participant
        self.bus = bus
        self._job_bus = job_bus or bus
        self._others = {other.name: other for other in others}
        self.trace = trace
        self.local = local
        self._host = host
        self._events: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._next: deque[Event] = deque()
        """Answers of the bus to this thread's own calls; handled before anything else."""
        self._chores: deque[Callable[[], None]] = deque()
        """What tidies up; done when no event waits, so that nobody waits for it."""
        world = participant.config.world
        mates = group_bus if world > 1 else None
        self._ballots = Ballots(bus, mates, world, self._chores.append)
        self._timers: list[tuple[float, int, Timer]] = []
        self._slot: Command | None = None
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._abandoned: Finish | None = None
        self._at_bus: tuple[str, float] | None = None
        """The operation that this thread is at, and since when."""
        self.ended = threading.Event()
        """Out: this thread has told the others what there was to tell, and the main thread."""
        self._subscriptions: list[Subscription] = []
        self._wire = Wire()
        self._epoch: Record | None = None
        """The newest epoch record seen."""
        self._announced: Record | None = None
        """The newest commit record of mine that was announced with its decision."""
        self._witness = Witness()
        self._told_held: TellHeld | None = None
        self._distrusted = ""
        """Why the bus's register is not to be used any more."""
        self._lists: dict[str, int] = {}
        """Lists of members that I wrote: the epoch each was proposed for."""
        self._gone: set[Peer] = set()
        """Left out by an epoch, and their inboxes perhaps not yet removed."""
        self._strange = LogSampler()
        self.fenced = 0
        """Events dropped because their fencing token was old."""
        self._thread = threading.Thread(
            target=self._run, name=f"fft-engine-{participant.config.me}", daemon=True
        )

    # --- any thread ---

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
        # who is deaf to operators goes on all the same
        obey, who = partial(self._on_message, decode_command), f"participant {me}"
        self._subscriptions += [
            ResubscribingListener(self.bus, "protocol", hear, who, self._on_missed, self._on_lost),
            ResubscribingListener(self._job_bus, "commands", obey, who),
        ]
        if self._job_bus is not self.bus:
            self._subscriptions.append(
                ResubscribingListener(
                    self._job_bus,
                    "protocol",
                    partial(self._on_message, _of_all_scopes),
                    f"{who}, of all scopes,",
                    on_lost=self._on_lost,
                )
            )
        self._subscriptions += [o.listen(self._events.put, who) for o in self._others.values()]
        if me.inc > 1:
            self.bus.delete(inbox_name(me._replace(inc=me.inc - 1)))
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
            while (command := self._abandoned or self._slot) is None:
                if self._failure is not None:
                    raise FftError("the FFT engine thread has failed") from self._failure
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError
                self._changed.wait(left)
            return command

    def wait_for(self, done: Callable[[], bool]) -> bool:
        """Main thread: wait until ``done()``; False if a command came before, which stays there.

        Who makes it true says so by `nudge`, and has a limit of its own. This thread does so when
        the state of this rank is there (`Local.healed`).
        """
        with self._changed:
            self._changed.wait_for(lambda: done() or self.has_word())
            return not self.has_word()

    def has_word(self) -> bool:  # any thread: whether `wait_command` would not wait
        return self.superseded() or self._failure is not None

    def nudge(self) -> None:
        """Any thread: look again at what ``wait_for`` waits for."""
        with self._changed:
            self._changed.notify_all()

    def take(self, command: Command) -> None:
        """Main thread: ``command`` is being carried out; the slot is free unless a newer came."""
        with self._changed:
            if self._slot is command:
                self._slot = None

    def superseded(self) -> bool:
        """Main thread, at work on a command: whether a newer one is waiting."""
        return self._slot is not None or self._abandoned is not None

    def abandon(self, command: Finish) -> None:
        """Any thread: the main thread shall stop with ``command``, for this thread is held up."""
        with self._changed:
            self._abandoned = command
            self._changed.notify_all()
        self._host.interrupt(command.reason)

    @property
    def abandoned(self) -> bool:
        """Whether the main thread was told to stop without this one."""
        return self._abandoned is not None

    def held_up(self) -> str | None:
        """Any thread: the operation on the bus that this thread waits for; None: there is none."""
        if (at := self._at_bus) is None or (took := time.monotonic() - at[1]) < _SILENCE_S:
            return None
        return f"{at[0]} on the bus has had no answer for {took:.1f} s"

    def close(self, limit: float = 5.0) -> None:
        """Leave (if still in), end the thread and the subscriptions. Idempotent.

        Of an engine that was abandoned nothing is waited for: the closing of the bus ends it.
        """
        if self._thread.is_alive():
            self.post(Stop("shut down"))
            self._events.put(None)
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

    def _on_message(self, read: Callable[[bytes], _Queued | None], payload: bytes) -> None:
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

    def _run(self) -> None:
        try:
            while (event := self._take_event()) is not None:
                if isinstance(event, RollCall):
                    self._answer_roll(event)
                elif isinstance(event, COMMANDS):
                    self._host.command(event)
                elif isinstance(event, Heard):
                    self._hear_elsewhere(event)
                else:
                    self._handle(self._whole(event) if isinstance(event, Packed) else event)
            self._tidy_up(lambda: True)
        except BaseException as error:  # the main thread must hear of it, whatever it is
            logger.exception("the FFT engine thread failed")
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self.ended.set()
            self._free(f"engine failed: {error!r}")

    def _hear_elsewhere(self, heard: Heard) -> None:
        try:
            record = heard.scope.take(heard.packed)
        except (BusError, UnreadableMessage) as error:  # whoever is held reads it
            logger.warning("a record of scope %s cannot be read: %s", heard.scope.name, error)
            return
        if record is not None:
            self._handle(record)

    def _free(self, cause: str) -> None:
        """Let the main thread out of whatever it waits for in a collective."""
        self._host.cancel_futures(cause)
        self._host.abort_groups(cause)

    def _answer_roll(self, call: RollCall) -> None:
        """Say that this participant lives, if it holds the state that the job would go on with."""
        s = self.local
        if s.head is None or self.ended.is_set():
            return
        is_member = s.epoch is not None and s.epoch.epoch == s.head.epoch
        if not is_member and s.lineage != s.head.lineage:
            return
        word = encode_answer(Answer(call.id, str(self.participant.config.me), "accepted"))
        try:
            self._job_bus.send(answer_inbox(call.id), word)
        except BusError as error:
            self._next.append(self._down("roll call", error))

    def _take_event(self) -> _Queued | None:
        self._tidy_up(lambda: not self._next and self._events.empty())
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

    def _tidy_up(self, may: Callable[[], bool]) -> None:
        while self._chores and may():
            self._chores.popleft()()

    def _handle(self, event: Event) -> None:
        if isinstance(event, Decision) and event.record is not None:
            event = self._believed(event, event.record)
        before, now = self.local, time.monotonic()
        after, out = self.participant.handle(before, event, now)
        self.local = after
        if after.healed and not before.healed:
            self.nudge()  # no command says it
        if out.verdict == "fenced":
            self.fenced += 1
        elif out.verdict == "refused" or (out.verdict == "row" and out.reason):
            logger.error("protocol error: %s (%s)", out.reason, event)
        self.trace.outcome(before, after, event, out, now)
        for effect in out.effects:
            self._carry_out(effect)
        if (after.dead, after.suspected) != (before.dead, before.suspected):
            self._host.members_lost()
        if isinstance(event, Decision) and event.record is not None:
            self._host.decided(event.record)
            self._tidy(event.record)

    def _believed(self, event: Decision, record: Record) -> Event:
        """The decision, or that the register cannot be trusted any more, as others shall hear.

        They may have seen one side only, and could go on with that.
        """
        if (found := self._witness.against(record)) is None:
            return event
        why, known = found
        if not self._distrusted:
            said = Broadcast(Decision(known))
            self._chores.append(partial(self._use_bus, said))
        error = BusForgot(f"the head register on {self.bus.url} has gone back: {why}")
        return self._down("decision", error)

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
                if isinstance(effect, Finish) and effect.error is not None:
                    self._free(effect.reason)  # the others may have left the collective
                elif isinstance(effect, Finish) and self._others:
                    tell_left(self.participant.config.me, self.bus)
                with self._changed:
                    self._slot = effect
                    self._changed.notify_all()
                if isinstance(effect, Finish):
                    self.ended.set()
                if isinstance(effect, Restore | Finish):
                    self._host.interrupt(getattr(effect, "cause", "") or "this participant stops")
            case Broadcast() | Tell() | ReadHead() | ReadScope() | Decide() | CastVote():
                self._use_bus(effect)
            case TellHeld():
                self._tell_held(effect)
            case DropBallot():
                self._chores.append(partial(self._use_bus, effect))
            case _:
                assert_never(effect)

    def _tell_held(self, held: TellHeld) -> None:
        if held != self._told_held:
            self._told_held = held
            self.trace.note("held", asdict(held), self.local)
            tell_held(held, self.participant.config.me, self._job_bus)

    def _use_bus(self, effect: BusEffect) -> None:
        begun = time.monotonic()
        self._at_bus = type(effect).__name__, begun
        try:
            if self._distrusted and isinstance(effect, ReadHead | Decide | CastVote):
                raise BusForgot(self._distrusted)
            match effect:
                case Broadcast(message=message):
                    if not self._is_announced(message):
                        bus = self._job_bus if isinstance(message, Drain) else self.bus
                        bus.broadcast(self._wire.encode(message))
                case Tell(to=to, message=message):
                    if to == self.participant.config.me:
                        self._events.put(message)
                    else:
                        self.bus.send(inbox_name(to), self._wire.encode(message))
                case ReadHead():
                    held = self.bus.read(HEAD)
                    if held is None and self.local.head is not None:
                        raise BusForgot(f"the head register on {self.bus.url} is gone")
                    self._next.append(Decision(None if held is None else self._read_head(held)))
                case ReadScope(scope=scope):
                    if (record := self._others[scope].read()) is not None:
                        self._next.append(record)
                case Decide(after=after, proposal=proposal):
                    self._decide(after, proposal)
                case CastVote():
                    if (ballot := self._ballots.cast(effect)) is not None:
                        self._next.append(ballot)
                case DropBallot(token=token):
                    self._ballots.drop(token)
                case _:
                    assert_never(effect)
        except (BusError, UnreadableMessage) as error:
            self._next.append(self._down(type(effect).__name__, error))
        self._at_bus = None
        self._excuse(time.monotonic() - begun)

    def _excuse(self, seconds: float) -> None:
        """Put off all timers but the bus's own by ``seconds``, for which the bus was silent.

        Nobody could be heard meanwhile, and what was said waits behind the timers: counting the
        time would make suspects of all peers whenever a replicated bus changes its leader.
        """
        if seconds < _SILENCE_S:
            return
        self._timers = [
            (due if timer.name in _BUS_TIMERS else due + seconds, serial, timer)
            for due, serial, timer in self._timers
        ]
        heapq.heapify(self._timers)

    def _down(self, operation: str, error: Exception) -> BusDown:
        logger.error("%s on the bus failed: %s", operation, error)
        kind = operation
        if isinstance(error, BusForgot):  # whatever it says from now on may lead astray
            kind, self._distrusted = "forgot", self._distrusted or str(error)
        return BusDown(kind, str(error)[:2000])

    def _decide(self, after: Record | None, proposal: Record) -> None:
        expected = None if after is None else self._wire.encode_record(after)
        desired = self._wire.encode_record(proposal)
        lists = proposal.kind == "epoch"
        if lists:
            name = list_name(proposal)
            self._lists[name] = proposal.epoch
            self.bus.write(name, encode_members(proposal))
        if proposal.kind == "commit":  # else many propose at once, and each would cost a message
            word = self._wire.encode(Decision(proposal))
            held = self.bus.decide(HEAD, expected, desired, word)
            self._announced = proposal if held == desired else None
        else:
            held = self.bus.compare_set(HEAD, expected, desired)
        if held == desired:
            self._next.append(Decision(proposal, won=True))
            if lists and self._epoch is not None and list_name(self._epoch) != list_name(proposal):
                self.bus.delete(list_name(self._epoch))
            self._drop_lists(self._wire.pack(proposal))
        elif held is not None:
            self._drop_lists(decode_packed(held))
            self._next.append(Decision(self._read_head(held)))

    def _drop_lists(self, head: Packed) -> None:
        """Remove the lists of my proposals that have lost; one whose outcome is open stays."""
        epoch, kept = head.record.epoch, list_name(head) if head.members else ""
        for name, number in list(self._lists.items()):
            if name != kept and (number < epoch or (number == epoch and kept)):
                del self._lists[name]
                self.bus.delete(name)

    def _is_announced(self, message: BusMessage) -> bool:
        """Whether the bus said so when it was decided."""
        return isinstance(message, Decision) and message.record is self._announced

    # --- records, whole again ---

    def _whole(self, packed: Packed) -> Decision | BusDown:
        """The event that a record announced without its members makes."""
        try:
            return Decision(self._complete(packed))
        except (BusError, UnreadableMessage) as error:
            return self._down("members", error)

    def _read_head(self, held: bytes) -> Record:
        """What the head register held. Raises ``BusForgot`` if it held something newer before."""
        record = self._complete(decode_packed(held))
        if self.local.head is not None and record.n < self.local.head.n:
            raise BusForgot(f"the head register on {self.bus.url} has gone back to an old record")
        return record

    def _complete(self, packed: Packed) -> Record:
        """The record with its members; if the job has moved on from it meanwhile, the newest.

        Raises ``BusForgot`` if the members of the newest record are nowhere.
        """
        for _ in range(_READS):
            if (record := self._wire.whole(packed)) is not None:
                return record
            listed = self.bus.read(list_name(packed))
            try:
                return self._wire.complete(packed, listed)
            except MissingList as error:
                missing = error
            head = self.bus.read(HEAD)
            if head is None or head == encode_packed(packed):
                break
            packed = decode_packed(head)
        raise BusForgot(f"{self.bus.url}: {missing}") from missing

    def _tidy(self, record: Record) -> None:
        """After a decision: show an epoch of mine to those outside; remove what the gone left."""
        me = self.participant.config.me
        if record.kind == "epoch" and (self._epoch is None or record.n > self._epoch.n):
            before = frozenset() if self._epoch is None else self._epoch.peer_set
            self._gone = (self._gone | before) - record.peer_set
            self._epoch = record
            if record.by == me:
                self._tidy_bus(lambda: self.bus.write(EPOCH, self._wire.encode_record(record)))
        elif record.kind == "commit" and self._gone:
            gone = sorted(self._gone)[:_REMOVALS]
            self._gone.difference_update(gone)
            if self._epoch is not None and self._epoch.by == me:
                self._tidy_bus(lambda: [self.bus.delete(inbox_name(peer)) for peer in gone])

    def _tidy_bus(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BusError as error:
            self._next.append(self._down("tidy", error))


def _of_all_scopes(payload: bytes) -> Event | None:
    """What the job's bus tells all scopes; the rest is the first one's."""
    word = decode(payload)
    return word if isinstance(word, Death | Suspect | Drain) else None

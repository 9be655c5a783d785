"""The bus of a simulated job: ordered broadcast, head register, ballots, and their failures.

Keeps the contract of the real bus: every listener receives all messages in one order, each after
its own delay; the register is linearizable; a vote cast twice is in its ballot twice; and ballots
use a few reused slots, as in the engine. An operation arrives some time after it was begun and is
answered some time after that. In between, either side may fail.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fft.messages.effects import (
    Broadcast,
    CastVote,
    Decide,
    DropBallot,
    ReadHead,
    ReadScope,
    Tell,
)
from fft.messages.protocol import (
    Ballot,
    BusDown,
    BusMessage,
    Decision,
    Event,
    Peer,
    Record,
    ScopeRecord,
    Token,
    Vote,
)

if TYPE_CHECKING:
    from fft.prove.simulator.job import World
    from fft.prove.simulator.process import Process

Operation = Broadcast | Tell | ReadHead | ReadScope | Decide | CastVote | DropBallot
SLOTS = 8
"""Number of ballot slots, as in the engine."""
_LONGEST_TROUBLE_S = 20.0
"""Maximum duration of a trouble: less than the spec's ``bus_limit``, when participants end."""
_LONGEST_GAP_S = 10.0
"""Maximum time for which a listener misses messages."""
_RECOVERY_S = 5.0
"""After a link was up for this long, the next cut is a new trouble."""


@dataclass(slots=True)
class Link:
    """The connection of one process to the bus."""

    until: float = 0.0
    """End of the present cut, in virtual seconds."""
    since: float = 0.0
    """Begin of the trouble that this cut belongs to."""
    fails: bool = False
    """Operations during the cut fail, and their outcome is unknown; otherwise they wait."""
    lag: float = 0.0
    """Maximum extra delay of a message, in seconds."""
    last: float = 0.0
    """Arrival time of the newest broadcast; no broadcast overtakes another."""
    last_alone: float = 0.0
    """Arrival time of the newest message to this process alone."""
    held: deque[tuple[BusMessage | ScopeRecord, bool]] = field(default_factory=deque)
    """Messages that wait for the link, and whether they are for this process alone."""
    waiting: list[Operation] = field(default_factory=list)
    """The operation that waits for the link."""
    deaf: bool = False
    behind: bool = False
    """The process misses broadcasts."""


class SimBus:
    """The bus of the whole job."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._clock = world.clock
        self.head: Record | None = None
        self.history: list[Record] = []
        """Every value that the register ever had."""
        self.slots: dict[int, list[tuple[Token, Vote]]] = {}

    # --- operations, begun by a process ---

    def begin(self, caller: Process, operation: Operation) -> None:
        """Start an operation; ``caller.answered`` follows if the caller is still alive."""
        self._clock.after(
            self._world.latency.operation(caller.slow), None, self._arrive, caller, operation
        )

    def _arrive(self, caller: Process, operation: Operation) -> None:
        world, link = self._world, caller.link
        if not caller.alive and world.rng.random() < 0.5:
            return  # died before it was sent
        if link.until > self._clock.now:
            if not link.fails:
                link.waiting.append(operation)
                return
            if world.rng.random() < 0.3:  # the operation arrives, but its answer does not
                self._carry_out(operation)
            self._clock.after(world.latency.hop(), caller, self._fail, caller, operation)
            return
        answer = self._carry_out(operation)
        delay = world.latency.hop() * caller.slow
        self._clock.after(delay, caller, self._answer, caller, operation, answer)

    def _answer(self, caller: Process, operation: Operation, answer: Event | None) -> None:
        link = caller.link
        if link.until > self._clock.now and link.fails:
            self._fail(caller, operation)
        elif link.until > self._clock.now:
            delay = link.until - self._clock.now
            self._clock.after(delay, caller, self._answer, caller, operation, answer)
        else:
            caller.answered(answer)

    def _fail(self, caller: Process, operation: Operation) -> None:
        self._world.count("operation_failed")
        caller.answered(BusDown(type(operation).__name__, "the bus is out of reach"))

    def _carry_out(self, operation: Operation) -> Event | None:
        match operation:
            case Broadcast(message=message):
                self.publish(message)
            case Tell(to=to, message=message):
                self._post(to, message)
            case ReadHead():
                return Decision(self.head)
            case ReadScope(scope=scope):
                return self._world.beside[scope].bus.scope_record()
            case Decide(after=after, proposal=proposal):
                if self.head == after:
                    self.head = proposal
                    self.history.append(proposal)
                    self._world.tell_beside()
                    self._world.hopeless |= proposal.diverged
                return Decision(self.head, won=self.head == proposal)
            case CastVote(token=token, vote=vote, voters=voters):
                slot = self.slots.setdefault((token.epoch + token.txn) % SLOTS, [])
                slot.append((token, vote))
                votes = tuple(v for t, v in slot if t == token)
                return Ballot(token, votes) if len(votes) >= voters else None
            case DropBallot(token=token):
                self.slots.pop((token.epoch + token.txn + SLOTS // 2) % SLOTS, None)
        return None

    def scope_record(self) -> ScopeRecord | None:
        """Return this scope's record for other scopes, or None if it has no record yet."""
        if self.head is None:
            return None
        epoch = next(record for record in reversed(self.history) if record.kind == "epoch")
        left = self.head.leavers if self.head.kind == "commit" else ()
        groups = tuple(g.group for g in epoch.members if g.group not in left)
        return ScopeRecord(self._world.name, self.head.n, self.head.cursor, groups, len(groups))

    # --- messages ---

    def publish(self, message: BusMessage | ScopeRecord) -> None:
        """Broadcast a message, in one order; every listener receives it eventually."""
        world = self._world
        for listener in world.live():
            if not (listener.link.deaf or listener.link.behind):
                self._give(listener, message)

    def _post(self, to: Peer, message: BusMessage) -> None:
        """Send a message to one participant, which cannot fall behind with such messages."""
        process = self._world.processes.get(to)
        if process is not None and process.alive:
            self._give(process, message, alone=True)

    def _give(
        self, listener: Process, message: BusMessage | ScopeRecord, alone: bool = False
    ) -> None:
        world = self._world
        if world.strikes("lost"):
            return
        if not alone and world.strikes("deaf"):
            self._deafen(listener)
            return
        if not alone and world.strikes("overrun"):
            self._overrun(listener)
            return
        for _ in range(2 if world.strikes("repeated") else 1):
            self._send(listener, listener.link, message, alone)

    def _send(
        self, listener: Process, link: Link, message: BusMessage | ScopeRecord, alone: bool
    ) -> None:
        if link.until > self._clock.now or link.held:
            link.held.append((message, alone))
            return
        world = self._world
        due = self._clock.now + world.latency.hop() + link.lag * world.rng.random()
        if alone:  # the two kinds of messages have no common order
            link.last_alone = due = max(due, link.last_alone)
        else:
            link.last = due = max(due, link.last)
        self._clock.after(due - self._clock.now, listener, self._deliver, listener, message)

    def _deliver(self, listener: Process, message: BusMessage | ScopeRecord) -> None:
        listener.post(message)

    def _deafen(self, listener: Process) -> None:
        listener.link.deaf = True
        self._clock.after(
            self._world.latency.hop(),
            listener,
            listener.post,
            BusDown("listen", "the listener has ended"),
        )

    def _overrun(self, listener: Process) -> None:
        """Let a listener miss all broadcasts for some seconds, then resume and be notified."""
        listener.link.behind = True
        seconds = _LONGEST_GAP_S * self._world.rng.random() ** 2
        self._clock.after(seconds, listener, self._hears_again, listener)

    def _hears_again(self, listener: Process) -> None:
        listener.link.behind = False
        listener.post(BusDown("overrun", "this listener fell 1024 messages behind"))

    # --- links ---

    def cut(self, process: Process, seconds: float, fails: bool) -> None:
        """Disconnect the process from the bus for some time; messages to it wait.

        Consecutive cuts form one trouble, which ends before any participant gives the bus up.
        """
        link, now = process.link, self._clock.now
        if now - link.until > _RECOVERY_S:
            link.since = now
        until = min(now + seconds, link.since + _LONGEST_TROUBLE_S)
        if until <= max(now, link.until):
            return
        if link.until <= now:
            link.fails = fails
        link.until = until
        self._clock.after(until - now, None, self.mend, process)

    def mend(self, process: Process) -> None:
        """End the cut of the link if its time is over; waiting messages and operations resume."""
        link = process.link
        if link.until > self._clock.now:
            return
        held, link.held = link.held, deque()
        for message, alone in held:
            self._send(process, link, message, alone)
        waiting, link.waiting = link.waiting, []
        for operation in waiting:
            self._arrive(process, operation)

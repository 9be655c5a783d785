"""One simulated process: the engine's thread with the shipped core, and the main thread.

``Process`` does in virtual time what ``fft.engine.loop`` does. There is one queue. Answers of the
bus come before due timers, and these before everything else. Effects are carried out one after
another, and each shared operation takes its time. Work for the main thread goes through a slot that
holds the newest command. A process can be stopped, slowed or killed between any two of its actions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, assert_never

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
from fft.messages.protocol import Event, Peer, Start, Timer
from fft.protocol.participant import Participant
from fft.protocol.state import Local
from fft.prove.bits import Bits
from fft.prove.simulator.bus import Link
from fft.prove.simulator.main_thread import MainThread

if TYPE_CHECKING:
    from fft.prove.simulator.groups import Group
    from fft.prove.simulator.job import World


class Process:
    """One process of the job."""

    def __init__(
        self,
        world: World,
        participant: Participant,
        local: Local,
        bits: Bits,
        group: Group,
        instance: int,
    ) -> None:
        self.world = world
        self.participant = participant
        self.local = local
        self.group = group
        self.instance = instance
        """The start of the group that this process belongs to."""
        self.peer: Peer = participant.config.me
        self.link = Link()
        self.alive = True
        self.code: int | None = None
        """Exit code, once it has ended."""
        self.stopped = False
        self.parked: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.slow = 1.0
        self.doom: int | None = None
        """Number of effects after which it is killed."""
        self.main = MainThread(self, bits)
        self._inbox: deque[Event] = deque()
        self._front: deque[Event] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._busy = False
        self._effects: list[Effect] = []
        self._done = 0

    def start(self) -> None:
        """Ask to join, after connecting to the bus."""
        self.post(Start())

    def later(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """Plan an action of this process; a slow process acts later."""
        self.world.clock.after(delay * self.slow, self, action, *args)

    # --- the queue ---

    def post(self, event: Event) -> None:
        """Queue an event."""
        self._inbox.append(event)
        self._wake()

    def answered(self, event: Event | None) -> None:
        """Finish the shared operation; its answer, if any, comes before everything else."""
        if event is not None:
            self._front.append(event)
        self._go_on()

    def _wake(self) -> None:
        if not self._busy:
            self._busy = True
            self.later(self.world.latency.handling, self._turn)

    def _take(self) -> Event | None:
        if self._front:
            return self._front.popleft()
        if self._timers and self._timers[0][0] <= self.world.clock.now:
            return heappop(self._timers)[2]
        return self._inbox.popleft() if self._inbox else None

    def _turn(self) -> None:
        event = self._take()
        if event is None:
            self._busy = False
            return
        self._effects, self._done = self.world.handle(self, event), 0
        self._go_on()

    def _go_on(self) -> None:
        """Carry out effects until one takes time, then handle the next event."""
        while self._done < len(self._effects):
            if self.doom is not None:
                self.doom -= 1
                if self.doom <= 0:
                    self.world.strike_down(self)
                    return
            effect = self._effects[self._done]
            self._done += 1
            match effect:
                case (
                    Broadcast()
                    | Tell()
                    | ReadHead()
                    | ReadScope()
                    | Decide()
                    | CastVote()
                    | DropBallot()
                ):
                    self.world.bus.begin(self, effect)
                    return
                case SetTimer(name=name, seconds=seconds, serial=serial):
                    due = self.world.clock.now + seconds
                    heappush(self._timers, (due, serial, Timer(name, serial)))
                    self.world.clock.after(seconds, self, self._wake)
                case ClearTimers(names=names):
                    self._timers = [t for t in self._timers if t[2].name not in names]
                    heapify(self._timers)
                case CancelFutures():
                    pass  # an aborted group has the same effect on the main thread
                case TellHeld():
                    self.world.count_held()
                case AbortGroups():
                    self.main.abort()
                case Restore() | Heal() | Apply() | StartTxn() | Finish():
                    self.main.command(effect)
                case _:
                    assert_never(effect)
        self._busy = False
        due = bool(self._timers) and self._timers[0][0] <= self.world.clock.now
        if self._front or self._inbox or due:
            self._wake()

    def resume(self) -> None:
        """Resume, as by SIGCONT: actions that came up meanwhile run now, in order."""
        self.stopped = False
        parked, self.parked = self.parked, []
        for action, args in parked:
            self.world.clock.after(0.0, self, action, *args)

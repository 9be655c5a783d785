"""The engine in virtual time: the counterpart of ``fft.engine.loop`` in simulated jobs. Pure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from fft.engine.calls import Call
from fft.engine.core import Command, EngineCore, Posted, Wiring
from fft.messages.commands import Command as OperatorCommand
from fft.messages.protocol import Event, NoStep, Peer, Record
from fft.protocol.participant import Outcome, Participant
from fft.protocol.state import Local
from fft.prove.clock import Clock


class InertHost:
    """A host, slot and trace of an engine on which most requests have no effect.

    Simulated jobs have no futures, no operators, and no thread that waits. Subclasses carry out the
    requests that they model.
    """

    def cancel_futures(self, cause: str) -> None:
        """See ``Host.cancel_futures``."""

    def abort_groups(self, cause: str) -> None:
        """See ``Host.abort_groups``."""

    def members_lost(self) -> None:
        """See ``Host.members_lost``."""

    def decided(self, record: Record) -> None:
        """See ``Host.decided``."""

    def no_step(self, message: NoStep) -> None:
        """See ``Host.no_step``."""

    def command(self, command: OperatorCommand) -> None:
        """See ``Host.command``."""

    def interrupt(self, cause: str) -> None:
        """See ``Host.interrupt``."""

    def nudge(self) -> None:
        """See ``CommandSlot.nudge``."""

    def note(self, name: str, data: dict[str, Any], local: Local | None = None) -> None:
        """See ``Trace.note``."""


class VirtualEngine(InertHost, ABC):
    """Drives the shipped ``EngineCore`` of one process in virtual time.

    It is the host, the slot and the trace of its core. A subclass carries out the calls on buses
    and the commands, and says how long they take; requests that it does not model have no effect.
    The process can be stopped or killed between any two of its actions, and so between any two
    calls of one event.

    Attributes:
        alive: Whether the process has not ended; the clock drops the actions of one that has.
        stopped: Whether the process is stopped, as by SIGSTOP; its actions are parked.
        call: The open call on a bus.
    """

    def __init__(
        self, clock: Clock, participant: Participant, local: Local, wiring: Wiring
    ) -> None:
        self.clock = clock
        self.participant = participant
        self.peer: Peer = participant.config.me
        self.alive = True
        self.stopped = False
        self.parked: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.call: Call | None = None
        self.core = EngineCore(participant, local, self, self, self, wiring)
        self._busy = False
        self._alarm = math.inf
        """Time of the earliest planned look at the timers."""

    @property
    def local(self) -> Local:
        """State of the participant."""
        return self.core.local

    # --- the engine's thread ---

    def post(self, event: Posted) -> None:
        """Queue an event."""
        self.core.post(event)
        self._wake()

    def answered(self, answer: object) -> None:
        """Pass the answer of the open call to the engine."""
        self._advance(self.core.step, answer)

    def failed(self, error: Exception) -> None:
        """Pass the failure of the open call to the engine."""
        self._advance(self.core.fail, error)

    @abstractmethod
    def _pause(self) -> float:
        """Return the seconds until the engine takes its next event."""

    @abstractmethod
    def _begin(self, call: Call) -> None:
        """Carry out a call, then give its answer to ``answered`` or ``failed``."""

    def _wake(self) -> None:
        if not self._busy:
            self._busy = True
            self.clock.after(self._pause(), self, self._advance, self.core.step)

    def _advance(self, go_on: Callable[..., Call | None], *given: object) -> None:
        now = self.clock.now
        self.call = go_on(now, *given)
        if self.call is None:
            self._rest(now)
        else:
            self._begin(self.call)

    def _rest(self, now: float) -> None:
        """Wait for an event or a timer, unless the engine has work."""
        self._busy = False
        wait = self.core.time_to_next_work(now)
        if wait == 0.0:
            self._wake()
        elif wait is not None and now + wait < self._alarm:
            self._alarm = now + wait
            self.clock.after(wait, self, self._ring, self._alarm)

    def _ring(self, alarm: float) -> None:
        if self._alarm == alarm:
            self._alarm = math.inf
        self._wake()

    # --- what its engine asks of it ---

    @abstractmethod
    def put(self, command: Command) -> None:
        """Hand a command to the main thread."""

    @abstractmethod
    def outcome(self, before: Local, after: Local, event: Event, out: Outcome, now: float) -> None:
        """Record the outcome of an event."""

"""Where the main thread of a process stands, by its table (`fsm_specs/main_thread.yaml`).

Whoever carries out a command, or says what came of it, asks here first.
"""

from __future__ import annotations

import threading
from collections.abc import Set

from fft.engine.loop import Command
from fft.protocol.main_thread import NO_FACTS, shipped_thread
from fft.protocol.roles import Role
from fft.protocol.vocabulary import COMMANDS


class MainThread:
    """The state of one main thread.

    The thread moves on by itself; an update's error may be told from another one.
    """

    def __init__(self) -> None:
        self._table = shipped_thread()
        self._state = self._table.spec.initial
        self._lock = threading.Lock()

    @property
    def role(self) -> Role:
        """What the state is for. Any thread."""
        return self._table.role(self._state)

    def awaits(self, event: str) -> bool:
        """Whether the state has a row for the event."""
        return self._table.has(self._state, event)

    def obeys(self, command: Command, facts: Set[str] = NO_FACTS) -> tuple[str, ...]:
        """The command is being carried out. What is to be done for it, in order.

        Raises:
            ProtocolError: not in this state.
        """
        return self.moves_on(COMMANDS[type(command)], facts)

    def moves_on(self, event: str, facts: Set[str] = NO_FACTS) -> tuple[str, ...]:
        """The same of any event, by its name."""
        with self._lock:
            return self._move(event, facts)

    def leaves(self, role: Role, event: str) -> bool:
        """The event happens if the thread stands in a state of this role. Whether it does."""
        with self._lock:
            if self.role != role:
                return False
            self._move(event, NO_FACTS)
            return True

    def _move(self, event: str, facts: Set[str]) -> tuple[str, ...]:
        self._state, effects = self._table.react(self._state, event, facts)
        return effects

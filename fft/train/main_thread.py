"""The state of a process's main thread, by its table (`fsm_specs/main_thread.yaml`).

Code that carries out a command, or reports its result, consults this state first.
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

    The main thread itself makes the transitions; only the error of an update may come from another
    thread.
    """

    def __init__(self) -> None:
        self._table = shipped_thread()
        self._state = self._table.spec.initial
        self._lock = threading.Lock()

    @property
    def role(self) -> Role:
        """The role of the state. Any thread."""
        return self._table.role(self._state)

    def awaits(self, event: str) -> bool:
        """Whether the state has a row for the event."""
        return self._table.has(self._state, event)

    def obeys(self, command: Command, facts: Set[str] = NO_FACTS) -> tuple[str, ...]:
        """Carry out the command; return the effects, in order.

        Raises:
            ProtocolError: The command is not allowed in this state.
        """
        return self.moves_on(COMMANDS[type(command)], facts)

    def moves_on(self, event: str, facts: Set[str] = NO_FACTS) -> tuple[str, ...]:
        """Make the transition for any event, by its name; return the effects."""
        with self._lock:
            return self._move(event, facts)

    def leaves(self, role: Role, event: str) -> bool:
        """Make the transition if the state has this role; return whether it has."""
        with self._lock:
            if self.role != role:
                return False
            self._move(event, NO_FACTS)
            return True

    def _move(self, event: str, facts: Set[str]) -> tuple[str, ...]:
        self._state, effects = self._table.react(self._state, event, facts)
        return effects

"""Runs the main thread's table: (state, event, facts) to the next state and its effects. Pure.

An event is a command of the engine or a report of the thread; `fft.protocol.vocabulary` lists the
names. The facts are the guards that hold for the event. The caller implements the effects.
"""

from __future__ import annotations

from collections.abc import Set
from functools import cache
from typing import NamedTuple

from fft.errors import ProtocolError
from fft.protocol.load import load_thread
from fft.protocol.roles import Role
from fft.protocol.spec import ThreadSpec
from fft.protocol.table import Table, Turn
from fft.protocol.vocabulary import MAIN_THREAD

NO_FACTS: frozenset[str] = frozenset()


class Reaction(NamedTuple):
    """The next state and the effects of an event."""

    state: str
    effects: tuple[str, ...] = ()


class ThreadTable:
    """The table of a main thread; any number of threads may share it."""

    def __init__(self, spec: ThreadSpec) -> None:
        self.spec = spec
        self._table = Table(spec)

    def role(self, state: str) -> Role:
        """Return the role of a state."""
        return self.spec.leaves[state].state.role

    def has(self, state: str, event: str) -> bool:
        """Return whether the state has rows for the event."""
        return event in self.spec.leaves[state].on

    def allows(self, state: str, event: str, facts: Set[str]) -> bool:
        """Return whether one of these rows can be taken."""
        return self._table.take(Turn(state, facts.__contains__), event).row is not None

    def react(self, state: str, event: str, facts: Set[str] = NO_FACTS) -> Reaction:
        """Return the reaction to an event.

        Args:
            facts: Names of the guards that hold.

        Raises:
            ProtocolError: The state has no row for the event; names the state, the event, and the
                events that it has rows for.
            ValueError: ``facts`` has an unknown guard.
        """
        if unknown := facts - MAIN_THREAD.guards:
            raise ValueError(f"no guard of the main thread is called {', '.join(sorted(unknown))}")
        if event in self.spec.leaves[state].ignore:
            return Reaction(state)
        turn = self._table.take(Turn(state, facts.__contains__), event)
        if turn.row is None:
            expected = ", ".join(sorted(self.spec.leaves[state].on)) or "nothing more"
            said = f"{event!r} ({', '.join(sorted(facts))})" if facts else repr(event)
            raise ProtocolError(
                f"the main thread is in {state}, which has no row for {said}; expected: {expected}"
            )
        return Reaction(turn.state, tuple(turn.row.effects))


@cache
def shipped_thread() -> ThreadTable:
    """Return the shipped table of the main thread."""
    return ThreadTable(load_thread())

"""Runs the main thread's table: (state, event, facts) → the next state, and what to do. Pure.

An event is a command of the engine, or what the thread says of its work; the names are in
`fft.protocol.vocabulary`. Facts are the guards that hold for it. What the effects mean is up to the
caller.
"""

from __future__ import annotations

from collections.abc import Set
from functools import cache
from typing import NamedTuple

from fft.protocol.load import load_thread
from fft.protocol.roles import Role
from fft.protocol.spec import ThreadSpec
from fft.protocol.table import Table, Turn
from fft.protocol.vocabulary import MAIN_THREAD
from fft.util.errors import ProtocolError

NO_FACTS: frozenset[str] = frozenset()


class Reaction(NamedTuple):
    """What an event comes to."""

    state: str
    effects: tuple[str, ...] = ()


class ThreadTable:
    """The table of a main thread; any number of threads may share it."""

    def __init__(self, spec: ThreadSpec, table: type[Table] = Table) -> None:
        self.spec = spec
        self._table = table(spec)

    def role(self, state: str) -> Role:
        """What a state is for."""
        return self.spec.leaves[state].state.role

    def has(self, state: str, event: str) -> bool:
        """Whether the state has rows for the event."""
        return event in self.spec.leaves[state].on

    def allows(self, state: str, event: str, facts: Set[str]) -> bool:
        """Whether one of these rows may be taken."""
        return self._table.take(Turn(state, facts.__contains__), event).row is not None

    def react(self, state: str, event: str, facts: Set[str] = NO_FACTS) -> Reaction:
        """Find the row for an event.

        Raises:
            ProtocolError: the state has none; names state, event, and what it has rows for.
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
def shipped_thread(table: type[Table] = Table) -> ThreadTable:
    """Return the shipped table of the main thread."""
    return ThreadTable(load_thread(), table)

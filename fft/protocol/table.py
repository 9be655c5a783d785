"""The transition table of a spec, run by the ``transitions`` library. The only importer of it.

Pure. One table serves any number of participants and threads: the library's events are triggered
on a small unregistered object (``Turn``), because a registered model keeps bound triggers that a
copy of the model would share.

Production, simulator and tests use ``Table``, in which the library finds the row. The checker and
the audit take millions of rows and use ``LookupTable``, which walks the library's own list of
candidates without its callbacks and log records. A test proves that both take the same row for
every state, event and combination of guards. Measured on one core, a vote in NORMAL takes 9 µs by
the library and 0.9 µs by look-up; handling an event takes some 200 µs in the engine.

The library holds the leaf states, ``STATE`` or ``STATE.sub``, side by side. Its own nesting is not
used: it would try all rows of a sub-state first, and here the exit rows of a state come before
those of its sub-states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast

from transitions import EventData, Machine

from fft.protocol.spec import MachineSpec, Part, Row, without_not

# it logs each transition at INFO, which a script may have enabled for all libraries
logging.getLogger("transitions").setLevel(logging.WARNING)

EXIT_ROWS = "exit"
"""Event name under which a state's exit rows are triggered; no other event may use it."""


@dataclass(slots=True)
class Turn:
    """One search for a row: starts in ``state``; afterwards ``row`` is the row taken, if any."""

    state: str
    check: Callable[[str], bool]
    row: Row | None = None
    guards: dict[str, bool] = field(default_factory=dict)
    """Results of the guards evaluated so far."""

    def ask(self, name: str) -> bool:
        """Whether the guard holds, or does not for ``not guard``; each is evaluated once."""
        asked, is_expected = without_not(name)
        if asked not in self.guards:
            self.guards[asked] = self.check(asked)
        return self.guards[asked] == is_expected

    def allows(self, row: Row) -> bool:
        """Whether all guards of the row hold; stops at the first one that does not."""
        return all(map(self.ask, row.guard))


Verdict = Literal["row", "ignore", "defer", "refuse"]


class Table:
    """The transition table of a spec; the library's machine finds the rows."""

    def __init__(self, spec: MachineSpec) -> None:
        self.spec = spec
        self._machine = Machine(
            model=None,
            states=list(spec.names),
            initial=spec.initial,
            auto_transitions=False,
            send_event=True,
            queued=False,
        )
        self._rows: set[tuple[str, str]] = set()
        for name, leaf in spec.names.items():
            rows = {**leaf.on, EXIT_ROWS: leaf.exit} if leaf.exit else leaf.on
            for event, candidates in rows.items():
                self._add(name, event, candidates)
        self._sequences = spec.sequences
        self._candidates = {at: self._listed(*at) for at in self._rows}

    def _add(self, state: str, event: str, rows: list[Row]) -> None:
        self._rows.add((state, event))
        for row in rows:
            self._machine.add_transition(
                trigger=event,
                source=state,
                dest=row.to,
                conditions=[partial(_ask, name) for name in row.guard],
                before=partial(_take, row),
            )

    def _listed(self, state: str, event: str) -> tuple[Row, ...]:
        """Return the rows of the library's table, in its order."""
        found = self._machine.events[event].transitions[state]
        return tuple(cast("partial[None]", t.before[0]).args[0] for t in found)

    def verdict(self, state: str, event: str) -> tuple[Verdict, str]:
        """Return how the state treats the event, and the reason unless it has rows for it."""
        leaf = self.spec.names[state]
        if (state, event) in self._rows:
            return "row", ""
        if event in leaf.ignore:
            return "ignore", leaf.ignore[event]
        if event in leaf.defer:
            return "defer", leaf.defer[event]
        if leaf.state.terminal:
            return "ignore", "the state is terminal"
        return "refuse", f"{state} has no row for {event!r}"

    def take(self, turn: Turn, event: str) -> Turn:
        """Find the first row of ``turn.state`` for ``event`` whose guards all hold.

        Returns:
            ``turn``, with ``row`` and the next ``state`` set; unchanged if there is no such row.
        """
        if (turn.state, event) in self._rows:
            self._machine.events[event].trigger(turn)
        return turn

    def parts_of(self, effect: str) -> Sequence[str | Part]:
        """Return the parts of a sequence, or the effect itself if it is not a sequence."""
        return self._sequences.get(effect) or (effect,)


class LookupTable(Table):
    """The same table without the library's overhead, for checker, audit and scale model."""

    def take(self, turn: Turn, event: str) -> Turn:
        """As ``Table.take``."""
        for row in self._candidates.get((turn.state, event), ()):
            if turn.allows(row):
                turn.row, turn.state = row, row.to or turn.state
                break
        return turn


def _ask(name: str, event: EventData) -> bool:
    return cast(Turn, event.model).ask(name)


def _take(row: Row, event: EventData) -> None:
    turn = cast(Turn, event.model)
    turn.row = row

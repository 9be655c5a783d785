"""A spec → its table, a ``transitions`` machine. The only importer of that library.

Pure. One table serves any number of participants: the library's events are triggered on a small
unregistered object (``Turn``), because registered models keep bound triggers that a copy of the
model would share (see DESIGN.md, "traps").

A step takes half a dozen look-ups, and the checker millions. What the library does for one is to
go through the candidates in its own table until all conditions of one hold; the rest is callbacks
that nobody has set, and log records. Measured on one core, in µs: a vote in NORMAL 0.9 by `look_up`
and 9.0 by `trigger`; the last of PREPARED's decisions 2.2 and 14.0; exit rows of which none holds
1.6 and 7.2. So `look_up` goes through that table itself, and tests hold it to `trigger`.

The library is given the states that one can be in, ``STATE`` or ``STATE.sub``, side by side. In
its own nesting all rows of a sub-state come first; here a state's exit rows come before those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast

from transitions import EventData, Machine

from fft.protocol.spec import MachineSpec, Part, Row

EXIT_ROWS = "exit"
"""Name under which a state's exit rows are triggered; no event may be called so."""


@dataclass(slots=True)
class Turn:
    """One look-up: starts in ``state``; afterwards ``row`` is the row taken, if any."""

    state: str
    check: Callable[[str], bool]
    row: Row | None = None
    guards: dict[str, bool] = field(default_factory=dict)
    """Guards asked so far, with their answers."""

    def ask(self, name: str) -> bool:
        """Whether the guard holds; it is looked at once."""
        if name not in self.guards:
            self.guards[name] = self.check(name)
        return self.guards[name]

    def allows(self, row: Row) -> bool:
        """Whether all guards of the row hold; those behind one that does not are not asked."""
        return all(map(self.ask, row.guard))


Verdict = Literal["row", "ignore", "defer", "refuse"]


class Table:
    """The transition table of a spec."""

    def __init__(self, spec: MachineSpec) -> None:
        self.spec = spec
        self._machine = Machine(
            model=None,
            states=list(spec.leaves),
            initial=spec.initial,
            auto_transitions=False,
            send_event=True,
            queued=False,
        )
        self._rows: set[tuple[str, str]] = set()
        for name, leaf in spec.leaves.items():
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
        """The rows of the library's table, in its order."""
        found = self._machine.events[event].transitions[state]
        return tuple(cast("partial[None]", t.before[0]).args[0] for t in found)

    def verdict(self, state: str, event: str) -> tuple[Verdict, str]:
        """What the state says to the event by name, and why: rows, ignore, defer, or refuse."""
        leaf = self.spec.leaves[state]
        if (state, event) in self._rows:
            return "row", ""
        if event in leaf.ignore:
            return "ignore", leaf.ignore[event]
        if event in leaf.defer:
            return "defer", leaf.defer[event]
        if leaf.state.terminal:
            return "ignore", "the state is terminal"
        return "refuse", f"{state} has no row for {event!r}"

    def look_up(self, turn: Turn, event: str) -> Turn:
        """Find the first row whose guards hold; ``turn.state`` is then the next state."""
        for row in self._candidates.get((turn.state, event), ()):
            if turn.allows(row):
                turn.row, turn.state = row, row.to or turn.state
                break
        return turn

    def parts_of(self, effect: str) -> Sequence[str | Part]:
        """What a row's effect stands for: itself, or the parts of a sequence."""
        return self._sequences.get(effect) or (effect,)

    def trigger(self, turn: Turn, event: str) -> Turn:
        """The same, by the library."""
        if (turn.state, event) in self._rows:
            self._machine.events[event].trigger(turn)
        return turn


def _ask(name: str, event: EventData) -> bool:
    return cast(Turn, event.model).ask(name)


def _take(row: Row, event: EventData) -> None:
    turn = cast(Turn, event.model)
    turn.row = row

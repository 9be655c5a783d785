"""FsmSpec → table, run by ``transitions``. The only importer of that library.

Pure. One table serves any number of participants: the library's events are triggered on a small
unregistered object (``Turn``), because registered models keep bound triggers that a copy of the
model would share (see DESIGN.md, "traps").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast

from transitions import EventData, Machine

from fft.spec import FsmSpec, Row

EXIT = "exit"
"""Name under which a state's exit rows are triggered; no event may be called so."""


@dataclass(slots=True)
class Turn:
    """One look-up: starts in ``state``; afterwards ``row`` is the row taken, if any."""

    state: str
    check: Callable[[str], bool]
    row: Row | None = None
    guards: dict[str, bool] = field(default_factory=dict)
    """Guards asked so far, with their answers."""


Verdict = Literal["row", "ignore", "defer", "refuse"]


class Table:
    """The transition table of a spec."""

    def __init__(self, spec: FsmSpec) -> None:
        self.spec = spec
        self._machine = Machine(
            model=None,
            states=list(spec.states),
            initial=spec.initial,
            auto_transitions=False,
            send_event=True,
            queued=False,
        )
        self._rows: set[tuple[str, str]] = set()
        for name, state in spec.states.items():
            shared = {} if state.terminal else spec.common.on
            named = state.on.keys() | state.ignore.keys() | state.defer.keys()
            rows = {**{e: r for e, r in shared.items() if e not in named}, **state.on}
            if state.exit:
                rows[EXIT] = state.exit
            for event, candidates in rows.items():
                self._add(name, event, candidates)

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

    def verdict(self, state: str, event: str) -> tuple[Verdict, str]:
        """What the state says to the event by name, and why: rows, ignore, defer, or refuse."""
        spec = self.spec.states[state]
        if (state, event) in self._rows:
            return "row", ""
        if event in spec.ignore:
            return "ignore", spec.ignore[event]
        if event in spec.defer:
            return "defer", spec.defer[event]
        if not spec.terminal and event in self.spec.common.ignore:
            return "ignore", self.spec.common.ignore[event]
        if spec.terminal:
            return "ignore", "the state is terminal"
        return "refuse", f"{state} has no row for {event!r}"

    def look_up(self, turn: Turn, event: str) -> Turn:
        """Find the first row whose guards hold; ``turn.state`` is then the next state."""
        if (turn.state, event) in self._rows:
            self._machine.events[event].trigger(turn)
        return turn


def _ask(name: str, event: EventData) -> bool:
    turn = cast(Turn, event.model)
    if name not in turn.guards:
        turn.guards[name] = turn.check(name)
    return turn.guards[name]


def _take(row: Row, event: EventData) -> None:
    turn = cast(Turn, event.model)
    turn.row = row

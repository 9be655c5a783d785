"""The transition table of a spec, run by the ``transitions`` library. The only importer of it.

Pure. One table serves any number of participants and threads: the library's events are triggered
on a small unregistered object (``Turn``), because a registered model keeps bound triggers that a
copy of the model would share.

The library's classes for a machine, an event and a transition are extended by rows without
callbacks and log records, because the checker and the audit take millions of rows. A test proves
that the same row is taken as by the library's own classes, for every state, event and combination
of guards. Measured on one core, a vote in NORMAL takes 9 µs by those and 1 µs by these.

The library holds the leaf states, ``STATE`` or ``STATE.sub``, side by side. Its own nesting is not
used: it would try all rows of a sub-state first, and here the exit rows of a state come before
those of its sub-states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from transitions import Event, Machine, Transition

from fft.protocol.spec import MachineSpec, Part, Row, without_not

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


class _RowTransition(Transition):
    """A row in the library's table. It has no callbacks besides its guards."""

    def __init__(self, *args: Any, row: Row) -> None:
        super().__init__(*args)
        self.row = row

    def execute(self, event_data: Any) -> bool:
        """Take the row if its guards hold; ``event_data`` is the turn."""
        turn: Turn = event_data
        if is_taken := turn.allows(self.row):
            turn.row, turn.state = self.row, self.row.to or turn.state
        return is_taken


class _RowEvent(Event):
    def trigger(self, model: Any, *args: Any, **kwargs: Any) -> bool:
        """Take the first row of the state whose guards hold."""
        for each in self.transitions[model.state]:  # noqa: SIM110  (a generator costs as much again)
            if each.execute(model):
                return True
        return False


class _RowMachine(Machine):
    """The library's machine without its callbacks and log records, which take most of its time."""

    transition_cls = _RowTransition
    event_cls = _RowEvent


class Table:
    """The transition table of a spec; the library's machine finds the rows."""

    def __init__(self, spec: MachineSpec) -> None:
        self.spec = spec
        self._machine = _RowMachine(
            model=None,
            states=list(spec.names),
            initial=spec.initial,
            auto_transitions=False,
            queued=False,
        )
        self._rows: set[tuple[str, str]] = set()
        for name, leaf in spec.names.items():
            rows = {**leaf.on, EXIT_ROWS: leaf.exit} if leaf.exit else leaf.on
            for event, candidates in rows.items():
                self._add(name, event, candidates)
        self._sequences = spec.sequences

    def _add(self, state: str, event: str, rows: list[Row]) -> None:
        self._rows.add((state, event))
        for row in rows:
            self._machine.add_transition(event, state, row.to, row=row)

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

"""The participant: a pure function from (state, event, now) to (state, effects).

``handle`` compares fencing tokens in one place (``_stale``) before it looks at any row. It then
finds the row in the spec's table, runs its effects by name, tries the state's exit rows until none
applies, and finally retries deferred events. Nothing is decided outside the table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from fft.messages.effects import ClearTimers, Effect
from fft.messages.protocol import (
    Ack,
    Applied,
    ApplyFailed,
    Ballot,
    Begin,
    BusMessage,
    Connected,
    Death,
    Decision,
    Event,
    Fault,
    Healed,
    HealFailed,
    Hello,
    Here,
    Join,
    Leave,
    Peer,
    Prepared,
    Ready,
    Restored,
    ScopeRecord,
    Suspect,
    Timer,
)
from fft.protocol.effects import EFFECTS, Action, set_timer
from fft.protocol.guards import GUARDS, Guard
from fft.protocol.roles import Role
from fft.protocol.spec import Leaf, Part, Row, outermost, without_not
from fft.protocol.state import GENESIS, Config, Local, is_older_self, peers_meant
from fft.protocol.table import EXIT_ROWS, Table, Turn

_MAX_CHAIN = 16
"""Maximum number of exit rows taken for one event; more means that the spec never settles."""


@dataclass(slots=True)
class Step:
    """One row that was taken."""

    source: str
    dest: str
    roles: tuple[Role, Role]
    """Roles of ``source`` and ``dest``, which are names of phases where these hold."""
    event: str
    guards: dict[str, bool]
    effects: list[str]
    """Names of the effects, in the order in which they ran."""
    row: Row
    """The row in the spec."""
    parts: list[Part] = field(default_factory=list)
    """Conditional parts of sequences whose guards held."""


@dataclass(slots=True)
class Outcome:
    """The result of one event. A ``verdict`` other than ``row`` means that the event had no effect.

    ``reason``: the reason for such a verdict; with ``row``, the refusal of a retried deferred
    event.
    """

    verdict: Literal["row", "ignored", "deferred", "fenced", "known", "refused"]
    reason: str = ""
    steps: list[Step] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)


def event_name(event: Event) -> str:
    """Return the event's name in a spec."""
    return f"timer.{event.name}" if isinstance(event, Timer) else event.type


class Participant:
    """Runs the protocol of one participant over a table; it holds no state itself.

    ``guards`` and ``actions`` implement the names of a spec, and ``stale`` is the fencing. The
    checker's planted bugs replace one of them in a subclass; production code never does.
    """

    guards: Mapping[str, Guard] = GUARDS
    actions: Mapping[str, Action] = EFFECTS

    def __init__(self, table: Table, config: Config) -> None:
        self.table = table
        self.config = config

    def initial(
        self,
        lineage: str = GENESIS,
        step: int = 0,
        cursor: int = 0,
        batches: int = 0,
        now: float = 0.0,
        returned: Sequence[int] = (),
    ) -> Local:
        """Return the state of a participant with the given training state and no known peers."""
        spec = self.table.spec
        return Local(
            state=spec.initial,
            role=spec.leaves[spec.initial].state.role,
            lineage=lineage,
            step=step,
            cursor=cursor,
            batches=batches,
            returned=tuple(returned),
            others=self.config.flow,
            since=now,
        )

    def handle(self, before: Local, event: Event, now: float) -> tuple[Local, Outcome]:
        """React to one event.

        Args:
            before: The state before the event; it is not changed.
            now: Monotonic time in seconds.

        Returns:
            The state after the event, and what the event did.
        """
        s = copy.copy(before)
        out = self._handle_one(s, event, now)
        if out.verdict != "row":
            if out.verdict == "deferred":
                s.deferred = (*s.deferred, event)
            return s, out
        self._retry_deferred(s, out, before.state, now)
        return s, out

    def stale(self, s: Local, event: Event) -> Outcome | None:
        """Return the outcome of an event that is fenced or already known, or None."""
        return _stale(s, self.config, event)

    def _retry_deferred(self, s: Local, out: Outcome, tried_in: str, now: float) -> None:
        while s.deferred and s.state != tried_in:
            tried_in, waiting, s.deferred = s.state, s.deferred, ()
            for event in waiting:
                again = self._handle_one(s, event, now)
                if again.verdict == "deferred":
                    s.deferred = (*s.deferred, event)
                elif again.verdict == "refused":
                    out.reason = f"a deferred {event.type} was refused: {again.reason}"
                out.steps += again.steps
                out.effects += again.effects

    def _handle_one(self, s: Local, event: Event, now: float) -> Outcome:
        if (stale := self.stale(s, event)) is not None:
            return stale
        name = event_name(event)
        verdict, reason = self.table.verdict(s.state, name)
        match verdict:
            case "ignore":
                return Outcome("ignored", reason)
            case "defer":
                return Outcome("deferred", reason)
            case "refuse":
                return Outcome("refused", reason)
        out, before = Outcome("row"), (s.timers, s.bus_down)
        if isinstance(event, Timer):
            s.timers = {n: serial for n, serial in s.timers.items() if n != event.name}
        elif isinstance(event, (BusMessage, Ballot)):
            s.bus_down = False  # any message shows that the bus works
        if not self._take_row(s, out, event, name, now):
            s.timers, s.bus_down = before
            if name in (ignored := self.table.spec.names[s.state].ignore):
                return Outcome("ignored", ignored[name])
            return Outcome("refused", f"{s.state}: no guard of {name!r} holds")
        for _ in range(_MAX_CHAIN):
            if not self._take_row(s, out, event, EXIT_ROWS, now):
                return out
        raise AssertionError(f"exit rows of {s.state} never settle")

    def _take_row(self, s: Local, out: Outcome, event: Event, name: str, now: float) -> bool:
        source = s.state
        turn = self.table.take(Turn(source, self._checker(s, event)), name)
        if turn.row is None:
            return False
        was, row = s.role, turn.row
        step = Step(source, turn.state, (was, was), name, turn.guards, [], row)
        out.steps.append(step)
        if row.to is not None:
            left, leaf = self.table.spec.names[source], self.table.spec.leaves[row.to]
            s.state, s.role = leaf.name, leaf.state.role
            is_inside = "." in row.to and left.state is leaf.state
            if not is_inside or left.name != leaf.name:
                self._enter(s, out, leaf, leaf.state.timers if is_inside else ())
        self._run(s, out, event, step)
        self._name_phase(s, event)
        step.dest, step.roles = s.state, (was, s.role)
        if outermost(source) != outermost(s.state):
            s.since = now
        return True

    def _name_phase(self, s: Local, event: Event) -> None:
        leaf = self.table.spec.names[s.state]
        for name, phase in leaf.state.phases.items():
            if all(map(self._checker(s, event), phase.guard)):
                s.state, s.role = leaf.called(name), phase.role
                return
        s.state, s.role = leaf.name, leaf.state.role

    def _checker(self, s: Local, event: Event) -> Callable[[str], bool]:
        return partial(self._holds, s, event)

    def _holds(self, s: Local, event: Event, name: str) -> bool:
        asked, is_expected = without_not(name)
        word, *argument = asked.split(" ", 1)
        return self.guards[word](s, self.config, event, *argument) == is_expected

    def _enter(self, s: Local, out: Outcome, leaf: Leaf, shared: Sequence[str]) -> None:
        """Clear the timers of the state that is left and arm those of ``leaf``; ``shared`` ones
        continue."""
        stay = {*self.table.spec.lasting, *shared}
        if gone := tuple(name for name in s.timers if name not in stay):
            s.timers = {name: s.timers[name] for name in s.timers if name in stay}
            out.effects.append(ClearTimers(gone))
        for name in leaf.timers:
            if name not in shared:
                out.effects.append(set_timer(s, self.config, name))

    def _run(self, s: Local, out: Outcome, event: Event, step: Step) -> None:
        asks = self._checker(s, event)
        for effect in step.row.effects:
            for part in self.table.parts_of(effect):
                if isinstance(part, str):
                    self._act(s, out, event, step, part)
                elif all(map(asks, part.guard)):
                    step.parts.append(part)
                    for name in part.effects:
                        self._act(s, out, event, step, name)

    def _act(self, s: Local, out: Outcome, event: Event, step: Step, name: str) -> None:
        step.effects.append(name)
        word, *argument = name.split(" ", 1)
        out.effects += self.actions[word](s, self.config, event, *argument)


# --- fencing ------------------------------------------------------------------------------------


def _stale(s: Local, c: Config, event: Event) -> Outcome | None:
    """Compare tokens, here only: an event older than this participant changes nothing."""
    match event:
        case Timer(name=name, serial=serial):
            if s.timers.get(name) != serial:
                return Outcome("known", "the timer was cleared")
        case Decision(record=record):
            return _stale_decision(s, event) if record is not None else None
        case Ack(hello=hello, token=token):
            if token.epoch < s.token.epoch:
                return Outcome("fenced", f"ack of {token}, I stand at {s.token}")
            return _stale_hello(s, hello)
        case Join(hello=hello):
            return None if is_older_self(c, hello.peer) else _stale_hello(s, hello)
        case Ready(peer=peer, epoch=epoch) | Begin(peer=peer, epoch=epoch):
            if epoch < s.token.epoch:
                return Outcome("fenced", f"{event.type} for epoch {epoch}, I stand at {s.token}")
            return _stale_peer(s, peer)
        case Leave(peer=peer) | Here(peer=peer):
            return _stale_peer(s, peer)
        case Death() | Suspect():
            if not peers_meant(s, event):
                return Outcome("fenced", f"the {event.type} of a process that is nobody here")
        case ScopeRecord(scope=scope, n=n, groups=groups):
            known = next((e for e in s.others if e.scope == scope), None)
            if known is None:
                return Outcome("fenced", f"a record of {scope!r}, which this scope is not bound to")
            is_left = not groups and not known.has_ended  # may come without a newer record
            if n < known.n or (n == known.n and not is_left):
                return Outcome("known", "a newer record of that scope is known")
        case Prepared() | Ballot() | Applied() | ApplyFailed() | Fault():
            if event.token != s.token:
                return Outcome("fenced", f"{event.type} of {event.token}, I stand at {s.token}")
        case Restored(token=token):
            if token != s.restoring:
                return Outcome("fenced", f"restored {token}, I wait for {s.restoring}")
        case Connected() | Healed() | HealFailed():
            if event.epoch != s.token.epoch:
                text = f"{event.type} for epoch {event.epoch}, I stand at {s.token}"
                return Outcome("fenced", text)
    return None


def _stale_decision(s: Local, event: Decision) -> Outcome | None:
    assert event.record is not None
    if s.head is None or event.record.n > s.head.n:
        return None
    if event.record.n == s.head.n and event.record != s.head:
        return Outcome("refused", f"two values for record {s.head.n} of the head register")
    return Outcome("known", "a decision I have obeyed")


def _stale_hello(s: Local, hello: Hello) -> Outcome | None:
    return _stale_peer(s, hello.peer)


def _stale_peer(s: Local, peer: Peer) -> Outcome | None:
    known = s.hellos.get((peer.group, peer.rank))
    if known is not None and known.peer.inc > peer.inc:
        return Outcome("fenced", f"{peer} was replaced by {known.peer}")
    if peer in s.dead:
        return Outcome("fenced", f"{peer} has ended")
    return None

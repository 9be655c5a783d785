"""Tests that the engine and the checker's model of it handle the same events by the same rows.

Random walks through the model are repeated with a real engine for each process. The engine receives
the events that the model's process receives, and its operations on the bus get the answers of the
modelled bus. The model folds the engine's queues, timers and procedures into single steps.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import pytest
from engine_job import Nothing

from fft.bus.base import HEAD
from fft.engine.calls import Call, Cast, CompareSet, Delete, Read, Write
from fft.engine.core import EngineCore
from fft.errors import BusError
from fft.messages.causes import CauseCode
from fft.messages.protocol import Decision, Event, Peer, Record, Timer
from fft.messages.wire import Register, Wire
from fft.protocol.load import load_spec
from fft.protocol.participant import Outcome, Participant
from fft.protocol.state import Local
from fft.prove.acts import Act, State
from fft.prove.bounds import Bounds
from fft.prove.model import Model, _Here, _Turn
from fft.prove.nodes import Node, Shared

Handled = list[tuple[Event, list[int]]]
"""Events in the order of their handling, and the identities of the rows that each has taken."""
BUDGET = ("crash", "drain", "fault", "no", "misfit", "torn", "heal", "early", "lapse", "quit")
WALK = 400
"""Maximum number of steps of a walk."""


Cause = tuple[str, CauseCode, tuple[Peer, ...]]
"""The text and the code of a record's cause, and the accused ranks."""
NO_CAUSE: Cause = ("", CauseCode.NONE, ())


def with_cause(record: Record, cause: Cause = NO_CAUSE) -> Record:
    """Return the record with another cause, by default without one, as in the model."""
    text, code, accused = cause
    return replace(record, cause=text, code=code, accused=accused)


def plain(event: Event) -> Event:
    """Return the event without what the model has in another form.

    These are the serials of timers and the causes of decisions. A proposal that is made again with
    another cause loses against the first one in the engine, and wins in the model.
    """
    if isinstance(event, Timer):
        return replace(event, serial=0)
    if isinstance(event, Decision) and event.record is not None:
        return replace(event, record=with_cause(event.record), won=False)
    return event


@dataclass
class Bus:
    """Contents of the bus that the model does not have."""

    registers: dict[str, Register] = field(default_factory=dict)
    causes: dict[int, Cause] = field(default_factory=dict)
    """Number of a record → its cause."""

    def whole(self, record: Record) -> Record:
        """Return a record of the model with its cause."""
        return with_cause(record, self.causes.get(record.n, NO_CAUSE))


class Watched(Model):
    """A model that records which events its processes handle."""

    seen: Handled

    def _handle(self, turn: _Turn, who: int, event: int) -> None:
        key = (who, turn.node.inc, turn.node.local, event)
        outcome = self._compute(*key).outcome
        self.seen.append((plain(self.events[event]), [id(s.row) for s in outcome.steps]))
        super()._handle(turn, who, event)


@dataclass
class Choice:
    """A possible step of one process, and the events that it handles in it."""

    who: int
    act: Act
    before: State
    handled: Handled


class Twin(Nothing):
    """The engine of one process of the model."""

    def __init__(self, participant: Participant, local: Local, bus: Bus) -> None:
        super().__init__()
        self.core = EngineCore(participant, local, self, self, self)
        self.handled: Handled = []
        self.call: Call | None = None
        self._bus = bus

    def outcome(self, before: Local, after: Local, event: Event, out: Outcome, now: float) -> None:
        self.handled.append((plain(event), [id(step.row) for step in out.steps]))

    def note(self, name: str, data: dict[str, object], local: Local | None = None) -> None: ...

    def take(self, event: Event) -> None:
        """Handle an event, up to the next operation that the model has, too."""
        assert self.call is None, "the model's process has finished its operations as well"
        if isinstance(event, Decision) and event.record is not None:
            event = replace(event, record=self._bus.whole(event.record))
        elif isinstance(event, Timer):
            event = replace(event, serial=self.core.local.timers.get(event.name, -1))
        self.core.post(event)
        self._go_on(self.core.step(0.0))

    def operate(self, shared: Shared, done: bool, answered: bool) -> None:
        """Carry out the open operation; ``shared`` is the bus afterwards."""
        assert self.call is not None and self.core.at_bus is not None
        answer = self._answer(self.call, shared) if done else None
        if answered:
            self._go_on(self.core.step(0.0, answer))
        else:
            self._go_on(self.core.fail(0.0, BusError("")))

    def _answer(self, call: Call, shared: Shared) -> object:
        head = None if shared.head is None else Wire().pack(self._bus.whole(shared.head))
        match call:
            case Read(key=key):
                assert key == HEAD
                return head
            case CompareSet(desired=desired):
                record = desired.record
                if shared.head is not None and shared.head.n not in self._bus.causes:
                    assert head == replace(desired, record=with_cause(record))
                    self._bus.causes[record.n] = record.cause, record.code, record.accused
                    return desired
                return head
            case Cast(votes=(vote,), voters=voters, tag=tag):
                ballots = {f"{t.epoch}.{t.txn}": votes for t, votes in shared.ballots}
                votes = ballots[tag]
                assert vote in votes
                return list(votes) if len(votes) >= voters else None
        return None

    def _go_on(self, call: Call | None) -> None:
        """Answer what the model does not have: member lists, removals, and the epoch's register."""
        while True:
            self.core._records._announced = None  # the model announces in a step of its own
            match call:
                case None:
                    self.core._inbox.clear()  # messages to itself come back through the model
                    if self.core.time_to_next_work(0.0) != 0.0:
                        break
                    call = self.core.step(0.0)
                case Write(key=key, value=value):
                    self._bus.registers[key] = value
                    call = self.core.step(0.0)
                case Delete():
                    call = self.core.step(0.0)
                case Read(key=key) if key != HEAD:
                    call = self.core.step(0.0, self._bus.registers[key])
                case _:
                    break
        self.call = call


def choices(model: Watched, state: State) -> Iterator[Choice]:
    """Yield what each process can do, or all timers if no process can do anything."""
    shared, left = model.shared[state[model.size]], model.budgets[state[model.size + 1]]
    found = False
    for who in range(model.size):
        node = model.node(state, who)
        if node.local < 0:
            continue
        here = _Here(model, who, node, shared, left)
        nodes = [model.node(state, i) for i in range(model.size)]
        acts: Iterator[Act] = iter(here.acts())
        at = model.at(node)
        if not node.pending and not node.stuck and at == "connecting":
            acts = chain(acts, here.healing(nodes))
        if not node.pending and not node.stuck and at == "computing" and node.source is not None:
            acts = chain(acts, here.learning(nodes))
        model.seen = []
        for act in acts:
            found = found or act.cost is None
            yield Choice(who, act, state, model.seen)
            model.seen = []
    if found:
        return
    for who in range(model.size):
        for name in model._armed(state[who], False):
            model._memo.rung.clear()
            model.seen = []
            yield Choice(who, model._fired(who, state[who], name), state, model.seen)


def walk(seed: int, spec_name: str, ranks: int) -> int:
    """Walk through the model with engines beside it. Returns the number of handled events."""
    rng, spec = random.Random(seed), load_spec(spec_name)
    budget = tuple((kind, 2) for kind in BUDGET)
    bounds = Bounds("walk", 2, ranks, commits=4, faults=rng.choice([0, 2, 5]), budget=budget)
    model = Watched(spec, replace(bounds, formed=False))
    model.seen = []
    bus = Bus()
    twins: dict[tuple[int, int], Twin] = {}
    state, events = model.initial(), 0
    starts = iter(model.seen)
    for who in range(model.size):
        start(model, state, who, twins, bus, [next(starts)])
    for _ in range(WALK):
        # the model counts a vote twice that was cast twice, and the engine does not
        able = [c for c in choices(model, state) if not c.act.what.startswith("fails at Cast")]
        if not able:
            break
        free = [choice for choice in able if choice.act.cost is None]
        chosen = rng.choice(able if rng.random() < 0.1 or not free else free)
        step = model._close(chosen.who, chosen.act, state)
        assert step.broken is None, step.broken
        follow(model, chosen, twins, step.state)
        events += len(chosen.handled)
        state = step.state
    return events


def start(
    model: Watched,
    state: State,
    who: int,
    twins: dict[tuple[int, int], Twin],
    bus: Bus,
    handled: Handled,
) -> None:
    node = model.node(state, who)
    participant = model.participant(who, node.inc)
    twin = twins[who, node.inc] = Twin(participant, participant.initial(), bus)
    twin.take(handled[0][0])
    assert twin.handled == handled


def follow(
    model: Watched, chosen: Choice, twins: dict[tuple[int, int], Twin], after: State
) -> None:
    """Let the engine do what the model's process has done, and compare."""
    who, act = chosen.who, chosen.act
    node: Node = model.node(chosen.before, who)
    twin = twins[who, node.inc]
    twin.handled = []
    if act.what.startswith(("does ", "fails at ")):
        name = type(model.effects[node.pending[0]]).__name__
        assert twin.core.at_bus is not None and twin.core.at_bus[0] == name
        answered = act.what.startswith("does ")
        done = answered or act.what.endswith("which was done")
        twin.operate(model.shared[after[model.size]], done, answered)
    elif chosen.handled:
        twin.take(chosen.handled[0][0])
    assert twin.handled == chosen.handled, act.what
    is_gone = model.node(after, who).local < 0
    if not is_gone:
        assert bool(twin.call) == bool(model.node(after, who).pending), act.what


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("spec", "ranks"), [("hsdp", 1), ("hsdp", 2), ("diloco", 1)])
def test_engine_and_model_take_the_same_rows(spec: str, ranks: int) -> None:
    assert sum(walk(seed, spec, ranks) for seed in range(8)) > 300

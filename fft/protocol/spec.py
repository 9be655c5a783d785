"""The spec format: strict models of a state machine file. Pure.

A spec contains only names; guards and effects are implemented in this package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from fft.protocol.roles import Role
from fft.protocol.scopes import Flow, ParameterGroups, Ranks, Samples, Scopes, Strict
from fft.protocol.state import ScopePosition


def _in_one_text(value: Any) -> Any:
    """Return a name with its argument as one text: ``{arm: {ready_window: 1.5}}`` as ``arm
    ready_window 1.5``."""
    if not isinstance(value, dict) or len(value) != 1 or value.keys() & Part.model_fields.keys():
        return value
    ((word, argument),) = value.items()
    return f"{word} {_in_one_text(argument)}"


Name = Annotated[str, BeforeValidator(_in_one_text, json_schema_input_type=str | dict[str, Any])]
"""A guard or an effect, in a file also ``{not: guard}`` and ``{name: argument}``."""


@cache
def without_not(name: str) -> tuple[str, bool]:
    """Return the guard that ``name`` or ``not name`` asks, and whether it is to hold."""
    asked = name.removeprefix("not ")
    return asked, asked == name


class Part(Strict):
    """Effects of a sequence that run if all guards hold when the sequence reaches them."""

    guard: list[Name] = Field(
        default_factory=list, description="names; all must hold; {not: name} must not hold"
    )
    effects: list[Name] = Field(
        default_factory=list, description="names, or {name: argument}; run in this order"
    )
    why: str = Field("", description="a sentence for the reader and the diagram")
    elsewhere: str = Field(
        "", description="why no search of the checker takes the row, and the test that does"
    )


class Row(Part):
    """One reaction: if all guards hold, run the effects in order and go to ``to``.

    An effect is one of ``fft.protocol.effects``, or a sequence of the spec.
    """

    to: str | None = Field(
        None, description="next state; absent: stay, the state is not re-entered"
    )


Rows = Annotated[list[Row], Field(min_length=1)]


class SubState(Strict):
    """The reactions to events: rows, and the events that are ignored or deferred by name."""

    doc: str = ""
    on: dict[str, Rows] = Field(default_factory=dict)
    exit: list[Row] = Field(
        default_factory=list, description="exit guards: tried in order after every event"
    )
    ignore: dict[str, str] = Field(default_factory=dict, description="event: reason")
    defer: dict[str, str] = Field(default_factory=dict, description="event: reason")
    timers: list[str] = Field(
        default_factory=list, description="armed on entry, cleared on leaving"
    )

    @property
    def named(self) -> frozenset[str]:
        """Events that have rows or are ignored or deferred here."""
        return frozenset().union(self.on, self.ignore, self.defer)


class Phase(Strict):
    """Another name and role of a state while all guards hold, in traces and for all code."""

    guard: Annotated[list[Name], Field(min_length=1)]
    role: Role


class StateSpec(SubState):
    """One state. For every event it has rows, or ignores or defers the event with a reason.

    A participant in a state with sub-states is in one of these. For an event, a sub-state's rows
    are tried before those of the state, and these before those of ``common``, up to one that
    ignores or defers the event. Exit rows of the state are tried before those of the sub-state. A
    change between sub-states of one state does not enter or leave the state, so its
    timers continue; those of the sub-state do not.
    """

    role: Role = Field(description="what the state is for; code asks for it, never for the name")
    phases: dict[str, Phase] = Field(
        default_factory=dict,
        description="name: the guards and the role; the first one that holds after a row counts",
    )
    states: dict[str, SubState] = Field(
        default_factory=dict, description="sub-states; a row leads to STATE.sub"
    )

    @property
    def terminal(self) -> bool:
        """Whether the state is final."""
        return self.role == "terminal"


class Common(Strict):
    """Reactions of every state that is not terminal, after its own."""

    on: dict[str, Rows] = Field(default_factory=dict)
    ignore: dict[str, str] = Field(default_factory=dict)


class Policies(Strict):
    """Settings that guards read."""

    min_reductions: int = Field(
        1, ge=0, description="reductions that a YES needs, so that a phantom step cannot commit"
    )
    on_divergence: Literal["stop", "heal"] = Field(
        "stop",
        description="replicas differ: end the job, or have whoever differs from most fetch anew",
    )
    bound: int | None = Field(
        None,
        ge=1,
        description="with sync: bounded: by how many steps of the job a contribution may be behind",
    )
    quorum: float = Field(
        0.5,
        ge=0.5,
        lt=1,
        description="with sync: bounded: more than this part of the job's groups synchronise "
        "together; at least half, so that of two such parts one group is in both",
    )


class TimerRule(Strict):
    """A lower bound of a timer, relative to another time."""

    times: float = Field(1.0, gt=0, description="the timer is at least so many times …")
    of: str = Field(description="… this one: another timer, an argument, a time of the bus")
    why: str


class TimerSpec(Strict):
    """A timer: its default in seconds, what it limits, and its lower bounds."""

    default: float = Field(gt=0, description="seconds; the manager's arguments come before it")
    doc: str = Field(description="what it bounds; `fft config` shows it")
    lasting: bool = Field(False, description="armed by effects, and outlives a state")
    follows: str | None = Field(
        None, description="the manager's argument that it is as long as, unless it is given itself"
    )
    grows: bool = Field(
        False, description="may be moved to fit its rules though what it follows was given"
    )
    at_least: list[TimerRule] = Field(default_factory=list)


@dataclass(frozen=True)
class Leaf:
    """A state that a participant can be in, ``STATE`` or ``STATE.sub``, with all its reactions."""

    name: str
    state: StateSpec
    on: dict[str, list[Row]]
    exit: list[Row]
    ignore: dict[str, str]
    defer: dict[str, str]
    timers: list[str]

    @property
    def named(self) -> frozenset[str]:
        """Events that have rows or are ignored or deferred here."""
        return frozenset().union(self.on, self.ignore, self.defer)

    def called(self, phase: str) -> str:
        """Return its name in a phase: ``PHASE`` or ``PHASE.sub``."""
        return phase + self.name.removeprefix(outermost(self.name))


def outermost(name: str) -> str:
    """Return ``STATE`` of ``STATE.sub``."""
    return name.partition(".")[0]


def _until_one_holds(rows: list[Row]) -> list[Row]:
    """The rows up to the first one without a guard; later ones are never taken."""
    last = next((i for i, row in enumerate(rows) if not row.guard), len(rows))
    return rows[: last + 1]


def _leaf(name: str, state: StateSpec, inner: SubState, common: Common) -> Leaf:
    outer = state if inner is not state else SubState()
    on: dict[str, list[Row]] = {}
    ignore: dict[str, str] = {}
    defer: dict[str, str] = {}

    def is_open(event: str) -> bool:
        rows = on.get(event)
        return event not in ignore and event not in defer and (not rows or bool(rows[-1].guard))

    parts: list[SubState | Common] = [inner, outer, *([] if state.terminal else [common])]
    for part in parts:
        for event in filter(is_open, part.on):
            on[event] = _until_one_holds([*on.get(event, ()), *part.on[event]])
        if isinstance(part, SubState):
            defer |= {e: why for e, why in part.defer.items() if e not in {*on, *ignore, *defer}}
        ignore |= {event: part.ignore[event] for event in filter(is_open, part.ignore)}
    rows, timers = [*outer.exit, *inner.exit], [*outer.timers, *inner.timers]
    return Leaf(name, state, on, rows, ignore, defer, timers)


class MachineSpec(Strict):
    """One state machine: the content that every spec file has."""

    name: str
    version: Literal[1]
    doc: str = ""
    machine: Literal["engine", "main_thread"] = Field(
        "engine", description="whose table it is; tells which names it may use"
    )
    timers: dict[str, TimerSpec] = Field(default_factory=dict)
    sequences: dict[str, Annotated[list[Name | Part], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="effects that rows share, in order; a part with guards runs if they hold",
    )
    initial: str
    common: Common = Common()
    states: dict[str, StateSpec]

    @cached_property
    def timeouts(self) -> dict[str, float]:
        """Defaults of the timers by name, in seconds."""
        return {name: timer.default for name, timer in self.timers.items()}

    @cached_property
    def lasting(self) -> frozenset[str]:
        """Timers that effects arm and that no state clears."""
        return frozenset(name for name, timer in self.timers.items() if timer.lasting)

    @cached_property
    def leaves(self) -> dict[str, Leaf]:
        """The states that a participant can be in, by name."""
        found = [
            _leaf(f"{name}.{sub}" if sub else name, state, inner, self.common)
            for name, state in self.states.items()
            for sub, inner in (state.states or {"": state}).items()
        ]
        return {leaf.name: leaf for leaf in found}

    @cached_property
    def names(self) -> dict[str, Leaf]:
        """The states that a participant can be in, by each of their names."""
        phases = {leaf.called(p): leaf for leaf in self.leaves.values() for p in leaf.state.phases}
        return {**self.leaves, **phases}

    def row_owners(self) -> Iterator[tuple[tuple[str, ...], Common | SubState]]:
        """Yield (place, owner) for each part of the file that has rows."""
        yield ("common",), self.common
        for name, state in self.states.items():
            yield ("states", name), state
            for sub, inner in state.states.items():
                yield ("states", name, "states", sub), inner

    def digest(self) -> str:
        """Return a hex digest of the whole spec, parts included; equal on all processes of a
        job."""
        return hashlib.blake2b(self.model_dump_json().encode(), digest_size=8).hexdigest()


class FsmSpec(MachineSpec):
    """A whole paradigm, as written in ``fsm_specs/<name>.yaml``: the engine's machine."""

    machine: Literal["engine"] = "engine"
    parameter_groups: ParameterGroups
    scopes: Scopes
    flow: Flow = Field(
        default_factory=list, description="which stage's steps are the input of which other one"
    )
    policies: Policies
    timers: dict[str, TimerSpec]

    @property
    def ranks(self) -> Ranks:
        """How the ranks of a replica group hold the parameters."""
        return next(iter(self.parameter_groups.values())).ranks

    @property
    def samples(self) -> Samples:
        """Whether each rank of a replica group takes its own samples."""
        return next(iter(self.parameter_groups.values())).samples

    @property
    def is_periodic(self) -> bool:
        """Whether each of the job's transactions follows several steps of each group alone."""
        return any(scope.sync != "every_step" for scope in self.scopes.values())

    @property
    def bound(self) -> int:
        """Number of job steps that a contribution may be behind; 0 if all groups step together."""
        is_bounded = any(scope.sync == "bounded" for scope in self.scopes.values())
        return (self.policies.bound or 0) if is_bounded else 0

    @property
    def terms(self) -> dict[str, Any]:
        """The fields of `fft.protocol.state.Config` that follow from the spec alone."""
        found = {"leases": self.is_periodic, "bound": self.bound, "quorum": self.policies.quorum}
        return {**found, "min_reductions": self.policies.min_reductions}

    @property
    def inner(self) -> FsmSpec:
        """The scope inside each replica group, which must exist, as a job of this group alone."""
        return self._alone(next(n for n, s in self.scopes.items() if s.members == "group"))

    @property
    def stages(self) -> list[str]:
        """The scopes of stages, by rank number; empty if all stages share a step."""
        return [name for name, scope in self.scopes.items() if scope.members == "stage"]

    def stage(self, rank: int) -> FsmSpec:
        """Return the scope of the stage on ``rank``, as a job of this rank of all groups."""
        return self._alone(self.stages[rank])

    def bound_to(self, scope: str) -> tuple[ScopePosition, ...]:
        """Return the scopes to which the flow binds ``scope``, in their initial positions."""
        follows = [ScopePosition(edge.source, 0) for edge in self.flow if edge.to == scope]
        leads = [ScopePosition(edge.to, edge.ahead) for edge in self.flow if edge.source == scope]
        return (*follows, *leads)

    def _alone(self, name: str) -> FsmSpec:
        scope = self.scopes[name]
        own = {group: self.parameter_groups[group] for group in scope.commits}
        whole = {name: scope.model_copy(update={"members": "job"})}
        update = {"name": f"{self.name}-{name}", "parameter_groups": own, "scopes": whole}
        return self.model_copy(update={**update, "flow": []})


class ThreadSpec(MachineSpec):
    """The main thread's machine, ``fsm_specs/main_thread.yaml``; the same for every paradigm.

    It has no timers because its waits are the engine's, and no sequences because its rows are
    short.
    """

    machine: Literal["main_thread"]
    timers: dict[str, TimerSpec] = Field(default_factory=dict, max_length=0)
    sequences: dict[str, Annotated[list[Name | Part], Field(min_length=1)]] = Field(
        default_factory=dict, max_length=0
    )

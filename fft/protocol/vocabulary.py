"""The names that a table of the engine or of the main thread may use. Pure data.

A table contains only names. Those of the engine are implemented in `fft.protocol.guards` and
`fft.protocol.effects`. Those of the main thread are implemented by each of its runners: the
manager, the checker's model and the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import get_args

from fft.messages.effects import Apply, Finish, Heal, Restore, StartTxn
from fft.messages.protocol import Event, Timer
from fft.protocol.effects import EFFECTS, STOPS
from fft.protocol.guards import GUARDS
from fft.protocol.roles import EngineRole, ThreadRole


@dataclass(frozen=True)
class Vocabulary:
    """The names of one machine. Timer events, ``timer.<name>``, come from the spec itself."""

    events: frozenset[str]
    guards: Set[str]
    effects: Set[str]
    roles: frozenset[str]
    answered: frozenset[str]
    """Events that every state must list; any other unlisted event is refused."""
    may_defer: bool = True
    all_used: bool = False
    """Every name must be used by a row. If False, an unused name may belong to another paradigm."""
    arguments: Mapping[str, Set[str] | None] = field(default_factory=dict)
    """The names that take an argument, and its values; None: a timer of the spec."""


_ENGINE_EVENTS = frozenset(
    kind.__dataclass_fields__["type"].default for kind in get_args(Event) if kind is not Timer
)

ENGINE = Vocabulary(
    _ENGINE_EVENTS,
    GUARDS.keys(),
    EFFECTS.keys(),
    frozenset(get_args(EngineRole)),
    answered=_ENGINE_EVENTS,
    arguments={"stop": STOPS.keys(), "arm": None, "armed": None},
)

COMMANDS = {
    Restore: "restore",
    Heal: "heal",
    StartTxn: "start_txn",
    Apply: "apply",
    Finish: "finish",
}
"""The engine's commands to the main thread, and their names in a table."""
WORDS = frozenset(
    {
        "prepared",
        "unwound",  # the step function has ended without a vote
        "restored",
        "connected",
        "healed",
        "heal_failed",
        "applied",
        "apply_failed",
    }
)
"""The reports of the main thread; all but ``unwound`` are also events of the engine."""

MAIN_THREAD = Vocabulary(
    WORDS.union(COMMANDS.values()),
    guards={
        "torn",  # the state of this rank is lost; the rollback reports it to the engine
        "learns",  # the state arrives while the first step function runs
        "fetches",  # the state is fetched from a peer before the first txn
        "says_no",  # the vote is a NO
    },
    effects={
        "restore",
        "connect",
        "refuse_epoch",
        "begin_body",
        "refuse_txn",
        "apply",
        "leave",
    },
    roles=frozenset(get_args(ThreadRole)),
    answered=frozenset({"finish"}),
    may_defer=False,  # the main thread does not retry deferred events
    all_used=True,
)

VOCABULARIES = {"engine": ENGINE, "main_thread": MAIN_THREAD}
"""Vocabularies by the value of ``machine`` in a spec."""

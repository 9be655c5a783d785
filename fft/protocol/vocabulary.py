"""The names that a table may use: the engine's, and the main thread's. Pure data.

A table holds names only. What the engine's mean is in `fft.protocol.guards` and
`fft.protocol.effects`; what the main thread's mean is up to whoever runs it: the manager, the
checker's model, the simulator.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import get_args

from fft.messages.effects import Apply, Finish, Heal, Restore, StartTxn
from fft.messages.protocol import Event, Timer
from fft.protocol.effects import EFFECTS
from fft.protocol.guards import GUARDS
from fft.protocol.roles import EngineRole, ThreadRole


@dataclass(frozen=True)
class Vocabulary:
    """Names of one machine. Timers' events, ``timer.<name>``, come from the spec itself."""

    events: frozenset[str]
    guards: Set[str]
    effects: Set[str]
    roles: frozenset[str]
    answered: frozenset[str]
    """Events that every state has to answer; any other that it does not name is refused."""
    may_defer: bool = True
    all_used: bool = False
    """Whether a name that no row uses was forgotten; else it is another paradigm's."""


_ENGINE_EVENTS = frozenset(
    kind.__dataclass_fields__["type"].default for kind in get_args(Event) if kind is not Timer
)

ENGINE = Vocabulary(
    _ENGINE_EVENTS,
    GUARDS.keys(),
    EFFECTS.keys(),
    frozenset(get_args(EngineRole)),
    answered=_ENGINE_EVENTS,
)

COMMANDS = {
    Restore: "restore",
    Heal: "heal",
    StartTxn: "start_txn",
    Apply: "apply",
    Finish: "finish",
}
"""What the engine asks of the main thread, and the names under which a table speaks of it."""
WORDS = frozenset(
    {
        "prepared",
        "unwound",  # the body has ended without a vote
        "restored",
        "connected",
        "healed",
        "heal_failed",
        "applied",
        "apply_failed",
    }
)
"""What the main thread says has come of it; but for ``unwound``, events of the engine."""

MAIN_THREAD = Vocabulary(
    WORDS.union(COMMANDS.values()),
    guards={
        "torn",  # the state of this rank is lost, and the engine is to hear it with a rollback
        "learns",  # the state comes while the first body runs
        "fetches",  # the state comes from a peer
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
    may_defer=False,  # nobody would try again
    all_used=True,
)

VOCABULARIES = {"engine": ENGINE, "main_thread": MAIN_THREAD}
"""By what a spec says under ``machine``."""

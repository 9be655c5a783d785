"""Effects as far as they matter to the model, and commands as the main thread's table names them.

Pure.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fft.messages.effects import (
    Apply,
    Broadcast,
    CastVote,
    Decide,
    Effect,
    Finish,
    Heal,
    ReadHead,
    ReadScope,
    Restore,
    StartTxn,
    Tell,
)
from fft.messages.protocol import Death, Leave, Token
from fft.protocol.main_thread import NO_FACTS
from fft.protocol.vocabulary import COMMANDS

SHARED = (Broadcast, Tell, ReadHead, ReadScope, Decide, CastVote)
"""Effects that others can see: each is a step of its own."""
BLOCKED = "blocked"
"""Cause of a ``Restore`` for a main thread whose process groups nobody aborts."""


def matters(effect: Effect) -> bool:
    """Whether the model carries it out."""
    return isinstance(effect, (*SHARED, Restore, Apply, StartTxn, Heal, Finish))


@dataclass(frozen=True)
class Begun:
    """``StartTxn``, as far as it matters here."""

    token: Token


@dataclass(frozen=True)
class Fetch:
    """``Heal``, as far as it matters here; ``group``: whom to fetch from; ``late``: in the txn."""

    epoch: int
    group: str | None
    late: bool = False


AnyEffect = Effect | Begun | Fetch


def heard(command: AnyEffect) -> tuple[str, frozenset[str]]:
    """Under which name, and with which facts, the main thread's table speaks of a command."""
    match command:
        case Begun():
            return COMMANDS[StartTxn], NO_FACTS
        case Fetch(group=group, late=late):
            facts = {"learns"} if late else {"fetches"} if group is not None else ()
            return COMMANDS[Heal], frozenset(facts)
        case Restore() | Apply() | Finish():
            return COMMANDS[type(command)], NO_FACTS
    raise TypeError(f"{command} is no command")


def bare(effect: Effect, frees: bool) -> AnyEffect:
    """The effect without texts, which nobody acts on, and without places in the member list.

    ``frees``: whether the process groups are aborted besides; else a main thread that is in one
    stays there.
    """
    match effect:
        case Decide(after=after, proposal=proposal):
            return Decide(after, dataclasses.replace(proposal, cause=""))
        case Broadcast(message=Leave() | Death() as message):
            return Broadcast(dataclasses.replace(message, cause=""))
        case Restore(token=token):
            return Restore(token, "" if frees else BLOCKED)
        case StartTxn(token=token):
            return Begun(token)
        case Heal(record=record, index=index, fetch_from=source):
            if source is None:
                return Fetch(record.epoch, None)
            late = record.members[index].group in record.learners
            return Fetch(record.epoch, record.members[source].group, late)
    return effect

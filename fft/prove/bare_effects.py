"""Reduce effects to the parts that matter to the model, and name commands as the main thread's
table.

Pure.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fft.messages.causes import NO_CAUSE, CauseCode
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
"""Effects that others can see: each is a separate step."""


def matters(effect: Effect) -> bool:
    """Whether the model carries out the effect."""
    return isinstance(effect, (*SHARED, Restore, Apply, StartTxn, Heal, Finish))


@dataclass(frozen=True)
class Begun:
    """``StartTxn``, reduced to what matters in the model."""

    token: Token


@dataclass(frozen=True)
class Fetch:
    """``Heal``, reduced to what matters in the model.

    ``group`` is the group to fetch from; ``late`` means that the fetch runs during the txn.
    """

    epoch: int
    group: str | None
    late: bool = False


@dataclass(frozen=True)
class Blocked:
    """``Restore`` for a main thread whose process groups are not aborted."""

    token: Token


AnyEffect = Effect | Begun | Fetch | Blocked


def heard(command: AnyEffect) -> tuple[str, frozenset[str]]:
    """Return the name of a command in the main thread's table, and its facts."""
    match command:
        case Begun():
            return COMMANDS[StartTxn], NO_FACTS
        case Fetch(group=group, late=late):
            facts = {"learns"} if late else {"fetches"} if group is not None else ()
            return COMMANDS[Heal], frozenset(facts)
        case Blocked():
            return COMMANDS[Restore], NO_FACTS
        case Restore() | Apply() | Finish():
            return COMMANDS[type(command)], NO_FACTS
    raise TypeError(f"{command} is no command")


def bare(effect: Effect, frees: bool) -> AnyEffect:
    """Return the effect without texts, which no code acts on, and without indexes of members.

    ``frees``: the process groups are aborted, too. If not, a main thread in one of them stays
    there.
    """
    match effect:
        case Decide(after=after, proposal=proposal):
            plain = dataclasses.replace(proposal, cause="", code=CauseCode.NONE, accused=())
            return Decide(after, plain)
        case Broadcast(message=Leave() | Death() as message):
            return Broadcast(dataclasses.replace(message, cause=""))
        case Restore(token=token):
            return Restore(token, NO_CAUSE) if frees else Blocked(token)
        case StartTxn(token=token):
            return Begun(token)
        case Heal(record=record, index=index, fetch_from=source):
            if source is None:
                return Fetch(record.epoch, None)
            late = record.members[index].group in record.learners
            return Fetch(record.epoch, record.members[source].group, late)
    return effect

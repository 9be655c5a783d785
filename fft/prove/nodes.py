"""What a state of the model is made of: the processes, and what the bus holds. Pure data."""

from __future__ import annotations

from typing import Any, NamedTuple

from fft.messages.protocol import Record, ScopeRecord, Token, Vote
from fft.protocol.main_thread import shipped_thread
from fft.prove.bits import Bits

NEVER = 1 << 30
"""An epoch that does not come."""


class Node(NamedTuple):
    """One process. ``local`` < 0: it is not there."""

    inc: int
    local: int = -1
    inbox: tuple[int, ...] = ()
    """Messages for everyone, in the order that all have in common."""
    mail: tuple[int, ...] = ()
    """Messages for this process alone; those for everyone may come before or after them."""
    pending: tuple[int, ...] = ()
    """Effects of the last event that are not carried out yet; the first is a shared one."""
    answers: tuple[int, ...] = ()
    """Answers of the bus, handled when ``pending`` is empty."""
    thread: str = shipped_thread().spec.initial
    """State of the main thread, in its own table."""
    task: tuple[Any, ...] = ()
    """What it has been told for what it is at: (token), (token, skip), (epoch, source), …"""
    stuck: bool = False
    """It is in a process group that nobody aborts, and stays there."""
    source: int | None = None
    """Of a learner in its first txn: where the state is on its way from."""
    done: int = -1
    """The main thread's word that it applied the step, not handled yet."""
    bits: Bits | None = None
    aged: frozenset[str] = frozenset()
    """Timers that are armed since before a much shorter one ran out."""


class Shared(NamedTuple):
    """What the bus holds."""

    head: Record | None = None
    ballots: tuple[tuple[Token, tuple[Vote, ...]], ...] = ()
    bus: str = "up"
    """``up``, ``down`` (out of reach) or ``gone`` (its memory is lost)."""
    scopes: tuple[ScopeRecord, ...] = ()
    """Newest records of the scopes that the flow binds this one to."""


def tidied(shared: Shared, epoch: int) -> Shared:
    """Ballots of epochs that everybody has left are never added to again."""
    if epoch == NEVER:
        return shared
    kept = tuple(b for b in shared.ballots if b[0].epoch >= epoch)
    return shared if len(kept) == len(shared.ballots) else shared._replace(ballots=kept)

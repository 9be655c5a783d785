"""The parts of a state of the model: the processes and the contents of the bus. Pure data."""

from __future__ import annotations

from typing import Any, NamedTuple

from fft.messages.protocol import Record, ScopeRecord, Token, Vote
from fft.protocol.main_thread import shipped_thread
from fft.prove.bits import Bits

NEVER = 1 << 30
"""An epoch that is never reached."""


class Node(NamedTuple):
    """One process, which does not live if ``local`` < 0."""

    inc: int
    local: int = -1
    inbox: tuple[int, ...] = ()
    """Broadcast messages, in the order common to all processes."""
    mail: tuple[int, ...] = ()
    """Messages to this process alone; their order relative to broadcasts is free."""
    pending: tuple[int, ...] = ()
    """Effects of the last event that are not carried out yet; the first is a shared one."""
    answers: tuple[int, ...] = ()
    """Answers of the bus, handled when ``pending`` is empty."""
    thread: str = shipped_thread().spec.initial
    """State of the main thread, in its own table."""
    task: tuple[Any, ...] = ()
    """Arguments of the main thread's present work: (token), (token, skip), (epoch, source), …"""
    stuck: bool = False
    """It is in a process group that is not aborted, and stays there."""
    source: int | None = None
    """For a learner in its first txn: index of the node that it fetches the state from."""
    done: int = -1
    """The main thread's unhandled report that it applied the step, or -1."""
    bits: Bits | None = None
    aged: frozenset[str] = frozenset()
    """Timers that have been armed since before a much shorter one fired."""


class Shared(NamedTuple):
    """The contents of the bus."""

    head: Record | None = None
    ballots: tuple[tuple[Token, tuple[Vote, ...]], ...] = ()
    bus: str = "up"
    """``up``, ``down`` (out of reach) or ``gone`` (its memory is lost)."""
    scopes: tuple[ScopeRecord, ...] = ()
    """Newest records of the scopes that the flow binds this one to."""


def tidied(shared: Shared, epoch: int) -> Shared:
    """Return the shared state without ballots of epochs that all participants have left."""
    if epoch == NEVER:
        return shared
    kept = tuple(b for b in shared.ballots if b[0].epoch >= epoch)
    return shared if len(kept) == len(shared.ballots) else shared._replace(ballots=kept)
